"""Whether all processes hold the same weights, as data parallel training assumes and nothing else would notice."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from config import RunError


class ReplicasDiffer(RunError):
    """The weights of the processes have drifted apart: a fault of the hardware, or of code that treats them unlike."""


def check_replicas(network: nn.Module, accelerator: Accelerator, step: int) -> None:
    """Compare a digest of every parameter over all processes; called by all together. Sharded models have no replicas.

    The digest is the sum of the bit patterns taken as integers, which any single changed bit changes. It reads the
    weights once and exchanges 8 bytes a parameter tensor.

    Raises:
        ReplicasDiffer: on all processes, with the first parameter that differs and the processes that hold each value.
    """
    parameters = dict(network.named_parameters())
    if accelerator.num_processes == 1 or accelerator.distributed_type == DistributedType.FSDP:
        return
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    digests = torch.stack(
        [p.detach().view(integers[p.element_size()]).sum(dtype=torch.int64) for p in parameters.values()]
    )
    table = accelerator.gather(digests[None])  # [processes, parameters]
    differs = (table != table[0]).any(dim=0).tolist()
    if True in differs:
        first = differs.index(True)
        holders: dict[int, list[int]] = {}
        for rank, digest in enumerate(table[:, first].tolist()):
            holders.setdefault(digest, []).append(rank)
        groups = " from ".join(f"process(es) {ranks}" for ranks in sorted(holders.values(), key=len))
        raise ReplicasDiffer(
            f"step {step}: the weights differ between processes, in {sum(differs)} of {len(parameters)} parameters, "
            f"first in {list(parameters)[first]}: {groups}; nothing was saved since the last checkpoint"
        )
