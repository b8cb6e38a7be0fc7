"""The tensors of a checkpoint as whole ones, in one process, however many processes wrote them and with what shards."""

import json
import math
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from checkpoint.manifest import Manifest
from config.errors import ConfigError


def whole_tensors(directory: Path, manifest: Manifest, prefix: str = "", suffix: str = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names begin and end so, put together however they were sharded.

    Raises:
        ConfigError: a part of one is not there.
    """
    pieces: dict[str, list[tuple[list[int], Tensor]]] = {}  # of each tensor: where a piece begins in it, and the piece
    for file in manifest.files:
        with safe_open(directory / file, "pt") as stored:
            metadata = stored.metadata() or {}
            begins = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
            for name in stored.keys():
                if name.startswith(prefix) and name.endswith(suffix):
                    piece = stored.get_tensor(name)
                    begin = begins.get(name, {}).get("saved_offsets") or [0] * piece.dim()
                    pieces.setdefault(name, []).append((begin, piece))
    tensors = {name: put_together(parts) for name, parts in pieces.items()}
    for name, tensor in tensors.items():
        if tensor is None:
            raise ConfigError(f"{directory} lacks a part of {name}")
    return tensors


def put_together(pieces: list[tuple[list[int], Tensor]]) -> Tensor | None:
    """The tensor of these pieces, each with where it begins; None where one is missing."""
    ends = [[start + size for start, size in zip(begin, piece.shape, strict=True)] for begin, piece in pieces]
    shape = [max(ends_of_axis) for ends_of_axis in zip(*ends, strict=True)]
    if sum(piece.numel() for _, piece in pieces) != math.prod(shape):
        return None
    whole = pieces[0][1].new_empty(shape)
    for (begin, piece), end in zip(pieces, ends, strict=True):
        whole[tuple(map(slice, begin, end))] = piece
    return whole


def read_weights(directory: Path, manifest: Manifest, weights: dict[str, Tensor], averaged: bool = False) -> None:
    """Fill `weights`, whole tensors by the names of the model, from a checkpoint, however it was sharded; `averaged`:
    with their average instead, of those that the optimizer keeps one of.

    Raises:
        ConfigError: the checkpoint has other tensors.
    """
    stored = {key.removeprefix("model."): t for key, t in whole_tensors(directory, manifest, "model.").items()}
    for name, tensor in stored.items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise ConfigError(f"{directory} has a tensor {name} of {list(tensor.shape)}, and the model has not")
        weights[name].copy_(tensor)
    if lacking := sorted(weights.keys() - stored.keys()):
        raise ConfigError(f"{directory} lacks {len(lacking)} tensors of the model, such as {lacking[0]}")
    # After all others: of weights that blocks share, the average stands under one of their names alone.
    ends = "optimizer.state.", ".ema"
    for key, tensor in whole_tensors(directory, manifest, *ends).items() if averaged else ():
        weights[key.removeprefix(ends[0]).removesuffix(ends[1])].copy_(tensor)
