"""Attention kernels agree with each other and with attention written out; masks let through what they should."""

import math

import pytest
import torch
import torch._dynamo.testing

import model.attention
import model.gpt
from model.attention import (
    attention_masks,
    dense_mask,
    document_ids,
    make_mask_mod,
    uses_flex_attention,
)
from model.config import GPTConfig
from model.gpt import GPTModel
from tests.model.test_model import WINDOWS, make_lively_model, make_model, make_tokens

DOCUMENTS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7, 0]])  # position_ids


def attention_written_out(q, k, v, mask):
    """Softmax over the keys where the mask is True."""
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).exp() * mask
    return scores / scores.sum(dim=-1, keepdim=True) @ v


def test_window_equals_attention_written_out():
    layer = make_model(**WINDOWS).blocks[0].attention
    x = torch.randn(2, 9, 32)
    q, k, v = (proj(x).view(2, 9, 4, 8).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    allowed = torch.tensor([[later - 4 < earlier <= later for earlier in range(9)] for later in range(9)])
    expected = layer.out_proj(attention_written_out(q, k, v, allowed).transpose(1, 2).flatten(-2))
    mask = dense_mask(make_mask_mod(4, None), 0, 9, None, x.device)
    result = layer(x, None, mask)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(y.square().sum(), [*layer.parameters()]) for y in (result, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("window", [3, 10])
@pytest.mark.parametrize("position_ids", [None, DOCUMENTS], ids=["one document", "documents"])
def test_dense_mask_equals_loop_over_positions(begin, window, position_ids):
    document_BT = None if position_ids is None else document_ids(position_ids)
    num_rows = None if position_ids is None else 2
    mask = dense_mask(make_mask_mod(window, document_BT), begin, 10, num_rows, torch.device("cpu"))
    assert mask.shape == ((10 - begin, 10) if num_rows is None else (2, 1, 10 - begin, 10))
    for row in range(2):
        starts = [0] if position_ids is None else (position_ids[row] == 0).nonzero().flatten().tolist()
        for query in range(begin, 10):
            first = max(max(start for start in starts if start <= query), query - window + 1)
            allowed = [first <= key <= query for key in range(10)]
            assert mask.expand(2, 1, -1, -1)[row, 0, query - begin].tolist() == allowed


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("position_ids", [None, DOCUMENTS], ids=["one document", "documents"])
def test_flex_mask_equals_dense_mask(window, position_ids):
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    dense, flex = (attention_masks([window], tokens, 0, None, position_ids, flex)[window] for flex in (False, True))
    if window is None and position_ids is None:
        assert dense is flex is None
        return
    mask = flex.mask_mod(*torch.meshgrid(*map(torch.arange, (2, 1, 10, 10)), indexing="ij"))
    assert torch.equal(mask, dense.expand(2, 1, -1, -1))


def test_windows_and_documents_combine():
    network, tokens, lengths = make_lively_model(**WINDOWS), make_tokens(), [6, 1, 4]
    position_ids = torch.cat([torch.arange(length) for length in lengths]).expand_as(tokens)
    separate = torch.cat([network(part)[0] for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(network(tokens, position_ids=position_ids)[0], separate, rtol=1e-6, atol=1e-6)


def test_attention_stays_within_documents_if_row_starts_inside_document():
    network, tokens = make_lively_model(), make_tokens()
    position_ids = torch.cat([torch.arange(3, 8), torch.arange(6)]).expand_as(tokens)
    parts = zip(tokens.split([5, 6], dim=1), position_ids.split([5, 6], dim=1), strict=True)
    separate = torch.cat([network(part, position_ids=positions)[0] for part, positions in parts], dim=1)
    torch.testing.assert_close(network(tokens, position_ids=position_ids)[0], separate, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [[5, 6], [11]], ids=str)
def test_rows_of_a_batch_may_have_different_documents(lengths):
    """One row that is a single document does not make the mask of the other rows superfluous."""
    network, tokens = make_lively_model(), make_tokens()
    rows = [torch.arange(11), torch.arange(11), torch.cat([torch.arange(length) for length in lengths])]
    separate = [network(tokens[[i]], position_ids=row[None])[0] for i, row in enumerate(rows)]
    together = network(tokens, position_ids=torch.stack(rows))[0]
    torch.testing.assert_close(together, torch.cat(separate), rtol=1e-6, atol=1e-6)
    assert (document_ids(torch.stack(rows)) is None) == (len(lengths) == 1)


def test_window_of_all_positions_changes_nothing():
    network, tokens = make_lively_model(), make_tokens()
    full = network(tokens)[0]
    for window, same in ((11, True), (10, False)):
        network.windows = [window, None]
        assert torch.equal(network(tokens)[0], full) == same


class CudaTensor(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize(("dropout", "head_dim", "flex"), [(0.0, 16, True), (0.1, 16, False), (0.0, 8, False)])
def test_flex_attention_is_for_gpus_without_dropout(dropout, head_dim, flex, monkeypatch):
    monkeypatch.setattr(model.attention, "HAS_TRITON", True)
    assert uses_flex_attention(make_tokens().as_subclass(CudaTensor), dropout, head_dim) == flex
    assert not uses_flex_attention(make_tokens(), dropout, head_dim)


@torch.no_grad()
@pytest.mark.filterwarnings(
    "error",
    "ignore:.*torch.autograd.function.Function.*instantiated",  # by torch.compile
    "ignore:Guards may run slower",  # by torch, on Python 3.13.0 alone
)
def test_compiled_blocks_do_not_recompile_for_new_masks(monkeypatch):
    """The mask is a new function in every step; recompiling for each would end in running uncompiled."""
    settings = dict(vocab_size=50, n_heads=4, n_kv_heads=2, d_model=64, d_ff=64, dropout=0.0, window=30)
    network, positions = GPTModel(GPTConfig(**settings)), torch.arange(128).repeat(2, 1)
    assert network.windows == [30, None]
    expected = []
    for first in (40, 64, 100):
        positions[:, first:] = torch.arange(128 - first)
        expected.append((positions.clone(), network(positions % 50, position_ids=positions)[0]))
    compiled = torch._dynamo.testing.CompileCounter()
    for block in network.blocks:
        block.compile(backend=compiled, fullgraph=True)
    monkeypatch.setattr(model.gpt, "uses_flex_attention", lambda *_: True)
    for positions, logits in expected:
        torch.testing.assert_close(network(positions % 50, position_ids=positions)[0], logits, rtol=1e-4, atol=1e-5)
    assert compiled.frame_count <= len(network.blocks)
