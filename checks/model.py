"""What verify.py asks of a model alone, in float32 on the CPU; each answers as a check of Verification does. And what
of its optimizer is lost."""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from checkpoint import storage
from model.config import GPTConfig
from model.generate import KVCache
from model.gpt import GPTModel
from model.hf import FAMILIES, to_transformers


def with_windows_within(config: GPTConfig, length: int) -> GPTConfig:
    """The same with windows, where it has any, that hide something of so few positions, however few layers are left."""
    return replace(config, window=config.window and min(config.window, max(1, length // 3)), window_pattern="S")


@torch.no_grad()
def moved_from_its_start(config: GPTConfig) -> GPTModel:
    """A model in which also what begins at zero does something, and no attention is uniform; in eval mode."""
    torch.manual_seed(0)
    model = GPTModel(config).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@torch.no_grad()
def logits_equal(family: str, config: GPTConfig) -> tuple[bool | None, str]:
    """This config's sizes in the architecture of a family of transformers', on two rows, of which one is padded."""
    lacking = ("logit_softcap", *(("n_kv_heads", "head_dim", "window") if family == "gpt2" else ()))
    own = FAMILIES[family] | dict.fromkeys(lacking)
    length = min(24, config.max_position_embeddings)
    config = with_windows_within(config, length)
    try:
        model = moved_from_its_start(replace(config, vocab_size=64, n_layers=2, dropout=0.0, **own))
        theirs = to_transformers(model).eval()
    except ValueError as error:
        why = str(error).splitlines()
        return None, next((line for line in why if line.startswith(f"{family}: ")), why[0])
    input_ids = torch.arange(2 * length).reshape(2, length)
    mask = torch.ones_like(input_ids)
    mask[1, : length // 3] = 0  # padding
    ours, expected = model(input_ids, mask)[0][mask == 1], theirs(input_ids, attention_mask=mask).logits[mask == 1]
    difference = ((ours - expected).abs().max() / ours.abs().max()).item()
    return difference < 1e-4, f"largest difference {difference:.1e}"


@torch.no_grad()
def writes_as_trained(config: GPTConfig, seq_len: int) -> tuple[bool | None, str]:
    """A sequence as it is written, by a prompt, several tokens and one, each seeing what is cached, and as a whole."""
    model = moved_from_its_start(replace(config, vocab_size=64))
    input_ids = torch.randint(64, (1, seq_len))
    cache = [KVCache(seq_len) for _ in range(config.n_layers)]
    parts = input_ids[:, : seq_len // 2], input_ids[:, seq_len // 2 : -1], input_ids[:, -1:]
    in_parts = torch.cat([model(part, cache=cache)[0] for part in parts if part.numel()], dim=1)
    whole = model(input_ids)[0]
    difference = ((whole - in_parts).abs().max() / whole.abs().max()).item()
    return difference < 1e-3, f"largest difference {difference:.1e}"


@torch.no_grad()
def flops_are_counted(config: GPTConfig, seq_len: int) -> tuple[bool | None, str]:
    """flops_per_token of at most two layers, against the products of a forward, which torch counts; a backward has
    twice as many. Without windows, for it counts what is masked, and in float64, where all products are torch's."""
    length = min(seq_len, 64)
    model = moved_from_its_start(replace(config, n_layers=min(2, config.n_layers), window=None)).double()
    tokens = torch.randint(config.vocab_size, (1, length))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens)
    counted = 3 * counter.get_total_flops() / length
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    expected = model.flops_per_token(length) - 6 * vectors  # whose products are too few to be counted
    tolerance = 0.02 + 1 / length  # the last position has no target
    return abs(counted / expected - 1) < tolerance, f"{expected:,.0f} for 2 layers, and {counted:,.0f} are counted"


def constants_stay(config: GPTConfig) -> tuple[bool | None, str]:
    """Where a module makes a parameter constant, as a gain of 1 or a gate of 0, init_weights draws no others for it."""
    small = replace(config, n_layers=min(2, config.n_layers))
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # what torch.empty leaves open is then nan, and no constant
    try:
        with patch.object(GPTModel, "init_weights", lambda self: None):
            made = {name: weight for name, weight in GPTModel(small).named_parameters() if is_constant(weight)}
    finally:
        torch.use_deterministic_algorithms(deterministic)
    begun = GPTModel(small)
    drawn = [name for name in made if not is_constant(begun.get_parameter(name))]
    if drawn:
        return False, f"init_weights draws {drawn[0]}, which its module made {made[drawn[0]].flatten()[0].item():g}"
    return True, f"{len(made)} of 2 layers and around them"


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def values_not_saved(model: GPTModel, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of an optimizer that has done nothing yet: what it keeps that is no tensor, in its state and its groups."""
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    # Does an update, at a learning rate of 0, if there is no state yet.
    state = storage.get_state_dict(model, optimizer, options=storage.FLATTENED)[1]
    lost = [name for name, value in state.items() if name.startswith("state.") and not torch.is_tensor(value)]
    for group, before in groups:
        lost += [f"group.{key}" for key in group if key != "params" and group[key] != before.get(key)]
    return lost
