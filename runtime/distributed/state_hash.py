"""A 64-bit digest of all weights and the optimizer state of a run; it changes with any bit and any permutation.

A tensor is read as rows of integers. Each row has a multilinear hash (Lemire and Kaser 2014, arXiv:1202.4961): the dot
product with odd pseudo-random factors. The hash of a row is mixed with the tensor's name and the row's index, and the
results are added modulo 2**64. The sum does not depend on the order, so one process, many processes and any sharding by
rows give the same digest. It detects accidents, not forgery; for that a manifest has the SHA-256 of each file.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.seeds import mix_bits
from runtime.config.errors import RunError
from runtime.distributed.collectives import all_gather
from runtime.distributed.sharding import is_sharded

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, like all factors here, so that multiplication modulo 2**64 is invertible
# Values hashed at once: enough to keep a GPU busy without a temporary copy of a large tensor. 0: each tensor as a whole
# and by itself, since on a CPU numpy's einsum needs no temporary.
VALUES_AT_ONCE = defaultdict(lambda: 2**24, cpu=0)


class ReplicasDiffer(RunError):
    """The processes hold different weights or optimizer states: a hardware fault, or code that depends on the rank."""


@dataclass(frozen=True)
class StateDigest:
    """The digest of a run's state, one value per tensor; str() combines the values into 16 hexadecimal digits."""

    names: list[str]
    values: Tensor
    """int64 [tensors], in the order of `names`."""

    def __str__(self) -> str:
        return f"{self.values.sum().item() % 2**64:016x}"

    def check_replicas(self, step: int) -> None:
        """Raise ReplicasDiffer on all processes if digests differ; the error names the first such tensor.

        All processes call this together; it sends 8 bytes per tensor.
        """
        table = all_gather(self.values)  # [processes, tensors]
        differs = (table != table[0]).any(dim=0).tolist()
        if True in differs:
            first = differs.index(True)
            holders: dict[int, list[int]] = {}
            for rank, digest in enumerate(table[:, first].tolist()):
                holders.setdefault(digest, []).append(rank)
            groups = " from ".join(f"process(es) {ranks}" for ranks in sorted(holders.values(), key=len))
            raise ReplicasDiffer(
                f"step {step}: the state differs between processes, in {sum(differs)} of {len(self.names)} tensors, "
                f"first in {self.names[first]}: {groups}; no checkpoint contains this state"
            )


def state_digest(network: nn.Module, optimizer: torch.optim.Optimizer) -> StateDigest:
    """Compute the digest of weights and optimizer state, named as in a checkpoint. All processes call this together.

    Raise RunError if the optimizer keeps a DTensor that is not sharded by rows.
    """
    tensors = {f"model.{name}": value for name, value in network.state_dict(keep_vars=True).items()}
    for name, parameter in network.named_parameters():  # a shared weight has one entry
        for key, moment in optimizer.state.get(parameter, {}).items():
            if is_sharded(moment) and len(_sharded_dimensions(moment)) != 1:
                raise RunError(
                    f"optimizer.state.{name}.{key}, which {type(optimizer).__name__} keeps, is a DTensor of "
                    f"{moment.placements}; keep it sharded by rows, as its parameter is, or as a plain tensor that is "
                    "the same on all processes"
                )
            if torch.is_tensor(moment):
                tensors[f"optimizer.state.{name}.{key}"] = moment
    return digest_tensors(tensors)


@torch.no_grad()
def digest_tensors(tensors: dict[str, Tensor]) -> StateDigest:
    """Compute the digest of each named tensor, possibly sharded by rows. All processes call this together."""
    device = next(iter(tensors.values())).device
    parts = [_local_rows(tensor) for tensor in tensors.values()]
    hashes = [rows_hash.to(device) for rows_hash in _hash_tensors([rows for rows, _ in parts])]
    name_hashes = [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True) for name in tensors]
    lengths = torch.tensor([len(rows) for rows in hashes], device=device)
    ends = lengths.cumsum(0)
    first_indices = torch.tensor([first for _, first in parts], device=device) - (ends - lengths)
    spread = functools.partial(torch.repeat_interleave, repeats=lengths, output_size=sum(map(len, hashes)))
    all_hashes = torch.cat(hashes)
    indices = torch.arange(len(all_hashes), device=device) + spread(first_indices)
    mixed = mix_bits(all_hashes + spread(torch.tensor(name_hashes, device=device)) + indices * GOLDEN)
    sums = torch.nn.functional.pad(mixed.cumsum(0), (1, 0))
    values = sums[ends] - sums[ends - lengths]
    if group := next((_sharding_group(tensor) for tensor in tensors.values() if is_sharded(tensor)), None):
        whole = torch.tensor([not is_sharded(tensor) for tensor in tensors.values()], device=device)
        if dist.get_rank(group) > 0:  # the sum below must count unsharded tensors once
            values[whole] = 0
        dist.all_reduce(values, group=group)
    return StateDigest(list(tensors), values)


def _sharding_group(tensor) -> dist.ProcessGroup:
    """Return the process group over which a DTensor is sharded by rows."""
    [dimension] = _sharded_dimensions(tensor)
    return tensor.device_mesh.get_group(dimension)


def _sharded_dimensions(tensor) -> list[int]:
    """Return the mesh dimensions along which a DTensor is sharded by rows."""
    return [index for index, placement in enumerate(tensor.placements) if placement.is_shard(0)]


def _local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this process's rows of a tensor as integers [rows, columns], and the index of the first of them."""
    first = 0
    if is_sharded(tensor):
        group = _sharding_group(tensor)
        rows_per_process = -(-len(tensor) // dist.get_world_size(group))
        tensor, first = tensor.to_local(), min(len(tensor), dist.get_rank(group) * rows_per_process)
    rows = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    return rows.reshape(len(rows) if rows.dim() else 1, -1 if rows.numel() else 1), first


def _hash_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Return the hashes of the rows of each tensor; on a GPU, with one kernel for many small tensors of one width."""
    batches: dict[tuple, list[list[int]]] = {}
    sizes: dict[tuple, int] = {}  # values in the newest batch of a kind
    for index, rows in enumerate(tensors):
        kind = rows.device, rows.dtype, rows.shape[1]
        sizes[kind] = sizes.get(kind, 0) + rows.numel()
        if kind in batches and sizes[kind] <= VALUES_AT_ONCE[rows.device.type]:
            batches[kind][-1].append(index)
        else:
            batches.setdefault(kind, []).append([index])
            sizes[kind] = rows.numel()
    hashes: dict[int, Tensor] = {}
    for batch in chain.from_iterable(batches.values()):
        rows = torch.cat([tensors[index] for index in batch]) if len(batch) > 1 else tensors[batch[0]]
        hashes |= zip(batch, _hash_rows(rows).split([len(tensors[index]) for index in batch]), strict=True)
    return [hashes[index] for index in range(len(tensors))]


def _hash_rows(rows: Tensor) -> Tensor:
    """Return the multilinear hash of each row, int64 [rows]."""
    factors = _factors(rows.shape[1], rows.device)
    if rows.shape[1] == 1:
        return rows[:, 0] * factors
    if not (at_once := VALUES_AT_ONCE[rows.device.type]):
        return torch.from_numpy(np.einsum("rc,c->r", rows.numpy(), factors.numpy()))
    return torch.cat([(part * factors).sum(1) for part in rows.split(max(1, at_once // rows.shape[1]))])


@functools.cache
def _factors(count: int, device: torch.device) -> Tensor:
    return mix_bits(torch.arange(1, count + 1, device=device) * GOLDEN) | 1
