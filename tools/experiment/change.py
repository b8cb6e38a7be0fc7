"""Ideas as given on the command line (settings, code, or both), as commits and folders of code.

Code is trained from folders of its own, so that edits of the working tree during an experiment reach no run. The
working tree and patches become commits that no branch contains, which git deletes after some weeks; a race keeps the
diffs.
"""

import ast
import os
import re
import shlex
import subprocess
import tempfile
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import product
from pathlib import Path
from threading import Lock

from runtime.config.errors import ConfigError, RunError
from runtime.config.paths import expand_user_path
from runtime.files import read_user_text, temporary_folder
from tools.experiment.settings import PER_RUN_OPTIONS

ROOT = Path(__file__).parents[2]
# Equal code has equal commits, whenever they are made.
WHO = {"NAME": "experiment", "EMAIL": "experiment", "DATE": "2000-01-01T00:00:00Z"}
AUTHOR = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in WHO.items()}

# Overrides user settings that would run programs, change the code in `git apply`, or escape file names. Git refuses a
# clone that another user owns, as in a container, because its hooks could run that user's code; no hook runs here.
OVERRIDES = ("core.hooksPath=/dev/null", "apply.whitespace=nowarn", "core.quotePath=false", "safe.directory=*")
# The data are the baseline's, so that what its loader delivers can be trusted. The order of the training data may
# change, because the evaluator counts the sequences of a whole run.
DATA_FOLDER, ORDER_FILE = "data/", "data/sampler.py"
ATTRIBUTES_FILE = ".gitattributes"  # with one, git would write the same blobs of other files differently
MODES_OF_FILES = {"100644", "100755", "000000"}  # 000000: it is removed; the others are links and submodules
SEED_WORDS = re.compile(r"(?i:seed)|default_rng|RandomState|\bRandom\b")
SEEDING_CALLS = {"manual_seed", "manual_seed_all", "seed", "default_rng", "RandomState", "Random"}
PATCH_SUFFIXES = (".patch", ".diff")
PRINTING_OPTIONS = ("--help", "-h", "--print_config")
SETTINGS_LINE = "Settings:"  # begins a line above the first diff of a patch


