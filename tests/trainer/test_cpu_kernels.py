"""Matrix products by oneDNN, RMSNorm and eager attention equal PyTorch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

import model.gpt
from model.config import GPTConfig
from model.gpt import GPTModel
from trainer import cpu_kernels
from trainer.cpu_kernels import EagerAttention, use_cpu_kernels

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.fixture
def onednn(monkeypatch):
    """Let `linear` choose oneDNN for any number of rows."""
    monkeypatch.setattr(cpu_kernels, "MIN_ROWS", 1)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_linear_onednn_equals_pytorch(bias, threads, compiled, onednn, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # selects how a transposed matrix is copied
    ours = torch.compile(cpu_kernels.linear) if compiled else cpu_kernels.linear
    inputs = [leaf(2, 5, 24), leaf(40, 24, seed=1), *([leaf(40, seed=2)] if bias else [])]
    copies = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with torch.profiler.profile() as trace:
        result = ours(*inputs)
    calls = [event.name for event in trace.events()]
    assert ("mini_gpt::linear" if compiled else "mkldnn::_linear_pointwise") in calls
    expected = F.linear(*copies)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(3))
    result.backward(gradient)
    expected.backward(gradient.double())
    for a, b in zip(inputs, copies, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_linear_onednn_second_derivative_equals_pytorch(onednn):
    """A gradient penalty differentiates the gradient."""

    def gradients_of_gradients(function):
        inputs = [leaf(7, 24), leaf(40, 24, seed=1), leaf(40, seed=2)]
        gradients = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)

    results = gradients_of_gradients(cpu_kernels.linear), gradients_of_gradients(F.linear)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["float64", "autocast", "few_rows"])
def test_linear_otherwise_leaves_product_to_pytorch(case, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "MIN_ROWS", 4 if case == "few_rows" else 1)
    dtype = torch.float64 if case == "float64" else torch.float32
    x, weight = leaf(3, 8, dtype=dtype), leaf(4, 8, dtype=dtype, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), torch.profiler.profile() as trace:
        y = cpu_kernels.linear(x, weight)
    assert "mkldnn::_linear_pointwise" not in [event.name for event in trace.events()]
    assert y.dtype == (torch.bfloat16 if case == "autocast" else dtype)


@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 5, 3, 8), (7, 8)])
def test_rms_norm_equals_pytorch(shape):
    norm, x = cpu_kernels.RMSNorm(shape[-1], eps=1e-3), leaf(*shape)
    with torch.no_grad():
        norm.weight.copy_(leaf(shape[-1], seed=1))
    inputs = [x, norm.weight]
    copies = [tensor.detach().double().requires_grad_() for tensor in inputs]
    result, expected = norm(x), F.rms_norm(copies[0], shape[-1:], copies[1], 1e-3)
    assert "RMSNormFunction" in result.grad_fn.name()
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    result.backward(gradient)
    expected.backward(gradient.double())
    for a, b in zip(inputs, copies, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rms_norm_leaves_other_dtypes_to_pytorch(dtype):
    norm, x = cpu_kernels.RMSNorm(8).to(dtype), leaf(3, 8, dtype=dtype)
    assert "RMSNormFunction" not in norm(x).grad_fn.name()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight), rtol=0, atol=0)


@pytest.mark.parametrize("value_width", [8, 5, 11], ids=["equal", "narrower", "wider"])
def test_eager_attention_equals_fused_kernel(value_width):
    """Also for a fork whose values have another width than its keys."""
    widths = 8, 8, value_width
    ours = [leaf(2, 3, 17, width, dtype=torch.float64, seed=seed) for seed, width in enumerate(widths)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    gradient = torch.randn(2, 3, 17, value_width, generator=torch.Generator().manual_seed(3)).double()
    result, expected = EagerAttention.apply(*ours), F.scaled_dot_product_attention(*theirs, is_causal=True)
    result.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)  # its softmax is in float32
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_rms_norm_refuses_second_derivative():
    x, weight = leaf(2, 5, 8, seed=0), leaf(8, seed=1)
    y = cpu_kernels.RMSNormFunction.apply(x, weight, 1e-6)
    (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_eager_attention_refuses_second_derivative():
    q, k, v = (leaf(2, 3, 17, 8, seed=seed) for seed in range(3))
    (gradient,) = torch.autograd.grad(EagerAttention.apply(q, k, v).sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


@pytest.mark.parametrize(
    ("length", "dtype", "settings", "eager"),
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
def test_eager_attention_is_for_short_sequences(length, dtype, settings, eager, monkeypatch):
    calls, compute = [], EagerAttention.apply
    monkeypatch.setattr(EagerAttention, "apply", lambda *inputs: calls.append(1) or compute(*inputs))
    shape = dict(vocab_size=50, max_position_embeddings=512, n_layers=1, n_heads=4, d_model=32, d_ff=64, dropout=0.0)
    network, tokens = GPTModel(GPTConfig(**shape | settings)), torch.arange(length)[None] % 50
    results = []
    for choose in (lambda network: None, use_cpu_kernels):
        choose(network)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            torch.manual_seed(0)
            results.append(network(tokens)[0])
    assert bool(calls) == eager
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5, "is_causal": True}, {}, {"attn_mask": "bias"}, {"attn_mask": "rows"}, {"is_causal": True}],
)
def test_attention_options_are_those_of_pytorch(options):
    q, k, v = (leaf(2, 3, 17, 8, seed=seed) for seed in range(3))
    masks = {"bias": leaf(17, 17).detach(), "rows": torch.ones(2, 1, 17, 17, dtype=torch.bool).tril(3)}
    if "attn_mask" in options:
        options = options | {"attn_mask": masks[options["attn_mask"]]}
    result = cpu_kernels.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, **options), rtol=1e-5, atol=1e-6)


def test_changed_attention_is_used(monkeypatch):
    """By a fork that edits `dot_product_attention`, also where the CPU has a faster kernel for it."""
    own = model.gpt.dot_product_attention
    monkeypatch.setattr(model.gpt, "dot_product_attention", lambda q, *rest: own(3 * q, *rest))
    torch.manual_seed(0)
    network, tokens = GPTModel(GPTConfig(vocab_size=50, d_model=32, d_ff=64, dropout=0.0)), torch.arange(16)[None]
    torch.nn.init.normal_(network.blocks[0].attention.q_proj.weight, std=1)
    changed = network(tokens)[0]
    use_cpu_kernels(network)
    torch.testing.assert_close(network(tokens)[0], changed, rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    assert (network(tokens)[0] - changed).abs().max() > 0.01


def test_own_sdpa_of_a_fork_is_kept():
    network = GPTModel(GPTConfig(vocab_size=50, d_model=32, d_ff=64, dropout=0.0))
    network.blocks[0].attention.sdpa = lambda q, *_, **__: q
    use_cpu_kernels(network)
    kernels = [block.attention.sdpa for block in network.blocks]
    assert kernels[0] is not cpu_kernels.scaled_dot_product_attention
    assert all(kernel is cpu_kernels.scaled_dot_product_attention for kernel in kernels[1:])


@needs_onednn
def test_network_with_cpu_kernels_equals_network_without(monkeypatch):
    """With all parts in place, and the same names of the weights."""
    family = dict(norm="rmsnorm", qk_norm=True, position="rope", mlp="swiglu", bias=False)
    network = GPTModel(GPTConfig(vocab_size=50, d_model=32, d_ff=64, dropout=0.0, **family))
    tokens, names = torch.arange(2 * 100).view(2, 100) % 50, list(network.state_dict())
    gradients, called = [], []
    for slow in (None, False, True):
        if slow is not None:
            monkeypatch.setattr(cpu_kernels, "mkl_is_slow", lambda slow=slow: slow)
            use_cpu_kernels(network)
        network.zero_grad()
        with torch.profiler.profile() as trace:
            network(tokens, labels=tokens)[1].backward()
        gradients.append([weight.grad.clone() for weight in network.parameters()])
        calls = [event.name for event in trace.events()]
        called.append((calls.count("mkldnn::_linear_pointwise"), "RMSNormFunction" in calls))
    assert called == [(0, False), (0, True), (3 * (2 * 7 + 1), True)]
    assert list(network.state_dict()) == names
    for expected, *others in zip(*gradients, strict=True):
        for gradient in others:
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_onednn_is_for_zen_5_and_exact_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_kernels, "HAS_ONEDNN", True)
    monkeypatch.setattr(cpu_kernels, "CPU_INFO", tmp_path / "cpuinfo")
    for vendor, family, slow in (("AuthenticAMD", 26, True), ("AuthenticAMD", 25, False), ("GenuineIntel", 26, False)):
        cpu_kernels.CPU_INFO.write_text(f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t: 2\n")
        monkeypatch.delenv("MKL_CBWR", raising=False)
        assert cpu_kernels.mkl_is_slow() is slow
        monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
        assert cpu_kernels.mkl_is_slow(), "the same bits on every processor"
