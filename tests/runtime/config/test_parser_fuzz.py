"""Random damage to the files that runs and tools read gives the right bits, or one message and exit code 2.

Nothing is lost and no traceback is printed. `make test` runs 10 cases of each kind, `make test-all` 200.
"""

import json
import random
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

import data.prepare.prepare
from evaluate import EvaluateConfig
from runtime.cli import scripts
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from sample import SampleConfig
from tests.conftest import ROOT, assert_same_bits, metrics, tensors
from tests.data.prepare.test_prepare import make_documents, write_jsonl
from trainer.pretrained.export import ExportConfig

RECIPE = ROOT / "tests" / "support" / "tiny_random.yaml"
CASES = [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.slow) for seed in range(200)]
STEPS = 6
WORDS = [
    b"null",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"[" * 3000,
    b"99999999999999999999",
    b"\n",
]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A bit flipped, a part cut off, taken out or doubled, or a number or word replaced by another."""
    kind, place = chance.randrange(6), chance.randrange(max(1, len(content)))
    end = min(len(content), place + chance.randrange(1, 60))
    if kind == 0 and content:
        return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    if kind == 1:
        return content[:place]
    if kind == 2:
        return content[:place] + content[end:]
    if kind == 3:
        return content[:end] + content[place:]
    if kind == 4:
        return content[:place] + chance.randbytes(chance.randrange(1, 20)) + content[end:]
    words = content.replace(b",", b" , ").replace(b"}", b" } ").split(b" ")
    words[chance.randrange(len(words))] = chance.choice(WORDS)
    return b" ".join(words)


MODULES = {"export": "trainer.pretrained.export"}


def run_tool(script, kind, *words):
    """Exit code, stdout and stderr of a script."""
    out, err = StringIO(), StringIO()
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = [f"{script}.py", *map(str, words)]
    sys.stdout, sys.stderr = out, err
    try:
        exit_code = (
            data.prepare.prepare.cli()
            if script == "prepare"
            else scripts.run_script(script, kind, module=MODULES.get(script))
        )
        return exit_code, out.getvalue(), err.getvalue()
    finally:
        sys.argv, sys.stdout, sys.stderr = before


def start(out_dir, steps):
    words = f"--config {RECIPE} --name run --out_dir {out_dir} --steps {steps} --checkpoint.keep 2"
    return run_tool("train", None, *words.split())


@pytest.fixture(scope="module")
def begun(in_process, tmp_path_factory):
    """Run of 4 steps, and the same run resumed until step 6."""
    directory = tmp_path_factory.mktemp("begun")
    assert start(directory, 4)[0] == 0
    shutil.copytree(directory, directory / "undisturbed")
    assert start(directory / "undisturbed", STEPS)[0] == 0
    return directory / "run", directory / "undisturbed" / "run"


@pytest.mark.parametrize("seed", CASES)
def test_damaged_run_resumes_bitwise_or_is_refused(seed, begun, tmp_path):
    chance = random.Random(seed)
    original, undisturbed = begun
    run = tmp_path / "run"
    shutil.copytree(original, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    victim = chance.choice(files)
    victim.write_bytes(damaged(victim.read_bytes(), chance))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    exit_code, out, err = start(tmp_path, STEPS)
    assert "Traceback" not in err
    if exit_code == 0:
        assert_same_bits(tensors(run, STEPS), tensors(undisturbed, STEPS))
        steps = [row["step"] for row in metrics(run)]
        assert steps == sorted(set(steps)) and set(steps) <= set(range(1, STEPS + 1))
        assert metrics(run)[-2:] == metrics(undisturbed)[-2:]
    else:
        assert exit_code == 2 and err.count("train.py: error:") == 1, (exit_code, err)
        after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert {path for path in before if after.get(path) != before[path]} <= {run / "status.json"}


@pytest.mark.parametrize("seed", CASES)
def test_damaged_config_is_read_literally_or_refused(seed, tmp_path):
    chance = random.Random(seed)
    recipe = tmp_path / "recipe.yaml"
    sources = [*(ROOT / "configs").glob("*.yaml"), RECIPE]
    recipe.write_bytes(damaged(chance.choice(sorted(sources)).read_bytes(), chance))
    arguments = ["--config", str(recipe), "--data.path", "corpora/x"]
    option = chance.choice(["--name", "--model.d_model", "--optimizer.betas", "--data.mix", "--profile", "--steps"])
    if chance.random() < 0.5:
        arguments += [
            option,
            damaged(chance.choice([b"1", b"[1, 2]", b"{a: 1}", b"x"]), chance).decode(errors="replace"),
        ]
    with redirect_stdout(StringIO()):
        try:
            config = parse_config(arguments)
        except ConfigError as refused:
            assert str(refused)
            return
    written = yaml.safe_load(recipe.read_bytes())
    for key, value in written.items():
        for name, item in value.items() if isinstance(value, dict) else [(None, value)]:
            ours = getattr(getattr(config, key), name) if name else getattr(config, key)
            if f"--{key}" in arguments or f"--{key}.{name}" in arguments or (key, name) == ("data", "path"):
                continue
            assert json.dumps(ours) == json.dumps(item) or float(ours) == float(item), (key, name, item, ours)


# Every script that reads a run: its settings and arguments, with RUN, OUT and FOLDER for directories.
SCRIPTS = {
    "sample": (SampleConfig, "RUN --prompt a --max_new_tokens 9"),
    "evaluate": (EvaluateConfig, "RUN --data FOLDER/corpus --out OUT"),
    "export": (ExportConfig, "RUN OUT"),
    "prepare": (
        None,
        "--source FOLDER/source.jsonl --tokenizer RUN/tokenizer --validation hash:0.3 --out OUT --num_workers 1",
    ),
}


def use(script, kind, words, run, folder, out):
    """Exit code, output, errors and written files of a script that reads a run."""
    words = words.replace("RUN", str(run)).replace("FOLDER", str(folder)).replace("OUT", str(out)).split()
    exit_code, output, errors = run_tool(script, kind, *words)
    written = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".png"}
    written = {name: content.replace(str(run).encode(), b"RUN") for name, content in written.items()}
    return exit_code, output.replace(str(out), "OUT").replace(str(run), "RUN"), errors, written


def files(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def used(in_process, tmp_path_factory):
    """A folder with a run on a text, and the recipe and corpus of the run."""
    folder = tmp_path_factory.mktemp("used")
    source = write_jsonl(folder / "source.jsonl", make_documents(30))
    words = ["--source", source, "--tokenizer", "train:300", "--validation", "hash:0.3", "--out", folder / "corpus"]
    assert (done := run_tool("prepare", None, *words, "--num_workers", 1))[0] == 0, done
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe["data"] = {"source": "text", "path": str(folder / "corpus")}
    recipe["model"] |= {"vocab_size": None, "max_position_embeddings": 16, "dropout": 0.0}
    recipe["evaluation"] |= {"num_logged_generations": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"seq_len": 16}))
    words = ["--config", folder / "recipe.yaml", "--name", "run", "--out_dir", folder / "runs", "--checkpoint.keep", 2]
    assert run_tool("train", None, *words)[0] == 0
    return folder


@pytest.fixture(scope="module")
def right(used):
    """The outcome of every script for the undamaged run."""
    right = {
        script: use(script, kind, words, used / "runs" / "run", used, used / "out" / script)
        for script, (kind, words) in SCRIPTS.items()
    }
    assert not (refused := {script: done for script, done in right.items() if done[0] != 0}), refused
    return right


def damage_a_copy(folder, tmp_path, chance):
    """Return a copy of the run with one damaged file, and that file."""
    run = Path(shutil.copytree(folder / "runs" / "run", tmp_path / "runs" / "run"))
    victim = chance.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    victim.write_bytes(damaged(victim.read_bytes(), chance))
    return run, victim


@pytest.mark.parametrize("seed", CASES)
def test_scripts_read_damaged_run_correctly_or_refuse(seed, used, right, tmp_path):
    script = list(SCRIPTS)[seed % len(SCRIPTS)]
    run, victim = damage_a_copy(used, tmp_path, random.Random(seed))
    before = files(run)
    exit_code, output, errors, written = use(script, *SCRIPTS[script], run, used, tmp_path / "out" / script)
    assert files(run) == before, "a script that only reads has written"
    assert "Traceback" not in errors
    if exit_code == 0:
        assert written.keys() == right[script][3].keys(), victim
        passed_over = "checkpoints" in victim.parts and victim.parent.name in errors  # for the one before
        has_hash = victim.parent.name != "tokenizer"  # as edited by hand, another setting is another tokenizer
        if script != "prepare" and has_hash and not passed_over:
            assert output == right[script][1] and written == right[script][3], victim
    else:
        program = "prepare" if script == "prepare" else f"{script}.py"
        assert errors.count(f"{program}: error:") == 1 and exit_code == 2, (script, victim, errors)
