"""Ideas become code and settings; the user's working tree and index stay unchanged."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from runtime.config.errors import ConfigError, RunError
from tests.conftest import ROOT, commands, shell, thinned
from tools.experiment import change
from tools.experiment.change import Checkouts, idea_texts, merge, parse_idea


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of three commits and a branch in place of this one; returns a function that runs git in it."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(change, "ROOT", root)
    for name, value in change.AUTHOR.items():
        monkeypatch.setenv(name, value)

    def git(*words):
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch=main")
    for number in range(3):
        (root / "train.py").write_text(f"print({number})\n")
        git("add", ".")
        git("commit", "--quiet", "--message", str(number))
        if number == 1:
            git("branch", "other")
    git("checkout", "--quiet", "other")
    (root / "mine.py").write_text("print('mine')\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "mine")
    git("checkout", "--quiet", "main")
    git.root = root
    return git


def codes(checkouts, idea):
    """The folders of an idea's base and of its code."""
    return checkouts.folder(idea.base), checkouts.folder(merge(idea.base, [idea]))


def test_settings_need_no_git(monkeypatch, tmp_path):
    monkeypatch.setattr(change, "ROOT", tmp_path)
    found = parse_idea("--model.mlp relu2 --model.x 'a b'")
    assert found.settings == ["--model.mlp", "relu2", "--model.x", "a b"] and not found.diff
    assert found.setting_names == {"model.mlp", "model.x"}
    with Checkouts() as checkouts:
        assert codes(checkouts, found) == (tmp_path, tmp_path) and change.head_commit() is None
    with pytest.raises(ConfigError, match="is not the root of a git repository"):
        parse_idea("other")


def test_head_is_trained_without_edits(repository):
    (repository.root / "train.py").write_text("print('edited')\n")
    with Checkouts() as checkouts:
        assert (checkouts.folder(change.head_commit()) / "train.py").read_text() == "print(2)\n"


def test_code_inside_a_larger_repository_is_refused(repository, monkeypatch):
    (repository.root / "sub").mkdir()
    monkeypatch.setattr(change, "ROOT", repository.root / "sub")
    assert change.head_commit() is None and parse_idea("--x 1").base is None
    with pytest.raises(ConfigError, match="is not the root of a git repository"):
        parse_idea("other")


def test_key_depends_on_no_setting_of_git(repository):
    """Nor on the number of objects, from which git derives the length of short hashes."""
    keys = set()
    for length in ("7", "20"):
        repository("config", "core.abbrev", length)
        keys.add(parse_idea("other").key)
    assert len(keys) == 1


def test_long_settings_are_no_file_name():
    settings = f"--data.mix {{{'x' * 300}: 1}}"
    assert idea_texts([settings]) == [settings]


def test_long_text_is_no_file_name(repository):
    """Nor are the settings behind a branch."""
    text = f"other --x {300 * 'y'}"
    assert idea_texts([text]) == [text] and parse_idea(text).files == {"mine.py"}
    with pytest.raises(ConfigError, match="is not a git branch or commit here"):
        parse_idea(f"{300 * 'y'}.patch")


def test_text_too_long_for_git_is_refused(repository):
    with pytest.raises(ConfigError, match="git show cannot be started: Argument list too long"):
        change.git("show", 10**7 * "y")


@pytest.mark.parametrize("name", ["ideas", "ideas.txt"])
def test_unreadable_ideas_are_named(name, tmp_path, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).mkdir() if name == "ideas" else (tmp_path / name).write_text("--x 1")
    monkeypatch.setattr(change.os, "listdir", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError, match=f"idea: '{tmp_path / name}' cannot be read: Permission denied"):
        idea_texts([str(tmp_path / name)])


