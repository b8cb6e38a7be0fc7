"""The chunked loss equals the whole loss, whatever `loss_of_logits` computes."""

import pytest
import torch
import torch.nn.functional as F

import model.loss
from model.config import GPTConfig
from model.gpt import GPTModel
from model.loss import NextTokenLoss, Targets, differentiate_loss, objective_of_logits, rows_per_chunk, soft_cap
from tests.trainer.test_cpu_kernels import leaf

CAPS = pytest.mark.parametrize("softcap", [None, 2.0])


def smoothed_with_z_loss(logits_NV, targets_N, config):
    """The loss of a fork: label smoothing and a z-loss, with the cross-entropy and the z-loss reported."""
    smoothed = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum", label_smoothing=0.1)
    cross_entropy = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    z_loss = logits_NV.logsumexp(dim=-1).masked_fill(targets_N == -100, 0).square().sum()
    return smoothed + 0.3 * z_loss, {"loss": cross_entropy, "z_loss": z_loss}


def weighted_tokens(logits_NV, targets_N, config):
    """The loss of a fork: the upper half of the vocabulary counts three times. Equal to cross-entropy on the others."""
    losses = F.cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="none")
    return (losses * torch.where(targets_N >= 18, 3.0, 1.0)).sum(), {}


def weighted_classes(logits_NV, targets_N, config):
    """The loss of a fork: a weight for each token of the vocabulary."""
    weights_V = torch.linspace(0.5, 2, 37, dtype=logits_NV.dtype)
    return F.cross_entropy(logits_NV, targets_N, weight=weights_V, ignore_index=-100, reduction="sum"), {}


class Square(torch.autograd.Function):
    """A custom function without `setup_context`, which torch.func does not support."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def custom_function(logits_NV, targets_N, config):
    """The loss of a fork: squared errors of the logits of the targets, by a custom function."""
    at_target_N = logits_NV.gather(1, targets_N.clamp_min(0)[:, None])[:, 0]
    return Square.apply(at_target_N - 1).masked_fill(targets_N == -100, 0).sum(), {}


FORKS = {
    "cross_entropy": model.loss.loss_of_logits,
    "z_loss": smoothed_with_z_loss,
    "weighted_tokens": weighted_tokens,
    "weighted_classes": weighted_classes,
    "custom_function": custom_function,
}


def make_labels(rows=3, length=9, vocab_size=37):
    labels = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(2))
    labels[0, 3:6] = labels[-1, :] = -100
    return labels


@CAPS
@pytest.mark.parametrize("num_items", [None, 7.0])
@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunked_loss_equals_whole_loss(num_items, fork, chunk_rows, softcap, monkeypatch):
    monkeypatch.setattr(model.loss, "CHUNK_BYTES", {"cpu": 4 * 37 * chunk_rows})
    monkeypatch.setattr(model.loss, "MIN_CHUNK_ROWS", 1)
    check_chunked_loss(fork, GPTConfig(logit_softcap=softcap), num_items, monkeypatch)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fork", [name for name in FORKS if name != "custom_function"])
def test_compiled_chunked_loss_equals_whole_loss(fork, backend, monkeypatch):
    compiled = torch.compile(differentiate_loss, backend=backend, fullgraph=True)
    monkeypatch.setattr(NextTokenLoss, "compile", lambda self: setattr(self, "differentiate", compiled))
    check_chunked_loss(fork, GPTConfig(), None, monkeypatch, compile=True)
    torch.compiler.reset()


def check_chunked_loss(fork, config, num_items, monkeypatch, compile=False, **teacher):
    """Compare the values and gradients of the whole and the chunked loss, where `loss_of_logits` is a fork's."""
    monkeypatch.setattr(model.loss, "loss_of_logits", FORKS[fork])
    labels, results = make_labels(), []
    for chunked in (False, True):
        hidden, weight = leaf(3, 9, 16, dtype=torch.float64), leaf(37, 16, dtype=torch.float64, seed=1)
        loss_function = NextTokenLoss(config, chunked)
        if chunked and compile:
            loss_function.compile()
        loss, metrics = loss_function(hidden, weight, labels, num_items, **teacher)
        (3 * loss).backward()
        results.append((loss, hidden.grad, weight.grad, *(number for pair in metrics.values() for number in pair)))
        names = ["loss"] * (fork == "z_loss" or len(teacher) > 0)
        names += ["z_loss"] * (fork == "z_loss") + ["teacher_kl"] * (len(teacher) > 0)
        assert list(metrics) == names
        assert not any(value.requires_grad for value, _ in metrics.values())
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)
    assert results[0][2].norm() > 1e-3


