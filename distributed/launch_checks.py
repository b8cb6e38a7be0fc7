"""Checks at the start of a run: the launcher did what was requested, and a run supports it."""

import glob
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError
from config.schema import TrainConfig, flat_settings
from distributed.launch import env_flag
from distributed.launch_file import launch_settings, unknown_section_keys

# Paths, and settings that change no result: each machine may have its own.
MAY_DIFFER_BY_MACHINE = {"out_dir", "resume", "branch_from", "init_from", "data.path", "data.num_workers"}
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# Launch settings that belong to train.py or are not supported: Accelerate's environment variable, the supported values
# (the first one is the default), and the remedy for any other value.
SUPPORTED = [
    ("ACCELERATE_MIXED_PRECISION", ("no", "bf16", "fp16"), "use bf16, fp16 or no"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "remove it and use --compile true of train.py"),
    (ACCUMULATION, ("1",), "set global_batch_size of the run, from which accumulation is derived"),
    ("ACCELERATE_USE_DEEPSPEED", ("false",), "use distributed_type: MULTI_GPU or FSDP"),
    ("ACCELERATE_USE_MEGATRON_LM", ("false",), "use distributed_type: MULTI_GPU or FSDP"),
    ("PARALLELISM_CONFIG_TP_SIZE", ("1",), "use dp_replicate_size and dp_shard_size"),
    ("PARALLELISM_CONFIG_CP_SIZE", ("1",), "use dp_replicate_size and dp_shard_size"),
    ("PARALLELISM_CONFIG_SP_SIZE", ("1",), "use dp_replicate_size and dp_shard_size"),
]
SUPPORTED_BY_FSDP = [
    ("FSDP_VERSION", ("2",), "set fsdp_version: 2 in fsdp_config"),
    ("FSDP_ACTIVATION_CHECKPOINTING", ("false",), "remove it and use --activation_checkpointing true of train.py"),
]


def check_launch(config: TrainConfig) -> None:
    """Raise ConfigError with every launch setting that the launcher ignored or a run does not support, and remedies."""
    if problems := unusable_devices(os.environ) + launch_problems(launch_settings(), os.environ, config):
        raise ConfigError("\n".join(problems))


def launch_problems(launch: dict[str, Any] | None, environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """Return a problem for each launch setting that is unknown, was ignored, or is not supported by a run."""
    if launch is None:
        return unsupported_settings(environment, config)
    # `accelerate launch` ignores this option, except for DeepSpeed.
    accumulation = {ACCUMULATION: str(launch.get("gradient_accumulation_steps", 1))}
    return [
        *unknown_section_keys(launch),
        *missing_processes(launch, int(environment.get("WORLD_SIZE", 1))),
        *unsupported_settings(accumulation | dict(environment), config),
    ]


def missing_processes(launch: dict[str, Any], started: int) -> list[str]:
    """Return a problem if `accelerate launch` silently started fewer processes than requested."""
    machines = launch.get("num_machines") or 1
    requested = max(launch.get("num_processes") or 1, machines)
    if requested <= started:
        return []
    return [
        f"num_processes: {requested} on {machines} machine(s) requested, but Accelerate started {started}; use "
        f"accelerate launch --num_processes {requested} with --config_file accelerate_configs/cpu.yaml (CPUs, without "
        "--cpu) or accelerate_configs/multi_gpu.yaml"
    ]


def unsupported_settings(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """Return a problem for each launch setting that belongs to train.py or is not supported."""
    is_sharded = env_flag(environment, "ACCELERATE_USE_FSDP")
    problems = []
    for variable, supported, remedy in SUPPORTED + (SUPPORTED_BY_FSDP if is_sharded else []):
        value = environment.get(variable, "1" if variable == "FSDP_VERSION" else supported[0])  # FSDP1 is the default
        if value.lower() not in supported:
            setting = variable.lower().removeprefix("accelerate_")
            problems.append(f"{setting}: {value} is not supported; {remedy}")
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp16" and not config.max_skipped:
        problems.append("mixed_precision: fp16 skips updates whose gradients overflow; set on_nonfinite: skip")
    if is_sharded and config.exact:
        problems.append(
            "exact: true sums whole gradients in a tree over processes, and with FSDP no process has whole gradients; "
            "set exact: false or use distributed_type: MULTI_GPU"
        )
    shards = environment.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")
    if shards != "1" and not is_sharded:  # Accelerate would train replicas
        problems.append(
            f"parallelism_config_dp_shard_size: {shards} needs distributed_type: FSDP, as in "
            "accelerate_configs/hsdp.yaml"
        )
    return problems


def unusable_devices(environment: Mapping[str, str]) -> list[str]:
    """Return problems with the GPUs: present but unusable, fewer than processes, or without bf16."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    are_hidden = not any(name.strip()[:1].isalnum() for name in visible)  # the variable is empty or -1
    if env_flag(environment, "ACCELERATE_USE_CPU") or are_hidden:
        return []
    if not torch.cuda.is_available():
        problem = f"torch {torch.__version__} cannot use the GPU of this machine; to train on the CPU, set "
        return [f"{problem}ACCELERATE_USE_CPU=true"] if glob.glob(NVIDIA_DEVICES) else []
    problems, num_gpus = [], torch.cuda.device_count()
    if (processes := int(environment.get("LOCAL_WORLD_SIZE", 1))) > num_gpus:
        problems.append(f"num_processes: {processes} on this machine, which has {num_gpus} GPU(s); use one per GPU")
    is_bf16 = environment.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    if is_bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        gpu = torch.cuda.get_device_name()
        problems.append(f"mixed_precision: bf16 is emulated by {gpu}; use fp16 with on_nonfinite: skip, or no")
    return problems


def check_same_settings(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raise ConfigError on all processes if their settings or versions differ, as may happen if started by hand.

    Such a run would silently train with a mixture of both. All processes call this together.
    """
    mine = flat_settings(asdict(config)) | {"mixed_precision": accelerator.mixed_precision}
    mine["data.mix"] = config.data.mix and list(config.data.mix.values())  # the keys are paths, which may differ
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
        raise ConfigError("\n  ".join(["the processes of this run have different settings or versions:", *lines]))
