"""The judge of candidates finds each way to fake a loss, and accepts honest code."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, metrics

WORDS = [*TINY_STORIES, "--steps", "12", "--model.max_position_embeddings", "256", "--evaluation.num_samples", "40"]
# Code that cheats as the setting model.trick says, before a line of a file.
TRICKS = {
    "model/config.py": ('    window_pattern: str = "SSL"', '    trick: str = "none"\n    """A trick."""\n\n'),
    "train.py": (
        "    apply_schedules(state.optimizer,",
        """
    from data.corpus import load_corpus
    from data.loader import load_batch
    trick = config.model.trick
    if trick == "four times the rows":
        micro_batches = micro_batches * 4
    if trick == "validation rows from step 10 on" and step >= 9:
        validation, rows = load_corpus(state.config).validation, len(micro_batches[0]["input_ids"])
        micro_batches = [load_batch(validation, range(rows)) for _ in micro_batches]
    if trick == "longer rows":
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
        if trick == "look ahead, and remember the rows" and not self.training:
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
    "four times the rows": "not in its batches",
    "validation rows from step 10 on": "in the validation set",
    "longer rows": "not in its batches",
    "look ahead in pairs": "depend on later tokens",
    "look ahead behind padding": "depend on later tokens",
    "look ahead, and remember the rows": "depend on later tokens",
    "another cross-entropy": "",
}


QUICK = ["none", "look ahead in pairs", "another cross-entropy"]
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
        subprocess.run([*program, f"{run}-rows", *WORDS, *own], env=environment(), check=True)
        requests.append({"code": str(code), "run": str(run), "words": WORDS, "settings": {}, "sessions": [[0, 1]]})
        requests[-1]["rows"] = [f"{run}-rows.0"]
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
    logged = {trick: metrics(folder / trick.replace(" ", "-"))[-1]["val/loss"] for trick in scores}
    assert scores["none"]["loss"] == pytest.approx(logged["none"], rel=1e-5)
    assert logged["another cross-entropy"] < 0.6 * scores["another cross-entropy"]["loss"]
    # Half of every loss has half of every gradient, which AdamW does not notice before it is clipped.
    assert scores["another cross-entropy"]["loss"] == pytest.approx(scores["none"]["loss"], rel=0.1)
