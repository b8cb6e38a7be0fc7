"""Join the processes of a launch, whatever started them: accelerate launch, torchrun or python.

Accelerate selects the device, wraps the model and casts. Data order, learning rate, accumulation, checkpoints and
compilation belong to this repository, and launch_checks.py refuses launch settings for them. docs/launching.md lists
which parts of Accelerate are used, and why the others are not.
"""

import os
import re
import socket
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    str_to_bool,
)

from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from runtime.distributed.rendezvous import fresh_store
from runtime.distributed.world import is_main_process, num_processes, process_rank
from runtime.machine.cpu import prepare_cpu, prepare_exact

TORCH_DEVICE = "ACCELERATE_TORCH_DEVICE"  # Accelerate's variable that overrides its choice of device
LAUNCH_VARIABLE = re.compile(r"(\w+_)?(RANK|RANKID|SIZE|NRANKS)|MASTER_(ADDR|PORT)")  # of torchrun, mpirun and others


def env_flag(environment: Mapping[str, str], name: str) -> bool:
    """Return a boolean variable of Accelerate, False if it is absent; raise ConfigError if it is neither."""
    value = environment.get(name, "false")
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise ConfigError(f"{name}: {value!r} is neither true nor false; set it to one of them, or unset it") from None


def uses_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether a run computes on the CPU: ACCELERATE_USE_CPU is true, or there is no GPU.

    A Mac's GPU is used only where ACCELERATE_TORCH_DEVICE=mps asks for it.
    """
    has_device = torch.cuda.is_available() or environment.get(TORCH_DEVICE) == "mps"
    return env_flag(environment, "ACCELERATE_USE_CPU") or not has_device


def join_process_group(config: TrainConfig) -> None:
    """Initialise the process group, unless there is only one process or it is already initialised.

    The backend is gloo on CPUs; on GPUs it is NCCL, and gloo for tensors on the CPU. A process waits for the others for
    `timeout_seconds`.
    """
    if num_processes() == 1 or dist.is_initialized():
        return
    # By default gloo resolves the name of the machine, which may take minutes or give the address of another one, or,
    # on Debian, 127.0.1.1, which no other machine can reach.
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and (interface := network_interface(os.environ["MASTER_ADDR"])):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if is_main_process():
        print(f"waiting for all {num_processes()} processes ...", file=sys.stderr, flush=True)
    use_cpu, timeout = uses_cpu(os.environ), timedelta(seconds=config.timeout_seconds)
    # Groups created later without a timeout, such as DeviceMesh's for hybrid sharding, use these defaults of torch.
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout  # pyright: ignore[reportPrivateImportUsage]
    store = fresh_store(process_rank(), num_processes(), config.timeout_seconds)
    store.set_timeout(timeout)
    dist.init_process_group(
        "gloo" if use_cpu else "cpu:gloo,cuda:nccl",
        store=store,
        rank=process_rank(),
        world_size=num_processes(),
        timeout=timeout,
        device_id=None if use_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"])),
    )


def network_interface(master: str) -> str:
    """Return the name of the network interface that leads to MASTER_ADDR, or "" if it cannot be resolved or reached.

    On the machine that has this address, it is the interface of the address.

    Raises:
        ConfigError: MASTER_ADDR is a name that this machine resolves to itself, and it has several interfaces.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # selects the route, and sends nothing
            own = ip_address(probe.getsockname()[0])
    except OSError:
        return ""  # fresh_store waits for the address, and reports it
    interfaces = {
        name: {ip_address(entry.address) for entry in addresses if entry.family in (socket.AF_INET, socket.AF_INET6)}
        for name, addresses in psutil.net_if_addrs().items()
    }
    if own.is_loopback and not is_loopback(master):
        # Debian's /etc/hosts gives the machine's own name the address 127.0.1.1.
        up = [name for name, state in psutil.net_if_stats().items() if state.isup]
        others = sorted(name for name in up if any(not each.is_loopback for each in interfaces.get(name, ())))
        if len(others) != 1:
            raise ConfigError(
                f"MASTER_ADDR: {master} is {own} on this machine (see /etc/hosts), an address that other machines "
                f"cannot reach; set GLOO_SOCKET_IFNAME to the network interface that connects them (here: "
                f"{', '.join(others) or 'none is up'})"
            )
        return others[0]
    return next((name for name, addresses in interfaces.items() if own in addresses), "")