@dataclass(frozen=True)
class Idea:
    """A change of the baseline."""

    text: str
    """As it was given, with the path of a patch."""
    settings: list[str] = field(default_factory=list)
    """Words of a command line."""
    base: str | None = None
    """Commit that the code is based on; None if only settings change."""
    diff: str = ""
    """Diff of the code from the base."""
    factors: dict[str, float] = field(default_factory=dict)
    """Of an arm: the factor on the value of each setting that --tune names."""
    why: str = ""
    """Why it may lower the loss: --note, the first line of a patch, or the subject of a commit."""

    @cached_property
    def key(self) -> str:
        """Hash of the settings, the diff and the factors."""
        content = shlex.join(self.settings) + "\n" + self.diff + (repr(self.factors) if self.factors else "")
        return sha256(content.encode(errors="surrogateescape")).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The text, of an arm with its factors but 1, such as "--model.mlp relu2 [optimizer.lr x0.5]"."""
        factors = [f"{name} x{factor:g}" for name, factor in self.factors.items() if factor != 1]
        return " ".join(filter(None, [self.text, f"[{', '.join(factors)}]" if factors else ""]))

    @property
    def code_name(self) -> str:
        """Name of its code: a branch, the file name of a patch, or `.`; "" if only settings change."""
        code = split_words(self.text)[0] if self.diff else ""
        return Path(code).name if code.endswith(PATCH_SUFFIXES) else code

    @property
    def setting_names(self) -> set[str]:
        """Names of the settings that it sets."""
        return {word[2:].partition("=")[0] for word in self.settings if word.startswith("--")}

    @property
    def files(self) -> set[str]:
        """Files that the diff changes."""
        return {name for pair in re.findall(r"^diff --git a/(.*) b/(.*)$", self.diff, re.MULTILINE) for name in pair}

    @property
    def lines(self) -> dict[str, int] | None:
        """Lines of code that the diff adds and removes, without tests; None if only settings change."""
        if not self.diff:
            return None
        counts = Counter(line.sign for line in changed_lines(self.diff) if line.is_code and line.text.strip())
        return {"added": counts["+"], "removed": counts["-"]}

    @property
    def lines_to_read(self) -> list[str]:
        """Lines that the diff adds and that a reader should judge first; see `reasons_to_read`."""
        return lines_to_read(self.diff)


def idea_texts(arguments: Iterable[str]) -> list[str]:
    """Return the text of each idea; a folder stands for the patches in it, a text file for an idea in each line.

    Raises:
        ConfigError: a folder or a text file cannot be read.
    """
    texts = []
    for argument in arguments:
        is_path = not argument.startswith("--") and argument.strip() not in ("", ".")
        path = expand_user_path("idea", argument) if is_path else Path()
        # Unlike the methods of Path in Python 3.11, these raise nothing for a text that is too long for a path.
        if is_path and os.path.isdir(path):
            texts += [shlex.quote(str(path / name)) for name in names_in(path) if is_patch(path / name)]
        elif path.suffix == ".txt" and os.path.isfile(path):
            lines = [line.strip() for line in read_user_text("idea", path).splitlines()]
            texts += [line for line in lines if line and not line.startswith("#")]
        else:
            texts.append(argument)
    return texts


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of what is in a folder of ideas."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError(f"idea: {str(folder)!r} cannot be read: {error.strerror}") from None


def parse_idea(text: str) -> Idea:
    """Parse one idea.

    Args:
        text: settings of train.py, such as `--model.mlp relu2`; or a git branch or commit, a patch file, or `.` for
            the changes of the working tree, optionally followed by settings. A line `Settings: ...` above the first
            diff of a patch gives settings, too.

    Raises:
        ConfigError: the text is none of these, changes nothing, changes the data or the seeds, or has an option that is
            no setting of the training.
    """
    words = split_words(text)
    if not any(words):
        raise ConfigError("idea: '' is empty; give settings, a git branch, a patch file, or . for the working tree")
    if words[0].startswith("--"):
        return Idea(text, check_options(words))
    code, *settings = words
    if head_commit() is None:
        raise ConfigError(
            f"idea: {code!r} is code, but {ROOT} is not the root of a git repository, or git is not installed; run "
            "`git init` and commit it in a folder of its own, or compare settings alone"
        )
    base, commit = resolve_commits(code)
    why = ""
    if is_patch(path := expand_user_path("idea", code)):
        # The lines of a patch have the encoding of its files, but a byte order mark is before its first word.
        header = path.read_bytes().removeprefix(BOM_UTF8).partition(b"diff --git ")[0].decode(errors="replace")
        own = next((line for line in header.splitlines() if line.startswith(SETTINGS_LINE)), SETTINGS_LINE)
        settings = [*split_words(own.removeprefix(SETTINGS_LINE)), *settings]
        why = first_line(header)
    elif code != ".":
        why = git("show", "--no-patch", "--format=%s", commit)
    if git("rev-parse", f"{base}^{{tree}}") == git("rev-parse", f"{commit}^{{tree}}"):
        what = "the working tree has no changes" if code == "." else f"{code!r} changes nothing"
        raise ConfigError(f"idea: {what} relative to {base[:12]}; there is nothing to compare")
    # As a patch that git can apply, whatever `git diff` is configured to print.
    diff = git("diff-tree", "-p", "--binary", "--full-index", "--find-renames", base, commit) + "\n"
    check_changes(text, base, commit)
    return Idea(text, check_options(settings), base, diff, why=why)


def first_line(header: str) -> str:
    """Return the first line of the text above the diff of a patch, or the subject of one by `git format-patch`."""
    lines = [line.strip() for line in header.splitlines()]
    subjects = [line.removeprefix("Subject:").strip() for line in lines if line.startswith("Subject:")]
    notes = [line for line in lines if line and not line.startswith((SETTINGS_LINE, "From ", "---"))]
    return re.sub(r"^\[PATCH[^]]*\] *", "", next(iter([*subjects, *notes]), ""))


def check_changes(text: str, base: str, commit: str) -> None:
    """Raise ConfigError if the losses of changed code would mean something else, with what to write instead.

    The data must be the baseline's, except for ORDER_FILE. Random numbers must come from the seed of a run. Every
    changed path is a file: a link may lead out of the checkout, which this process reads outside of the sandbox.
    """
    # By blobs, whatever a diff would show: renamed files are listed by both names, and no name is escaped.
    fields = git("diff-tree", "-r", "-z", "--no-renames", "--raw", base, commit).split("\0")
    for facts, name in zip(fields[::2], fields[1::2], strict=False):  # behind the last one is an empty field
        problem, mode = "", facts.split()[1]  # ":100644 120000 ..."
        if mode not in MODES_OF_FILES:
            problem = "which is a link or a submodule; add the file itself"
        elif Path(name).name == ATTRIBUTES_FILE:
            problem = "which decides the bytes that git writes for other files; leave it out"
        elif name.startswith(DATA_FOLDER) and name != ORDER_FILE:
            line = first_changed_line(base, commit, name)
            where = f"in the line `{line:.80}`, " if line else ""
            only = f"of {DATA_FOLDER} an idea may change only {ORDER_FILE}, the order and the lengths of samples"
            problem = f"{where}so its losses would mean something else; {only}"
        elif name.endswith(".py") and not name.startswith("tests/") and name != ORDER_FILE:
            before, after = (seed_statements(source(one, name)) for one in (base, commit))
            problem = seed_problem(before, after, is_model=name.startswith("model/"))
        if problem:
            raise ConfigError(f"idea: {text!r} changes {name}, {problem}")


def first_changed_line(base: str, commit: str, name: str) -> str:
    """Return the first line that a commit adds to a file or removes from it, without indentation; "" if it has none."""
    options = "--no-ext-diff", "--no-textconv", "--no-color", "--unified=0"
    difference = git("--literal-pathspecs", "diff", *options, base, commit, "--", name)
    lines = difference.partition("\n@@")[2].splitlines()
    return next((text for line in lines if line[:1] in ("+", "-") and (text := line[1:].strip())), "")


def seed_problem(before: Counter[str], after: Counter[str], is_model: bool) -> str:
    """Describe a changed statement by which all runs could have one seed, chosen for its luck; "" if there is none.

    A model may need fewer random numbers than before.
    """
    for statement in after - before:
        if sets_constant_seed(statement):
            instead = 'derive_seed(torch.initial_seed(), "NAME") of model/seeds.py, or config.seed outside of model/'
            return f"where `{statement}` gives all runs the same random numbers; write {instead}"
    lost = [statement for statement in before - after if "manual_seed" in statement]
    if lost and not is_model and len(after - before) < len(before - after):
        return f"where `{lost[0]}` is missing, so random numbers would not be those of the run's seed; keep that line"
    return ""


def sets_constant_seed(statement: str) -> bool:
    """Return whether a statement gives a generator, or a seed by its name, a value without any variable."""
    try:
        tree = ast.parse(statement.removesuffix(":") + (": pass" if statement.endswith(":") else ""))
    except SyntaxError:  # such as `else:` alone
        return False
    values: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SEEDING_CALLS:
                values.append(ast.Tuple([*node.args, *(keyword.value for keyword in node.keywords)], ast.Load()))
            values += [keyword.value for keyword in node.keywords if is_seed(keyword.arg or "")]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(is_seed(ast.unparse(target)) for target in targets):
                values.append(node.value)
    return any(is_constant(value) for value in values)


def is_seed(name: str) -> bool:
    """Return whether a name is that of a seed or of several: LUCKY_SEED and seeds are, num_seeds and seeded are not."""
    parts = {part.lower() for part in re.split(r"\W|_", name)}
    return bool(parts & {"seed", "seeds"}) and not parts & {"num", "n", "number", "count"}


def is_constant(value: ast.AST) -> bool:
    """Return whether an expression reads no variable: the names of what it calls do not count, initial_seed() does."""
    called = {id(part) for node in ast.walk(value) if isinstance(node, ast.Call) for part in ast.walk(node.func)}
    calls = [ast.unparse(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)]
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name) and id(node) not in called]
    return not names and not any(call.endswith("initial_seed") for call in calls)


def source(commit: str, file: str) -> str:
    """Return the text of a file in a commit, "" if it does not exist there."""
    try:
        return git("show", f"{commit}:{file}")
    except ConfigError:
        return ""


@cache  # the patches of a folder have the same base
def seed_statements(text: str) -> Counter[str]:
    """Count the lines of Python code that mention a seed or a generator, without comments and docstrings."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a run of it will fail
        return Counter()
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # such as a docstring
                child.value.value = ""
    return Counter(line.strip() for line in ast.unparse(tree).splitlines() if SEED_WORDS.search(line))