def test_folders_and_text_files_stand_for_several_ideas(repository, tmp_path):
    folder = tmp_path / "ideas"
    folder.mkdir()
    for name, text in (("b", "b"), ("a", "a"), ("._a", "a")):
        (repository.root / "train.py").write_text(f"print('{text}')\n")
        (folder / f"{name}.patch").write_text("Settings: --x 'a b'\n\n" * (name == "b") + repository("diff"))
    (folder / "notes.md").write_text("no patch")
    repository("checkout", "--quiet", "train.py")
    (tmp_path / "more.txt").write_text("# a comment\n\n--x 1\nother --x 2\n")
    texts = idea_texts([str(folder), str(tmp_path / "more.txt"), "--y 1"])
    a, b, settings, code, more = map(parse_idea, texts)
    assert [Path(idea.text).name for idea in (a, b)] == ["a.patch", "b.patch"]
    assert a.settings == [] and b.settings == ["--x", "a b"] and "print('b')" in b.diff
    assert settings.settings == ["--x", "1"] and code.settings == ["--x", "2"] and code.files == {"mine.py"}
    both = parse_idea(f"{folder / 'b.patch'} --y 2")
    assert both.settings == ["--x", "a b", "--y", "2"], "the header of the patch and the argument"
    assert len({idea.key for idea in (a, b, settings, code, more, both)}) == 6


def test_file_of_ideas_is_utf8(tmp_path):
    """With a byte order mark, too, as an editor of Windows writes; another encoding is refused."""
    file, idea = tmp_path / "ideas.txt", "--name Zähler"
    file.write_bytes(idea.encode("utf-8-sig"))
    assert idea_texts([str(file)]) == [idea]
    for encoding in ("utf-16", "utf-16-le", "latin-1"):
        file.write_bytes(idea.encode(encoding))
        with pytest.raises(ConfigError, match=r"idea: '.*ideas.txt' is not a text in UTF-8: .*save it as UTF-8"):
            idea_texts([str(file)])


def test_settings_of_patch_are_read_after_a_byte_order_mark(repository, tmp_path):
    (repository.root / "train.py").write_text("print('a')\n")
    patch = tmp_path / "a.patch"
    patch.write_text("Settings: --x 1\n\n" + repository("diff"), encoding="utf-8-sig")
    repository("checkout", "--quiet", "train.py")
    assert parse_idea(str(patch)).settings == ["--x", "1"]


def test_first_idea_of_program_md_is_one(tmp_path):
    page = (ROOT / "tools/experiment/program.md").read_text()
    [line] = [line for line in commands(page) if line.endswith("the race needs one")]
    (tmp_path / "ideas").mkdir()
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    shell(line, tmp_path)
    [text] = idea_texts([str(tmp_path / "ideas")])
    assert parse_idea(text).settings == ["--model.z_loss", "1e-4"]
    assert "model/loss.py" in parse_idea(text).files


def test_patches_are_merged_or_conflict(repository, tmp_path):
    lines = [f"x = {index}\n" for index in range(30)]
    (repository.root / "long.py").write_text("".join(lines))
    repository("add", ".")
    repository("commit", "--quiet", "--message", "long")
    for name, index in (("first", 3), ("near", 5), ("last", 26), ("third", 3)):
        changed = [f"y = '{name}'\n" if number == index else line for number, line in enumerate(lines)]
        (repository.root / "long.py").write_text("".join(changed))
        (tmp_path / f"{name}.patch").write_text(repository("diff"))
    repository("checkout", "--quiet", "long.py")
    names = ("first", "near", "last", "third")
    first, near, last, third = (parse_idea(str(tmp_path / f"{name}.patch")) for name in names)
    with Checkouts() as checkouts:
        text = (checkouts.folder(merge(first.base, [first, near, last])) / "long.py").read_text()
    assert all(f"y = '{name}'" in text for name in ("first", "near", "last")), "the lines around `near` have changed"
    with pytest.raises(ConfigError, match="git apply fails"):
        merge(first.base, [first, third])


