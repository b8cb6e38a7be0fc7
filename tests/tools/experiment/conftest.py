"""Experiments with a fake train.py, which take no time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.experiment import change, confirm, race, reach, report, runs, sandbox, settings, variant, verdicts
from tools.experiment.settings import ConfirmConfig, ExperimentConfig, ReportConfig
from tools.jobs import runner
from tools.jobs.launch import Launch
from trainer.run.directory import Run

# In place of train.py: the excess loss over an entropy of 0.5 is EFFECT / steps, times the values of all settings
# model.effect_*, with noise of 0.4% over seeds. A run first executes LAB/hook.py, in which a test says what happens.
# Without the module json it starts twice as fast.
FAKE = """
import math, os, sys
EFFECT = 40
WORK = 1
settings = {"name": None, "steps": 100, "seed": 0, "out_dir": "runs", "seq_len": 8, "global_batch_size": 1,
    "micro_batch_size": 1, "init_from": None, "branch_from": None, "teacher.path": None,
    "model.effect_a": 1.0, "model.effect_b": 1.0, "model.effect_c": 1.0, "model.readout": 1.0,
    "model.sham": 0, "model.big": False, "model.fails": False, "model.crashes": False, "model.x": False,
    "model.d_ff": 64, "model.d_model": 64, "model.n_heads": 4, "model.n_kv_heads": None, "data.seed": 0,
    "data.source": "stories", "data.facts": 0, "data.zipf": 1.3,
    "data.num_samples": 100, "data.path": None, "data.mix": None, "data.num_workers": 0,
    "optimizer.lr": 1.0, "evaluation.num_samples": 5, "evaluation.every": 10, "schedule.warmup_steps": 10,
    "schedule.decay_steps": None, "schedule.batch_warmup_from": None, "schedule.batch_warmup_steps": None,
    "tracking.log_every": 1}
# Patches insert lines below one of these.
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
NAMES = {"null": None, "true": True, "false": False}

