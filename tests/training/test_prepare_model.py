"""What makes a step fast or small changes nothing that it computes: products, attention, loss, recomputing."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import model.gpt
import model.kernels
from config.schema import TrainConfig
from model.config import GPTConfig
from model.gpt import GPTModel, PlainAttention
from model.loss import loss_of_chunk, next_token_loss
from tests.conftest import metrics, train
from training.prepare_model import prepare_network


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


# The product of the linear layers


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_onednn_gives_the_products_and_gradients_of_pytorch(bias, threads, compiled, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # which copy by one or by all
    monkeypatch.setattr(model.kernels, "use_onednn", True)
    monkeypatch.setattr(model.kernels, "MIN_ROWS", 1)
    ours = torch.compile(model.kernels.linear) if compiled else model.kernels.linear
    inputs = [leaf(2, 5, 24), leaf(40, 24, seed=1), *([leaf(40, seed=2)] if bias else [])]
    copies = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with torch.profiler.profile() as trace:
        mine = ours(*inputs)
    calls = [event.name for event in trace.events()]
    assert ("mini_gpt::linear" if compiled else "mkldnn::_linear_pointwise") in calls
    theirs = F.linear(*copies)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3))
    mine.backward(gradient)
    theirs.backward(gradient.double())
    for a, b in zip(inputs, copies, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_a_gradient_of_gradients_is_pytorchs_or_refused(monkeypatch):
    """As for a penalty on gradients, which must not be silently wrong."""
    monkeypatch.setattr(model.kernels, "use_onednn", True)
    monkeypatch.setattr(model.kernels, "MIN_ROWS", 1)

    def of_gradients(function):
        inputs = [leaf(7, 24), leaf(40, 24, seed=1), leaf(40, seed=2)]
        gradients = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)

    for ours, theirs in zip(of_gradients(model.kernels.linear), of_gradients(F.linear), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    q, k, v = (leaf(2, 3, 17, 8, seed=seed) for seed in range(3))
    (of_attention,) = torch.autograd.grad(PlainAttention.apply(q, k, v).sin().sum(), q, create_graph=True)
    labels = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(2))
    loss, _ = next_token_loss(hidden := leaf(2, 9, 16), leaf(37, 16, seed=1), labels, chunked=True)
    (of_loss,) = torch.autograd.grad(loss.sin(), hidden, create_graph=True)
    for gradient in (of_attention, of_loss):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("case", ["float64", "autocast", "fast_mkl", "few_rows"])
def test_other_products_stay_pytorchs(case, monkeypatch):
    monkeypatch.setattr(model.kernels, "MIN_ROWS", 4 if case == "few_rows" else 1)
    monkeypatch.setattr(model.kernels, "use_onednn", case != "fast_mkl")
    dtype = torch.float64 if case == "float64" else torch.float32
    x, weight = leaf(3, 8, dtype=dtype), leaf(4, 8, dtype=dtype, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), torch.profiler.profile() as trace:
        y = model.kernels.linear(x, weight)
    assert "mkldnn::_linear_pointwise" not in [event.name for event in trace.events()]
    assert y.dtype == (torch.bfloat16 if case == "autocast" else dtype)


# Attention on a CPU


def test_plain_attention_equals_the_fused_kernel():
    ours = [leaf(2, 3, 17, 8, dtype=torch.float64, seed=seed) for seed in range(3)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    gradient = torch.randn(2, 3, 17, 8, generator=torch.Generator().manual_seed(3)).double()
    mine, reference = PlainAttention.apply(*ours), F.scaled_dot_product_attention(*theirs, is_causal=True)
    mine.backward(gradient)
    reference.backward(gradient)
    torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)  # its softmax is in float32
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "dtype", "settings", "plain"),
    [
        (16, torch.bfloat16, {}, True),
        (128, torch.float32, {}, True),
        (129, torch.float32, {}, False),
        (1, torch.float32, {}, False),
        (512, torch.bfloat16, {}, False),
        (16, torch.bfloat16, {"n_kv_heads": 2}, False),
        (16, torch.bfloat16, {"dropout": 0.1}, False),
        (16, torch.bfloat16, {"n_layers": 2, "window": 3}, True),
    ],
)
def test_the_plain_attention_is_for_short_sequences(length, dtype, settings, plain, monkeypatch):
    calls = []
    monkeypatch.setattr(PlainAttention, "apply", lambda q, k, v, mask: calls.append(q.dtype) or q)
    shape = dict(vocab_size=50, max_position_embeddings=512, n_layers=1, n_heads=4, d_model=32, d_ff=64, dropout=0.0)
    network = GPTModel(GPTConfig(**shape | settings))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        network(torch.zeros(1, length, dtype=torch.long))
        assert bool(calls) == plain
        calls.clear()
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        network(torch.zeros(1, length, dtype=torch.long))
        assert bool(calls) == (plain and dtype == torch.bfloat16), "an exact run in float32 keeps its bits"


# The loss in chunks


CAPS = pytest.mark.parametrize("softcap", [None, 2.0])


@CAPS
@pytest.mark.parametrize("num_items, z_loss", [(None, 0.0), (7.0, 0.0), (None, 0.3)])
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_the_loss_in_chunks_is_the_loss(num_items, z_loss, chunk_rows, softcap, monkeypatch):
    monkeypatch.setattr("model.loss.CHUNK_BYTES", {"cpu": 4 * 37 * chunk_rows})
    monkeypatch.setattr("model.loss.MIN_CHUNK_ROWS", 1)
    labels = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(2))
    labels[0, 3:6] = labels[2, :] = -100
    results = []
    for chunked in (False, True):
        hidden, weight = leaf(3, 9, 16, dtype=torch.float64), leaf(37, 16, dtype=torch.float64, seed=1)
        loss, sums = next_token_loss(hidden, weight, labels, num_items, chunked, z_loss, softcap)
        (3 * loss).backward()
        results.append((loss, hidden.grad, weight.grad, *(number for pair in sums.values() for number in pair)))
        assert not any(pair[0].requires_grad for pair in sums.values())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert results[0][2].norm() > 1e-3
    is_target = labels[:, 1:] != -100
    logits = (leaf(3, 9, 16, dtype=torch.float64) @ leaf(37, 16, dtype=torch.float64, seed=1).T)[:, :-1][is_target]
    logits = logits if softcap is None else softcap * (1 - 2 / ((2 * logits / softcap).exp() + 1))
    log_z = logits.exp().sum(-1).log()
    cross_entropy = log_z - logits[range(len(logits)), labels[:, 1:][is_target]]
    assert sums["loss"] == (pytest.approx(cross_entropy.sum().item()), len(logits))
    if z_loss:
        assert sums["z_loss"] == (pytest.approx(log_z.square().sum().item()), len(logits))
        torch.testing.assert_close(loss, cross_entropy.mean() + z_loss * log_z.square().mean())


@pytest.mark.parametrize("exact, rows", [(False, 200), (False, 1000), (True, 200)])
def test_the_loss_in_small_chunks_adds_in_place_unless_its_bits_are_those_of_every_processor(exact, rows, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    monkeypatch.setattr("model.loss.CHUNK_BYTES", {"cpu": 4 * 37 * rows})
    labels = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.profiler.profile() as trace:
        next_token_loss(leaf(2, 9, 16), leaf(37, 16, seed=1), labels, chunked=True)
    assert ("aten::addmm_" in [event.name for event in trace.events()]) == (rows < 512 and not exact)


def test_the_loss_in_chunks_under_autocast():
    labels = torch.randint(301, (2, 40), generator=torch.Generator().manual_seed(2))
    exact, _ = next_token_loss(leaf(2, 40, 64).double(), leaf(301, 64, seed=1).double(), labels)
    errors = []
    for chunked in (False, True):
        hidden, weight = leaf(2, 40, 64), leaf(301, 64, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = next_token_loss(hidden, weight, labels, chunked=chunked)
        loss.backward()
        assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
        errors.append((loss.double() / exact - 1).abs())
    assert errors[1] < 2e-3 and errors[1] < 1.5 * errors[0] + 1e-4


def test_the_logits_never_exist_at_once():
    """The largest tensor of a step with a large vocabulary is the weight, not the logits."""
    shape = dict(max_position_embeddings=256, n_layers=1, n_heads=2, d_model=16, d_ff=32, dropout=0.0)
    network = GPTModel(GPTConfig(vocab_size=50_257, **shape))
    tokens = torch.randint(50_257, (8, 256), generator=torch.Generator().manual_seed(0))

    def largest() -> int:
        with torch.profiler.profile(profile_memory=True) as trace:
            network(tokens, labels=tokens)[1].backward()
        return max(event.self_cpu_memory_usage for event in trace.events())

    logits = 4 * 8 * 255 * 50_257
    assert largest() < logits / 8
    network.next_token_loss = partial(next_token_loss, chunked=False)
    assert largest() >= logits


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("z_loss, softcap", [(0.0, None), (0.3, None), (0.0, 2.0)])
def test_what_the_loss_in_chunks_does_compiles_to_one_graph(backend, z_loss, softcap):
    compiled = torch.compile(loss_of_chunk, backend=backend, fullgraph=True)
    for rows in (7, 5):  # the last chunk is a shorter one
        logits = leaf(rows, 37).detach()
        targets = torch.randint(37, (rows,), generator=torch.Generator().manual_seed(1))
        targets[2:4] = -100
        results = [of_chunk(logits, targets, z_loss, softcap, True) for of_chunk in (compiled, loss_of_chunk)]
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
    torch.compiler.reset()


@pytest.mark.parametrize("asked, chunked", [(None, True), (True, True), (False, False)])
def test_compile_is_for_the_loss_too_which_then_goes_in_chunks_unless_told_not_to(asked, chunked):
    network = GPTModel(GPTConfig(vocab_size=37, n_layers=1, n_heads=2, d_model=16, d_ff=32))
    prepare_network(network, TrainConfig(compile=True, chunked_loss=asked), torch.device("cpu"))
    settings = network.next_token_loss.keywords
    assert settings["of_chunk"]._torchdynamo_orig_callable is loss_of_chunk and settings["chunked"] is chunked


def test_without_gradients_the_loss_in_chunks_makes_none():
    labels = torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(2))
    hidden, weight = leaf(3, 9, 16).detach(), torch.nn.Parameter(leaf(37, 16, seed=1))
    asked = []

    def of_chunk(*arguments, needs_gradient, **settings):
        asked.append(needs_gradient)
        return loss_of_chunk(*arguments, needs_gradient=needs_gradient, **settings)

    with torch.no_grad():
        loss, _ = next_token_loss(hidden, weight, labels, chunked=True, of_chunk=of_chunk)
        torch.testing.assert_close(loss, next_token_loss(hidden, weight, labels, chunked=False)[0])
    next_token_loss(hidden, weight.detach(), labels, chunked=True, of_chunk=of_chunk)
    next_token_loss(hidden, weight, labels, chunked=True, of_chunk=of_chunk)
    assert asked == [False, False, True] and not loss.requires_grad


# In runs

TINY = ["--config", "tests/tiny_stories.yaml", "--steps", "6", "--evaluation.every", "0", "--tracking.log_every", "1"]


def test_recomputing_changes_no_bit(tmp_path):
    """Dropout included: the second forward draws what the first one drew."""
    for name, recomputed in (("kept", "false"), ("recomputed", "true")):
        settings = ["--name", name, "--model.dropout", "0.2", "--activation_checkpointing", recomputed]
        done = train(*TINY, *settings, "--out_dir", tmp_path)
        assert ("activation checkpointing" in done.stdout) == (recomputed == "true")
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "recomputed")


def test_a_machine_without_a_compiler_trains_uncompiled(tmp_path):
    done = train(*TINY, "--name", "run", "--compile", "true", "--out_dir", tmp_path, CXX="no-such-compiler")
    assert "precision: fp32, not compiled: no compiler: no-such-compiler\n" in done.stdout
    assert done.stdout.endswith("Training finished.\n")


def test_a_profile_is_a_trace_of_these_steps(tmp_path):
    train(*TINY, "--name", "run", "--profile", "[3, 4]", "--out_dir", tmp_path, processes=2)
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / f"trace-steps-3-4-rank-{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        assert sum(name == "Optimizer.step#AdamW.step" for name in names) == 2
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
        assert any("all_reduce" in name or "allreduce" in name for name in names)


def test_a_profile_backwards_is_refused(tmp_path):
    done = train(*TINY, "--name", "run", "--profile", "[4, 3]", "--out_dir", tmp_path, exit_code=2)
    assert "profile: [4, 3] must be the first and the last step" in done.stderr