@pytest.mark.parametrize(
    ("file", "line", "problem"),
    [
        ("data/text.py", "\n  x = 1\ny = 2", "in the line `x = 1`, so its losses would mean something else"),
        ('data/"odd"\n.py', "x = 1", "in the line `x = 1`, so its losses would mean something else"),
        ("data/:(top)x.bin", "\0", "x.bin, so its losses would mean something else"),
        ("data/sampler.py", "seed = 1", None),
        ("trainer/evaluation.py", "x = 1", None),
        ("model/gpt.py", "x = 1", None),
        ("model/gpt.py", '"""A docstring\n\nof seeds."""\nx = 1  # no seed', None),
        ("docs/seeds.md", "seed", None),
        ("tests/data/test_x.py", "seed = 1", None),
        (".gitattributes", "data/*.py working-tree-encoding=UTF-16", "decides the bytes"),
        ("data/.gitattributes", "*.py eol=crlf", "decides the bytes"),
    ],
)
def test_data_files_of_change(file, line, problem, repository):
    path = repository.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    if not problem:
        assert parse_idea("HEAD").files == {file}
        return
    with pytest.raises(ConfigError, match=problem) as error:
        parse_idea("HEAD")
    assert f"changes {file}, " in str(error.value)


@pytest.mark.parametrize("file", ["model/a table.bin", "data/sampler.py"])
def test_idea_adds_no_link(file, repository, tmp_path):
    """Neither as a patch nor as a branch; a baseline may have links, and an idea may remove them."""
    path = repository.root / file
    path.parent.mkdir()
    path.symlink_to("/proc/self/mem")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "a link")
    (tmp_path / "link.patch").write_text(repository("show"))
    repository("checkout", "--quiet", "HEAD^")
    for text in ("main", str(tmp_path / "link.patch")):
        with pytest.raises(ConfigError, match=f"changes {file}, which is a link or a submodule; add the file itself"):
            parse_idea(text)
    repository("checkout", "--quiet", "main")
    repository("rm", "--quiet", file)
    repository("commit", "--quiet", "--message", "no link")
    assert parse_idea("HEAD").files == {file}


def test_idea_adds_no_submodule(repository):
    repository("update-index", "--add", "--cacheinfo", f"160000,{change.head_commit()},model/other")
    repository("commit", "--quiet", "--message", "x")
    with pytest.raises(ConfigError, match="changes model/other, which is a link or a submodule"):
        parse_idea("HEAD")


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("torch.manual_seed(0)", True),
        ("generator.manual_seed(int('7'))", True),
        ("seed = 7", True),
        ("seed: int = derive_seed(7, 'mine')", True),
        ("x = torch.rand(3, generator=make(seed=3))", True),
        ("for x in draw(seed=3):", True),
        ("rng = numpy.random.default_rng(3)", True),
        ("from model.seeds import derive_seed", False),
        ("generator.manual_seed(derive_seed(torch.initial_seed(), 'mine', name))", False),
        ("seed = derive_seed(config.seed, 'mine', step)", False),
        ("torch.manual_seed(config.seed)", False),
        ("    def forward(self, x, seed):", False),
        ("rng = numpy.random.default_rng(seed)", False),
        ("self.LUCKY_SEED = 7", True),
        ("seeds = [7, 8]", True),
        ("self.num_seeds = 4", False),
        ("seeded = False", False),
    ],
)
@pytest.mark.parametrize("file", thinned(["model/gpt.py", "train.py"], 2))
def test_seeds_of_changed_code_are_those_of_the_run(line, is_refused, file, repository):
    """derive_seed, which docs/forking_reference.md recommends, is accepted; a constant is refused with a remedy."""
    path = repository.root / file
    path.parent.mkdir(exist_ok=True)
    body = "pass" if line.endswith(":") else ""
    path.write_text(f"if True:\n    {line.strip()} {body}\n")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    if is_refused:
        remedy = r"gives all runs the same random numbers; write derive_seed\(torch.initial_seed\(\), \"NAME\"\)"
        with pytest.raises(ConfigError, match=f"changes {file}, where .*{remedy}"):
            parse_idea("HEAD")
    else:
        assert parse_idea("HEAD").files == {file}


