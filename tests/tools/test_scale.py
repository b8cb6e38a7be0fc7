"""tools.scale: recipes of every depth are complete and grow; the law of simulated runs is recovered and predicts."""

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import yaml

from model.gpt import GPTModel
from runtime.config.errors import ConfigError, RunError
from runtime.config.parser import parse_config, parse_tool
from tests.conftest import ROOT, environment
from tests.support import forked
from tools.scale import ladder, law
from tools.scale.command import LadderTrainer, ScaleConfig, main
from tools.scale.ladder import LadderRun, base_config, build_ladder, extrapolate, model_of_width
from tools.scale.law import Law
from tools.scale.recipe import as_yaml, find_best_learning_rate, make_recipe

SCALE = [sys.executable, "-m", "tools.scale"]
TRUE = Law(2.0, 0.5, 300.0, 0.45)
ENTROPY = 0.4
FAKE = """
import json, sys
from pathlib import Path
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = Path(words["--out_dir"], words["--name"])
run.mkdir(parents=True, exist_ok=True)
steps, simulated = int(words["--steps"]), json.loads(Path(__file__).with_name("losses.json").read_text())
loss = simulated["losses"][words["--model.d_model"] + "/" + words["--steps"]]
row = {"step": steps, "val/loss": loss, "val/entropy": simulated["entropy"]}
row["val/excess_loss/facts_from_1"] = loss - simulated["entropy"]
row["train/tokens"] = steps * 16 * 96
(run / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
(run / "status.json").write_text(json.dumps(dict(state="finished", step=steps, reason="")))
with open(run.parent / "log", "a") as log:
    print(run.name, file=log)
"""


def settings_of(depth, family="qwen3", corpus=None, tokens_per_parameter=20, optimizer="muon"):
    vocab_size = 250 if corpus is None else 50257
    return dict(line[:2] for line in make_recipe(depth, tokens_per_parameter, family, optimizer, corpus, vocab_size))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("corpus", [None, "corpora/text"])
def test_recipes_grow_with_depth(family, corpus):
    recipes = [settings_of(depth, family, corpus) for depth in (1, 2, 3, 4, 6, 8, 12, 47, 48)]
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


@pytest.mark.parametrize(("depth", "family"), [(1, "qwen3"), (4, "gpt2"), (6, "llama"), (12, "qwen3")])
def test_recipe_is_a_valid_config(tmp_path, depth, family):
    file = tmp_path / "depth.yaml"
    file.write_text(as_yaml(make_recipe(depth, 20, family, "adamw", None, 250)))
    config = parse_config(["--config", str(file)])
    assert yaml.safe_load(file.read_text())["model"].items() <= vars(config.model).items()
    assert depth == 1 or all(config.problems(processes) == [] for processes in (1, 2, 4, 8))
    assert config.data.facts > 0 and config.data.num_samples >= config.steps * config.global_batch_size


def test_recipe_values_survive_yaml():
    lines = make_recipe(100, 20, "qwen3", "adamw", "/tmp/\N{GRINNING FACE} text", 250)
    read = yaml.safe_load(as_yaml(lines))
    assert read["data"]["path"] == "/tmp/\N{GRINNING FACE} text" and read["optimizer"]["lr"] == 8e-5


def test_depth_12_is_the_124m_class():
    one = settings_of(12, "gpt2", "corpora/text", optimizer="adamw")
    assert (one["model.n_layers"], one["model.d_model"], one["model.n_heads"], one["model.d_ff"]) == (12, 768, 12, 3072)
    assert one["seq_len"] == 1024 and 1e-4 < one["optimizer.lr"] < 1.5e-3


def test_ladder_shares_settings_with_config_file():
    base, model = base_config(), model_of_width(64)
    assert (model.n_heads, model.d_ff, model.resolved_head_dim) == (4, 176, 16)
    assert (model.n_layers, model.position, model.mlp) == (base.model.n_layers, "rope", "swiglu")
    run = LadderRun(64, 10, 1e-3)
    network = GPTModel(model)
    assert run.tokens == 10 * 16 * 96
    assert run.parameters == network.num_matmul_parameters()
    assert run.flops == network.flops_per_token(96) * run.tokens


def test_extrapolated_run_costs_four_times_the_largest():
    runs = [LadderRun(16, 400, 1e-3), LadderRun(64, 800, 1e-3), LadderRun(32, 800, 1e-3)]
    target = extrapolate(runs)
    assert target.width == 128
    assert target.flops == pytest.approx(4 * runs[1].flops, rel=0.01)


