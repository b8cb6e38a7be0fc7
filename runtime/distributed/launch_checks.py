"""Checks at the start of a run: the launch is complete, and a run supports its settings."""

import glob
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from runtime.distributed.launch import TORCH_DEVICE, env_flag, num_shards, uses_cpu
from runtime.distributed.world import is_main_process, read_number

# Paths, and settings that change no result: each machine may have its own.
MAY_DIFFER_BY_MACHINE = {
    *("out_dir", "resume", "branch_from", "init_from", "teacher.path", "data.path", "data.num_workers"),
}
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
# Launch settings that belong to train.py or are not supported: the environment variable by which `accelerate launch`
# passes them on, the supported values (the first one is the default), and the remedy for any other value.
SUPPORTED = [
    ("ACCELERATE_MIXED_PRECISION", ("no", "bf16", "fp16"), "use bf16, fp16 or no"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "remove it and use --compile true of train.py"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("1",), "set global_batch_size, from which accumulation is derived"),
    ("ACCELERATE_USE_DEEPSPEED", ("false",), "use distributed_type: MULTI_GPU or FSDP"),
    ("ACCELERATE_USE_MEGATRON_LM", ("false",), "use distributed_type: MULTI_GPU or FSDP"),
    (
        "PARALLELISM_CONFIG_TP_SIZE",
        ("1",),
        "use dp_replicate_size and dp_shard_size, or export the model and train it by transformers with "
        'tp_plan="auto" (docs/using.md)',
    ),
    ("PARALLELISM_CONFIG_CP_SIZE", ("1",), "use dp_replicate_size and dp_shard_size"),
    ("PARALLELISM_CONFIG_SP_SIZE", ("1",), "use dp_replicate_size and dp_shard_size"),
]
WITH_FSDP = [
    ("FSDP_VERSION", ("2",), "set fsdp_version: 2 in fsdp_config"),
    ("FSDP_ACTIVATION_CHECKPOINTING", ("false",), "remove it and use --activation_checkpointing true of train.py"),
    ("FSDP_IGNORED_MODULES", ("",), "remove it: all weights are sharded"),
]
WITHOUT_FSDP = [("PARALLELISM_CONFIG_DP_SHARD_SIZE", ("1",), "use distributed_type: FSDP, as in hsdp.yaml")]


def check_launch(config: TrainConfig) -> None:
    """Raise ConfigError with every problem of the launch, and remedies; warn about a launch for absent GPUs."""
    if problems := launch_problems(os.environ, config):
        raise ConfigError("\n".join(problems))
    if is_main_process() and (warning := missing_gpus(os.environ)):
        warn_once(warning)


