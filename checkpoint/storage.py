"""Weights and moments as safetensors files, by torch.distributed.checkpoint (DCP) and its Hugging Face storage.

Any number of processes reads what any other number wrote, and under DDP every file opens in whatever reads safetensors.
DCP takes as long to import as half of torch: checkpoint/saver.py imports this module when it is first needed.
"""

import functools
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.futures import Future

from config.errors import ConfigError
from data.files import copy_folder_permissions, fsync

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # for DCP: one process is one process


@functools.cache
def stager(on_gpu: bool) -> StateDictStager:
    """From a GPU to pinned memory, which costs too much for small tensors. DefaultStager, which is around it, is of no
    more use after its first copy in torch 2.11."""
    return StateDictStager(pin_memory=on_gpu, pin_memory_min_bytes=2**20)


def state_tensors(model, optimizer, with_moments: bool = True) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, as `model.*` and `optimizer.*`; called by all processes together.

    Learning rates, betas and the like are left out: they are functions of the config and the step. An optimizer that
    has no moments yet takes a step to make them.
    """
    weights, moments = get_state_dict(model, optimizer if with_moments else (), options=FLATTENED)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {f"optimizer.{name}": value for name, value in moments.items() if torch.is_tensor(value)}
    return state


def copy_to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in CPU memory, which is kept from copy to copy: they hold until the next call."""
    return stager(next(iter(tensors.values())).is_cuda).stage(tensors)


class Writer(HuggingFaceStorageWriter):
    """Writes tensors from where they lie. Its base copies all of them, and until that is done no other Python runs."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        """The file of this process, as the base would write it."""
        tensors = {item.index.fqn: planner.resolve_data(item).detach().cpu().contiguous() for item in plan.items}
        written = set()
        for name, tensor in tensors.items():
            if tensor.data_ptr() in written:  # of blocks that share weights; in a file each name has its own
                tensors[name] = tensor.clone()
            written.add(tensor.data_ptr())
        begins = {item.index.fqn: {"saved_offsets": item.tensor_data.chunk.offsets} for item in plan.items}
        if tensors:
            file = Path(self.path, f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors")
            save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"})
            copy_folder_permissions(file)
            fsync(file)
        done = Future()
        done.set_result([])
        return done


def write(directory: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's part as shard-RANK-*.safetensors, ranks counted from 1; called by all processes together.

    Raises:
        OSError: it cannot be written.
    """
    try:
        dcp.save(tensors, storage_writer=Writer(str(directory), save_distributed=True), process_group=group)
    except CheckpointException as exception:
        raise OSError("; ".join(sorted({str(cause) for cause, _ in exception.failures.values()}))) from None


def read(directory: Path, model, optimizer) -> None:
    """Load weights and moments into the prepared model and optimizer; called by all processes together.

    Raises:
        ConfigError: there are other tensors than they have, or they cannot be read.
    """
    try:
        reader = HuggingFaceStorageReader(str(directory))
        stored = reader.read_metadata().state_dict_metadata
        # Their own, filled in place. A run whose every update was skipped has no moments, and makes none.
        tensors = state_tensors(model, optimizer, any(name.startswith("optimizer.") for name in stored))
        ours = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
        theirs = {name: f"{list(facts.size)} {facts.properties.dtype}" for name, facts in stored.items()}
        if ours == theirs:
            dcp.load(tensors, storage_reader=reader)
    except (OSError, ValueError, LookupError, TypeError, CheckpointException, SafetensorError) as error:
        raise ConfigError(f"resume: {directory} cannot be read: {type(error).__name__}: {error}") from None
    if different := [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]:
        first = different[0]
        raise ConfigError(
            f"resume: {directory} holds other tensors than this model and optimizer have: {len(different)} differ, "
            f"such as {first}: {theirs.get(first, 'none')} there, {ours.get(first, 'none')} now"
        )