def arms(idea: Idea, grid: Mapping[str, Sequence[float]]) -> list[Idea]:
    """Return an idea with each combination of the factors of a grid; without a grid, the idea alone."""
    return [replace(idea, factors=dict(zip(grid, factors, strict=True))) for factors in product(*grid.values())]


def split_words(text: str) -> list[str]:
    """Split a text like a shell; raise ConfigError if a quotation mark is missing."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"idea: {text!r} cannot be parsed: {error}") from None


def check_options(words: list[str]) -> list[str]:
    """Return the settings of an idea; raise ConfigError if one is set for each run, or prints something."""
    for word in words:
        if word.partition("=")[0] in (*PER_RUN_OPTIONS, *PRINTING_OPTIONS):
            raise ConfigError(f"idea: {word} is set for each run, or prints something; leave it out")
    return words


@dataclass(frozen=True)
class ChangedLine:
    """A line that a diff adds or removes."""

    file: str
    number: int
    """In the new file; of a removed line, where it was."""
    sign: str
    """"+" or "-"."""
    text: str

    @property
    def is_code(self) -> bool:
        """Whether it can change what a run does: neither of the tests nor of a page."""
        return not self.file.startswith(("tests/", "docs/")) and not self.file.endswith(".md")


def changed_lines(diff: str) -> Iterator[ChangedLine]:
    """Yield the lines that a diff adds and removes."""
    file, number, left = "", 0, [0, 0]
    for line in diff.splitlines():
        if found := re.match(r"^@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            number, left = int(found[2]), [int(found[1] or 1), int(found[3] or 1)]
        elif any(left):  # inside of a hunk, where a line such as "+++ b/x" is content
            sign, text = line[:1] or " ", line[1:]
            if sign in ("+", "-"):
                yield ChangedLine(file, number, sign, text)
            if sign == "\\":
                continue
            left = [left[0] - (sign != "+"), left[1] - (sign != "-")]
            number += sign != "-"
        elif found := re.match(r"^diff --git .* b/(.*)$", line):
            file = found[1]


# What changed code can do besides computing, and words of Python that do it. A reader judges these lines first. Code
# that hides what it does is not found, so `hidden` names the words by which it would.
REASONS_TO_READ = {
    "files": r"\b(open|Path|shutil|tempfile|pickle|glob|mmap|read_text|read_bytes|write_text|write_bytes|memmap)\b"
    r"|\b(torch|np|numpy)\.(load|save|fromfile|savez)\b|\b(safetensors|load_file|save_file|torch\.hub)\b",
    "processes": r"\b(subprocess|multiprocessing|threading|concurrent|asyncio|signal|atexit|fork|Popen|Thread)\b",
    "environment": r"\b(os|sys|platform|environ|getenv|argv|ctypes|socket|urllib|requests|http)\b",
    "time": r"\b(time|datetime|perf_counter|monotonic)\b",
    "data": r"(?<!utils\.)\b(data|load_corpus|load_batch|StoriesDataset|TextDataset|global_batches)\b",
    "harness": r"variant_program|evaluator|experiment|is_grad_enabled|\.training\b|\b(seed|manual_seed|initial_seed)\b",
    "hidden": r"\b(exec|eval|compile|getattr|setattr|globals|vars|__(?!init__)\w+__|importlib|inspect|gc)\b"
    r"|\b(codecs|base64|zlib)\b|\\x[0-9a-f]{2}",
}
MAX_LINE = 120  # characters of a line to read


def lines_to_read(diff: str) -> list[str]:
    """Return the lines that a diff adds and that touch what REASONS_TO_READ names, as "FILE:LINE: REASONS: TEXT".

    A changed file that is not Python, and one whose content a diff does not show, is listed as a whole.
    """
    found: list[str] = []
    for line in changed_lines(diff):
        text = line.text.strip()
        if line.sign == "+" and line.is_code and text and not text.startswith("#"):
            reasons = [name for name, words in REASONS_TO_READ.items() if re.search(words, text)]
            if not line.file.endswith(".py"):
                reasons = ["not Python"]
            if reasons:
                found.append(f"{line.file}:{line.number}: {', '.join(reasons)}: {text[:MAX_LINE]}")
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        name = re.match(r"diff --git .* b/(.*)", part)
        if name and re.search(r"^(GIT binary patch|new mode)", part, re.MULTILINE):
            found.append(f"{name[1]}: binary or mode")
    return found


def is_patch(file: Path) -> bool:
    """Return whether a file is a patch; files that macOS writes on other file systems (`._NAME`) are not."""
    return file.suffix in PATCH_SUFFIXES and not file.name.startswith("._") and os.path.isfile(file)


def head_commit() -> str | None:
    """Return the commit of HEAD; None if this folder is not the root of a git repository, or git is not installed."""
    try:
        head = git("rev-parse", "HEAD")
        return head if Path(git("rev-parse", "--show-toplevel")).samefile(ROOT) else None
    except ConfigError:
        return None


def resolve_commits(code: str) -> tuple[str, str]:
    """Return the commit on which a piece of code is based, and the commit of the code itself."""
    head = git("rev-parse", "HEAD")
    if code == ".":
        return head, commit_on(head, "add", "--update", "--", ".")
    if os.path.isfile(patch := expand_user_path("idea", code)):
        return head, commit_on(head, "apply", "--cached", str(patch.resolve()))
    try:
        commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{code}^{{commit}}")
    except ConfigError:
        raise ConfigError(
            f"idea: {code!r} is not a git branch or commit here, a patch file or a folder of them, or settings, which "
            "begin with --"
        ) from None
    try:
        base = git("merge-base", "HEAD", commit)
        return (git("rev-parse", "--verify", "--quiet", f"{commit}^") if base == commit else base), commit
    except ConfigError:
        raise ConfigError(
            f"idea: git has no earlier commit with which to compare {code!r}; in a shallow clone, run "
            "git fetch --unshallow"
        ) from None


def merge(base: str | None, ideas: Iterable[Idea]) -> str | None:
    """Commit the diffs of ideas on a base, by three-way merges where the lines around them differ; return the commit.

    Without any diff it is the base, which is None outside of a git repository.

    Raises:
        ConfigError: a diff conflicts with the base or with those before it.
    """
    with tempfile.TemporaryDirectory() as folder:
        patch = Path(folder, "change.patch")
        for idea in ideas:
            if idea.diff and base:
                patch.write_bytes(idea.diff.encode(errors="surrogateescape"))
                base = commit_on(base, "apply", "--cached", "--3way", str(patch))
    return base


def commit_on(parent: str, *change: str) -> str:
    """Commit the result of a git command on a parent, in a separate index: working tree and index stay unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index")), **AUTHOR}
        git("read-tree", parent, **index)
        git(*change, **index)
        if change[0] == "add":  # new files of code as well
            git("add", "--", "*.py", **index)
        return git("commit-tree", git("write-tree", **index), "-p", parent, "-m", "Change under test", **index)


