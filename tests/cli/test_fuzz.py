"""Seeded damage to what a run reads. Allowed are the right bits, or one message, exit code 2 and nothing lost; never a
traceback. In this process, for speed: 20 cases of each kind in `make test`, 200 in `make test-all`."""

import json
import random
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import yaml

from cli import scripts
from cli.arguments import parse_config
from config import ConfigError
from plot import save_loss_curve
from tests.conftest import ROOT, assert_same_bits, metrics, tensors

RECIPE = ROOT / "tests" / "old_runs" / "recipe.yaml"
CASES = [pytest.param(seed, marks=[] if seed < 10 else pytest.mark.slow) for seed in range(200)]
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


def start(out_dir, steps):
    """The exit code of train.py, what it printed and its errors."""
    out, err = StringIO(), StringIO()
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = [
        *f"train.py --config {RECIPE} --name run --out_dir {out_dir} --steps {steps} --checkpoint.keep 2".split()
    ]
    sys.stdout, sys.stderr = out, err
    try:
        return scripts.run_script("train"), out.getvalue(), err.getvalue()
    finally:
        sys.argv, sys.stdout, sys.stderr = before


@pytest.fixture(scope="module")
def begun(in_process, tmp_path_factory):
    """A run of 4 steps, and the same run gone on with until the 6th."""
    directory = tmp_path_factory.mktemp("begun")
    assert start(directory, 4)[0] == 0
    shutil.copytree(directory, directory / "undisturbed")
    assert start(directory / "undisturbed", STEPS)[0] == 0
    return directory / "run", directory / "undisturbed" / "run"


@pytest.mark.parametrize("seed", CASES)
def test_a_run_with_damaged_files_goes_on_with_the_right_bits_or_is_refused(seed, begun, tmp_path):
    chance = random.Random(seed)
    original, undisturbed = begun
    run = tmp_path / "run"
    shutil.copytree(original, run)
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".png")
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
    assert save_loss_curve(run).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("seed", CASES)
def test_a_damaged_config_means_what_it_says_or_is_refused(seed, tmp_path):
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
    said = yaml.safe_load(recipe.read_bytes())
    for key, value in said.items():
        for name, item in value.items() if isinstance(value, dict) else [(None, value)]:
            ours = getattr(getattr(config, key), name) if name else getattr(config, key)
            if f"--{key}" in arguments or f"--{key}.{name}" in arguments or (key, name) == ("data", "path"):
                continue
            assert json.dumps(ours) == json.dumps(item) or float(ours) == float(item), (key, name, item, ours)