def is_loopback(master: str) -> bool:
    """Return whether the user has named this machine by its loopback address."""
    try:
        return ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def join_launch(config: TrainConfig) -> dict[str, Any]:
    """Join the other processes of this launch, and return the arguments with which each builds its `Accelerator`.

    On a CPU this also selects the number of threads. The mixed precision, and DDP or FSDP2 with its settings, reach
    Accelerate by the environment variables of `accelerate launch`.

    Raises:
        ConfigError: the launcher's variables are incomplete, for example left behind in a shell; or Accelerate counts
            another number of processes, because it also reads mpirun's variables.
    """
    use_cpu, world_size = uses_cpu(os.environ), num_processes()
    variables = sorted(filter(LAUNCH_VARIABLE.fullmatch, os.environ))  # before Accelerate adds others
    try:
        if use_cpu:
            prepare_cpu()
        if config.exact:
            prepare_exact()
        join_process_group(config)
        # Where a launcher has not set OMP_NUM_THREADS, as torchrun for one process, Accelerate would set another number
        # of threads, which changes the bits of an exact run.
        threads = torch.get_num_threads()
        state = PartialState(cpu=use_cpu)
        torch.set_num_threads(threads)
    except ValueError as error:  # of torch, Accelerate or int(): each reads other variables
        if not variables or "TORCHELASTIC_RUN_ID" in os.environ:  # torch's launcher has set all of them
            raise
        raise ConfigError(
            f"{', '.join(variables)}: set in the environment, perhaps by an earlier launch, but not enough to join its "
            f"processes ({str(error).splitlines()[0]}); run `unset {' '.join(variables)}`, or use accelerate launch or "
            "torchrun"
        ) from None
    if state.num_processes != world_size:
        raise ConfigError(
            f"WORLD_SIZE: {world_size} process(es), but Accelerate started {state.num_processes}; use accelerate "
            "launch or torchrun"
        )
    return {
        "cpu": use_cpu,
        "fsdp_plugin": fsdp_plugin(state) if env_flag(os.environ, "ACCELERATE_USE_FSDP") else None,
        "kwargs_handlers": [
            # Gradients are views of DDP's buckets, which saves a copy of them.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # In fp16 the loss is scaled by a function of the step (trainer/gradients.py), which needs no state.
            GradScalerKwargs(enabled=False),
        ],
    }


def fsdp_plugin(state: PartialState) -> FullyShardedDataParallelPlugin:
    """Return the FSDP2 settings of the launch file with our mixed precision; on CPUs, make Accelerate shard.

    Accelerate's own policy would round float inputs, such as weights of tokens, outputs and sums of gradients to bf16.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy  # slow to import

    warnings.filterwarnings("ignore", "Slicing a flattened dim")  # from Accelerate's code for hybrid sharding
    # Accelerate 1.15 ignores FSDP on CPUs (MULTI_CPU), although torch shards over gloo. As MULTI_GPU it shards on the
    # device of `state`, which stays the CPU. Remove this once test_sharding.py passes without it.
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
    if os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP") == "":  # a blank answer to `accelerate config`
        del os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"]  # unset, it is the model's _no_split_modules
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return FullyShardedDataParallelPlugin(mixed_precision_policy=policy)


def num_shards(accelerator: Accelerator) -> int:
    """Return the number of processes (of consecutive ranks) over which one replica of the model is sharded."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return 1
    sizes = accelerator.parallelism_config
    return (sizes.dp_shard_size or 1) if sizes else accelerator.num_processes
