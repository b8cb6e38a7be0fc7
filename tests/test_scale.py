"""scale.py: recipes of every depth are whole and grow, and the law of made-up runs is found and predicts."""

import json
import math
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from config.errors import ConfigError
from config.parser import parse_config
from model.gpt import GPTModel
from scale import Bench, ScaleConfig, main
from scaling import ladder, law
from scaling.ladder import Rung, target
from scaling.law import Law
from scaling.recipe import as_yaml, best_of, multiplied, recipe
from tests.conftest import ROOT

SCALE = [sys.executable, "scale.py"]
TRUE = Law(2.0, 0.5, 300.0, 0.45)
FLOOR = 0.4
FAKE = """
import json, sys
from pathlib import Path
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = Path(words["--out_dir"], words["--name"])
run.mkdir(parents=True, exist_ok=True)
steps, told = int(words["--steps"]), json.loads(Path(__file__).with_name("losses.json").read_text())
loss = told["losses"][words["--model.d_model"] + "/" + words["--steps"]]
row = {"step": steps, "val/loss": loss, "val/entropy": told["floor"]}
row["val/excess_loss/facts_from_1"] = loss - told["floor"]
row["train/tokens"] = steps * 16 * 96
(run / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
(run / "status.json").write_text(json.dumps(dict(state="finished", step=steps, reason="")))
with open(run.parent / "log", "a") as log:
    print(run.name, file=log)
"""


