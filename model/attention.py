"""The attention operation: the choice of the kernel, and the masks.

The suffix of a name is the shape of the tensor, with the letters of model/gpt.py. T counts queries and S counts keys:
with a KV cache, S is the number of cached positions plus T.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask | None
"""None: causal attention. Otherwise bool [T, S] or [B, 1, T, S], True where a query may attend to a key, or a BlockMask
for flex attention."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask as a function, the mask_mod of flex attention: (row, head, query, key) -> bool, elementwise on indices."""

HAS_TRITON = importlib.util.find_spec("triton") is not None  # absent from CPU builds of torch, and on some ARM machines
# Uncompiled flex attention materialises all scores. It is compiled on first use, because importing the compiler takes
# seconds.
compiled_flex_attention = functools.cache(lambda: torch.compile(flex_attention))


def dot_product_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Mask,
    dropout: float,
    sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, [B, H, T, D], by flex attention if `mask` is a BlockMask, else by `sdpa`."""
    grouped = q_BHTD.shape[1] != k_BKSD.shape[1]  # several query heads share a key and value head
    if isinstance(mask, BlockMask):
        # There is no dropout here (see uses_flex_attention). Where torch.compile compiles the transformer block, it
        # compiles flex attention too.
        attend = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return attend(q_BHTD, k_BKSD, v_BKSD, block_mask=mask, enable_gqa=grouped)

    # Without a mask attention is causal. A single query, as in generation, comes after all keys and attends to all.
    causal = mask is None and q_BHTD.shape[-2] > 1
    return sdpa(q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped)


# Masks


def document_ids(position_ids: Tensor) -> Tensor | None:
    """Return the document number of each token, int64 [B, T], ascending in each row.

    On a CPU, return None if each row is one document, or a part of one.

    Args:
        position_ids: int64 [B, T], 0 at the first token of each document. A row may start inside a document.
    """
    document_BT = (position_ids == 0).cumsum(dim=-1)

    # Without a mask the kernel is faster. On a GPU the host would have to wait for the result of this comparison, so
    # there the mask is always built.
    if position_ids.device.type == "cpu" and torch.equal(document_BT[:, 0], document_BT[:, -1]):
        return None
    return document_BT


def uses_flex_attention(tokens: Tensor, dropout: float, head_dim: int) -> bool:
    """Return whether to use flex attention where attention needs a mask.

    Flex attention skips the blocks of scores that are fully masked; scaled_dot_product_attention with a dense mask
    computes all scores. But flex attention supports no dropout and no narrow heads, and on a GPU it needs Triton.
    """
    return tokens.is_cuda and dropout == 0 and head_dim >= 16 and HAS_TRITON


def make_mask_mod(window: int, document_BT: Tensor | None) -> MaskMod:
    """Return a mask_mod for causal sliding-window attention.

    A query attends to itself and to the `window` - 1 positions before it, but only within its document if the
    documents are given.
    """

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (query - key < window)
        if document_BT is not None:
            allowed = allowed & (document_BT[row, query] == document_BT[row, key])
        return allowed

    return mask_mod


def dense_mask(mask_mod: MaskMod, begin: int, end: int, num_rows: int | None, device: torch.device) -> Tensor:
    """Evaluate `mask_mod` for queries at the positions [begin, end) and keys at the positions [0, end).

    Returns:
        bool [T, S] with T = end - begin and S = end, or [B, 1, T, S] if B = `num_rows` is given.
    """
    query_T1, key_S = torch.arange(begin, end, device=device)[:, None], torch.arange(end, device=device)
    row = torch.zeros((), dtype=torch.int64, device=device)
    if num_rows is not None:
        row = torch.arange(num_rows, device=device)[:, None, None, None]  # [B, 1, 1, 1]
    head = torch.zeros_like(row)  # all heads have the same mask
    return mask_mod(row, head, query_T1, key_S)


def attention_masks(
    windows: list[int | None],
    input_ids: Tensor,
    num_cached: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    use_flex: bool,
) -> dict[int | None, Mask]:
    """Return {window: mask} for the distinct windows of the layers.

    Args:
        windows: attention window of each layer in tokens; None: all positions before.
        input_ids: int64 [B, T].
        num_cached: number of positions before `input_ids` whose keys and values are cached.
        attention_mask: [B, T], 0 at padding.
        position_ids: int64 [B, T], restarting from 0 at each document.
        use_flex: whether to return masks for flex attention; ignored if positions are cached or padded.
    """
    begin, end, device = num_cached, num_cached + input_ids.shape[1], input_ids.device

    # Padding and documents; None if there is nothing to mask.
    is_token_BT = None
    if attention_mask is not None and not attention_mask.all():  # the host waits for the device here
        is_token_BT = attention_mask.bool()
    document_BT = None if position_ids is None else document_ids(position_ids)
    num_rows = None if document_BT is None else len(document_BT)

    # is_causal=True aligns the first query with the first key, which is wrong for several queries after cached keys.
    needs_offset_causal_mask = begin > 0 and end - begin > 1

    masks: dict[int | None, Mask] = {}
    for window in set(windows):
        width = end if window is None else min(window, end)
        mask_mod = make_mask_mod(width, document_BT)
        if width == end and document_BT is None and is_token_BT is None and not needs_offset_causal_mask:
            masks[window] = None
        elif use_flex and begin == 0 and is_token_BT is None:
            masks[window] = create_block_mask(mask_mod, num_rows, None, end, end, device=device)
        else:
            mask = dense_mask(mask_mod, begin, end, num_rows, device)
            # A query at padding may have no key to attend to; since torch 2.5 the kernel returns zeros for it.
            masks[window] = mask if is_token_BT is None else mask & is_token_BT[:, None, None, :]
    return masks
