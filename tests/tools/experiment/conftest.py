"""Experiments with a fake train.py, which take no time."""

import json
import os
import signal
import subprocess

import pytest

from tools.experiment import arm, change, confirm, experiment, judge
from tools.experiment import settings as experiment_settings
from tools.experiment.settings import ConfirmConfig, ExperimentConfig
from tools.jobs import runner

# In place of train.py: the excess loss over an entropy of 0.5 is EFFECT / steps, times the values of all settings
# model.effect_*, with noise of 0.4% over seeds. A run first executes LAB/hook.py, in which a test says what happens.
FAKE = """
import json, math, os, random, sys
EFFECT = 40
def refuse(message):
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(2)
settings = {"name": None, "steps": 100, "seed": 0, "out_dir": "runs", "seq_len": 8, "global_batch_size": 1,
    "init_from": None, "branch_from": None, "teacher.path": None,
    "model.effect_a": 1.0, "model.effect_b": 1.0, "model.effect_c": 1.0, "model.effect_d": 1.0,
    "model.sham": 0, "model.big": False, "model.fails": False, "model.x": False, "model.y": False, "model.z": False,
    "model.d_ff": 64, "model.d_model": 64, "model.n_heads": 4, "model.n_kv_heads": None, "data.seed": 0,
    "data.source": "stories", "data.num_samples": 100, "data.path": None, "data.mix": None, "data.num_workers": 0,
    "optimizer.lr": 1.0, "evaluation.every": 10, "evaluation.num_samples": 5, "schedule.warmup_steps": 10,
    "schedule.decay_steps": None, "tracking.log_every": 1}
# Patches insert settings below one of these lines.
# 1
#
#
#
#
#
#
# 2
#
#
#
#
#
#
# 3
#
#
#
#
#
#
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
if settings["model.x"] and settings["model.y"] and settings["model.z"]:
    refuse("idea: x, y and z are too many")
if settings["model.x"] and settings["model.sham"]:
    refuse("idea: x needs no sham")
nested = {}
for name, value in settings.items():
    section, _, last = name.rpartition(".")
    (nested.setdefault(section, {}) if section else nested)[last] = value
if "--print_config" in sys.argv:
    sys.exit(print(json.dumps(nested)))
run, lab = os.path.join(settings["out_dir"], settings["name"]), os.path.dirname(settings["out_dir"])
os.makedirs(run, exist_ok=True)
with open(os.path.join(lab, "started"), "a") as file:
    print(settings["name"], file=file)
if os.path.exists(os.path.join(lab, "hook.py")):
    exec(open(os.path.join(lab, "hook.py")).read())
excess = EFFECT / settings["steps"] * math.exp(math.log(settings["optimizer.lr"] or math.nan) ** 2 / 10)
excess *= math.prod(value for name, value in settings.items() if name.startswith("model.effect_"))
excess *= 64 / settings["model.d_model"]
excess *= 1 + 0.004 * random.Random(f"{excess} {settings['seed']} {settings['data.seed']}").gauss(0, 1)
state = "finished" if math.isfinite(excess) and not settings["model.fails"] else "failed"
row = {"step": settings["steps"], "val/loss": 0.5 + excess, "val/excess_loss": excess, "val/entropy": 0.5}
row |= {"val/excess_loss/names": excess / 2, "val/shifted": excess - 1, "val/nothing": 0.0}
row |= {"perf/tokens_per_second": 100.0, "state/digest": str(random.Random(excess).random())}
row["train/tokens"] = settings["steps"] * settings["global_batch_size"] * settings["seq_len"]
with open(run + "/metrics.jsonl", "w") as file:
    print(json.dumps(row), file=file)
with open(run + "/config.yaml", "w") as file:
    json.dump(nested, file)
size = 1000 * settings["model.d_model"] // 64 * (3 if settings["model.big"] else 2) // 2
with open(run + "/sessions.jsonl", "w") as file:
    session = {"step": 0, "mixed_precision": "no", "processes": 1, "shards": 1, "code": "x"}
    print(json.dumps(session | {"parameters": size, "flops_per_token": 6 * size}), file=file)
with open(run + "/status.json", "w") as file:
    reason = "" if state == "finished" else "the loss is nan"
    json.dump({"state": state, "step": settings["steps"], "reason": reason}, file)
sys.exit(state == "failed")
"""

