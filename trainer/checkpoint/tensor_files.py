"""Write and read weights and optimizer state as safetensors files, with torch.distributed.checkpoint (DCP).

Any number of processes can read what any other number wrote. Files of unsharded (DDP) training open in every tool that
reads safetensors. DCP is slow to import, so trainer/checkpoint/saver.py imports this module when it is first needed.
"""

import errno
import functools
import json
import re
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from runtime.config.errors import ConfigError
from runtime.distributed.world import num_processes
from runtime.files import copy_folder_permissions, fsync

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP warns when there is a single process


@functools.cache
def get_stager(on_gpu: bool) -> StateDictStager:
    """Return the stager that copies to CPU memory, from a GPU to pinned memory for large tensors.

    It is private in torch; its public wrapper, DefaultStager, cannot be reused after its first copy in torch 2.11.
    """
    return StateDictStager(pin_memory=on_gpu, pin_memory_min_bytes=2**20)


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, with_moments: bool = True
) -> dict[str, torch.Tensor]:
    """Return the content of a checkpoint, as `model.*` and `optimizer.*`; called by all processes together.

    Learning rates, betas and the like are omitted, because they are functions of the config and the step. An optimizer
    without state takes a step to create it, unless `with_moments` is False. Raise ConfigError if `optimizer.state`
    has a value other than tensors.
    """
    lost = {name for state in optimizer.state.values() for name, value in state.items() if not torch.is_tensor(value)}
    if lost:
        bare = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's wrapper
        raise ConfigError(
            f"optimizer: {type(bare).__name__} keeps {', '.join(f'state[{name!r}]' for name in sorted(lost))} as "
            "numbers or objects; checkpoints contain only tensors, so a resumed run would lose this; use torch.tensor"
        )
    weights, moments = get_state_dict(model, optimizer if with_moments else (), options=FLATTENED)
    state = {f"model.{name}": value for name, value in weights.items()}
    state |= {f"optimizer.{name}": value for name, value in moments.items()}
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def copy_to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in CPU memory; the memory is reused, so they are valid until the next call."""
    return get_stager(next(iter(tensors.values())).is_cuda).stage(tensors)


class Writer(HuggingFaceStorageWriter):
    """Writes tensors without the copies that the base class makes, which block all other Python code."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list]:
        """Write the file of this process, with the same content as the base class."""
        tensors: dict[str, torch.Tensor] = {}
        offsets: dict[str, dict[str, torch.Size]] = {}
        written = set()
        for item in plan.items:
            value = planner.resolve_data(item)
            assert isinstance(value, torch.Tensor), "state_tensors returns only tensors"
            assert item.tensor_data is not None, "a tensor has offsets"
            tensor = value.detach().cpu().contiguous()
            # Blocks may share weights; in the file each name has a separate tensor.
            tensors[item.index.fqn] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
            offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        if tensors:
            index = plan.storage_data["shard_index"]
            file = Path(self.path, f"shard-{index:05d}-model-00001-of-00001.safetensors")
            save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})
            copy_folder_permissions(file)
            fsync(file)
        done: Future[list] = Future()
        done.set_result([])
        return done


def write(directory: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's part as shard-RANK-*.safetensors, with ranks from 1; called by all processes together."""
    try:
        save(tensors, storage_writer=Writer(str(directory), save_distributed=True), process_group=group)
    except CheckpointException as exception:
        causes = [cause for cause, _ in exception.failures.values()]
        text = "; ".join(sorted(map(str, causes)))
        # safetensors has no attribute for the number, only "(os error 28)" in its text.
        numbers = [getattr(cause, "errno", None) for cause in causes] + re.findall(r"\(os error (\d+)\)", text)
        raise OSError(int(next(filter(None, numbers), errno.EIO)), text) from None


def read(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state into the prepared model and optimizer; called by all processes together.

    Raise ConfigError if the tensors in the checkpoint do not match theirs, or it cannot be read.
    """
    try:
        reader = HuggingFaceStorageReader(str(directory))
        # The reader opens every file that it lists; macOS puts a file ._NAME beside each file on a network disk.
        shards = [str(file) for file in directory.iterdir() if file.name.startswith("shard-")]
        reader.fs.ls = lambda path: shards
        stored = reader.read_metadata().state_dict_metadata
        # A run whose updates were all skipped has no optimizer state, and must not create any.
        tensors = state_tensors(model, optimizer, any(name.startswith("optimizer.") for name in stored))
        ours = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
        theirs = {name: f"{list(entry.size)} {entry.properties.dtype}" for name, entry in stored.items()}  # pyright: ignore[reportAttributeAccessIssue] all are tensors
        if ours == theirs:
            # A launcher's group of one process may have no backend for the objects that DCP would send.
            load(tensors, storage_reader=reader, no_dist=num_processes() == 1)  # in place
    except (OSError, ValueError, LookupError, TypeError, CheckpointException, SafetensorError) as error:
        raise ConfigError(f"resume: {directory} cannot be read: {type(error).__name__}: {error}") from None
    if different := [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]:
        first = different[0]
        raise ConfigError(
            f"resume: {directory} has other tensors than this model and optimizer: {len(different)} differ, such as "
            f"{first}: {theirs.get(first, 'none')} there, {ours.get(first, 'none')} now"
        )
