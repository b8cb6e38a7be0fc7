"""Experiments with a fake train.py, which take no time."""

import json
import signal

import pytest

from tools.experiment import change, experiment, score, variants
from tools.experiment import settings as experiment_settings
from tools.experiment.experiment import main
from tools.experiment.settings import ExperimentConfig
from tools.jobs import runner

# In place of train.py: the excess loss over an entropy of 0.5 is EFFECT / steps, with noise of 0.4% over seeds, and
# depends on the settings that a candidate may change. The noise depends on settings and code alone, not on run names.
FAKE = """
import json, math, os, random, sys
EFFECT = 40
def refuse(message):
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)
settings = {"name": None, "steps": 100, "seed": 0, "out_dir": "runs", "seq_len": 8, "global_batch_size": 1,
    "init_from": None, "branch_from": None,
    "model.d_ff": 64, "model.d_model": 64, "model.n_heads": 4, "model.n_kv_heads": None, "model.mlp": "gelu",
    "data.source": "stories", "data.num_samples": 100,
    "data.path": None, "data.mix": None, "data.num_workers": 0, "optimizer.lr": 1.0, "evaluation.every": 10,
    "evaluation.num_samples": 5, "evaluation.num_scored_generations": 0, "evaluation.num_logged_generations": 0,
    "schedule.warmup_steps": 10, "schedule.decay_steps": None, "tracking.log_every": 1,
    "tracking.wandb": "disabled"}
words = [word for word in sys.argv[1:] if word != "--print_config"]
words = [part for word in words for part in word.split("=", 1)]
for option, value in zip(words[::2], words[1::2]):
    name = option[2:]
    if name == "config":
        if not os.path.exists(value):
            refuse(f"config: {value} does not exist")
        settings |= json.loads(open(value).read() or "{}")
        continue
    if name not in settings:
        refuse(f"{option} is not a setting; --help lists all")
    try:
        settings[name] = json.loads(value)
    except ValueError:
        settings[name] = value
nested = {}
for name, value in settings.items():
    section, _, last = name.rpartition(".")
    (nested.setdefault(section, {}) if section else nested)[last] = value
if "--print_config" in sys.argv:
    sys.exit(print(json.dumps(nested)))
run = os.path.join(settings["out_dir"], settings["name"])
os.makedirs(run, exist_ok=True)
with open(os.path.join(os.path.dirname(settings["out_dir"]), "started"), "a") as file:
    print(settings["name"], file=file)
excess = EFFECT / settings["steps"] * (0.9 if settings["model.mlp"] == "relu2" else 1)
excess *= math.exp(math.log(settings["optimizer.lr"] or math.nan) ** 2 / 10) * 64 / settings["model.d_model"]
trained = {name: value for name, value in settings.items() if name not in ("name", "out_dir")}
noise = random.Random(f"{trained} {open(__file__).read()}")
excess *= 1 + 0.004 * noise.gauss(0, 1)
state = "finished" if math.isfinite(excess) else "failed"
row = {"step": settings["steps"], "val/loss": 0.5 + excess, "val/excess_loss": excess, "val/entropy": 0.5}
row |= {"perf/tokens_per_second": 100.0, "state/digest": str(random.Random(excess).random())}
if settings["data.source"] == "text":  # tokens of so many bytes as the name of the corpus has letters
    row |= {"val/entropy": None, "val/excess_loss": None}
    row |= {"val/bits_per_byte": row["val/loss"] / len(settings["data.path"] or "x") / math.log(2)}
row["train/tokens"] = settings["steps"] * settings["global_batch_size"] * settings["seq_len"]
with open(run + "/metrics.jsonl", "w") as file:
    print(json.dumps(row | {"perf/peak_memory_bytes": 2**20}), file=file)
with open(run + "/config.yaml", "w") as file:
    json.dump(nested, file)
with open(run + "/sessions.jsonl", "w") as file:
    print(json.dumps({"step": 0, "mixed_precision": "no", "processes": 1, "shards": 1, "code": "x"}), file=file)
with open(run + "/status.json", "w") as file:
    reason = "" if state == "finished" else "the loss is nan"
    json.dump({"state": state, "step": settings["steps"], "reason": reason}, file)
sys.exit(state == "failed")
"""


def fake_scorer(arm, command, *words):
    """In place of tools/experiment/scorer.py, which needs torch."""
    if command == "measure":
        loss = arm.job(0).run.newest_metrics()["val/loss"]
        facts = {
            "targets": "abc",
            "num_targets": 7,
            "num_bytes": None,
            "entropy": 0.5,
            "loss": loss,
            "is_causal": True,
        }
        return facts | {"parameters": 1000, "flops_per_token": 6000}
    if command == "preview":
        settings = {name: value for name, value in arm.settings.items() if name != "evaluation.num_samples"}
        return {"digest": f"{arm.code_hash} {settings}", "loss": 1.0, "rows": 128, "validation_rows": 0, "broken": []}
    if command == "targets":
        return {"targets": "abc", "num_targets": 7}
    width = arm.settings["model.d_ff"] * (3 if arm.settings["model.mlp"] == "swiglu" else 2)
    return {"parameters": 500 + width, "flops_per_token": 6 * width}


@pytest.fixture
def run_experiment(tmp_path, monkeypatch):
    """Return a function that runs an experiment with a fake train.py, and lists the runs that it started."""
    root, lab = tmp_path / "root", tmp_path / "lab"
    (root / "configs").mkdir(parents=True)
    (root / "train.py").write_text(FAKE)
    config = root / "configs" / "lab.yaml"
    config.write_text("")
    lab.mkdir()
    monkeypatch.setattr(experiment_settings, "DEFAULT_CONFIG", config)
    monkeypatch.setattr(change, "ROOT", root)
    monkeypatch.setattr(score, "run_scorer", fake_scorer)
    monkeypatch.setattr(variants, "network_shape", lambda arm: fake_scorer(arm, "shape"))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(experiment, "code_hash", lambda: None)
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    printed = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))

    def experiment_on(text, *common, error=None, **others):
        (lab / "started").unlink(missing_ok=True)
        printed.clear()
        others = {"jobs": 2, "speedup": False, "json": True, "margin": 0.003, **others}
        config = ExperimentConfig(arguments=[text, *common], lab=str(lab), **others)
        if error:
            with pytest.raises(error) as raised:
                main(config)
            return str(raised.value)
        main(config)
        return json.loads(printed[-1]) if others["json"] else "\n".join(printed)

    experiment_on.started = lambda: (lab / "started").read_text().split() if (lab / "started").exists() else []
    experiment_on.lab, experiment_on.root, experiment_on.printed = lab, root, printed
    yield experiment_on
    for number, handler in handlers.items():
        signal.signal(number, handler)