@pytest.mark.parametrize("file", ["model/gpt.py", "train.py"])
def test_seeding_may_be_removed_from_a_model_alone(file, repository):
    path = repository.root / file
    path.parent.mkdir(exist_ok=True)
    for text in ("torch.manual_seed(config.seed)\nx = 1\n", "x = 1\n"):
        path.write_text(text)
        repository("add", ".")
        repository("commit", "--quiet", "--message", "x")
    if file == "train.py":
        with pytest.raises(ConfigError, match="`torch.manual_seed.config.seed.` is missing"):
            parse_idea("HEAD")
    else:
        assert parse_idea("HEAD").lines == {"added": 0, "removed": 1}


LINES = {
    "x = x + self.bias": "",
    "# open(file)": "",
    "": "",
    "with open(file) as opened:": "files",
    "state = torch.load(name)": "files",
    "import subprocess": "processes",
    "if 'resolve' in sys.argv:": "environment",
    "start = perf_counter()": "time",
    "from data.corpus import load_corpus": "data",
    "from torch.utils.data import Subset": "",
    "if torch.is_grad_enabled():": "harness",
    "if not self.training:": "harness",
    "generator.manual_seed(derive_seed(torch.initial_seed(), 'mine'))": "harness",
    "getattr(torch, name)()": "hidden",
    "super().__init__()": "",
    "functional.cross_entropy.__wrapped__ = f": "hidden",
}


def test_lines_to_read_of_change(repository):
    """Added code that touches more than tensors, with its place and the reason; what a diff does not show is listed."""
    files = {
        name: repository.root / name for name in ("model.py", "tests/test_x.py", "notes.md", "new.bin", "conf.yaml")
    }
    for file in files.values():
        file.parent.mkdir(exist_ok=True)
        file.write_text("import os\n")
    files["model.py"].write_text("\n".join(LINES) + "\n")
    files["new.bin"].write_bytes(bytes(range(256)))
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    found = parse_idea("HEAD").lines_to_read
    expected = [
        f"model.py:{number}: {reason}: {text}" for number, (text, reason) in enumerate(LINES.items(), 1) if reason
    ]
    assert [line for line in found if line.startswith("model.py")] == expected
    others = [line for line in found if not line.startswith("model.py")]
    assert "conf.yaml:1: not Python: import os" in others and "new.bin: binary or mode" in others
    assert not [line for line in others if "tests" in line or "notes" in line]


def test_lines_of_hunks_may_look_like_headers():
    """A removed line of SQL, or an added one of C, is content."""
    diff = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -4,2 +4,2 @@\n--- a/y.py\n+++ os\n x\n"
    assert [(line.file, line.number, line.sign, line.text) for line in change.changed_lines(diff)] == [
        ("x.py", 4, "-", "-- a/y.py"),
        ("x.py", 4, "+", "++ os"),
    ]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("", ""),
        ("Less noise in the gradient.\n\nSettings: --x 1\n", "Less noise in the gradient."),
        ("Settings: --x 1\nLess noise.\n", "Less noise."),
        ("From 1234 Mon Sep 17\nFrom: me <x@y>\nSubject: [PATCH 1/2] Less noise\n\nMore.\n---\n", "Less noise"),
    ],
)
def test_why_of_patch_is_its_first_line(header, why, repository, tmp_path):
    (repository.root / "train.py").write_text("print('a')\nprint('b')\n")
    patch = tmp_path / "a.patch"
    patch.write_text(header + repository("diff"))
    repository("checkout", "--quiet", "train.py")
    found = parse_idea(str(patch))
    assert found.why == why and found.lines == {"added": 2, "removed": 1}
    assert parse_idea("other").why == "mine" and parse_idea("--x 1").lines is None


