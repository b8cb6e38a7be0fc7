"""Checks of the model and its optimizer's state for verify.py, in float32 on the CPU.

Each check of a config returns (passed, detail); passed is None where the check does not apply.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils.flop_counter import FlopCounterMode

from model.attention import attention_masks
from model.config import FAMILIES, GPTConfig
from model.generate import KVCache
from model.gpt import GPTModel
from model.hf import MAX_DIFFERENCE, build_perturbed, find_misfits, log_probability_difference, to_transformers
from trainer.pretrained.load import LoadedModel, copy_initial_weights

Result = tuple[bool | None, str]
MASK_POSITIONS = 24
NOT_CAUSAL = "the model does not predict the next token, so it need not be causal"


def with_short_windows(config: GPTConfig, seq_len: int) -> GPTConfig:
    """Return a copy whose window, if set, is at most max(1, seq_len // 3), in all layers but the last."""
    return config.replace(window=config.window and min(config.window, max(1, seq_len // 3)), window_pattern="S")


def build_checked(config: GPTConfig, initial: LoadedModel | None) -> GPTModel:
    """Build a model in eval mode with the initial weights of the run; without `initial`, a perturbed one."""
    if initial is None:
        return build_perturbed(config.replace(vocab_size=64))
    model = GPTModel(config).eval()
    copy_initial_weights(model, initial)
    return model


def compare(ours: Tensor, expected: Tensor, tolerance: float) -> Result:
    """Compare logits by the largest difference of their log-probabilities."""
    difference = log_probability_difference(ours, expected)
    return difference < tolerance, f"largest difference {difference:.1e} nats"  # NaN is not below


@torch.no_grad()
def check_transformers_logits(family: str, config: GPTConfig) -> Result:
    """Compare logits with transformers' for a family's architecture in this config's sizes; one row is padded.

    If the family supports sliding windows, the first layer has one, even if the config has none.
    """
    seq_len = min(24, config.max_position_embeddings)
    absent = ["logit_softcap", *{"gpt2": ["n_kv_heads", "head_dim", "window"], "llama": ["window"]}.get(family, [])]
    config = with_short_windows(config.replace(window=config.window or seq_len), seq_len)
    config = config.replace(vocab_size=64, n_layers=2, dropout=0.0, **FAMILIES[family] | dict.fromkeys(absent))
    if misfits := find_misfits(config)[family]:
        return None, "; ".join(misfits)
    model = build_perturbed(config)
    try:
        reference = to_transformers(model).eval()
    except ValueError as error:  # a fork has added parameters, or does not predict the next token
        return None, str(error)
    input_ids = torch.arange(2 * seq_len).reshape(2, seq_len)
    mask = torch.ones_like(input_ids)
    mask[1, : seq_len // 3] = 0  # padding
    expected = reference(input_ids, attention_mask=mask).logits
    return compare(model(input_ids, mask)[0][mask == 1], expected[mask == 1], 1e-4)


@torch.no_grad()
def check_cached_logits(config: GPTConfig, seq_len: int, initial: LoadedModel | None = None) -> Result:
    """Compare the logits of one forward with those of cached ones: a prompt, several tokens and one token.

    The prompt is once a single token, as for a text without a prompt, and once half of the sequence.
    """
    if not GPTModel.predicts_next_token:
        return None, NOT_CAUSAL
    model = build_checked(config, initial)
    input_ids, cached = torch.randint(model.token_embedding.num_embeddings, (1, seq_len)), []
    for length in (1, seq_len // 2):
        cache = [KVCache(seq_len) for _ in range(config.n_layers)]
        parts = input_ids[:, :length], input_ids[:, length:-1], input_ids[:, max(length, seq_len - 1) :]
        try:
            cached.append(torch.cat([model(part, cache=cache)[0] for part in parts if part.numel()], dim=1))
        except ValueError as error:
            return None, f"the model refuses a cache, so it cannot generate: {error}"
    return compare(torch.cat(cached), model(input_ids)[0], MAX_DIFFERENCE if initial else 1e-3)


@torch.no_grad()
def check_isolated_documents(
    config: GPTConfig, seq_len: int, initial: LoadedModel | None = None, is_needed: bool = True
) -> Result:
    """Compare the logits of two documents in one row with those of each document alone.

    The model may refuse `position_ids`, or the shorter sequences, by a ValueError, unless the batches of the run have
    them (`is_needed`).
    """
    if seq_len < 2:
        return None, "seq_len is 1"
    model = build_checked(config, initial)
    input_ids = torch.randint(model.token_embedding.num_embeddings, (1, seq_len))
    lengths = [seq_len // 2, seq_len - seq_len // 2]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    try:
        alone = torch.cat([model(part)[0] for part in input_ids.split(lengths, dim=1)], dim=1)
        together = model(input_ids, position_ids=position_ids)[0]
    except ValueError as error:
        if is_needed:
            raise
        return None, f"no documents of this run are isolated, and the model refuses them: {error}"
    return compare(together, alone, MAX_DIFFERENCE if initial else 1e-3)


def check_masks(config: GPTConfig, seq_len: int) -> Result:
    """Compare flex attention's and the dense mask with a written-out one, with and without windows and documents.

    A GPU uses the first and a CPU the second, so training on a CPU exercises only one of them.
    """
    if not GPTModel.predicts_next_token:
        return None, NOT_CAUSAL
    length = min(seq_len, MASK_POSITIONS)
    tokens, windows = torch.zeros(2, length, dtype=torch.int64), {None, 1, max(1, length // 3), config.window}
    documents = (torch.arange(length) % max(1, length // 2)).expand(2, -1).clone()
    documents[1] = torch.arange(length)  # a single document
    compared = 0
    for window in windows:
        for position_ids in (None, documents):
            masks = [attention_masks([window], tokens, 0, None, position_ids, flex)[window] for flex in (False, True)]
            expected = written_out_mask(length, window, position_ids)
            for kernel, mask in zip(("the dense mask", "the mask of flex attention"), masks, strict=True):
                if not torch.equal(as_dense(mask, length), expected):
                    kind = "one document" if position_ids is None else "several documents"
                    return False, f"{kernel} is wrong for window {window} and {kind} a row"
                compared += 1
    return True, f"{compared} masks of {length} positions"


def written_out_mask(length: int, window: int | None, position_ids: Tensor | None) -> Tensor:
    """Build the mask [2, 1, T, T] from its definition, position by position."""
    mask = torch.zeros(2, 1, length, length, dtype=torch.bool)
    for row in range(2):
        document_begin = 0
        for query in range(length):
            if position_ids is not None and position_ids[row, query] == 0:
                document_begin = query
            first = document_begin if window is None else max(document_begin, query - window + 1)
            mask[row, 0, query, first : query + 1] = True
    return mask


def as_dense(mask: Tensor | BlockMask | None, length: int) -> Tensor:
    """Return any mask as bool [2, 1, T, T]; None is the causal mask."""
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, 2, 1, length, length, device="cpu")
    dense = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
    return dense.expand(2, 1, length, length)


def check_flops(config: GPTConfig, seq_len: int) -> Result:
    """Compare flops_per_token with the FLOPs that torch counts in a training step, for at most two layers.

    The model has no windows, because torch counts masked products too, and no biases, whose products it does not count.
    """
    length = min(seq_len, 64)
    config = config.replace(n_layers=min(2, config.n_layers), window=None, dropout=0.0, bias=False)
    model = build_perturbed(config).train()
    try:
        counted = count_flops(model, length)
    except Exception:  # a model that works in blocks of tokens may need the sequences of the run
        length = seq_len
        counted = count_flops(model, length)
    # torch does not count elementwise products, so `expected` may exceed `counted` by 6 for each vector that is used. A
    # mixture of experts uses a part of its vectors, hence the bounds.
    expected = model.flops_per_token(length)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    tolerance = 0.02 + 1 / length  # the last position has no target
    figure = f"{expected:,.0f} for {config.n_layers} layer(s), {counted:,.0f} counted"
    return counted * (1 - tolerance) < expected < counted * (1 + tolerance) + 6 * vectors, figure


def count_flops(model: GPTModel, length: int) -> float:
    """Count the FLOPs per token of the matrix products in the forward and backward of a sequence.

    Attention is computed as separate products. Nothing prepared the model for a run, so all products are torch's.
    """
    tokens = torch.randint(model.token_embedding.num_embeddings, (1, length))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens)[1].backward()
    return counter.get_total_flops() / length


def check_constant_init(config: GPTConfig) -> Result:
    """Check that every parameter is initialised, and none is drawn that its module sets to a constant."""
    small = config.replace(n_layers=min(2, config.n_layers))
    memory: Any = torch.utils.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    was_filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = True  # with NaN, which is not constant
    try:
        initialised = GPTModel(small)
        with patch.object(GPTModel, "init_weights", lambda self: None):
            constant = {name: weight for name, weight in GPTModel(small).named_parameters() if is_constant(weight)}
    finally:
        torch.use_deterministic_algorithms(deterministic)
        memory.fill_uninitialized_memory = was_filled
    for name, weight in initialised.named_parameters():
        if weight.isnan().any():
            return False, f"{name} is not initialised"
    for name, weight in constant.items():
        if not is_constant(initialised.get_parameter(name)):
            value = weight.flatten()[0].item()
            return False, f"init_weights draws {name}, which its module initialises to {value:g}"
    return True, f"{len(constant)} parameters of a model with {small.n_layers} layer(s)"


def is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal; False for NaN and for an empty tensor."""
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())
