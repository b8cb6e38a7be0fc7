"""The experiments of docs/patches apply, train, resume and are verified."""

import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CPU_LAUNCH, ROOT, commands, environment, metrics, train
from tools.trial import TINY

# (name, lines, settings) of every patch in docs/forking.md.
EXPERIMENTS = re.findall(
    r"^\| \[\w+\]\(patches/(\w+)\.patch\).*? \| (\d+) \| `(.*)` \|$", (ROOT / "docs/forking.md").read_text(), re.M
)
ON_TOP_OF_EACH_OTHER = EXPERIMENTS[:-6]
APPLY = {
    "git": ["git", "apply"],
    "patch": ["patch", "--strip=1", "--silent", "--fuzz=0", "--no-backup-if-mismatch", "--input"],
}


def copy_of_the_repository(directory):
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "*.png"))
    return directory


def apply(name, tool, directory, *options):
    program, *rest = APPLY[tool]
    command = [program, *rest[:1], *options, *rest[1:], ROOT / "docs" / "patches" / f"{name}.patch"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} by {tool}: {done.stdout}{done.stderr}"


@pytest.mark.slow
def test_commands_of_page_run(tmp_path):
    """In a clone, with short trainings: those of the experiment end before it has a verdict."""
    copy, identity = copy_of_the_repository(tmp_path / "copy"), "-c user.name=Test -c user.email=test@example.org"
    init = f"git init --quiet && git add . && git {identity} commit --quiet --message fork"
    short = "--steps 20 --schedule.warmup_steps 2 --evaluation.num_samples 20"
    page = commands((ROOT / "docs" / "forking.md").read_text())
    assert len(page) == 4 and "tools.experiment" in page[2]
    for command in [init, *page]:
        if command.startswith("python "):
            command = f"{sys.executable} {command.removeprefix('python ')} {short}"
            command += " --runs 4" if "tools.experiment" in command else " --data.num_samples 320"
        done = subprocess.run(command, shell=True, cwd=copy, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert not subprocess.run(["git", "diff"], cwd=copy, capture_output=True).stdout


def test_patches_have_the_length_their_page_states():
    assert {path.stem for path in (ROOT / "docs" / "patches").iterdir()} == {name for name, *_ in EXPERIMENTS}
    for name, lines, _ in EXPERIMENTS:
        patch = (ROOT / "docs" / "patches" / f"{name}.patch").read_text()
        assert len(re.findall(r"^(?:\+(?!\+\+)|-(?!--))", patch, re.M)) == int(lines) <= 30, name
    for page, words in {"README.md": "{} examples", "README.zh-CN.md": "{} 个"}.items():
        assert words.format(len(EXPERIMENTS)) in " ".join((ROOT / page).read_text().split()), page


NO_PATCH = pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")


@pytest.mark.parametrize("tool", ["git", pytest.param("patch", marks=NO_PATCH)])
def test_patches_apply_alone_and_together(tool, tmp_path):
    directory = copy_of_the_repository(tmp_path / "copy")
    for name, *_ in EXPERIMENTS:
        apply(name, tool, directory)
        apply(name, tool, directory, "--reverse")
    for order in (ON_TOP_OF_EACH_OTHER, ON_TOP_OF_EACH_OTHER[::-1]):
        for name, *_ in order:
            apply(name, tool, directory)
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--quiet", "--ignore", "C901,D,E402", "."],
            cwd=directory,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        for name, *_ in reversed(order):
            apply(name, tool, directory, "--reverse")


def test_patches_apply_in_any_order(tmp_path):
    """The test above has both orders of each pair; a third patch could repeat the lines that a patch looks for."""
    directory = copy_of_the_repository(tmp_path / "copy")
    for seed in range(10):
        order = random.Random(seed).sample(ON_TOP_OF_EACH_OTHER, len(ON_TOP_OF_EACH_OTHER))
        for name, *_ in order:
            apply(name, "git", directory)
        for name, *_ in reversed(order):
            apply(name, "git", directory, "--reverse")


SHARED_ROWS = """
from runtime.config.parser import parse_config
from data.corpus import load_corpus
words = "--data.source counting --model.vocab_size 50 --seq_len 16 --data.num_samples 200 --evaluation.num_samples 20"
corpus = load_corpus(parse_config(words.split()))
train, validation = ([tuple(row["input_ids"].tolist()) for row in rows] for rows in (corpus.train, corpus.validation))
print(len(train), len(validation), len({*train} & {*validation}))
"""


@pytest.mark.slow
def test_counting_is_validated_on_other_sequences(tmp_path):
    copy = copy_of_the_repository(tmp_path / "copy")
    apply("data_counting", "git", copy)
    done = subprocess.run([sys.executable, "-c", SHARED_ROWS], cwd=copy, capture_output=True, text=True)
    assert done.stdout == "200 20 0\n", done.stdout + done.stderr


# The patches as version 1.0 had them; docs/stability.md states that they apply to each later 1.x.
RELEASED = sorted((ROOT / "tests" / "repo" / "patches_1.0").glob("*.patch"))


def test_patches_of_first_release_apply():
    assert len(RELEASED) == 17
    for patch in RELEASED:
        done = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"


def changed_since_release():
    """Patches whose present text differs; those that are the same train in the test below."""
    now = ROOT / "docs" / "patches"
    return [p for p in RELEASED if not (now / p.name).exists() or (now / p.name).read_text() != p.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("patch", changed_since_release() or RELEASED[:1], ids=lambda patch: patch.stem)
def test_patch_of_first_release_trains(patch, tmp_path):
    copy = copy_of_the_repository(tmp_path / "copy")
    subprocess.run(["git", "apply", patch], cwd=copy, check=True)
    settings = next((shlex.split(words) for name, _, words in EXPERIMENTS if name == patch.stem), [])
    command = [sys.executable, "train.py", *TINY.split(), *settings, "--out_dir", str(tmp_path), "--steps", "2"]
    done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "Training finished." in done.stdout, done.stdout + done.stderr


def git(*arguments, cwd):
    words = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


HAS_HISTORY = (ROOT / ".git").exists() and not git("rev-parse", "--is-shallow-repository", cwd=ROOT).stdout != "false\n"


@pytest.mark.skipif(not HAS_HISTORY, reason="needs a clone with its history, which has the files that patches change")
def test_patches_merge_with_other_edits_of_the_same_lines(tmp_path):
    """`git apply --3way` needs the `index` lines of a patch, and the versions of the files that they name."""
    git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(tmp_path / "clone"), cwd=tmp_path)
    clone = tmp_path / "clone"
    for patch in RELEASED:
        assert re.search(r"^index \w+\.\.\w+ 100644$", patch.read_text(), re.M), patch.name
    config, patch = clone / "model" / "config.py", ROOT / "tests" / "repo" / "patches_1.0" / "block_parallel.patch"
    before, context = config.read_text(), "    qk_norm: bool = False\n"
    assert before.count(context) == 1
    config.write_text(before.replace(context, "    qk_norm: bool = True\n"))  # the line after that of the patch
    git("commit", "--quiet", "--all", "--message", "edit", cwd=clone)
    assert git("apply", "--check", str(patch), cwd=clone).returncode == 1
    merged = git("apply", "--3way", str(patch), cwd=clone)
    text = config.read_text()
    assert "<<<<<<<" in text or merged.returncode == 0, merged.stderr
    assert "parallel: bool = False" in text and "qk_norm: bool = True" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiments",
    [*([one] for one in EXPERIMENTS), ON_TOP_OF_EACH_OTHER],
    ids=lambda them: f"{len(them)}_{them[0][0]}",
)
def test_patched_repository_trains_resumes_and_is_verified(experiments, tmp_path):
    """By tools/trial.py, in the copy."""
    copy = copy_of_the_repository(tmp_path / "copy")
    for index, (name, *_) in enumerate(experiments):
        apply(name, list(APPLY)[index % 2], copy)
    settings = [word for *_, words in experiments for word in shlex.split(words)]
    command = [sys.executable, "-m", "tools.trial", *settings]
    done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"^(PASS|SKIP)  ", done.stdout, re.M)
    no_family = {"attention_lora", "block_parallel", "mlp_experts", "value_embeddings"}
    skipped = 3 if no_family & {name for name, *_ in experiments} else 0
    assert results.count("SKIP") == skipped and len(results) == 15


