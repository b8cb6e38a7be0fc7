"""The pages: their commands run, with long trainings shortened, and the files and names in them exist."""

import inspect
import json
import pkgutil
import re
import subprocess
from fnmatch import fnmatch

import pytest
import torch
import yaml

from data.prepare.sources import Source
from docs import settings
from runtime.config.parser import parse_config, parse_tool
from runtime.config.schema import TrainConfig
from tests.conftest import ROOT, commands, python, shell
from tests.data.prepare.test_prepare import make_documents, write_jsonl
from tools.sweep import SweepConfig, plan_sweep
from trainer.run.resume import FIXED_IN_BRANCH, is_fixed_in_branch

README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples/README.md", ROOT / "benchmarks/LOG.md"]
PAGES += [ROOT / "tests/GUARANTEES.md", ROOT / "tools/experiment/program.md"]
MADE_BY_A_RUN = {"tokenizer/", "wandb/", "ideas/", "tensorboard/", "exports/", "experiments/"}


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


# In this order: later ones use the run of `make train`. tests/tools/test_debugging.py runs the rest of debugging.md.
COMMANDS = [*commands(README), *commands(page("launching")), *commands(page("runs")), *commands(page("debugging"))[:1]]
assert COMMANDS[:2] == ["make train", "make verify"] and len(COMMANDS) >= 12
SHORT_STORIES = (
    "--steps 3 --schedule.warmup_steps 1 --schedule.decay_steps null --data.num_samples 50 --evaluation.num_samples 20 "
    "--evaluation.num_scored_generations 2 --tracking.log_every 1"
)
SMALL_GPT2 = (
    " --model.n_layers 1 --model.d_model 32 --model.n_heads 2 --model.d_ff 32 --seq_len 32 --global_batch_size 8 "
    "--micro_batch_size 4 --model.vocab_size null --compile false --data.num_workers 0 --evaluation.num_samples 8 "
    "--schedule.warmup_steps 1"
)


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("readme") / "runs"


def shortened(command, out_dir):
    """Shorten a command for a test: a small run in `out_dir`, with two processes instead of several GPUs."""
    if command == "make train":
        return f'make train ARGS="{SHORT_STORIES} --out_dir {out_dir}"'
    if command == "make verify":
        return f'make verify ARGS="--out_dir {out_dir}"'
    if "--multi_gpu" in command or "multi_gpu.yaml" in command:
        command = command.replace("train.py", "--num_processes 2 --main_process_port 0 train.py")
    if "fineweb" in command:  # a small corpus of one's own, and a small model
        command = command.replace("corpora/fineweb", str(out_dir.parent / "fineweb"))
        documents = out_dir.parent / "documents.jsonl"
        write_jsonl(documents, make_documents(300))
        command = command.replace(
            "HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer gpt2", f"{documents} --tokenizer byte"
        )
        command += SMALL_GPT2 if "train.py" in command else " --validation hash:0.1"
    if "train.py" in command:
        command += f" --out_dir {out_dir} --steps 3 --tracking.wandb disabled"
    return command.replace(" runs/", f" {out_dir}/").replace(" 1020", " 2")


def marked(command):
    """Mark commands that start real launchers as slow, and one that differs from another by a name."""
    slow = any(word in command for word in ("torchrun", "multi_gpu", "fineweb", "make verify", "no_gpu"))
    return pytest.param(command, marks=pytest.mark.slow if slow else ())


def launched_by(make):
    """Return the command that a target of the Makefile launches, which prints it first."""
    printed = shell(f"{make.replace('make', 'make --dry-run', 1)}").stdout
    [launch] = re.findall(r"^\.venv/bin/(accelerate launch .*)$", printed, re.MULTILINE)
    return launch