# In place of tools/experiment/candidate.py, which needs torch.
CANDIDATE = """
import json, os, runpy, sys
code, what, *words = sys.argv[1:]
if what == "checks":
    broken = {"cache": "3.7e-02"} if "BROKEN" in open(code + "/train.py").read() else {}
    sys.exit(print(json.dumps(broken)))
sys.argv = [code + "/train.py", *words[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fake_scorer(baseline, runs):
    """In place of tools/experiment/scorer.py, which needs torch."""
    return [{"loss": run.newest_metrics()["val/excess_loss"], "problem": ""} for _, run in runs]


@pytest.fixture
def run_experiment(tmp_path, monkeypatch):
    """Return a function that runs an experiment with a fake train.py, and lists the runs that it started."""
    root, lab = tmp_path / "root", tmp_path / "lab"
    (root / "configs").mkdir(parents=True)
    (root / "train.py").write_text(FAKE)
    config = root / "configs" / "lab.yaml"
    config.write_text("")
    lab.mkdir()
    (tmp_path / "candidate.py").write_text(CANDIDATE)
    monkeypatch.setattr(experiment_settings, "DEFAULT_CONFIG", config)
    monkeypatch.setattr(change, "ROOT", root)
    for module in (arm, judge):
        monkeypatch.setattr(module, "CANDIDATE", tmp_path / "candidate.py")
    monkeypatch.setattr(judge, "run_scorer", fake_scorer)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    handlers = {number: signal.getsignal(number) for number in range(1, 16) if number != 9}
    printed = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))

    def run(main, config, error):
        (lab / "started").unlink(missing_ok=True)
        printed.clear()
        if error:
            with pytest.raises(error) as raised:
                main(config)
            return str(raised.value)
        main(config)
        return json.loads(printed[-1]) if config.print_json else "\n".join(printed)

    def experiment_on(*arguments, error=None, **others):
        others = {"arguments": [*arguments], "lab": str(lab), "jobs": 2, "json": True, **others}
        ideas = ExperimentConfig(**others).ideas
        if len(ideas) == 1 and change.idea_texts(ideas) == ideas:
            others = {"speedup": False, "margin": 0.003, **others}
        return run(experiment.main, ExperimentConfig(**others), error)

    def confirm_on(*arguments, error=None, **others):
        others = {"jobs": 2, "json": True, "seeds": 3, **others}
        return run(confirm.main, ConfirmConfig(arguments=[*arguments], lab=str(lab), **others), error)

    def started():
        return (lab / "started").read_text().split() if (lab / "started").exists() else []

    def record():
        [file] = lab.glob("screens/*/screen.json")
        return json.loads(file.read_text())

    def on():
        """Texts of the ideas that are on in each run."""
        content = record()
        return [[content["ideas"][key]["text"] for key in run["ideas"]] for run in content["runs"]]

    def hook(code):
        (lab / "hook.py").write_text(code)

    experiment_on.confirm, experiment_on.started, experiment_on.hook = confirm_on, started, hook
    experiment_on.record, experiment_on.on = record, on
    experiment_on.lab, experiment_on.root, experiment_on.printed = lab, root, printed
    yield experiment_on
    for number, handler in handlers.items():
        signal.signal(number, handler)


def git_in(root):
    """Commit all files of a folder into a new repository; return a function that runs git there."""

    def git(*words):
        env = os.environ | change.AUTHOR
        return subprocess.run(["git", *words], cwd=root, env=env, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message", "base")
    return git


@pytest.fixture
def write_patch(run_experiment):
    """Return a function that writes a patch of train.py into a folder; the root becomes a repository."""
    git, source, folder = git_in(run_experiment.root), run_experiment.root / "train.py", run_experiment.lab / "ideas"
    folder.mkdir()

    def write(name, before, after, header="", folder=folder):
        assert FAKE.count(before) == 1
        source.write_text(FAKE.replace(before, after))
        (folder / name).write_text(header + git("diff"))
        source.write_text(FAKE)
        return str(folder / name)

    def setting(name, line, value, default="1.0", folder=folder):
        """A patch that adds a setting below one of the lines for it."""
        header = f"Settings: --model.effect_{name} {value}\n\n"
        code = f'# {line}\nsettings["model.effect_{name}"] = {default}\n'
        return write(f"{name}.patch", f"# {line}\n", code, header, folder)

    write.setting, write.git, write.folder = setting, git, folder
    return write
