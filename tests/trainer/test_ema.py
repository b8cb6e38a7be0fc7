"""The EMA of the weights is evaluated, exported and sampled from, and does not change training."""

import json

import pytest
import torch

from runtime.config.errors import ConfigError
from tests.conftest import TINY_STORIES, assert_same_bits, environment, metrics, python, tensors, thinned, train
from tests.runtime.distributed.test_sharding import sharded
from tests.support import forked
from trainer.ema import ema_weights, track_ema
from trainer.pretrained import export
from trainer.pretrained.load import load_run
from trainer.pretrained.settings import ExportConfig

AVERAGE = 0.7  # the first seven steps use a smaller decay
RUN = [*TINY_STORIES, "--name", "run", "--evaluation.every", "2", "--checkpoint.every", "2"]


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """Run of 8 steps with an EMA, saved at each step."""
    out_dir = tmp_path_factory.mktemp("averaged")
    train(*RUN, "--checkpoint.every", 1, "--evaluation.ema_decay", AVERAGE, "--out_dir", out_dir)
    return out_dir / "run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same run without an EMA."""
    out_dir = tmp_path_factory.mktemp("plain")
    train(*RUN, "--out_dir", out_dir)
    return out_dir / "run"


def average_by_hand(run, step):
    """EMA computed in float64 from the checkpoints; the decay of step s, from 0, is at most (1 + s) / (10 + s)."""
    mean = None
    for s in range(step):
        kept = min(AVERAGE, (1 + s) / (10 + s)) if s else 0
        trained = {n.removeprefix("model."): t.double() for n, t in tensors(run, s + 1).items() if n[:6] == "model."}
        mean = {name: kept * (mean[name] if s else 0) + (1 - kept) * weight for name, weight in trained.items()}
    return mean


@pytest.mark.parametrize("step", thinned([5, 1, 8], 3))
def test_load_run_returns_the_ema_weights(step, averaged):
    by_hand = average_by_hand(averaged, step)
    found, trained = load_run(averaged, step).model, load_run(averaged, step, weights="trained").model
    assert by_hand.keys() == found.state_dict().keys()
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, by_hand[name].float(), rtol=1e-5, atol=1e-7)
        assert torch.equal(trained.state_dict()[name], tensors(averaged, step)[f"model.{name}"])


def test_card_shows_metrics_of_exported_weights(averaged, tmp_path):
    """val/loss is of the EMA, so the card of the trained weights does not have it."""
    cards = {}
    for weights in ("evaluated", "trained"):
        export.main(ExportConfig(run=str(averaged), out=str(tmp_path / weights), weights=weights))
        cards[weights] = (tmp_path / weights / "README.md").read_text()
    last = metrics(averaged)[-1]
    for name in ("val/loss", "val/excess_loss", "val/perplexity"):
        assert f"| {name} | {last[name]:.6g} |" in cards["evaluated"] and f"| {name} |" not in cards["trained"]
    assert all(f"| train/loss | {last['train/loss']:.6g} |" in card for card in cards.values())


def test_ema_does_not_change_training(averaged, plain):
    """Every evaluation swaps the weights and restores them."""
    for step in (2, 8):
        kept = {name: tensor for name, tensor in tensors(averaged, step).items() if not name.endswith(".ema")}
        assert_same_bits(kept, tensors(plain, step))
    assert [row["train/loss"] for row in metrics(averaged)] == [row["train/loss"] for row in metrics(plain)]


def test_evaluation_uses_the_ema_weights(averaged, plain, tmp_path):
    losses = {row["step"]: row["val/loss"] for row in metrics(averaged) if "val/loss" in row}
    for words, run in {"": averaged, "--weights trained": plain}.items():
        python(f"python evaluate.py {averaged} --micro_batch_size 2 --out {tmp_path} {words}")
        assert json.loads((tmp_path / "evaluation.json").read_text())["val/loss"] == metrics(run)[-1]["val/loss"]
    best = min(losses, key=losses.get)
    assert_same_bits(load_run(averaged, "best").model.state_dict(), load_run(averaged, best).model.state_dict())


def test_export_and_sample_use_the_ema_weights(averaged, plain, tmp_path):
    for words, run in {"": averaged, "--weights trained": plain}.items():
        folder = tmp_path / f"export{words}".replace(" ", "")
        python(f"python export.py {averaged} {folder} {words}")
        assert_same_bits(load_run(folder).model.state_dict(), load_run(run).model.state_dict())
        card = (folder / "README.md").read_text()
        assert ("an exponential moving average (EMA) of the trained weights" in card) == (words == "")
    texts = [python(f"python sample.py {averaged} --seed 3 {words}").stdout for words in ("", "--weights trained")]
    assert texts[1] == python(f"python sample.py {plain} --seed 3").stdout != texts[0]


OWN_AVERAGE = """
import sys, train
from runtime.cli import scripts
from trainer.ema import track_ema
del sys.argv[0]
build, decay = train.build_optimizer, float(sys.argv.pop(1))
def build_averaging(network, config, ema_decay):
    optimizer = build(network, config, ema_decay)
    track_ema(optimizer, decay)
    return optimizer
train.build_optimizer = build_averaging
scripts.run_and_exit("train")
"""