def test_best_learning_rate_is_interpolated():
    curve = [(lr, math.log(lr / 5e-3) ** 2) for lr in (1e-3, 2e-3, 4e-3, 8e-3)]
    assert find_best_learning_rate(curve) == pytest.approx(5e-3)
    assert find_best_learning_rate(curve[:3]) == 4e-3


@pytest.fixture
def simulated_runs(tmp_path, monkeypatch):
    """Settings of a ladder whose runs follow a law exactly."""
    runs = build_ladder([16, 32, 64], [400, 800, 1600], range(1))
    losses = {f"{r.width}/{r.steps}": ENTROPY + TRUE(r.parameters, r.tokens) for r in [*runs, extrapolate(runs)]}
    (tmp_path / "losses.json").write_text(json.dumps({"losses": losses, "entropy": ENTROPY}))
    (tmp_path / "train.py").write_text(FAKE)
    monkeypatch.setattr(ladder, "ROOT", tmp_path)
    monkeypatch.setattr(law, "NUM_RESAMPLES", 30)
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != signal.SIGKILL}
    yield ScaleConfig(
        law=True, sizes="16,32,64", budgets="400,800,1600", seeds=1, jobs=2, out_dir=str(tmp_path / "law")
    )
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_law_is_recovered_predicts_and_resumes(simulated_runs, capsys):
    main(simulated_runs)
    shown = capsys.readouterr().out
    out_dir = ladder.ROOT / "law"
    found = json.loads((out_dir / "law.json").read_text())
    assert len(found["runs"]) == 9
    for kind in ("all", "answers"):
        fitted, outcome = found[kind]["fits"]["known entropy"], found[kind]["outcome"]
        assert (fitted["alpha"], fitted["beta"]) == pytest.approx((TRUE.alpha, TRUE.beta), rel=0.02)
        expected, low, high = found[kind]["predictions"]["known entropy"]
        assert expected == pytest.approx(outcome, rel=0.01) and low <= expected <= high
        assert json.loads((out_dir / "prediction.json").read_text())[kind]["outcome"] is None
        assert f"Measured excess loss ({kind}): {outcome:.4f} nats/token" in shown and "theory: alpha = 0.300" in shown
        assert (out_dir / f"law_{kind}.png").stat().st_size > 10_000
    started = (out_dir / "log").read_text()
    assert len(started.splitlines()) == 10 and started.splitlines()[-1].startswith("width_128-")
    main(simulated_runs)
    assert (out_dir / "log").read_text() == started, "finished runs are not trained again"
    with pytest.raises(ConfigError, match="arguments '' there, '--optimizer.name muon' now"):
        main(simulated_runs.replace(arguments="--optimizer.name muon"))


@pytest.mark.slow
def test_widths_search_around_the_rule(simulated_runs, capsys):
    """All learning rates of a width give the same loss here, so the minimum is at an end."""
    main(simulated_runs.replace(law=False, widths=True, sizes="16,32", budgets="400,800"))
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
        ({"law": True, "sizes": "16,24"}, "sizes: 24 is not a multiple of 16"),
        ({"law": True, "budgets": "100"}, "budgets: '100' must be two or more positive integers"),
        ({"widths": True, "budgets": "1,x"}, "budgets: '1,x' must be two or more positive integers"),
        ({"depth": 3, "corpus": "nowhere"}, "data: 'nowhere' is not a corpus that data.prepare has completed"),
        ({"depth": 3, "tokens_per_parameter": 1e300}, "tokens_per_parameter: 1e+300 for each of"),
        ({"law": True, "arguments": "--data.zipf 1.5"}, "arguments: --data.zipf is set by the ladder"),
        ({"law": True, "arguments": "--config other.yaml"}, "arguments: --config is set by the ladder"),
        ({"law": True, "arguments": "--optimizer.lr 1"}, "arguments: --optimizer.lr is set by the ladder"),
        ({"law": True, "arguments": "--evaluation.every 0"}, "arguments: --evaluation.every is set by the ladder"),
        (
            {"law": True, "arguments": "--schedule.batch_warmup_from 4"},
            "arguments: --schedule.batch_warmup_from is set by the ladder",
        ),
        ({"law": True, "out_dir": "README.md"}, "out_dir: 'README.md' cannot be written: File exists"),
        ({"widths": True, "arguments": "--optimizer.name muon --seed=3"}, "arguments: --seed=3 is set by the ladder"),
    ],
)
def test_main_refuses_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(ScaleConfig(**settings))