def settings_of(depth, family="qwen3", corpus=None, tokens_per_parameter=20):
    return dict(
        line[:2] for line in recipe(depth, tokens_per_parameter, family, corpus, 250 if corpus is None else 50257)
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("corpus", [None, "corpora/text"])
def test_recipes_grow_with_the_depth(family, corpus):
    recipes = [settings_of(depth, family, corpus) for depth in range(1, 49)]
    for name in ("model.d_model", "model.n_heads", "model.d_ff", "global_batch_size"):
        values = [one[name] for one in recipes]
        assert values == sorted(values), name
    for name in ("steps", "schedule.warmup_steps"):  # a larger batch takes fewer of them
        sequences = [one[name] * one["global_batch_size"] for one in recipes]
        assert sequences == sorted(sequences), name
    rates = [one["optimizer.lr"] for one in recipes]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2 * rates[-1]
    for one in recipes:
        assert one["model.d_model"] % one["model.n_heads"] == 0 and one["model.d_ff"] % 64 == 0
        assert one["global_batch_size"] % one["micro_batch_size"] == 0


@pytest.mark.parametrize(("depth", "family"), [(1, "qwen3"), (4, "gpt2"), (12, "qwen3")])
def test_a_recipe_is_a_config_that_train_py_takes(tmp_path, depth, family):
    file = tmp_path / "depth.yaml"
    file.write_text(as_yaml(recipe(depth, 20, family, None, 250)))
    config = parse_config(["--config", str(file)])
    assert yaml.safe_load(file.read_text())["model"].items() <= vars(config.model).items()
    assert depth == 1 or all(config.problems(processes) == [] for processes in (1, 2, 4, 8))
    assert config.data.facts > 0 and config.data.num_samples >= config.steps * config.global_batch_size


def test_what_a_recipe_says_is_what_yaml_reads():
    lines = recipe(100, 20, "qwen3", "/tmp/\N{GRINNING FACE} text", 250)
    read = yaml.safe_load(as_yaml(lines))
    assert read["data"]["path"] == "/tmp/\N{GRINNING FACE} text" and read["optimizer"]["lr"] == 8e-5


def test_depth_12_is_the_124m_class():
    one = settings_of(12, "gpt2", "corpora/text")
    assert (one["model.n_layers"], one["model.d_model"], one["model.n_heads"], one["model.d_ff"]) == (12, 768, 12, 3072)
    assert one["seq_len"] == 1024 and 1e-4 < one["optimizer.lr"] < 1.5e-3


@pytest.mark.parametrize("width", [16, 64])
def test_parameters_and_flops_are_those_of_the_model_but_for_gains(width):
    rung = Rung(width, 10, 1e-3)
    model = GPTModel(rung.model)
    gains = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert multiplied(rung.model) == model.num_parameters(lookups=False) - gains
    assert rung.flops == (model.flops_per_token(96) - 6 * gains) * rung.tokens


def test_the_target_costs_four_times_the_largest():
    rungs = [Rung(16, 400, 1e-3), Rung(64, 800, 1e-3), Rung(32, 800, 1e-3)]
    beyond = target(rungs)
    assert beyond.width == 128 and beyond.flops == pytest.approx(4 * rungs[1].flops, rel=0.01)


def test_the_best_learning_rate_lies_between_those_that_were_tried():
    curve = [(lr, math.log(lr / 5e-3) ** 2) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
    assert best_of(curve) == pytest.approx(5e-3)
    assert best_of(curve[:3]) == 4e-3


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """The ladder on runs that follow a law exactly."""
    rungs = ladder.ladder([16, 32, 64], [400, 800, 1600], range(1))
    losses = {f"{r.width}/{r.steps}": FLOOR + TRUE(r.parameters, r.tokens) for r in [*rungs, target(rungs)]}
    (tmp_path / "losses.json").write_text(json.dumps({"losses": losses, "floor": FLOOR}))
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    monkeypatch.setattr(law, "RESAMPLES", 30)
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != signal.SIGKILL}
    yield ScaleConfig(
        law=True, sizes="16,32,64", budgets="400,800,1600", seeds=1, jobs=2, out_dir=str(tmp_path / "law")
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_a_law_is_found_predicts_and_goes_on_where_it_was(made_up, capsys):
    main(made_up)
    shown = capsys.readouterr().out
    out_dir = ladder.ROOT / "law"
    found = json.loads((out_dir / "law.json").read_text())
    assert len(found["points"]) == 9
    for kind in ("all", "answers"):
        fitted, outcome = found[kind]["fits"]["exact floor"], found[kind]["outcome"]
        assert (fitted["alpha"], fitted["beta"]) == pytest.approx((TRUE.alpha, TRUE.beta), rel=0.02)
        expected, low, high = found[kind]["predictions"]["exact floor"]
        assert expected == pytest.approx(outcome, rel=0.01) and low <= expected <= high
        assert json.loads((out_dir / "prediction.json").read_text())[kind]["outcome"] is None
        assert f"Outcome, of {kind}: {outcome:.4f} above the floor" in shown and "theory: alpha = 0.300" in shown
        assert all((out_dir / f"{name}_{kind}.png").stat().st_size > 10_000 for name in ("law", "floor"))
    started = (out_dir / "log").read_text()
    assert len(started.splitlines()) == 10 and started.splitlines()[-1].startswith("width_128-")
    main(made_up)
    assert (out_dir / "log").read_text() == started, "nothing is trained again"
    with pytest.raises(ConfigError, match="arguments '' there, '--optimizer.name muon' now"):
        main(replace(made_up, arguments="--optimizer.name muon"))


def test_the_widths_are_tried_around_the_rule(made_up, capsys):
    """All rates of a width give the same loss here, so its least lies at an end."""
    main(replace(made_up, law=False, widths=True, sizes="16,32", budgets="400,800"))
    shown = capsys.readouterr().out
    assert "width 16: best learning rate 0.008 or less, 0.25 times the rule's 0.032" in shown
    log = (ladder.ROOT / "law" / "log").read_text().split()
    assert log[0].startswith("width_64-steps_400-") and len(log) == 15
    assert (ladder.ROOT / "law" / "learning_rates.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of --depth N, --law and --widths"),
        ({"law": True, "depth": 3}, "give one of --depth N, --law and --widths"),
        ({"law": True, "sizes": "16,24"}, "sizes: 24 is no multiple of 16"),
        ({"law": True, "budgets": "100"}, "budgets: '100' are no two or more whole numbers"),
        ({"widths": True, "budgets": "1,x"}, "budgets: '1,x' are no two or more whole numbers"),
        ({"depth": 3, "corpus": "nowhere"}, "corpus: nowhere is not one that data.prepare made"),
        ({"depth": 3, "tokens_per_parameter": 1e300}, "tokens_per_parameter: 1e+300 for each of"),
        ({"law": True, "arguments": "--data.zipf 1.5"}, "arguments: --data.zipf is the ladder's own"),
        ({"widths": True, "arguments": "--optimizer.name muon --seed=3"}, "arguments: --seed=3 is the ladder's own"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(ScaleConfig(**settings))


def test_the_command_line_prints_a_config_and_takes_law_without_a_value():
    printed = subprocess.run([*SCALE, "--depth", "2"], cwd=ROOT, capture_output=True, text=True)
    assert yaml.safe_load(printed.stdout)["model"]["n_layers"] == 2 and printed.returncode == 0
    for asked in (["--law"], ["--law", "true"], ["--law=true"]):
        refused = subprocess.run([*SCALE, *asked, "--depth", "2"], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 2 and "give one of" in refused.stderr, asked


@pytest.mark.slow
def test_a_miniature_law_of_real_runs(tmp_path):
    settings = ["--sizes", "16,32", "--budgets", "4,8", "--seeds", "2", "--out_dir", tmp_path]
    command = [*SCALE, "--law", *settings, "--arguments", "--evaluation.num_samples 20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Outcome, of answers: " in done.stdout and (tmp_path / "law_all.png").exists()


def test_the_processes_of_a_launch_share_a_batch(monkeypatch, tmp_path):
    (tmp_path / "four.yaml").write_text("num_processes: 4\n")
    file = f"accelerate launch --config_file {tmp_path / 'four.yaml'}"
    monkeypatch.setattr("shutil.which", lambda name: name)
    for launch, share in {None: 16, file: 4, f"{file} --num_processes 64": 1, "bash launch.sh": 16}.items():
        config = ScaleConfig(launch=launch, arguments="--compile true")
        settings = Bench(config, tmp_path / str(len(launch or ""))).settings
        assert settings == ("--micro_batch_size", str(share), "--compile", "true"), launch
