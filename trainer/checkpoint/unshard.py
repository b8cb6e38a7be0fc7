"""Read the tensors of a checkpoint in one process, however many processes wrote them and however they were sharded."""

import json
import math
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from runtime.config.errors import ConfigError
from trainer.checkpoint.manifest import Manifest


def whole_tensors(directory: Path, manifest: Manifest, prefix: str = "", suffix: str = "") -> dict[str, Tensor]:
    """Return the unsharded tensors of a checkpoint whose names have this prefix and suffix, on the CPU.

    Raise ConfigError if a shard is missing.
    """
    shards: dict[str, list[tuple[list[int], Tensor]]] = {}  # by tensor: offsets and values of its shards
    for file in manifest.files:
        with safe_open(directory / file, "pt") as stored:
            metadata = stored.metadata() or {}
            sharding = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
            for name in stored.keys():  # noqa: SIM118 - safe_open is not a dict
                if name.startswith(prefix) and name.endswith(suffix):
                    shard = stored.get_tensor(name)
                    offsets = sharding.get(name, {}).get("saved_offsets") or [0] * shard.dim()
                    shards.setdefault(name, []).append((offsets, shard))
    tensors: dict[str, Tensor] = {}
    for name, parts in shards.items():
        ends = [[start + size for start, size in zip(offsets, shard.shape, strict=True)] for offsets, shard in parts]
        shape = [max(ends_of_axis) for ends_of_axis in zip(*ends, strict=True)]
        if sum(shard.numel() for _, shard in parts) != math.prod(shape):
            raise ConfigError(f"{directory} lacks a part of {name}")
        tensors[name] = parts[0][1].new_empty(shape)
        for (offsets, shard), end in zip(parts, ends, strict=True):
            tensors[name][tuple(map(slice, offsets, end))] = shard
    return tensors


def read_averages(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return the averages of weights that the optimizer kept as `ema` in its state, by the names of the weights."""
    prefix, suffix = "optimizer.state.", ".ema"
    averages = whole_tensors(directory, manifest, prefix, suffix)
    return {key.removeprefix(prefix).removesuffix(suffix): tensor for key, tensor in averages.items()}


def read_weights(directory: Path, manifest: Manifest, weights: dict[str, Tensor], averaged: bool = False) -> None:
    """Copy the weights of a checkpoint into `weights`, an unsharded state dict; with `averaged`, any averages of them.

    Raise ConfigError if the checkpoint has other tensors.
    """
    stored = {key.removeprefix("model."): t for key, t in whole_tensors(directory, manifest, "model.").items()}
    for name, tensor in stored.items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise ConfigError(f"{directory} has a tensor {name} of {list(tensor.shape)}, which the model lacks")
        weights[name].copy_(tensor)
    if lacking := sorted(weights.keys() - stored.keys()):
        raise ConfigError(f"{directory} lacks {len(lacking)} tensors of the model, such as {lacking[0]}")
    # After all others: the average of weights that blocks share is stored under only one of their names.
    if averaged:
        for name, tensor in read_averages(directory, manifest).items():
            weights[name].copy_(tensor)