@pytest.mark.parametrize("command", [marked(command) for command in COMMANDS if command != "make test"])
def test_command_of_first_pages(command, out_dir):
    line = shortened(command, out_dir)
    line = launched_by(line) if command == "make train" else line
    in_forks = line.startswith(("python ", "accelerate "))
    done = (python if in_forks else shell)(line, WANDB_MODE="disabled")
    if "train.py" in command and "--print_config" not in command:
        assert done.stdout.endswith("Training finished.\n")
        processes = 1 if command.startswith("python") else 2
        assert f"processes: {processes} x" in done.stdout
    if "tools.replay" in command:
        assert "reproduced bitwise (2 digest(s))" in done.stdout, "replay must be launched like the run"
    if command == "make verify":
        assert done.stdout.count("\nPASS  ") == 15 and "\nEverything holds.\n" in done.stdout
    if command == "make train":
        assert "val/entropy" in done.stdout and "generation/valid" in done.stdout
        assert "The run is in" in done.stdout
        assert json.loads((out_dir / "stories" / "status.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_make_train_trains_with_a_real_launcher(tmp_path):
    done = shell(shortened("make train", tmp_path), WANDB_MODE="disabled")
    assert done.stdout.endswith("Training finished.\n") and "processes: 2 x" in done.stdout


def test_python_that_loads_a_run(out_dir):
    """Runs after the commands, which train the run."""
    [code] = re.findall(r"```python\n(.*?)```", page("using"), re.DOTALL)
    names = {}
    exec(code.replace("runs/", f"{out_dir}/"), names)
    assert names["model"].generate(torch.zeros(1, 1, dtype=torch.int64), 3).shape == (1, 4)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="then it starts")
def test_multi_gpu_launch_fails_without_gpu():
    """docs/launching.md names the command to use instead."""
    done = shell("! accelerate launch --multi_gpu train.py")
    assert done.stderr.endswith("\nAssertionError\n") and "loading torch" not in done.stderr


def test_chinese_readme_matches_english():
    """Commands, output, sections, tables, links and code are the same, in the same order."""
    chinese = (ROOT / "README.zh-CN.md").read_text()
    for kind in (r"(?s)```\w*\n.*?```", r"(?m)^#+ ", r"(?m)^\|", r"(?<=\]\()(?!README|#)[^)]+"):
        ours, theirs = (re.findall(kind, text) for text in (README, chinese))
        assert ours == theirs and ours, kind
    words = [" ".join(re.sub(r"(?s)```.*?```", "", text).split()) for text in (README, chinese)]
    ours, theirs = (set(re.findall(r"`[^`]+`", text)) for text in words)
    assert ours == theirs, ours ^ theirs


@pytest.mark.slow
def test_launch_of_first_screen(tmp_path):
    """`accelerate config default`, as the questions need a terminal, then the launch with the file that it writes."""
    [block] = re.findall(r"((?:^    accelerate .*\n)+)", README, re.MULTILINE)
    config, launch = (line.partition("  #")[0].strip() for line in block.splitlines())
    file = tmp_path / "default_config.yaml"
    shell(f"{config} default --config_file {file}")
    launch = launch.replace("train.py", f"--config_file {file} train.py")
    done = shell(f"{launch} {SHORT_STORIES} --out_dir {tmp_path / 'runs'}", WANDB_MODE="disabled")
    assert done.stdout.endswith("Training finished.\n")


def anchors(file):
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower() for heading in headings}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_outputs_of_commands_are_ignored_by_git(file):
    """Otherwise the next commit of a reader has them, and a run records them as changes of the code."""
    fences = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
    text = fences.sub(lambda block: block[0] if block[1] == "bash" else "", file.read_text())
    blocks = re.findall(r"```bash\n(.*?)```|((?:^    .*\n)+)", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in "".join(block).splitlines()]
    options = r"--out|--out_dir|--outfile|mkdir -p|git clone \S+|tee|-o|python export\.py \S+|>|>>"
    outputs = [found for line in lines for found in re.findall(rf"(?:^|\s)(?:{options}) +([\w.][\w./-]*)", line)]
    outputs = [output for output in outputs if not output.startswith((".", "/"))]
    done = subprocess.run(["git", "check-ignore", *outputs], cwd=ROOT, capture_output=True, text=True)
    assert not set(outputs) - set(done.stdout.split())


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_and_files_of_page_exist(file):
    text = file.read_text()
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = file.parent / link if link else file
        assert target.exists() and (not anchor or anchor in anchors(target)), (link, anchor)
    if file.name == "CHANGELOG.md":  # names files of earlier versions
        return
    for name in re.findall(r"`([\w./]+\.(?:py|sh|patch)|[\w.]+/[\w./]+\.yaml|\w+/)(?:::\w+)?`", text):
        assert any((folder / name).exists() for folder in (ROOT, file.parent)) or name in MADE_BY_A_RUN, name


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/forking.md", "docs/forking_reference.md"])
def test_code_names_of_page_exist(name):
    parts = [ROOT / part for part in ("data", "examples", "model", "runtime", "tests", "tools", "trainer")]
    sources = [ROOT / "Makefile", *ROOT.glob("*.py"), *(file for part in parts for file in part.rglob("*.py"))]
    code = "".join(source.read_text() for source in sources)
    text = re.sub(r"(?s)```.*?```", "", (ROOT / name).read_text())
    named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", text)) - {"requires_grad_", "with_format"}  # torch's, datasets'
    assert not [word for word in named if word not in code]


def call_of(function):
    """A call of a function as docs/stability.md writes it: names and defaults of its parameters."""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        default = getattr(parameter.default, "__name__", repr(parameter.default))
        parameters.append(parameter.name if parameter.default is parameter.empty else f"{parameter.name}={default}")
    return f"({', '.join(parameters)})"


