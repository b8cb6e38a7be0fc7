"""The rules of this house: lint, arrows, sizes, the pages and the patches of docs/. A fork may delete this file.

What a user relies on is in the other tests, which hold for a fork too.
"""

import ast
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser

from config import TrainConfig
from docs import settings
from model.config import GPTConfig
from model.gpt import GPTModel
from tests.conftest import ROOT, commands, environment, python, shell
from tests.test_prepare import make_documents, write_jsonl

RUFF = [sys.executable, "-m", "ruff"]


@pytest.mark.parametrize("arguments", [["check", "."], ["format", "--check", "."]], ids=lambda a: a[0])
def test_ruff(arguments):
    done = subprocess.run([*RUFF, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# What each part of the house may stand on, besides itself: every arrow runs downward.
MAY_IMPORT = {
    "model": {"model"},
    "files.py": set(),
    "config.py": {"model"},
    "arguments.py": {"config"},
    "chat.py": {"config", "files"},
    "data": {"arguments", "chat", "config", "data", "files"},
    "training": {"config", "data", "files", "model", "training"},
    "cli.py": {"arguments", "config", "training"},
    "launcher.py": {"config", "model", "training"},
    "plot.py": {"files", "training"},
    "records.py": {"config", "files", "training"},
    "compare.py": {"cli", "config", "plot", "records"},
    "sweep.py": {"arguments", "cli", "compare", "config", "training"},
    "hub.py": {"model"},
    "load.py": {"config", "data", "files", "hub", "model", "training"},
    "model_checks.py": {"hub", "model", "training"},
    "nested.py": {"training"},
    "plan.py": {"config", "data", "launcher", "load", "model", "nested", "train", "training"},
    "evaluate.py": {"cli", "config", "data", "files", "load", "training"},
    "export.py": {"chat", "cli", "config", "data", "files", "hub", "load", "model", "plot", "training"},
    "sample.py": {"chat", "cli", "config", "data", "load", "training"},
    "trackers.py": {"config", "export", "files", "hub", "load", "training"},
    "train.py": {"cli", "config", "data", "launcher", "load", "model", "plot", "trackers", "training"},
    "verify.py": {"cli", "config", "data", "hub", "launcher", "model", "model_checks", "nested", "train", "training"},
    "audit.py": {"config", "load", "nested", "train", "training"},
    "replay.py": {*"audit cli config data files launcher load model nested train training".split()},
    "examples": {"model", "examples"},
}


def imported_packages(part):
    for file in (ROOT / part).glob("*.py") if (ROOT / part).is_dir() else [ROOT / part]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield node.module.split(".")[0]
            elif isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_arrows_run_downward(part):
    inside = {Path(name).stem for name in (*MAY_IMPORT, "benchmarks", "tests")}
    assert set(imported_packages(part)) & inside <= MAY_IMPORT[part]
    if part in ("model", "files.py", "config.py", "arguments.py", "data"):
        assert "accelerate" not in imported_packages(part)


def code_lines(text):
    """Lines that hold code: not blank, not a comment, not a docstring."""
    words = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in words for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def code_sizes(*parts):
    files = [
        file for part in parts for file in ((ROOT / part).glob("*.py") if (ROOT / part).is_dir() else [ROOT / part])
    ]
    return {str(file.relative_to(ROOT)): code_lines(file.read_text()) for file in files}


def test_the_house_stays_small():
    core = code_sizes("train.py", "model", "data", "training")
    assert 1000 < sum(core.values()) < 3500
    assert not {file: lines for file, lines in core.items() if lines > 350}
    scripts = [str(file) for file in ROOT.glob("*.py") if "__main__" in file.read_text()]
    assert not {file: lines for file, lines in code_sizes(*scripts).items() if lines > 200}


def test_the_loop_fits_on_a_screen():
    functions = [
        node for node in ast.walk(ast.parse((ROOT / "train.py").read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert {"main", "train"} <= {node.name for node in functions}
    assert not {node.name for node in functions if node.end_lineno - node.lineno >= 140}


def test_uv_installs_what_pip_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (ROOT / "requirements.txt").read_text().split()


# Of docs/forking.md, (name, lines, settings) of every experiment.
EXPERIMENTS = re.findall(
    r"^\| \[\w+\]\(patches/(\w+)\.patch\).*? \| (\d+) \| `(.*)` \|$", (ROOT / "docs/forking.md").read_text(), re.M
)
ON_TOP_OF_EACH_OTHER = [experiment for experiment in EXPERIMENTS if experiment[0] != "data_counting"]
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


def test_every_experiment_is_as_long_as_its_page_says():
    assert {path.stem for path in (ROOT / "docs" / "patches").iterdir()} == {name for name, *_ in EXPERIMENTS}
    for name, lines, _ in EXPERIMENTS:
        patch = (ROOT / "docs" / "patches" / f"{name}.patch").read_text()
        assert len(re.findall(r"^(?:\+(?!\+\+)|-(?!--))", patch, re.M)) == int(lines) < 30, name


NO_PATCH = pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")


@pytest.mark.parametrize("tool", ["git", pytest.param("patch", marks=NO_PATCH)])
def test_experiments_apply_alone_and_on_top_of_each_other(tool, tmp_path):
    directory = copy_of_the_repository(tmp_path / "copy")
    for name, *_ in EXPERIMENTS:
        apply(name, tool, directory)
        apply(name, tool, directory, "--reverse")
    for order in (ON_TOP_OF_EACH_OTHER, ON_TOP_OF_EACH_OTHER[::-1]):
        for name, *_ in order:
            apply(name, tool, directory)
        done = subprocess.run([*RUFF, "check", "--quiet", "."], cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        for name, *_ in reversed(order):
            apply(name, tool, directory, "--reverse")


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiments",
    [*([one] for one in EXPERIMENTS), ON_TOP_OF_EACH_OTHER],
    ids=lambda them: f"{len(them)}_{them[0][0]}",
)
def test_an_experiment_trains_resumes_and_is_verified(experiments, tmp_path):
    """The work is tests/fork_trial.py's, in the copy."""
    copy = copy_of_the_repository(tmp_path / "copy")
    for index, (name, *_) in enumerate(experiments):
        apply(name, list(APPLY)[index % 2], copy)
    settings = [word for *_, words in experiments for word in shlex.split(words)]
    command = [sys.executable, "-m", "tests.fork_trial", str(tmp_path / "runs"), *settings]
    done = subprocess.run(command, cwd=copy, env=environment(), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"^(PASS|SKIP)  ", done.stdout, re.M)
    no_family = {"attention_lora", "block_parallel", "mlp_experts"} & {name for name, *_ in experiments}
    assert results.count("SKIP") == (2 if no_family else 0) and len(results) == 9


# The pages: what they show runs, long trainings shortened, and what they name is there.


README = (ROOT / "README.md").read_text()
README_COMMANDS = commands(README)
SHORT_STORIES = (
    "--steps 3 --schedule.warmup_steps 1 --schedule.decay_steps null --data.num_samples 50 --evaluation.num_samples 20 "
    "--evaluation.num_story_samples 2 --tracking.log_every 1"
)


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("readme") / "runs"


def shortened(command, out_dir):
    """The command as a test can run it: small, into `out_dir`, with two processes where it says so many GPUs."""
    if command == "make train":
        return f'make train ARGS="{SHORT_STORIES} --out_dir {out_dir}"'
    if command == "make verify":
        return f'make verify ARGS="--out_dir {out_dir}"'
    if "--multi_gpu" in command or "multi_gpu.yaml" in command:
        command = command.replace("train.py", "--num_processes 2 --main_process_port 0 train.py")
    if "train.py" in command:
        command += f" --out_dir {out_dir} --steps 3 --tracking.wandb disabled"
    return command.replace(" runs/", f" {out_dir}/").replace(" 420", " 2 --arithmetic false")


def start_of_the_readme(command):
    """A real launcher is that of `make train`; what starts others is slow."""
    slow = "torchrun" in command or "multi_gpu.yaml" in command or command == "make verify"
    return pytest.param(command, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("command", [start_of_the_readme(c) for c in README_COMMANDS if c != "make test"])
def test_a_command_of_the_readme(command, out_dir):
    in_forks = command.startswith(("python ", "accelerate "))
    done = (python if in_forks else shell)(shortened(command, out_dir), WANDB_MODE="disabled")
    if "train.py" in command and "--print_config" not in command:
        assert done.stdout.endswith("Training finished.\n")
        processes = 1 if command.startswith("python") else 2
        assert f"processes: {processes} x" in done.stdout
    if "replay.py" in command:
        assert done.stdout.count("as in the run, by 1 fingerprint(s)") == 2, "it is started like the run"
    if command == "make verify":
        assert done.stdout.count("\nPASS  ") == 9 and "\nEverything holds.\n" in done.stdout
    if command == "make train":
        assert "above the floor" in done.stdout and "sample/accepted" in done.stdout
        assert "The run lies in" in done.stdout and (out_dir / "stories" / "loss.png").exists()
        assert json.loads((out_dir / "stories" / "status.json").read_text())["state"] == "finished"


def test_the_python_that_the_readme_shows(out_dir):
    """After the commands, which train the run that it loads."""
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        names = {}
        exec(code.replace("runs/", f"{out_dir}/"), names)
        assert names["model"].generate(torch.zeros(1, 1, dtype=torch.int64), 3).shape == (1, 4)


def test_the_chinese_readme_says_the_same():
    """As far as a machine can tell: commands and output, sections, tables, links and code, in their order."""
    chinese = (ROOT / "README.zh-CN.md").read_text()
    for kind in (r"(?s)```\w*\n.*?```", r"(?m)^#+ ", r"(?m)^\| `[^`]+`", r"(?<=\]\()(?!README)[^)]+"):
        ours, theirs = (re.findall(kind, page) for page in (README, chinese))
        assert ours == theirs and ours, kind
    words = [" ".join(re.sub(r"(?s)```.*?```", "", page).split()) for page in (README, chinese)]
    ours, theirs = (set(re.findall(r"`[^`]+`", page)) for page in words)
    assert ours == theirs, ours ^ theirs


def test_the_term_of_a_loss_that_the_forking_page_shows():
    """In training, and for whoever calls a model without the number of targets."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "forking.md").read_text(), re.DOTALL)
    labels, x_BTC = torch.ones(2, 5, dtype=torch.int64), torch.randn(2, 5, 128)
    for number, share in ((None, 1), (8, 1), (32, 1 / 4)):
        model = GPTModel(GPTConfig(8))
        names = {"self": model, "x_BTC": x_BTC, "labels": labels, "num_items_in_batch": number}
        made = {"balance": torch.tensor(3.0)}
        exec(code, names, made)
        without = model.next_token_loss(x_BTC, model.output_weight, labels, number)[0]
        assert (made["loss"] - without).item() == pytest.approx(0.03 * share, rel=1e-4)


def test_all_the_commands_of_the_readme_were_found():
    assert "make train" in README_COMMANDS and "make test" in README_COMMANDS and len(README_COMMANDS) >= 9


def test_what_the_readme_names_is_there():
    for name in re.findall(r"\]\(([^)#:]+)\)|`((?:[\w.]+/)+[\w.]+\.(?:py|yaml|patch))`", README):
        assert (ROOT / (name[0] or name[1])).exists(), name


def test_every_guarantee_names_a_test_that_is_there():
    table = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`(?:, `::(\w+)`)?", row)
        assert named, row
        for file, *tests in named:
            for test in filter(None, tests):
                assert f"def {test}(" in (ROOT / file).read_text(), test


def test_the_launch_files_are_all_in_the_table():
    for file in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"| `accelerate_configs/{file.name}` |" in README


def test_make_help_lists_every_target_and_clean_spares_the_runs(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^([a-z-]+):", makefile, re.MULTILINE):
        assert f"make {target} " in listed
    (tmp_path / "Makefile").write_text(makefile)
    for path in ("runs/stories/__pycache__/kept", ".venv/bin/python", "data/__pycache__/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["Makefile", "runs/stories/__pycache__/kept"]


DATA_PAGE = (ROOT / "docs" / "data.md").read_text()
DATA_COMMANDS = commands(DATA_PAGE)
SHORT_TEXT = (
    "--steps 2 --schedule.warmup_steps 1 --schedule.decay_steps 1 --evaluation.num_samples 8 "
    "--tracking.wandb disabled --tracking.log_every 1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user who has the texts and a copy of the repository."""
    folder = tmp_path_factory.mktemp("user")
    folders = (ROOT / name for name in ("data", "model", "training", "configs", "accelerate_configs"))
    for path in (*ROOT.glob("*.py"), *folders):
        (folder / path.name).symlink_to(path)
    documents = [text.replace("\r", "") for text in make_documents(60)]
    (folder / "input.txt").write_text("\n".join(documents))
    (folder / "stories.txt").write_text("<|endoftext|>\n".join(documents))
    (folder / "texts").mkdir()
    write_jsonl(folder / "texts" / "a.jsonl", documents)
    return folder


@pytest.mark.parametrize("command", DATA_COMMANDS)
def test_a_command_of_the_data_page(command, folder):
    training = "train.py" in command
    done = python(f"{command} {SHORT_TEXT if training else '--num_workers 1'}", cwd=folder)
    if training:
        assert done.stdout.endswith("Training finished.\n") and "val/bits_per_byte" in done.stdout
    else:
        out = re.search(r"--out (\S+)", command)[1]
        metadata = json.loads((folder / out / "metadata.json").read_text())
        documents = metadata["train"]["documents"]
        assert documents == 1 if "input.txt" in command else 40 < documents < 60


def test_all_the_commands_of_the_data_page_were_found():
    assert len([command for command in DATA_COMMANDS if "data.prepare" in command]) >= 3
    assert len([command for command in DATA_COMMANDS if "train.py" in command]) >= 2


def test_the_files_that_the_data_page_names_are_there():
    for name in re.findall(r"(configs/\w+\.yaml)", DATA_PAGE):
        assert (ROOT / name).exists(), name


def test_docs_settings_is_the_page_of_the_settings():
    assert settings.PAGE.read_text() == settings.page(), "run python -m docs.settings"


def test_docs_settings_has_every_setting_of_the_parser_with_its_default():
    parser = ArgumentParser()
    parser.add_class_arguments(TrainConfig, as_group=False)
    defaults = parser.get_defaults().as_flat()
    written = dict(re.findall(r"^- \*\*`([\w.]+)`\*\* \(.*?; default (.*?)\): \w", settings.PAGE.read_text(), re.M))
    assert written.keys() == vars(defaults).keys() and len(written) > 60
    for name, value in vars(defaults).items():
        assert written[name] == (value if isinstance(value, str) else json.dumps(value)).replace("1e-05", "1.0e-05"), (
            name
        )


def test_docs_settings_explains_a_choice_and_a_section():
    page = settings.page()
    assert "- **`model.position`** (learned or rope; default learned): How the model knows order" in page
    assert "\n## schedule\n\nThe learning rate as a function of the step.\n" in page
