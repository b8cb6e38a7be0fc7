"""Matrix products by oneDNN and RMSNorm equal PyTorch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

import model.kernels

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.fixture
def onednn(monkeypatch):
    """Let `linear` choose oneDNN for any number of rows."""
    monkeypatch.setattr(model.kernels, "use_onednn", True)
    monkeypatch.setattr(model.kernels, "MIN_ROWS", 1)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_linear_onednn_equals_pytorch(bias, threads, compiled, onednn, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # selects how a transposed matrix is copied
    ours = torch.compile(model.kernels.linear) if compiled else model.kernels.linear
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

    results = gradients_of_gradients(model.kernels.linear), gradients_of_gradients(F.linear)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["float64", "autocast", "fast_mkl", "few_rows"])
def test_linear_otherwise_leaves_product_to_pytorch(case, monkeypatch):
    monkeypatch.setattr(model.kernels, "MIN_ROWS", 4 if case == "few_rows" else 1)
    monkeypatch.setattr(model.kernels, "use_onednn", case != "fast_mkl")
    dtype = torch.float64 if case == "float64" else torch.float32
    x, weight = leaf(3, 8, dtype=dtype), leaf(4, 8, dtype=dtype, seed=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), torch.profiler.profile() as trace:
        y = model.kernels.linear(x, weight)
    assert "mkldnn::_linear_pointwise" not in [event.name for event in trace.events()]
    assert y.dtype == (torch.bfloat16 if case == "autocast" else dtype)


@pytest.mark.parametrize("shape", [(2, 5, 24), (2, 5, 3, 8), (7, 8)])
def test_rms_norm_equals_pytorch(shape):
    norm, x = model.kernels.RMSNorm(shape[-1], eps=1e-3), leaf(*shape)
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
    norm, x = model.kernels.RMSNorm(8).to(dtype), leaf(3, 8, dtype=dtype)
    assert "RMSNormFunction" not in norm(x).grad_fn.name()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight), rtol=0, atol=0)
