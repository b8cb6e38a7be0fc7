"""Muon on the matrices inside the blocks and AdamW on the rest, as one optimizer, are torch's two, each on its own."""

import copy
import shutil

import pytest
import torch

from config import OptimizerConfig
from model.config import GPTConfig
from model.gpt import GPTModel
from tests.conftest import TINY_STORIES, assert_same_bits, metrics, tensors, train
from training.optimizer import build_optimizer, set_lr

CONFIG = OptimizerConfig(name="muon", lr=0.01, weight_decay=0.2, betas=(0.8, 0.9))


def new_model():
    torch.manual_seed(0)
    return GPTModel(GPTConfig(vocab_size=20, n_layers=2, d_model=16, n_heads=2, d_ff=32, dropout=0.0))


def backward(model, step):
    input_ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    model(input_ids, labels=input_ids)[1].backward()


def test_muon_and_adamw_together_are_each_alone():
    together, apart = new_model(), new_model()
    optimizer = build_optimizer(together, CONFIG)
    named = dict(apart.named_parameters())
    hidden = {name: p for name, p in named.items() if ".attention." in name or ".mlp." in name and "norm" not in name}
    hidden = {name: p for name, p in hidden.items() if p.dim() == 2}
    assert len(hidden) == 2 * 6
    rest = [p for name, p in named.items() if name not in hidden]
    decay = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0},
    ]
    muon = torch.optim.Muon(hidden.values(), lr=1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(decay, lr=1, weight_decay=0.2, betas=(0.8, 0.9), fused=True)
    for step in range(6):
        for model in (together, apart):
            backward(model, step)
        for each in (optimizer, muon, adamw):
            set_lr(each, 0.01 / (step + 1))
            each.step()
        if step == 2:  # another optimizer takes the moments over
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(together, CONFIG)
            optimizer.load_state_dict(state)
    for name, parameter in together.named_parameters():
        assert torch.equal(parameter, named[name]), name


@pytest.mark.slow
def test_a_run_with_muon_resumes_bitwise_and_learns(runs):
    arguments = [*TINY_STORIES, "--optimizer.name", "muon", "--out_dir", runs, "--name", "run"]
    train(*arguments, processes=2)
    finished, rows = tensors(runs / "run", 8), metrics(runs / "run")
    assert "optimizer.state.blocks.0.attention.q_proj.weight.momentum_buffer" in finished
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3
    for step in (4, 5, 6, 7, 8):
        shutil.rmtree(runs / "run" / "checkpoints" / f"step-{step:08d}")
    train(*arguments, processes=2)
    assert_same_bits(tensors(runs / "run", 8), finished)
    assert metrics(runs / "run") == rows