def touches_model(name):
    return "\n+++ b/model/" in (ROOT / "docs" / "patches" / f"{name}.patch").read_text()


OF_MODEL = [(name, settings) for name, _, settings in EXPERIMENTS if touches_model(name)]
FIRST_STEP = ["--steps", "1", "--schedule.warmup_steps", "0"]
MORE = {"mlp_experts": "--model.n_experts 8"}  # as many as an experiment would have


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Settings with which a model learns from a trained one, and the first row that it logs without a patch."""
    out_dir = tmp_path_factory.mktemp("runs")
    train(*TINY.split(), "--steps", 4, "--out_dir", out_dir, "--name", "teacher")
    settings = [*TINY.split(), "--teacher.path", str(out_dir / "teacher"), "--teacher.temperature", "2"]
    settings += ["--chunked_loss", "true", "--model.dropout", "0"]
    train(*settings, *FIRST_STEP, "--out_dir", out_dir, "--name", "plain")
    return settings, metrics(out_dir / "plain")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), OF_MODEL, ids=[name for name, _ in OF_MODEL])
def test_patch_is_verified_beside_other_settings(name, settings, teacher, tmp_path):
    """With a teacher, a chunked loss and accumulation, on two processes."""
    copy = copy_of_the_repository(tmp_path / "copy")
    apply(name, "git", copy)
    others, plain = teacher
    words = [*others, *shlex.split(f"{settings} {MORE.get(name, '')}"), "--out_dir", str(tmp_path)]
    launcher = [
        Path(sys.executable).parent / "accelerate",
        "launch",
        "--config_file",
        CPU_LAUNCH,
        "--num_processes",
        "2",
    ]
    command = [*map(str, launcher), "verify.py", *words]
    done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and done.stdout.endswith("Everything holds.\n"), done.stdout + done.stderr
    if name.startswith("loss_"):  # the model is the same, and so is the loss that is logged beside the objective
        command = [sys.executable, "train.py", *words, "--name", "patched", *FIRST_STEP]
        done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        row = metrics(tmp_path / "patched")[0]
        for metric in ("train/loss", "train/teacher_kl"):
            assert row[metric] == pytest.approx(plain[metric], rel=1e-5), metric
        assert row["train/grad_norm"] != pytest.approx(plain["train/grad_norm"], rel=1e-5)
