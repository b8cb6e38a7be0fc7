"""From a launch (`accelerate launch`, `torchrun`, `python`) to an Accelerator.

Accelerate places devices, makes process groups, wraps the model and casts. What this repository does itself (data
order, learning rate, accumulation, checkpoints, compilation) a launch file must not do a second time.
"""

import os
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin, str_to_bool

from config.errors import ConfigError
from config.schema import TrainConfig
from distributed.cpu import prepare_cpu, prepare_exact
from distributed.rendezvous import fresh_store
from distributed.world import is_main_process, num_processes


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Whether a switch of Accelerate is on.

    Raises:
        ConfigError: its value is no word for it.
    """
    value = environment.get(name) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise ConfigError(f"{name}: {value!r} of the environment must be true or false") from None


def uses_cpu(environment: Mapping[str, str]) -> bool:
    """Whether to compute on the CPU: because it was asked for, or there is nothing else.

    Several processes cannot be joined on an MPS device, so they use the CPU.
    """
    alone = int(environment.get("WORLD_SIZE", 1)) == 1
    has_device = torch.cuda.is_available() or (alone and torch.backends.mps.is_available())
    return is_on(environment, "ACCELERATE_USE_CPU") or not has_device


def join_process_group(config: TrainConfig) -> None:
    """Bring the process group up, if there are several processes and it is not up yet.

    Processes on CPUs are joined by gloo. Those on GPUs by NCCL, and by gloo for tensors on the CPU.
    """
    use_cpu = uses_cpu(os.environ)
    if num_processes() > 1 and not dist.is_initialized():
        if is_main_process():
            print(f"waiting for all {num_processes()} processes ...", file=sys.stderr, flush=True)
        rank, world_size = int(os.environ["RANK"]), num_processes()
        dist.init_process_group(
            "gloo" if use_cpu else "cpu:gloo,cuda:nccl",
            store=fresh_store(rank, world_size, config.timeout_seconds),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
            device_id=None if use_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"])),
        )


def start_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process, with the process group up."""
    use_cpu = uses_cpu(os.environ)
    if use_cpu:
        prepare_cpu()
    if config.exact:
        prepare_exact()
    join_process_group(config)
    accelerator = Accelerator(
        cpu=use_cpu or None,
        fsdp_plugin=sharding(use_cpu) if is_on(os.environ, "ACCELERATE_USE_FSDP") else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    if accelerator.mixed_precision == "fp16":  # the loss is scaled by training/gradients.py, and a CPU casts too
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=False)
    return accelerator


def sharding(use_cpu: bool) -> FullyShardedDataParallelPlugin:
    """What the launch file says of FSDP2, with our precisions; on the CPU it makes Accelerate do what it says.

    Accelerate's own policy rounds inputs (so also the number of targets that a loss is divided by), outputs and sums of
    gradients to bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # slow to import

    warnings.filterwarnings("ignore", "Slicing a flattened dim")  # of Accelerate, for hybrid sharding
    if not os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"):  # empty from the questionnaire: as the model says
        os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
    state = PartialState(cpu=use_cpu)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU  # one of those that Accelerate shards, whatever the device
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return FullyShardedDataParallelPlugin(mixed_precision_policy=policy)


def num_shards(accelerator: Accelerator) -> int:
    """How many processes share a replica of the model: neighbours in rank, each with its part of every tensor."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return 1
    sizes = accelerator.parallelism_config
    return sizes.dp_shard_size if sizes else accelerator.num_processes