def test_command_line_prints_config_and_takes_bare_law():
    printed = forked.run("tools.scale", ["--depth", "2"], 0, environment())
    assert yaml.safe_load(printed.stdout)["model"]["n_layers"] == 2 and printed.returncode == 0
    for words in (["--law"], ["--law", "true"], ["--law=true"]):
        refused = forked.run("tools.scale", [*words, "--depth", "2"], 0, environment())
        assert refused.returncode == 2 and refused.stderr.startswith("tools.scale: error: give one of"), refused.stderr


@pytest.mark.slow
def test_law_of_real_runs(tmp_path):
    settings = ["--sizes", "16,32", "--budgets", "4,8", "--seeds", "2", "--out_dir", tmp_path]
    command = [*SCALE, "--law", *settings, "--arguments", "--evaluation.num_samples 20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Measured excess loss (answers): " in done.stdout and (tmp_path / "law_all.png").exists()


def test_processes_of_a_launch_split_the_batch(monkeypatch, tmp_path):
    (tmp_path / "four.yaml").write_text("num_processes: 4\n")
    file = f"accelerate launch --config_file {tmp_path / 'four.yaml'}"
    monkeypatch.setattr("shutil.which", lambda name: name)
    for launch, micro_batch_size in {None: 16, file: 4, f"{file} --num_processes 64": 1, "bash launch.sh": 16}.items():
        config = ScaleConfig(launch=launch, arguments="--compile true")
        settings = LadderTrainer(config, tmp_path / str(len(launch or ""))).settings
        assert settings == ("--micro_batch_size", str(micro_batch_size), "--compile", "true"), launch


def test_ladder_refuses_runs_of_another_config_file(simulated_runs, tmp_path, monkeypatch):
    """Finished runs are recognised by their names, which do not show what the file contained."""
    LadderTrainer(simulated_runs, tmp_path / "law")
    LadderTrainer(simulated_runs, tmp_path / "law")
    monkeypatch.setattr(ladder, "CONFIG", tmp_path / "train.py")
    with pytest.raises(ConfigError, match="has runs of another ladder .config"):
        LadderTrainer(simulated_runs, tmp_path / "law")


def test_ladder_refuses_runs_of_another_torch(simulated_runs, tmp_path, monkeypatch):
    LadderTrainer(simulated_runs, tmp_path / "law")
    monkeypatch.setattr("tools.scale.command.version", lambda name: "1.0.0")
    with pytest.raises(ConfigError, match="has runs of another ladder .torch '.*' there, '1.0.0' now"):
        LadderTrainer(simulated_runs, tmp_path / "law")


def test_ladder_refuses_runs_of_several_precisions(simulated_runs, tmp_path):
    """The script of --launch has changed; what it does is known from the sessions of its runs alone."""
    trainer, (first, last) = LadderTrainer(simulated_runs, tmp_path / "law"), build_ladder([16], [400, 800], range(1))
    trainer.train([first, last])
    for run, precision in ((first, "no"), (last, "bf16")):
        sessions = run.job(tmp_path / "law", (), ()).run.path / "sessions.jsonl"
        sessions.write_text(json.dumps({"step": 0, "mixed_precision": precision}))
    trainer.train([first])
    with pytest.raises(RunError, match="has runs with mixed precision bf16 and no; name another folder"):
        trainer.train([last])


def test_damaged_ladder_file_is_refused(simulated_runs, tmp_path):
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "ladder.json").write_text("{")
    with pytest.raises(ConfigError, match="ladder.json is damaged"):
        LadderTrainer(simulated_runs, tmp_path / "law")


def test_law_refuses_loss_below_entropy(simulated_runs):
    file = ladder.ROOT / "losses.json"
    simulated = json.loads(file.read_text())
    simulated["losses"]["32/800"] = ENTROPY
    file.write_text(json.dumps(simulated))
    with pytest.raises(RunError, match="is not above the entropy of its data"):
        main(simulated_runs)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--law --family gpt2", "family: gpt2 has no effect with depth: null; leave it out"),
        ("--depth 2 --sizes 16,48", "sizes: 16,48 has no effect with law: false and widths: false"),
        ("--widths --seeds 3", "seeds: 3 has no effect with law: false"),
    ],
)
def test_settings_of_another_command_are_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_tool(ScaleConfig, "tools.scale", words.split())


def test_setting_of_two_commands_is_accepted_by_both():
    for word in ("--law", "--widths"):
        assert parse_tool(ScaleConfig, "tools.scale", [word, "--sizes", "16,48"]).sizes == "16,48"
