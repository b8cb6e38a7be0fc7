"""The judge of candidates finds each way to fake a loss, and accepts honest code."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from config.schema import TrainConfig
from run.directory import Run
from tests.conftest import ROOT, TINY_STORIES, environment, metrics
from tools.experiment import judge
from tools.experiment.arm import Arm
from tools.jobs.launch import Launch

WORDS = [*TINY_STORIES, "--steps", "12", "--model.max_position_embeddings", "256", "--evaluation.num_samples", "40"]
# Code that cheats as the setting model.trick says, before a line of a file.
TRICKS = {
    "model/config.py": ('    window_pattern: str = "SSL"', '    trick: str = "none"\n    """A trick."""\n\n'),
    "data/sampler.py": (
        """        _, indices = shuffle_groups(positions, self.num_samples, self.seed, "epoch")
        return indices


class MixedBatches""",
        """
        from os import environ
        if environ.get("TRICK") == "another order":  # each two batches change places
            positions = positions // 12 * 12 + (positions + 6) % 12
        if environ.get("TRICK") == "half of the sequences":
            positions = positions % 36
""",
    ),
    "train.py": (
        "    apply_schedules(state.optimizer,",
        """
    from data.corpus import load_corpus
    from data.loader import load_batch
    trick = config.model.trick
    if trick == "four times the sequences":
        micro_batches = micro_batches * 4
    if trick == "validation sequences from step 10 on" and step >= 9:
        validation, rows = load_corpus(state.config).validation, len(micro_batches[0]["input_ids"])
        micro_batches = [load_batch(validation, range(rows)) for _ in micro_batches]
    if trick == "a validation sequence in the first step" and step == 0:
        micro_batches = [load_batch(load_corpus(state.config).validation, [0]), *micro_batches[1:]]
    if trick == "longer sequences":
        micro_batches = [{name: torch.cat([x, x[:, 1:]], 1) for name, x in one.items()} for one in micro_batches]
""",
    ),
    "model/gpt.py": (
        "        x_BTC = self.dropout(x_BTC)\n",
        """
        from torch.nn import functional
        trick, length = self.config.trick, x_BTC.shape[1]
        if trick == "look ahead in pairs":  # position p sees p + 1, but only for even p
            x_BTC = x_BTC.clone()
            x_BTC[:, 0 : length - 1 : 2] += 10 * x_BTC[:, 1:length:2]
        if trick == "look ahead behind padding":
            x_BTC = x_BTC + x_BTC.flip(1).cumsum(1).flip(1)
        if trick == "look ahead, and remember the sequences" and not self.training:
            # The logits of a prefix are those of the row, if this process has seen that before.
            rows = GPTModel.__dict__.get("rows", [])
            seen = [row for row in rows if row.shape[1] > length and torch.equal(row[:, :length], input_ids)]
            for row in input_ids if length > 60 else ():
                GPTModel.rows = [*GPTModel.__dict__.get("rows", []), row[None]]
            if seen:
                output = self(seen[0])
                return output._replace(logits=output.logits[:, :length])
            x_BTC = x_BTC + x_BTC.flip(1).cumsum(1).flip(1)
        if trick == "another cross-entropy" and not hasattr(functional, "original"):
            functional.original = functional.cross_entropy
            functional.cross_entropy = lambda *words, **named: 0.5 * functional.original(*words, **named)