def test_average_of_optimizer_needs_no_setting(averaged, tmp_path):
    """A fork's optimizer keeps an average by itself, here the same one."""
    arguments = ["train.py", str(AVERAGE), *map(str, RUN), "--out_dir", str(tmp_path)]
    done = forked.run("-c", [OWN_AVERAGE, *arguments], 0, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    own = tmp_path / "run"
    assert metrics(own)[-1]["val/loss"] == metrics(averaged)[-1]["val/loss"]
    for weights in ("evaluated", "trained"):
        ours, theirs = (load_run(run, weights=weights).model.state_dict() for run in (own, averaged))
        assert_same_bits(ours, theirs)
        export.main(ExportConfig(run=str(own), out=str(tmp_path / weights), weights=weights))
        card = (tmp_path / weights / "README.md").read_text()
        assert ("each the average that the optimizer (adamw) keeps of the trained weights" in card) == (
            weights == "evaluated"
        )
        assert ("| val/loss |" in card) == (weights == "evaluated")


def test_ema_decay_is_refused_if_the_optimizer_keeps_an_average(tmp_path):
    """Both would move the same tensor, so that a setting of the evaluation would change the training."""
    arguments = ["train.py", "0.9", *map(str, RUN), "--out_dir", str(tmp_path), "--evaluation.ema_decay", "0.9"]
    done = forked.run("-c", [OWN_AVERAGE, *arguments], 0, environment())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "evaluation.ema_decay: 0.9, but the optimizer keeps an average itself; use null" in done.stderr


class ScheduleFree(torch.optim.SGD):
    """An optimizer that averages the weights from its second update on, and takes gradients at the average."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["updates"] = state.get("updates", 0) + 1
            if state["updates"] > 1 and "ema" not in state:
                state["ema"] = weight.clone()
            elif "ema" in state and state["updates"] > 2:
                torch._foreach_lerp_([state["ema"]], [weight], 0.5)


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_ema_decay_is_refused_whenever_the_average_of_the_optimizer_begins(updates):
    """Track an EMA too, after some updates by the optimizer alone, as after a resume."""
    layer = torch.nn.Linear(3, 3)
    optimizer = ScheduleFree(layer.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="evaluation.ema_decay: 0.7, but the optimizer keeps an average itself"):
        for update in range(4):
            if update == updates:
                track_ema(optimizer, AVERAGE)
            layer(torch.ones(3)).sum().backward()
            optimizer.step()
    assert update <= 2


@pytest.mark.slow
def test_run_with_ema_resumes_bitwise(averaged, tmp_path):
    words = [*RUN, "--evaluation.ema_decay", AVERAGE, "--out_dir", tmp_path]
    train(*words, "--stop_after", 5, exit_code=75)
    train(*words)
    assert_same_bits(tensors(tmp_path / "run", 8), tensors(averaged, 8))
    assert metrics(tmp_path / "run") == metrics(averaged)


@pytest.mark.parametrize("words", [["--evaluation.ema_decay", "0.9"], []], ids=["another", "none"])
def test_resume_refuses_changed_ema_decay(words, averaged, tmp_path):
    before = tensors(averaged, 8)
    done = train(*RUN, *words, "--out_dir", averaged.parent, "--steps", 9, exit_code=2)
    assert "evaluation.ema_decay: 0.7 in the run" in done.stderr and "Traceback" not in done.stderr
    branch = averaged / "checkpoints" / "step-00000004"
    done = train(*RUN, *words, "--out_dir", tmp_path, "--branch_from", branch, exit_code=2)
    assert "evaluation.ema_decay: 0.7 in the run" in done.stderr and "Traceback" not in done.stderr
    assert_same_bits(tensors(averaged, 8), before)


def test_ema_weights_restores_weights_after_error(tmp_path):
    """A checkpoint that is saved afterwards holds the trained weights."""
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    track_ema(optimizer, AVERAGE)
    for _ in range(3):
        layer(torch.ones(3)).sum().backward()
        optimizer.step()
    trained = layer.weight.clone()
    with pytest.raises(KeyError), ema_weights(optimizer):
        assert not torch.equal(layer.weight, trained)
        raise KeyError
    assert torch.equal(layer.weight, trained)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_sharded_ema_matches_up_to_rounding(kind, averaged, tmp_path):
    processes = 2 if kind == "fsdp2" else 4
    rest = "--global_batch_size 8 --data.num_samples 24".split()
    words = [*RUN, *rest, "--evaluation.ema_decay", AVERAGE]
    train(*words, "--out_dir", tmp_path / "whole")
    sharded(kind, processes, *words, "--out_dir", tmp_path / "sharded", "--stop_after", 4, exit_code=1)
    sharded(kind, processes, *words, "--out_dir", tmp_path / "sharded")
    whole, parts = (load_run(tmp_path / name / "run").model.state_dict() for name in ("whole", "sharded"))
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-3, atol=1e-5)
    ours, theirs = metrics(tmp_path / "whole" / "run")[-1], metrics(tmp_path / "sharded" / "run")[-1]
    assert ours["val/loss"] == pytest.approx(theirs["val/loss"], rel=1e-5)