class Checkouts(ExitStack):
    """Folders with the files of commits, made when they are first asked for and removed at the end of a `with` block.

    The next experiment removes those of a killed one.
    """

    def __init__(self):
        super().__init__()
        self.folders: dict[str | None, Path] = {None: ROOT}
        self.lock = Lock()

    @cached_property
    def parent(self) -> Path:
        """Temporary folder of all of them."""
        return self.enter_context(temporary_folder(Path(tempfile.gettempdir()), "mini-gpt-experiment_"))

    def folder(self, commit: str | None) -> Path:
        """Return the folder of a commit; None, outside of a git repository, is this folder.

        Threads may ask for the same commit at once, as those that check one patch with two learning rates do.
        """
        with self.lock:
            if commit not in self.folders:
                self.folders[commit] = self._check_out(str(commit))
            return self.folders[commit]

    def _check_out(self, commit: str) -> Path:
        folder = self.parent / commit[:12]
        index = {"GIT_INDEX_FILE": f"{folder}.index"}
        git("read-tree", commit, **index)
        git("checkout-index", "--all", f"--prefix={folder}/", **index)
        HASHES_OF_CHECKOUTS[folder] = file_hashes(folder)
        for file in map(folder.joinpath, HASHES_OF_CHECKOUTS[folder]):
            if not file.is_symlink():
                file.chmod(file.stat().st_mode & ~0o222)
        return folder


