"""A model that does not predict the next token: what needs such predictions is left out or refused."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import sample
from model.config import GPTConfig
from model.generate import CannotGenerate
from model.gpt import GPTModel
from model.hf import to_transformers
from model.loss import count_targets
from runtime.config.errors import ConfigError
from runtime.config.parser import parse_config
from tests.conftest import TINY_STORIES, environment, metrics, train
from tests.support import forked
from tests.trainer.checks.test_gradients import LEARN, TEACHER, errors_of
from trainer.checks import model as checks
from trainer.pretrained import export
from trainer.pretrained.settings import ExportConfig, SampleConfig
from trainer.run import trackers

PROGRAM = "tests/programs/masked_train.py"
EXPORTABLE = GPTConfig(vocab_size=20, d_model=16, n_heads=2)


@pytest.fixture(autouse=True)
def other_predictions(monkeypatch):
    monkeypatch.setattr(GPTModel, "predicts_next_token", False)


@pytest.mark.parametrize("chunked", [False, True])
def test_target_is_the_label_of_the_position(chunked):
    torch.manual_seed(0)
    model = GPTModel(EXPORTABLE)
    model.next_token_loss.chunked = chunked
    tokens, labels = torch.randint(20, (2, 2, 9))
    labels[:, 4] = -100
    logits, loss, _ = model(tokens, labels=labels, logits_to_keep=0)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert count_targets(labels, model.predicts_next_token) == 16 and count_targets(labels, True) == 14


def test_generation_and_export_are_refused():
    model = GPTModel(EXPORTABLE).eval()
    with pytest.raises(CannotGenerate, match="predicts_next_token"):
        model.generate(torch.zeros(1, 1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="no counterpart in transformers: it does not predict the next token"):
        to_transformers(model)
    with pytest.raises(ConfigError, match="tracking.log_model: .*does not predict the next token"):
        trackers.check(parse_config([*map(str, TINY_STORIES), "--tracking.log_model", "true"]))


def test_checks_of_causal_models_do_not_apply():
    for check in (checks.check_cached_logits, checks.check_masks):
        assert check(EXPORTABLE, 16) == (None, checks.NOT_CAUSAL)
    assert checks.check_transformers_logits("gpt2", EXPORTABLE)[0] is None
    assert checks.check_flops(EXPORTABLE, 16)[0]


def test_gradient_with_teacher_passes():
    assert max(errors_of(*LEARN, teacher=TEACHER).values()) < 1e-5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    runs = tmp_path_factory.mktemp("masked")
    words = "--steps 4 --evaluation.every 4 --evaluation.num_logged_generations 2 --evaluation.num_scored_generations 2"
    train(*TINY_STORIES, *words.split(), "--data.facts", 16, "--out_dir", runs, "--name", "run", script=PROGRAM)
    return runs / "run"


def test_run_logs_no_metric_of_next_token_predictions(trained):
    rows = metrics(trained)
    assert 0 < rows[-1]["train/loss"] < rows[0]["train/loss"]
    logged = {name for row in map(json.loads, (trained / "metrics.jsonl").read_text().splitlines()) for name in row}
    assert {name for name in logged if name.startswith(("val/", "generation/"))} == {"val/loss"}
    assert not (trained / "generations.jsonl").exists()
    vocab_size = parse_config(["--config", str(trained / "config.yaml")]).model.vocab_size
    assert rows[0]["train/loss"] == pytest.approx(math.log(vocab_size), rel=0.02), "the mean over the masked tokens"


def test_scripts_refuse_what_needs_next_token_predictions(trained, tmp_path):
    with pytest.raises(ConfigError, match="cannot generate: predicts_next_token"):
        sample.main(SampleConfig(run=str(trained), prompt=""))
    with pytest.raises(ConfigError, match="run: .*does not predict the next token"):
        export.main(ExportConfig(run=str(trained), out=str(tmp_path / "exported")))


@pytest.mark.slow
def test_verify_passes(tmp_path):
    words = [*TINY_STORIES, "--verify_steps", "4", "--out_dir", str(tmp_path)]
    done = forked.run(PROGRAM, words, 0, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything holds" in done.stdout
    assert done.stdout.count(checks.NOT_CAUSAL) == 2