def parse(text):
    if not isinstance(text, str):
        return text
    if text in NAMES:
        return NAMES[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text

def write_json(file, row):
    names = {"None": "null", "True": "true", "False": "false", "nan": "NaN"}
    words = (f'"{value}"' if isinstance(value, str) else names.get(str(value), repr(value)) for value in row.values())
    with open(file, "w") as opened:
        print("{" + ", ".join(f'"{name}": {word}' for name, word in zip(row, words)) + "}", file=opened)

def resolve(given):
    for name in given:
        if name not in settings:
            return {"refused": f"--{name} is not a setting; --help lists all"}
    found = settings | {name: parse(value) for name, value in given.items()}
    if found["model.crashes"]:
        return {"crash": "ValueError: x (train.py:1)"}
    if found["model.x"] and found["model.sham"]:
        return {"refused": "model.x: needs no sham"}
    size = 1000 * found["model.d_model"] // 64 * (3 if found["model.big"] else 2) // 2
    return {"settings": found, "parameters": size, "flops_per_token": 6 * size, "warnings": WARNINGS,
        "validation_rows": None}
WARNINGS = []

def read(file):
    rows = (line.split(": ", 1) for line in open(file).read().splitlines() if line != "{}")
    return {name: parse(value.strip("'")) for name, value in rows}

def noise(*seeds):
    state = sum(7919 ** i * (seed + 1) for i, seed in enumerate(seeds)) % 2**31
    total = 0
    for i in range(24):
        state = (1103515245 * state + 12345) % 2**31
        total += (state / 2**31) * (i >= 12)
    return 0.004 * (total - 6)

def main(delivered, words):
    given = {}
    for option, value in zip(words[::2], words[1::2]):
        given |= read(value) if option == "--config" else {option[2:]: parse(value)}
        if option == "--name":  # a digest such as 1234567e, followed by -0, is a number
            given["name"] = value
    if unknown := given.keys() - settings.keys():
        sys.exit(f"train.py: error: {min(unknown)} is not a setting")
    settings.update(given)
    run = os.path.join(settings["out_dir"], settings["name"])
    lab = os.path.dirname(os.path.dirname(settings["out_dir"]))
    os.makedirs(run + "/checkpoints/step-1", exist_ok=True)
    with open(os.path.join(lab, "started"), "a") as file:
        print(settings["name"], file=file)
    if os.path.exists(os.path.join(lab, "hook.py")):
        exec(open(os.path.join(lab, "hook.py")).read(), globals() | {"lab": lab})
    kind = "model.effect_", "optimizer.", "model.readout"
    excess = EFFECT / settings["steps"] * math.exp(math.log(settings["optimizer.lr"] or math.nan) ** 2 / 10)
    for name, value in settings.items():
        excess *= value if name.startswith("model.effect_") else 1
    excess *= 64 / settings["model.d_model"]
    planted = round(1e6 * excess) if excess == excess else 0
    excess *= 1 + noise(settings["seed"], settings["data.seed"], planted)
    digest = str(excess)
    excess *= settings["model.readout"]
    state = "finished" if math.isfinite(excess) and not settings["model.fails"] else "failed"
    row = {"step": settings["steps"], "val/loss": 0.5 + excess, "val/excess_loss": excess, "val/entropy": 0.5}
    row |= {"val/other": 1.0 + settings["model.effect_b"] * excess, "state/digest": digest}
    write_json(run + "/metrics.jsonl", row)
    write_json(run + "/settings.json", settings)
    write_json(run + "/checkpoints/step-1/manifest.json", {})
    reason = "" if state == "finished" else "the loss is nan"
    write_json(run + "/status.json", {"state": state, "step": settings["steps"], "reason": reason})
    os.makedirs(os.path.dirname(delivered), exist_ok=True)
    work = {"tokens": WORK * settings["steps"] * settings["global_batch_size"] * settings["seq_len"]}
    write_json(run + "/counts.0", work | {"updates": WORK * settings["steps"]})
    with open(delivered + ".0", "a") as file:
        print(file=file)
    return state == "failed"
"""

# In place of tools/experiment/variant_program.py, which needs torch.
PROGRAM = """
import sys
code, what, file, *words = sys.argv[1:]
sys.path.insert(0, code)
import train
if what == "train":
    sys.exit(train.main(file, words))
import json
for line in sys.stdin:
    number, _, settings = line.partition(" ")
    print(number, json.dumps(train.resolve(json.loads(settings))), flush=True)
"""


def fake_evaluator(code, requests, *_):
    """In place of tools/experiment/evaluator.py, which needs torch: the losses that the runs logged."""
    answers = []
    for request in requests:
        run = Run(Path(request["run"]))
        row, nothing = run.newest_metrics(), {"loss": None, "excess_loss": None}
        if run.checkpoints.exists():
            answers.append({"loss": row["val/loss"], "excess_loss": row["val/excess_loss"], "problem": ""})
        else:
            answers.append(nothing | {"problem": "it cannot be evaluated: it has no checkpoint"})
    return answers


class Experiments:
    """Commands of tools.experiment on a fake train.py, and what they left."""

    def __init__(self, root, lab, capsys):
        self.root, self.lab, self._capsys = root, lab, capsys
        self.errors = ""
        """What the last command printed on stderr."""
        self.output = ""

    def race(self, *arguments, error=None, **options):
        """Race ideas; return the object of --json, or the text without it, or the message of an error."""
        options = {"jobs": 2, "json": True, "folder": str(self.lab), **options}
        return self._run(race.main, ExperimentConfig(ideas_and_settings=[*arguments], **options), error)

    def confirm(self, *arguments, error=None, **options):
        options = {"jobs": 2, "json": True, "seeds": 3, "folder": str(self.lab), **options}
        return self._run(confirm.main, ConfirmConfig(ideas_and_settings=[*arguments], **options), error)

    def report(self, error=None, **options):
        return self._run(report.main, ReportConfig(**{"json": True, "folder": str(self.lab), **options}), error)

    def _run(self, main, config, error):
        (self.lab / "started").unlink(missing_ok=True)
        self._capsys.readouterr()
        message = None
        try:
            if error:
                with pytest.raises(error) as raised:
                    main(config)
                message = str(raised.value)
            else:
                main(config)
        finally:
            self.output, self.errors = self._capsys.readouterr()
        if error:
            return message
        return json.loads(self.output, parse_constant=not_json) if config.print_json else self.output

    def hook(self, code):
        """Let each run execute this before it trains; `settings` and `lab` are its settings and the folder of all."""
        (self.lab / "hook.py").write_text(code)

    def started(self):
        """Return the names of the runs that the last command started, in order."""
        return (self.lab / "started").read_text().split() if (self.lab / "started").exists() else []

    def folder(self):
        """Return the folder of the only experiment."""
        [folder] = (path for path in self.lab.iterdir() if (path / "experiment.json").exists())
        return folder

    def race_file(self):
        [file] = self.folder().glob("races/*.json")
        return file

    def settings(self, name):
        """Return the settings that a run was trained with."""
        [file] = self.lab.glob(f"*/runs/{name}/settings.json")
        return json.loads(file.read_text())

    def trained(self):
        """Return the settings of each run that the last command started."""
        return [self.settings(name) for name in self.started()]


def not_json(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def experiments(tmp_path, monkeypatch, capsys):
    """Commands of tools.experiment on a fake train.py."""
    root, lab = tmp_path / "root", tmp_path / "lab"
    (root / "configs").mkdir(parents=True)
    (root / "train.py").write_text(FAKE)
    config = root / "configs" / "lab.yaml"
    config.write_text("{}")
    lab.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(settings, "DEFAULT_CONFIG", config)
    monkeypatch.setattr(change, "ROOT", root)
    monkeypatch.setattr(variant, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(runs, "run_evaluator", fake_evaluator)
    monkeypatch.setattr(report, "draw", lambda race, path: None)  # it takes a second
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "problem", lambda: "the fake runs write into the folder of all")
    monkeypatch.setattr(reach, "TEXT", {"data.source": "text", "data.path": "no text here", "data.none": 1})
    # Without site packages Python starts three times as fast, too.
    parse = Launch.parse
    fast = Launch((sys.executable, "-IS"))
    # With so little noise two runs decide; tests of verdicts.py are in test_verdicts.py.
    monkeypatch.setattr(verdicts, "MIN_RUNS_OF_DISCOVERY", 2)
    monkeypatch.setattr(Launch, "parse", lambda launch: parse(launch) if launch else fast)
    handlers = {number: signal.getsignal(number) for number in runner.signals_to_catch()}
    yield Experiments(root, lab, capsys)
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


class Patches:
    """Writes patches of the fake train.py; `folder` is an empty folder of ideas."""

    def __init__(self, experiments):
        self.git, self.source, self.folder = git_in(experiments.root), experiments.root / "train.py", None
        self.folder = experiments.lab.parent / "ideas"
        self.folder.mkdir()

    def write(self, name, before, after, header="", folder=None):
        """Write a patch that replaces a text; return its path."""
        assert FAKE.count(before) == 1
        self.source.write_text(FAKE.replace(before, after))
        file = (folder or self.folder) / name
        file.write_text(header + self.git("diff"))
        self.git("checkout", "--quiet", "train.py")
        return str(file)

    def effect(self, name, line, value, folder=None):
        """Write a patch that inserts a setting below one of the lines for it, and gives it a value."""
        header = f"Settings: --model.effect_{name} {value}\n\n"
        code = f'# {line}\nsettings["model.effect_{name}"] = 1.0\n'
        return self.write(f"{name}.patch", f"# {line}\n", code, header, folder)


@pytest.fixture
def patches(experiments):
    """Makes the folder of the fake train.py a repository, and writes patches of it."""
    return Patches(experiments)