HASHES_OF_CHECKOUTS: dict[Path, dict[str, str]] = {}  # in the memory of this process, which no run can write


def check_checkout(folder: Path) -> None:
    """Raise RunError if a file of a checkout is not what git wrote; the code of an idea may have changed it."""
    hashes = HASHES_OF_CHECKOUTS.get(folder)  # None: this is not a checkout, but the folder of the user
    if hashes is not None and (changed := sorted(dict(hashes.items() ^ file_hashes(folder).items()))):
        raise RunError(
            f"{folder / changed[0]}: the code has changed since it was checked out, perhaps by the code of an idea; "
            "read the ideas, then run the same command again"
        )


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file in a folder, by its name; Python's own copies of compiled code do not count.

    A link is hashed by its target, which may be any file of this machine and is neither read nor changed.
    """
    hashes = {}
    for path in folder.rglob("*"):
        if path.parent.name != "__pycache__" and (path.is_symlink() or path.is_file()):
            content = b"link to " + os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            hashes[str(path.relative_to(folder))] = sha256(content).hexdigest()
    return hashes


def git(*arguments: str, **environment: str) -> str:
    """Run git in this repository, in a separate session so that Ctrl-C reaches tools.experiment alone.

    Raises:
        ConfigError: git fails, with its message, is not installed, or cannot be started with arguments of this length.
    """
    try:
        done = subprocess.run(
            ["git", *(word for setting in OVERRIDES for word in ("-c", setting)), *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError("idea: git is not installed") from None
    except OSError as error:
        raise ConfigError(f"idea: git {arguments[0]} cannot be started: {error.strerror}") from None
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip() or "no error message"
        raise ConfigError(f"git {arguments[0]} fails: {message}")
    return done.stdout.decode(errors="surrogateescape").strip("\n")
