"""64 bits for all weights and moments of a run: any changed bit, and any two values that change places, change them.

A tensor is taken as rows of integers, and each row as a multilinear hash (Lemire and Kaser 2014, arXiv:1202.4961): the
sum of its integers times as many odd random numbers. The hash of a row is mixed with the name of the tensor and the
number of the row, and all are added up modulo 2**64. Sums do not ask who adds: on one process, on many, and sharded by
rows the result is the same. It finds accidents. Against somebody who looks for another state with the same digest
there is the SHA-256 of every file of a checkpoint.
"""

import functools
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from config.errors import RunError
from distributed.sharding import is_sharded
from model.seeds import mix_bits

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, as all factors here: multiplying by it modulo 2**64 loses no bit
# How many values are multiplied at once: enough to keep a GPU busy, without a copy of a large tensor. On a CPU numpy
# multiplies and adds without a copy (0).
VALUES_AT_ONCE = {"cpu": 0, "cuda": 2**24}


class ReplicasDiffer(RunError):
    """The state of the processes has drifted apart: a fault of the hardware, or of code that treats them unlike."""


@dataclass(frozen=True)
class StateDigests:
    """A digest of every tensor of a run's state; str() is that of all of them, in 16 hexadecimal digits."""

    names: list[str]
    values: Tensor
    """int64 [tensors], in the order of the names."""

    def __str__(self) -> str:
        return f"{self.values.sum().item() % 2**64:016x}"

    def require(self, saved: str | None, checkpoint: Path) -> None:
        """Compare with what stood in the manifest of the checkpoint that was just read; None in those of old versions.

        Raises:
            RunError: it is not the same.
        """
        if saved is not None and saved != str(self):
            problem = f"the state that was read has the digest {self}, and not {saved} as when saved"
            raise RunError(f"{checkpoint}: {problem}")

    def check_replicas(self, accelerator: Accelerator, step: int) -> None:
        """Compare all processes, which exchange 8 bytes a tensor; called by all together.

        Raises:
            ReplicasDiffer: on all processes, with the first tensor that differs and the processes that hold each value.
        """
        table = accelerator.gather(self.values[None])  # [processes, tensors]
        differs = (table != table[0]).any(dim=0).tolist()
        if True in differs:
            first = differs.index(True)
            holders: dict[int, list[int]] = {}
            for rank, digest in enumerate(table[:, first].tolist()):
                holders.setdefault(digest, []).append(rank)
            groups = " from ".join(f"process(es) {ranks}" for ranks in sorted(holders.values(), key=len))
            raise ReplicasDiffer(
                f"step {step}: the state differs between processes, in {sum(differs)} of {len(self.names)} tensors, "
                f"first in {self.names[first]}: {groups}; nothing was saved since the last checkpoint"
            )


def state_digests(network: nn.Module, optimizer: torch.optim.Optimizer) -> StateDigests:
    """Of all that a checkpoint holds, under the names that it has there; called by all processes together.

    Raises:
        RunError: the optimizer keeps a DTensor that is not sharded by rows.
    """
    tensors = {f"model.{name}": value for name, value in network.state_dict(keep_vars=True).items()}
    for name, parameter in network.named_parameters():  # weights that blocks share have their moments once
        for key, moment in optimizer.state.get(parameter, {}).items():
            if is_sharded(moment) and len(_sharded_dimensions(moment)) != 1:
                raise RunError(
                    f"optimizer.state.{name}.{key}, which {type(optimizer).__name__} keeps, is a DTensor of "
                    f"{moment.placements}; keep it sharded by rows, as its parameter is, or as a plain tensor that is "
                    "the same on all processes"
                )
            if torch.is_tensor(moment):
                tensors[f"optimizer.state.{name}.{key}"] = moment
    return digests(tensors)


@torch.no_grad()
def digests(tensors: dict[str, Tensor]) -> StateDigests:
    """Of named tensors, some of which may be sharded by rows; called by all processes together."""
    device = next(iter(tensors.values())).device
    parts = [_local_rows(tensor) for tensor in tensors.values()]
    hashes = [_hash_rows(rows).to(device) for rows, _ in parts]
    seeds = [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True) for name in tensors]
    lengths = torch.tensor([len(rows) for rows in hashes], device=device)
    ends = lengths.cumsum(0)
    first_numbers = torch.tensor([first for _, first in parts], device=device) - (ends - lengths)
    spread = functools.partial(torch.repeat_interleave, repeats=lengths, output_size=sum(map(len, hashes)))
    all_hashes = torch.cat(hashes)
    numbers = torch.arange(len(all_hashes), device=device) + spread(first_numbers)
    mixed = mix_bits(all_hashes + spread(torch.tensor(seeds, device=device)) + numbers * GOLDEN)
    sums = torch.nn.functional.pad(mixed.cumsum(0), (1, 0))
    values = sums[ends] - sums[ends - lengths]
    if group := next((_shards(tensor) for tensor in tensors.values() if is_sharded(tensor)), None):
        whole = torch.tensor([not is_sharded(tensor) for tensor in tensors.values()], device=device)
        if dist.get_rank(group) > 0:
            values[whole] = 0
        dist.all_reduce(values, group=group)
    return StateDigests(list(tensors), values)


def _shards(tensor) -> dist.ProcessGroup:
    """The processes that hold a DTensor together: along the one dimension of its mesh that shards it, by rows."""
    [dimension] = _sharded_dimensions(tensor)
    return tensor.device_mesh.get_group(dimension)


def _sharded_dimensions(tensor) -> list[int]:
    """Of the mesh of a DTensor: those that shard it by rows."""
    return [index for index, placement in enumerate(tensor.placements) if placement.is_shard(0)]


def _local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """This process's rows of a tensor as integers, [rows, columns], and the number of their first one."""
    first = 0
    if is_sharded(tensor):
        group = _shards(tensor)
        rows_of_each = -(-len(tensor) // dist.get_world_size(group))
        tensor, first = tensor.to_local(), min(len(tensor), dist.get_rank(group) * rows_of_each)
    rows = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    return rows.reshape(len(rows) if rows.dim() else 1, -1 if rows.numel() else 1), first


def _hash_rows(rows: Tensor) -> Tensor:
    """int64 [rows]."""
    factors = _factors(rows.shape[1], rows.device)
    if rows.shape[1] == 1:  # most tensors are vectors, and each operation on a small one costs its launch
        return rows[:, 0] * factors
    if not (at_once := VALUES_AT_ONCE.get(rows.device.type, 2**24)):
        return torch.from_numpy(np.einsum("rc,c->r", rows.numpy(), factors.numpy()))
    return torch.cat([(part * factors).sum(1) for part in rows.split(max(1, at_once // rows.shape[1]))])


@functools.cache
def _factors(count: int, device: torch.device) -> Tensor:
    return mix_bits(torch.arange(1, count + 1, device=device) * GOLDEN) | 1