@pytest.mark.parametrize("fork", ["cross_entropy", "z_loss"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunked_distillation_equals_whole_loss(fork, chunk_rows, monkeypatch):
    monkeypatch.setattr(model.loss, "CHUNK_BYTES", {"cpu": 4 * 37 * chunk_rows})
    monkeypatch.setattr(model.loss, "MIN_CHUNK_ROWS", 1)
    teacher = {"teacher_NV": leaf(27, 37, dtype=torch.float64, seed=3).detach(), "teacher_weight": 0.7}
    check_chunked_loss(fork, GPTConfig(logit_softcap=2.0), None, monkeypatch, **teacher, temperature=2.0)


def test_divergence_from_own_capped_logits_is_zero():
    logits, targets, config = leaf(27, 37), make_labels().flatten(), GPTConfig(logit_softcap=2.0)
    for temperature, teacher in ((1.0, soft_cap(logits, 2.0)), (3.0, soft_cap(logits, 2.0)), (1.0, logits)):
        divergence = objective_of_logits(logits, Targets(targets, teacher, 0.5, temperature), config)[1]["teacher_kl"]
        assert (abs(divergence.item()) < 1e-5) == (teacher is not logits)


def test_compiled_distillation_equals_uncompiled():
    compiled = torch.compile(differentiate_loss, backend="aot_eager", fullgraph=True)
    logits, targets = leaf(27, 37).detach(), Targets(make_labels().flatten(), leaf(27, 37, seed=3).detach(), 0.7, 2.0)
    arguments = logits, targets, GPTConfig(), True
    for ours, theirs in zip(compiled(*arguments), differentiate_loss(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.compiler.reset()


@CAPS
def test_loss_equals_cross_entropy_written_out(softcap):
    labels = make_labels()
    hidden, weight = leaf(3, 9, 16, dtype=torch.float64), leaf(37, 16, dtype=torch.float64, seed=1)
    loss, _ = NextTokenLoss(GPTConfig(logit_softcap=softcap))(hidden, weight, labels)
    is_target = labels[:, 1:] != -100
    logits = (hidden @ weight.T)[:, :-1][is_target]
    logits = logits if softcap is None else softcap * (1 - 2 / ((2 * logits / softcap).exp() + 1))
    cross_entropy = logits.exp().sum(-1).log() - logits[range(len(logits)), labels[:, 1:][is_target]]
    torch.testing.assert_close(loss, cross_entropy.mean())


@pytest.mark.parametrize(("exact", "rows"), [(False, 200), (False, 1000), (True, 200)])
def test_small_chunks_accumulate_in_place_unless_exact(exact, rows, monkeypatch):
    """An exact run must have the same bits on every processor."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    with torch.profiler.profile() as trace:
        NextTokenLoss(GPTConfig(), chunked=True)(leaf(1, rows, 16), leaf(37, 16, seed=1), make_labels(1, rows))
    assert ("aten::addmm_" in [event.name for event in trace.events()]) == (rows < 512 and not exact)


def test_chunks_are_equal_and_whole_tiles():
    assert rows_per_chunk(16 * 1024, 50_257, "cuda") == 4096
    assert rows_per_chunk(1000, 50_257, "cpu") == 143, "seven chunks of at most 166 rows"
    for num_rows in (1, 127, 128, 5_337, 100_000):
        rows = rows_per_chunk(num_rows, 50_257, "cuda")
        assert rows % 128 == 0
        assert 128 <= rows <= max(128, 2**30 / (4 * 50_257))


def test_chunked_loss_under_autocast_is_as_accurate():
    labels = torch.randint(301, (2, 40), generator=torch.Generator().manual_seed(2))
    exact, _ = NextTokenLoss(GPTConfig())(leaf(2, 40, 64).double(), leaf(301, 64, seed=1).double(), labels)
    errors = []
    for chunked in (False, True):
        hidden, weight = leaf(2, 40, 64), leaf(301, 64, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = NextTokenLoss(GPTConfig(), chunked)(hidden, weight, labels)
        loss.backward()
        assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
        errors.append((loss.double() / exact - 1).abs())
    assert errors[1] < 2e-3
    assert errors[1] < 1.5 * errors[0] + 1e-4


def test_chunked_loss_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(model.loss, "CHUNK_BYTES", {"cpu": 2**21})
    shape = dict(max_position_embeddings=256, n_layers=1, n_heads=2, d_model=16, d_ff=32, dropout=0.0)
    network = GPTModel(GPTConfig(vocab_size=5000, **shape))
    tokens = torch.randint(5000, (8, 256), generator=torch.Generator().manual_seed(0))

    def largest_allocation() -> int:
        with torch.profiler.profile(profile_memory=True) as trace:
            network(tokens, labels=tokens)[1].backward()
        return max(event.self_cpu_memory_usage for event in trace.events())

    logits_bytes = 4 * 8 * 255 * 5000
    assert largest_allocation() < logits_bytes / 8
    network.next_token_loss.chunked = False
    assert largest_allocation() >= logits_bytes


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@CAPS
def test_chunk_compiles_to_one_graph(backend, softcap):
    compiled = torch.compile(differentiate_loss, backend=backend, fullgraph=True)
    for rows in (7, 5):  # the last chunk is shorter
        logits = leaf(rows, 37).detach()
        targets = torch.randint(37, (rows,), generator=torch.Generator().manual_seed(1))
        targets[2:4] = -100
        arguments = logits, Targets(targets), GPTConfig(logit_softcap=softcap), True
        (loss, _, gradient), (expected_loss, _, expected) = (f(*arguments) for f in (compiled, differentiate_loss))
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(gradient, expected)
    torch.compiler.reset()


def test_chunked_loss_computes_gradients_only_if_needed(monkeypatch):
    labels, config = make_labels(), GPTConfig()
    hidden, weight = leaf(3, 9, 16).detach(), torch.nn.Parameter(leaf(37, 16, seed=1))
    loss_function, calls = NextTokenLoss(config, chunked=True), []

    def differentiate(*arguments):
        calls.append(arguments[3])
        return differentiate_loss(*arguments)

    loss_function.differentiate = differentiate
    with torch.no_grad():
        loss, _ = loss_function(hidden, weight, labels)
        torch.testing.assert_close(loss, NextTokenLoss(config, chunked=False)(hidden, weight, labels)[0])
    loss_function(hidden, weight.detach(), labels)
    loss_function(hidden, weight, labels)
    assert calls == [False, False, True]
    assert not loss.requires_grad


def test_chunked_loss_refuses_second_derivative():
    loss, _ = NextTokenLoss(GPTConfig(), chunked=True)(hidden := leaf(3, 9, 16), leaf(37, 16, seed=1), make_labels())
    (gradient,) = torch.autograd.grad(loss.sin(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_auxiliary_metrics_leave_the_model(monkeypatch):
    """A fork that edits `loss_of_logits` needs no change of the network to have its metrics logged."""
    monkeypatch.setattr(model.loss, "loss_of_logits", smoothed_with_z_loss)
    network, tokens = GPTModel(GPTConfig(vocab_size=37, dropout=0.0)), torch.arange(20).view(2, 10)
    logits, loss, metrics = network(tokens, labels=tokens, logits_to_keep=0)
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(metrics["loss"], (cross_entropy.detach(), torch.tensor(18)))
    assert list(metrics) == ["loss", "z_loss"]
    assert loss > cross_entropy / 18 + 0.1
    assert network(tokens).metrics == {}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("num_items", [None, 1.0, 32])
@pytest.mark.parametrize("fork", ["cross_entropy", "z_loss"])
def test_auxiliary_term_counts_once_for_each_target(fork, num_items, chunked, monkeypatch):
    monkeypatch.setattr(model.loss, "loss_of_logits", FORKS[fork])
    labels, weight, hidden = make_labels(), leaf(37, 16, seed=1), leaf(3, 9, 16)
    loss_function, balance = NextTokenLoss(GPTConfig(), chunked), torch.tensor(3.0, requires_grad=True)
    without, plain_metrics = loss_function(hidden, weight, labels, num_items)
    loss, metrics = loss_function(hidden, weight, labels, num_items, {"balance": 0.01 * balance})
    num_targets = (labels[:, 1:] != -100).sum()
    divisor = num_targets if num_items is None else num_items
    torch.testing.assert_close(loss, without + 0.03 * num_targets / divisor)
    loss.backward()
    torch.testing.assert_close(balance.grad, 0.01 * num_targets / divisor)
    torch.testing.assert_close(metrics["balance"], (0.03 * num_targets, num_targets))
    cross_entropy = plain_metrics.get("loss", (without.detach() * divisor, num_targets))
    torch.testing.assert_close(metrics["loss"], cross_entropy)
    assert not any(value.requires_grad for value, _ in metrics.values())


def test_soft_cap_bounds_and_keeps_small_values():
    logits = torch.tensor([-1e6, -1e-3, 0.0, 1e-3, 1e6])
    torch.testing.assert_close(soft_cap(logits, 5.0), torch.tensor([-5.0, -1e-3, 0.0, 1e-3, 5.0]))
    assert soft_cap(logits, None) is logits