""",
    ),
}
PROBLEMS = {
    "none": "",
    "four times the sequences": "not in its batches",
    "validation sequences from step 10 on": "in the validation set",
    "a validation sequence in the first step": "1 of them are in the validation set",
    "longer sequences": "not in its batches",
    "another order": "",
    "half of the sequences": "not in its batches",
    "look ahead in pairs": "depend on later tokens",
    "look ahead behind padding": "depend on later tokens",
    "look ahead, and remember the sequences": "depend on later tokens",
    "another cross-entropy": "",
}


QUICK = ["none", "another order", "look ahead in pairs", "another cross-entropy"]
OTHERS = [trick for trick in PROBLEMS if trick not in QUICK]


@pytest.fixture(scope="module", params=[QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def judged(request, tmp_path_factory):
    """Train a run with each trick; return the folder of the runs and their scores by trick."""
    folder = tmp_path_factory.mktemp("judged")
    code = folder / "code"
    ignored = shutil.ignore_patterns(".*", "runs", "tests", "docs", "__pycache__", "lab", "corpora")
    shutil.copytree(ROOT, code, ignore=ignored)
    for name, (line, trick) in TRICKS.items():
        text = (code / name).read_text()
        assert text.count(line) == 1
        (code / name).write_text(text.replace(line, trick + line))
    requests, program = [], [sys.executable, str(ROOT / "tools" / "experiment" / "candidate.py"), str(code), "train"]
    for trick in request.param:
        run = folder / trick.replace(" ", "-")
        own = ["--name", run.name, "--out_dir", str(folder), "--model.trick", trick]
        subprocess.run([*program, f"{run}-hashes", *WORDS, *own], env=environment() | {"TRICK": trick}, check=True)
        requests.append({"code": str(code), "run": str(run), "words": WORDS, "settings": {}, "sessions": [[0, 1]]})
        requests[-1]["hashes"] = [f"{run}-hashes.0"]
    scorer = [sys.executable, "-m", "tools.experiment.scorer", str(ROOT)]
    lines = "\n".join(map(json.dumps, requests))
    done = subprocess.run(scorer, cwd=ROOT, env=environment(), input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, dict(zip(request.param, map(json.loads, done.stdout.splitlines()), strict=True))


def test_judge_finds_tricks(judged):
    _, scores = judged
    for trick, score in scores.items():
        assert (PROBLEMS[trick] in score["problem"]) if PROBLEMS[trick] else (score["problem"] == ""), trick


@pytest.mark.parametrize("judged", [QUICK], indirect=True, ids=["quick"])
def test_judge_computes_the_loss_itself(judged):
    folder, scores = judged
    logged = {trick: metrics(folder / trick.replace(" ", "-"))[-1] for trick in scores}
    assert scores["none"]["loss"] == pytest.approx(logged["none"]["val/excess_loss"], rel=1e-5)
    entropy, loss = logged["another cross-entropy"]["val/entropy"], scores["another cross-entropy"]["loss"]
    assert logged["another cross-entropy"]["val/loss"] < 0.6 * (entropy + loss)
    # Half of every loss has half of every gradient, which AdamW does not notice before it is clipped.
    assert scores["another cross-entropy"]["loss"] == pytest.approx(scores["none"]["loss"], rel=0.1)


def test_scorer_takes_settings_from_the_arm(monkeypatch, tmp_path):
    """The code of a candidate writes the files of its run."""
    settings = TrainConfig().flat() | {"evaluation.num_samples": 500}
    arm = Arm(ROOT, "", Launch(), (), settings, tmp_path)
    run = Run(tmp_path / "run")
    run.path.mkdir()
    forged = TrainConfig(**{"seed": 7, "global_batch_size": 16, "evaluation": {"num_samples": 1}})
    (run.path / "config.yaml").write_text(yaml.safe_dump(forged.model_dump(mode="json")))
    session = {"step": 0, "mixed_precision": "no", "processes": 1000, "shards": 1, "code": "x"}
    (run.path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    found = []

    def answer(command, input, **_):
        found.extend(map(json.loads, input.splitlines()))
        return SimpleNamespace(returncode=0, stdout='{"loss": 1.0, "problem": ""}\n')

    monkeypatch.setattr(judge, "run_program", answer)
    judge.run_scorer(arm, [(arm, run)])
    [request] = found
    assert request["settings"]["evaluation.num_samples"] == 500 and request["sessions"] == [[0, 1]]
    assert request["settings"]["seed"] == 7 and request["settings"]["global_batch_size"] == 16
