"""Attention of queries, keys and values: the masks, and the choice of the kernel.

Suffixes name the shape, as in model/gpt.py; S is the number of keys, which with a cache is larger than T.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask | None
"""bool [T, S] or [B, 1, T, S], True where a query may attend to a key; or flex attention's BlockMask; None: causal."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A mask in flex attention's form: a function of indices (row, head, query, key) that returns bool, elementwise."""

HAS_TRITON = importlib.util.find_spec("triton") is not None  # absent on some ARM machines
# Uncompiled, flex attention materialises all scores. Compiled on first use: importing the compiler takes seconds.
compiled_flex_attention = functools.cache(lambda: torch.compile(flex_attention))


def attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Mask, dropout: float) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, [B, H, T, D], by the fastest kernel that supports the arguments."""
    grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
    if isinstance(mask, BlockMask):
        attend = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return attend(q_BHTD, k_BKSD, v_BKSD, block_mask=mask, enable_gqa=grouped)
    causal = mask is None and q_BHTD.shape[-2] > 1  # a single query, after cached keys, attends to all of them
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )


# Masks


def document_ids(position_ids: Tensor) -> Tensor | None:
    """Return the document of each token, int64 [B, T], from 1 in each row; None if each row is one document.

    The number of documents is tested on a CPU only, because the test would synchronise with a GPU.

    Args:
        position_ids: int64 [B, T], 0 at the first token of each document.
    """
    document_BT = (position_ids == 0).cumsum(dim=-1)
    return None if position_ids.device.type == "cpu" and document_BT.max() == 1 else document_BT


def uses_flex_attention(tokens: Tensor, dropout: float, head_size: int) -> bool:
    """Return whether flex attention, which skips masked blocks, supports the arguments on this machine."""
    return tokens.is_cuda and dropout == 0 and head_size >= 16 and HAS_TRITON


def make_mask_mod(window: int, document_BT: Tensor | None) -> MaskMod:
    """Return a mask_mod that lets a query attend to itself and the `window` - 1 positions before, in its document."""

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (query >= key) & (query - key < window)
        if document_BT is not None:
            allowed = allowed & (document_BT[row, query] == document_BT[row, key])
        return allowed

    return mask_mod


def dense_mask(mask_mod: MaskMod, begin: int, end: int, num_rows: int | None, device: torch.device) -> Tensor:
    """Evaluate `mask_mod` for queries from `begin` to `end` and all keys before `end`.

    Returns:
        bool [T, S], or [B, 1, T, S] if `num_rows` is given.
    """
    query_T1, key_S = torch.arange(begin, end, device=device)[:, None], torch.arange(end, device=device)
    row = torch.zeros((), dtype=torch.int64, device=device)
    if num_rows is not None:
        row = torch.arange(num_rows, device=device)[:, None, None, None]
    return mask_mod(row, torch.zeros_like(row), query_T1, key_S)


def attention_masks(
    windows: list[int | None],
    input_ids: Tensor,
    num_cached: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    flex: bool,
) -> dict[int | None, Mask]:
    """Return the mask for each distinct window of `windows`; see GPTModel.forward for the other arguments.

    Args:
        windows: attention window of each layer in tokens; None: all tokens before.
        input_ids: int64 [B, T].
        num_cached: number of positions before `input_ids` whose keys and values are cached.
        attention_mask: 0 where there is padding, [B, T].
        position_ids: int64 [B, T], restarting from 0 at each document.
        flex: whether to return masks for flex attention where nothing is cached or padded.
    """
    begin, end, device = num_cached, num_cached + input_ids.shape[1], input_ids.device
    is_token_BT = None if attention_mask is None or attention_mask.all() else attention_mask.bool()
    document_BT = None if position_ids is None else document_ids(position_ids)
    num_rows = None if document_BT is None else len(document_BT)
    # is_causal=True aligns the mask with the first key, which is wrong for several queries after cached keys.
    needs_offset_causal_mask = 0 < begin < end - 1
    masks: dict[int | None, Mask] = {}
    for window in set(windows):
        width = end if window is None else min(window, end)
        mask_mod = make_mask_mod(width, document_BT)
        if width == end and document_BT is None and is_token_BT is None and not needs_offset_causal_mask:
            masks[window] = None
        elif flex and begin == 0 and is_token_BT is None:
            masks[window] = create_block_mask(mask_mod, num_rows, None, end, end, device=device)
        else:
            mask = dense_mask(mask_mod, begin, end, num_rows, device)
            # For a query without any key (left padding) PyTorch's kernel returns zeros, since torch 2.5.
            masks[window] = mask if is_token_BT is None else mask & is_token_BT[:, None, None, :]
    return masks