def test_data_file_moved_elsewhere_is_listed(repository):
    (repository.root / "data").mkdir()
    (repository.root / "data" / "text.py").write_text("x = 1\n")
    repository("add", ".")
    repository("commit", "--quiet", "--message", "x")
    repository("mv", "data/text.py", "text.py")
    with pytest.raises(ConfigError, match="changes data/text.py, in the line `x = 1`, so its losses"):
        parse_idea(".")


def test_parse_idea_branch_uses_merge_base(repository):
    found = parse_idea("other --x 3")
    assert found.base == repository("rev-parse", "main~1").strip() and found.settings == ["--x", "3"]
    assert "+print('mine')" in found.diff
    assert parse_idea("HEAD").base == repository("rev-parse", "HEAD^").strip()
    with Checkouts() as checkouts:
        code, changed = codes(checkouts, found)
        assert (code / "train.py").read_text() == (changed / "train.py").read_text() == "print(1)\n"
        assert (changed / "mine.py").exists() and not (code / "mine.py").exists()


def test_parse_idea_working_tree_stays_unchanged(repository):
    (repository.root / "train.py").write_text("print('changed')\n")
    (repository.root / "new.py").write_text("x = 1\n")
    (repository.root / "notes.txt").write_text("not code")
    before = repository("status", "--porcelain"), repository("for-each-ref")
    found = parse_idea(".")
    with Checkouts() as checkouts:
        code, changed = codes(checkouts, found)
        assert (code / "train.py").read_text() == "print(2)\n" and not (code / "new.py").exists()
        assert (changed / "train.py").read_text() == "print('changed')\n" and (changed / "new.py").exists()
        assert not (changed / "notes.txt").exists()
    assert (repository("status", "--porcelain"), repository("for-each-ref")) == before
    (repository.root / "kept.diff").write_text(found.diff)
    repository("stash", "--include-untracked", "--", "train.py", "new.py")
    repository("apply", "kept.diff")
    assert (repository.root / "train.py").read_text() == "print('changed')\n", "the diff does not reproduce the change"


@pytest.mark.parametrize("setting", ["diff.noprefix=true", "apply.whitespace=fix", "core.quotePath=true"])
def test_git_settings_change_no_code(setting, repository):
    repository("config", *setting.split("="))
    (repository.root / "é.py").write_text("print('trailing space') \n")
    found = parse_idea(".")
    with Checkouts() as checkouts:
        assert (codes(checkouts, found)[1] / "é.py").read_text() == "print('trailing space') \n"


def test_parse_idea_patch_ignores_uncommitted_changes(repository, tmp_path):
    (repository.root / "train.py").write_text("print('patched')\n")
    (tmp_path / "idea.patch").write_text(repository("diff"))
    (repository.root / "train.py").write_text("print('dirty')\n")
    with Checkouts() as checkouts:
        code, changed = codes(checkouts, parse_idea(f"{tmp_path / 'idea.patch'} --x 1"))
        assert (code / "train.py").read_text() == "print(2)\n"
        assert (changed / "train.py").read_text() == "print('patched')\n"
    assert (repository.root / "train.py").read_text() == "print('dirty')\n"


@pytest.mark.parametrize("how", ["changed", "added", "removed"])
def test_changed_files_of_checkouts_are_found(how, repository):
    with Checkouts() as checkouts:
        folder = checkouts.folder(change.head_commit())
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "train.pyc").write_text("")
        change.check_checkout(folder)
        file = folder / ("new.py" if how == "added" else "train.py")
        assert not (folder / "train.py").stat().st_mode & 0o222, "it is read-only"
        file.unlink(missing_ok=True)
        if how != "removed":
            file.write_text("print(3)\n")
        with pytest.raises(RunError, match=f"{file}: the code has changed since it was checked out"):
            change.check_checkout(folder)