def test_calls_of_stability_page_are_those_of_the_code():
    [block] = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "stability.md").read_text(), re.DOTALL)
    lines = block.splitlines()
    assert len(lines) > 20
    for line in lines:
        name = line.partition("(")[0]
        assert line == name + call_of(pkgutil.resolve_name(name)), name


def trainings(text):
    """The command lines of train.py in a page, as lists of words."""
    lines = [line for line in commands(text) if "train.py" in line or line == "make train"]
    lines += [line.strip() for line in re.findall(r"^    python train.py .*", text, re.MULTILINE)]
    in_python = re.findall(r'args=\("train", ([^)]*)\)', text)
    return [line.split() for line in lines] + [re.findall(r'"([^"]+)"', arguments) for arguments in in_python]


def run_name(words):
    if "--name" in words:
        return words[words.index("--name") + 1]
    return re.sub(r".*/|\.yaml", "", words[words.index("--config") + 1]) if "--config" in words else "stories"


def test_page_names_the_settings_that_a_branch_keeps():
    """Those that the code refuses to change."""
    [names] = re.findall(r"A branch allows\s+them, except those of (.*?)\.\n", page("runs"), re.DOTALL)
    named = set(re.findall(r"`([\w.]+)`", names))
    assert named == {"model", *FIXED_IN_BRANCH}
    fixed = {name for name in TrainConfig().flat() if is_fixed_in_branch(name)}
    assert fixed == {name for name in TrainConfig().flat() if name in named or name.startswith("model.")}


def test_commands_of_pages_train_runs_of_their_own():
    """A second run of the same name would be complete already, so that it trains nothing."""
    pages = [README, *(page(name) for name in ("launching", "runs", "data", "using", "comparing", "evaluation"))]
    words = [words for text in pages for words in trainings(text) if "--print_config" not in words]
    names = [run_name(one) for one in words]
    assert len(names) > 12 and "notebook" in names
    assert not [name for name in names if names.count(name) > 1]


OUTPUT = re.compile(r"(?:--out|--outfile|--out_dir| >>?| -m venv) ([\w./-]+)|export\.py \S+ ([\w./-]+)")


def test_git_ignores_what_commands_of_pages_make():
    """Otherwise `git status` shows it, and `git add .` adds it."""
    lines = [line for path in PAGES if path.name != "LOG.md" for line in commands(path.read_text())]
    names = {name for line in lines for pair in OUTPUT.findall(line) for name in pair}
    made = sorted(name for name in names if name and not name.startswith("..")) + ["slurm-1.out"]
    done = subprocess.run(["git", "check-ignore", "--no-index", *made], cwd=ROOT, capture_output=True, text=True)
    assert len(made) > 15 and done.stdout.splitlines() == made, done.stderr


def test_pages_export_to_folders_of_their_own():
    texts = [README, *(page(name) for name in ("using", "evaluation", "data"))]
    folders = [line.split()[3] for text in texts for line in commands(text) if line.startswith("python export.py")]
    assert len(folders) > 3 and len({*folders}) == len(folders)


def test_sweeps_of_comparing_page_train_the_runs_that_it_compares():
    shown = commands(page("comparing"))
    sweeps = [line for line in shown if line.startswith("python -m tools.sweep ")]
    compared = [line for line in shown if line.startswith("python -m tools.compare ")]
    assert len(sweeps) == len(compared) == 2
    for sweep, compare in zip(sweeps, compared, strict=True):
        settings = parse_tool(SweepConfig, "tools.sweep", sweep.split()[3:])
        runs = plan_sweep(settings.arguments, {"mixed_precision": "no", "code": None})
        assert len(runs) == 4
        assert all(fnmatch(f"{config.out_dir}/{config.name}", compare.split()[3]) for config in runs)


@pytest.mark.parametrize("name", ["runs", "debugging", "comparing", "reliability", "using"])
def test_checkpoints_of_pages_are_kept_by_make_train(name):
    config = parse_config(["--config", str(ROOT / "configs" / "stories.yaml")])
    saved = [*range(config.checkpoint.every, config.steps, config.checkpoint.every), config.steps]
    named = re.findall(r"runs/stories/checkpoints/step-(\d+)", page(name))
    assert {int(step) for step in named} <= {*saved[-config.checkpoint.keep :]}


def test_examples_page_trains_a_run_of_its_own():
    """A command of another page would have completed a run of the same name."""
    [last] = [command for command in commands((ROOT / "examples" / "README.md").read_text()) if "train.py" in command]
    command, _, name = last.partition(" --name ")
    assert name and command in COMMANDS and not any(f"--name {name}" in other for other in COMMANDS)