def launch_problems(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """Return what is wrong with the number of processes, and settings that a run owns or does not support."""
    problems = []
    missing = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - environment.keys()
    if environment.get("WORLD_SIZE", "1") != "1" and missing:
        problems.append(
            f"WORLD_SIZE: {environment['WORLD_SIZE']} processes, but {', '.join(sorted(missing))} not set in the "
            "environment; use accelerate launch or torchrun, or, to train with one process, unset WORLD_SIZE"
        )
    num_processes = read_number("WORLD_SIZE", 1, environment)
    rank = read_number("RANK", 0, environment) if num_processes > 1 else 0
    if rank >= num_processes:  # it would wait for processes that do not know it
        problems.append(
            f"RANK: {rank}, but of WORLD_SIZE: {num_processes} processes the last one is {num_processes - 1}; use "
            "accelerate launch or torchrun"
        )
    # srun starts one process a task, each of which would train the whole run alone.
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "WORLD_SIZE" not in environment:
        problems.append(
            f"SLURM_STEP_NUM_TASKS: srun started {environment['SLURM_STEP_NUM_TASKS']} tasks, but no launcher connects "
            "them (WORLD_SIZE is not set); submit accelerate_configs/slurm.sh, or, to train another run in each task, "
            "unset SLURM_STEP_NUM_TASKS"
        )
    # If it starts one process although several are requested, accelerate launch sets MASTER_ADDR but not WORLD_SIZE.
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= environment.keys() and "WORLD_SIZE" not in environment:
        problems.append(
            "num_processes: accelerate launch started one process instead of several; use --config_file "
            "accelerate_configs/cpu.yaml (without --cpu) or multi_gpu.yaml, or, for one process, unset MASTER_ADDR"
        )
    is_sharded = env_flag(environment, "ACCELERATE_USE_FSDP")
    for variable, supported, remedy in SUPPORTED + (WITH_FSDP if is_sharded else WITHOUT_FSDP):
        value = environment.get(variable, "1" if variable == "FSDP_VERSION" else supported[0])  # FSDP1 is the default
        # Accelerate reads flags and backends in any case, but trains in float32 if the precision is "BF16".
        if (value if variable == "ACCELERATE_MIXED_PRECISION" else value.lower()) not in supported:
            problems.append(f"{variable.lower().removeprefix('accelerate_')}: {value} is not supported; {remedy}")
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        if uses_cpu(environment):
            problems.append("mixed_precision: fp16 needs a GPU, and this run trains on the CPU; use bf16 or no")
        if config.on_nonfinite != "skip":
            problems.append("mixed_precision: fp16 skips updates whose gradients overflow; set on_nonfinite: skip")
    if (device := environment.get(TORCH_DEVICE, "cuda")) not in ("cuda", "mps"):
        problems.append(
            f"{TORCH_DEVICE}: {device} is not supported; unset it, and choose GPUs by CUDA_VISIBLE_DEVICES, or the CPU "
            "by ACCELERATE_USE_CPU=true"
        )
    if is_sharded and config.exact:
        problems.append("exact: true sums whole gradients, which FSDP shards; use distributed_type: MULTI_GPU")
    if config.cuda_graph and (env_flag(environment, "ACCELERATE_USE_CPU") or not torch.cuda.is_available()):
        problems.append("cuda_graph: true needs an NVIDIA GPU; set it to false")
    elif is_sharded and config.cuda_graph:
        problems.append("cuda_graph: true captures no collectives, which FSDP needs; use distributed_type: MULTI_GPU")
    return problems + mps_problems(environment, config) + device_problems(environment)


@cache  # verify.py trains several times
def warn_once(warning: str) -> None:
    """Print the warning, unless it has been printed before."""
    print(f"warning: {warning}", file=sys.stderr, flush=True)


def missing_gpus(environment: Mapping[str, str]) -> str:
    """Return a warning if `accelerate launch` has started processes for GPUs, and there is none; else ""."""
    from_launch_file = {"ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"} <= environment.keys()
    if not from_launch_file or has_hidden_gpus(environment) or not uses_cpu(environment):
        return ""
    return (
        f"no GPU was found, so {environment['WORLD_SIZE']} process(es) train on the CPU, with mixed_precision "
        f"{environment['ACCELERATE_MIXED_PRECISION']}; for a CPU use accelerate_configs/cpu.yaml"
    )


def has_hidden_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether the user asks for the CPU, as cpu.yaml does."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    are_hidden = not any(name.strip()[:1].isalnum() for name in visible)  # the variable is empty or -1
    return are_hidden or env_flag(environment, "ACCELERATE_USE_CPU")


def mps_problems(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """Return what a run on a Mac's GPU (MPS) does not support."""
    if environment.get(TORCH_DEVICE) != "mps" or env_flag(environment, "ACCELERATE_USE_CPU"):
        return []
    unsupported = {
        "no MPS in this torch": not torch.backends.mps.is_available(),
        "WORLD_SIZE: several processes": environment.get("WORLD_SIZE", "1") != "1",
        "exact: true": config.exact,
        "compile: true": config.compile,
        # torch restores a GPU's generator before it recomputes a block, but not MPS's: the gradients would be wrong.
        "activation_checkpointing: true with dropout": config.activation_checkpointing and config.model.dropout > 0,
    }
    return [f"{TORCH_DEVICE}: mps, but {what}; unset one of the two" for what, is_set in unsupported.items() if is_set]


def device_problems(environment: Mapping[str, str]) -> list[str]:
    """Return problems with the GPUs: present but unusable, fewer than processes, or without bf16."""
    processes, num_gpus = read_number("LOCAL_WORLD_SIZE", 1, environment), torch.cuda.device_count()
    if env_flag(environment, "ACCELERATE_USE_CPU") and processes > num_gpus > 0:
        # Accelerate's barrier allocates on GPU number LOCAL_RANK, even if the processes train on the CPU (until it
        # passes no `device_ids` to gloo; then test_trial_needs_no_second_gpu passes with ACCELERATE_USE_CPU, too).
        return [
            f"ACCELERATE_USE_CPU: {processes} processes on this machine, which has {num_gpus} GPU(s); set "
            "CUDA_VISIBLE_DEVICES=-1 instead, as accelerate_configs/cpu.yaml does"
        ]
    if has_hidden_gpus(environment):
        return []
    if not torch.cuda.is_available():
        problem = f"torch {torch.__version__} cannot use the GPU of this machine; to train on the CPU, set "
        return [f"{problem}ACCELERATE_USE_CPU=true"] if glob.glob(NVIDIA_DEVICES) else []
    problems = []
    if processes > num_gpus:
        problems.append(f"num_processes: {processes} on this machine, which has {num_gpus} GPU(s); use one per GPU")
    is_bf16 = environment.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if is_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        gpu = torch.cuda.get_device_name()
        problems.append(f"mixed_precision: bf16 is emulated by {gpu}; use fp16 with on_nonfinite: skip, or no")
    return problems


def check_same_settings(config: TrainConfig, accelerator: Accelerator, code: str) -> None:
    """Raise ConfigError on all processes if their settings, launch, code (a hash) or versions differ.

    Machines that are set up apart may differ. Such a run would silently train with a mixture of both. All processes
    call this together.
    """
    mine = config.flat() | {"mixed_precision": accelerator.mixed_precision, "shards": num_shards(accelerator)}
    mine["data.mix"] = config.data.mix and list(config.data.mix.values())  # the keys are paths, which may differ
    mine |= {"code": code, "python": ".".join(platform.python_version_tuple()[:2])}
    mine |= {"torch": torch.__version__, "accelerate": accelerate.__version__}
    first, *others = gather_object([mine])
    different: dict[str, str] = {}
    for rank, theirs in enumerate(others, start=1):
        for name in (first.keys() | theirs.keys()) - MAY_DIFFER_BY_MACHINE:
            if first.get(name) != theirs.get(name):
                message = f"{name}: {first.get(name)} in process 0, {theirs.get(name)} in process {rank}"
                different.setdefault(name, message)
    if different:
        lines = sorted(different.values())
        raise ConfigError("\n  ".join(["the processes of this run have different settings, code or versions:", *lines]))