def test_threads_share_a_checkout(repository, monkeypatch):
    """As those that check one patch with two learning rates; the first is still busy when the second one asks."""
    read_trees, asked = [], Event()

    def git(*arguments, **environment):
        if arguments[0] == "read-tree":
            read_trees.append(arguments)
            asked.wait(0.5)  # until a second thread is here, too, if nothing keeps it out
            if len(read_trees) == 2:
                asked.set()
        return original(*arguments, **environment)

    commit, original = change.head_commit(), change.git
    monkeypatch.setattr(change, "git", git)
    with Checkouts() as checkouts, ThreadPoolExecutor(2) as threads:
        first, second = threads.map(checkouts.folder, [commit, commit])
        assert first == second and (first / "train.py").exists()
    assert len(read_trees) == 1


def test_links_of_checkouts_are_not_followed(repository, tmp_path):
    """Links of the baseline, and those that the code of an idea puts in place of a file."""
    (tmp_path / "mine").write_text("before")
    for name, target in (("mine.bin", tmp_path / "mine"), ("memory.bin", "/proc/self/mem"), ("nothing", "no/such")):
        (repository.root / name).symlink_to(target)
    repository("add", ".")
    repository("commit", "--quiet", "--message", "links")
    with Checkouts() as checkouts:
        folder = checkouts.folder(change.head_commit())
        assert (tmp_path / "mine").stat().st_mode & 0o200, "the file of the user stays writable"
        (tmp_path / "mine").write_text("after")
        change.check_checkout(folder)
        for name, target in (("mine.bin", tmp_path / "other"), ("train.py", "/proc/self/mem")):
            (folder / name).unlink()
            (folder / name).symlink_to(target)
            with pytest.raises(RunError, match=f"{name}: the code has changed"):
                change.check_checkout(folder)
            repository("checkout-index", "--force", f"--prefix={folder}/", name)


@pytest.mark.parametrize("error", [None, ConfigError("x"), KeyboardInterrupt()])
def test_checkouts_are_removed(error, repository):
    before = repository("status", "--porcelain")
    try:
        with Checkouts() as checkouts:
            code, changed = codes(checkouts, parse_idea("other"))
            assert code.exists() and changed.exists()
            if error:
                raise error
    except type(error) as raised:
        assert raised is error
    assert not code.parent.exists() and repository("status", "--porcelain") == before


def test_checkouts_of_killed_experiments_are_removed(repository):
    """Those of experiments that run stay."""
    found, (read, write) = parse_idea("other"), os.pipe()
    killed = os.fork()
    if not killed:
        with Checkouts() as checkouts:
            os.write(write, str(codes(checkouts, found)[0]).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    left = Path(os.read(read, 1000).decode())
    assert left.exists()
    with Checkouts() as checkouts:
        living, _ = codes(checkouts, found)
        with Checkouts() as others:
            codes(others, found)
            assert (living / "train.py").exists() and not left.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-branch", "'no-such-branch' is not a git branch"),
        ("", "is empty"),
        ("'", "cannot be parsed"),
        (".", "the working tree has no changes"),
        ("-x", "'-x' is not a git branch"),
        ("--x 1 --seed 3", "is set for each run"),
        ("other --out_dir=x", "is set for each run"),
        ("--x 1 --help", "prints something"),
        ("~nobody_here/x.patch", "names a user that this machine does not have"),
    ],
)
def test_parse_idea_refuses_invalid_text(text, message, repository):
    with pytest.raises(ConfigError, match=message):
        parse_idea(text)


def test_parse_idea_without_earlier_commit_is_refused(repository):
    first = repository("rev-list", "--max-parents=0", "HEAD").strip()
    unrelated = repository("commit-tree", "HEAD^{tree}", "-m", "unrelated").strip()
    for commit in (first, unrelated):
        with pytest.raises(ConfigError, match=f"compare '{commit}'; in a shallow clone, run git fetch --unshallow"):
            parse_idea(commit)


def test_parse_idea_inapplicable_patch_shows_git_message(repository, tmp_path):
    (tmp_path / "idea.patch").write_text("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-print(7)\n+print(8)\n")
    with pytest.raises(ConfigError, match="git apply fails: .*train.py"):
        parse_idea(str(tmp_path / "idea.patch"))