def test_readme_leads_to_every_page():
    """The README links to each page of docs/, or to a page of which it is the reference."""
    linked = set(re.findall(r"\]\(docs/(\w+\.md)", README))
    pages = {file.name for file in (ROOT / "docs").glob("*.md")}
    references = {name for name in pages if name.endswith("_reference.md")}
    assert linked | references == pages
    for name in references:
        parent = name.replace("_reference", "")
        assert parent in linked and f"]({name}" in (ROOT / "docs" / parent).read_text()


# Commands that make a text to start with; the others get smaller texts from `folder`.
MAKES_TEXT = [command for name in ("data", "using") for command in commands(page(name)) if "python -c" in command]
DATA_COMMANDS = [command for command in commands(page("data")) if command not in MAKES_TEXT]
assert len(DATA_COMMANDS) >= 5
SHORT_TEXT = (
    "--steps 2 --schedule.warmup_steps 1 --schedule.decay_steps 1 --evaluation.num_samples 8 "
    "--tracking.wandb disabled --tracking.log_every 1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user who has the texts and a copy of the repository."""
    folder = tmp_path_factory.mktemp("user")
    folders = (path for path in ROOT.iterdir() if (path / "__init__.py").exists() or path.name.endswith("configs"))
    for path in (*ROOT.glob("*.py"), *folders):
        (folder / path.name).symlink_to(path)
    documents = [text.replace("\r", "") for text in make_documents(60)]
    (folder / "input.txt").write_text("\n".join(documents))
    (folder / "stories.txt").write_text("<|endoftext|>\n".join(documents))
    (folder / "few.txt").write_text("\n".join(documents[:40]))
    (folder / "held_out.txt").write_text("\n".join(documents[40:]))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if "python-library" in command else [])
        for command in DATA_COMMANDS
    ],
)
def test_command_of_data_page(command, folder):
    training, preparing = "train.py" in command, "data.prepare" in command
    checking = "--check" in command
    more = SHORT_TEXT if training else "--num_workers 1" if preparing and not checking else ""
    done = python(f"{command} {more}", cwd=folder)
    if "export.py" in command:
        assert (folder / command.split()[-1] / "model.safetensors").exists()
    elif "sample.py" in command:
        assert "To be" in done.stdout
    elif checking:
        assert "files have their recorded hashes" in done.stdout
    elif training:
        assert done.stdout.endswith("Training finished.\n") and "val/bits_per_byte" in done.stdout
    else:
        out = re.search(r"--out (\S+)", command)[1]
        metadata = json.loads((folder / out / "metadata.json").read_text())
        documents = metadata["train"]["documents"]
        source = re.search(r"--source (\S+)", command)[1]
        least = {"input.txt": 1, "few.txt": 1, "stories.txt": 40, "python-library": 400}[source]
        assert least <= documents < (2 if least == 1 else 1.5 * least)


@pytest.mark.slow
def test_commands_make_the_texts_that_the_pages_prepare(tmp_path):
    (tmp_path / "data").symlink_to(ROOT / "data")
    for name in ("model", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in MAKES_TEXT:
        shell(command, cwd=tmp_path)
    made = {"input.txt": 1, "few.txt": 1, "stories.txt": 2000, "answers.jsonl": 70}
    sources = re.findall(r"data\.prepare --source '?([^' ]+\.\w+)'?", "\n".join(commands(page("data") + page("using"))))
    assert made.keys() == {*sources}
    for name, least in made.items():
        separator = "<|endoftext|>\\n" if name == "stories.txt" else None
        source = Source(str(tmp_path / name), document_separator=separator)
        documents = "".join(text + "\0" * ends for text, ends in source).split("\0")[:-1]
        assert len(documents) >= least and all(map(str.strip, documents)), name
        assert len("".join(documents)) > 4000, name


def test_settings_page_is_up_to_date():
    assert settings.PAGE.read_text() == settings.page(), "run python -m docs.settings"


def test_settings_page_has_every_default():
    defaults = TrainConfig().flat()
    text = settings.PAGE.read_text()
    written = dict(re.findall(r"^- \*\*`([\w.]+)`\*\* \((?:.*?; )?default (.*?)(?:; no effect .*?)?\): \w", text, re.M))
    assert written.keys() == defaults.keys() and len(written) > 60
    for name, value in defaults.items():
        assert written[name] == (value if isinstance(value, str) else json.dumps(value)), name


def test_command_of_settings_page():
    [command] = commands(settings.PAGE.read_text())
    printed = yaml.safe_load(python(command).stdout)
    assert printed["optimizer"]["lr"] == 0.002 and printed["steps"] == 1500
