"""Checks at the start of a run: what was asked of the launcher has happened, and the run supports it."""

import glob
import os
from collections.abc import Mapping
from dataclasses import asdict

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError
from config.schema import TrainConfig, flat_settings
from distributed.launch import env_flag
from distributed.launch_file import LaunchCommand, find_launch_command, unknown_section_keys
from distributed.world import num_processes

# Paths, and settings that change no result: each machine may have its own.
MAY_DIFFER_BY_MACHINE = {"out_dir", "resume", "branch_from", "init_from", "data.path", "data.num_workers"}
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
MIN_BF16_CAPABILITY = (8, 0)


def check_launch(config: TrainConfig) -> None:
    """Refuse launch settings that a run does not support, and launches that are not what was asked for.

    Raises:
        ConfigError: With every such setting and its remedy.
    """
    launch = find_launch_command()
    problems = [*unknown_section_keys(launch), *dropped_settings(launch, num_processes())] if launch else []
    problems += unsupported_settings(os.environ, config)
    problems += unusable_devices(os.environ)
    if problems:
        raise ConfigError("\n".join(problems))


def check_same_settings(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse processes that were started with different settings or versions, as by hand on each machine.

    Such a run would train silently on a mixture of both. All processes call this together.

    Raises:
        ConfigError: On all processes, with every setting that differs.
    """
    mine = flat_settings(asdict(config)) | {"mixed_precision": accelerator.mixed_precision}
    mine["data.mix"] = config.data.mix and list(config.data.mix.values())  # the keys are paths
    mine |= {"torch": torch.__version__, "accelerate": accelerate.__version__}
    first, *others = gather_object([mine])
    different: dict[str, str] = {}
    for rank, theirs in enumerate(others, start=1):
        for name in (first.keys() | theirs.keys()) - MAY_DIFFER_BY_MACHINE:
            if first.get(name) != theirs.get(name):
                message = f"{name}: {first.get(name)} in process 0, {theirs.get(name)} in process {rank}"
                different.setdefault(name, message)
    if different:
        lines = [different[name] for name in sorted(different)]
        raise ConfigError("\n  ".join(["the processes of this run have different settings or versions:", *lines]))


def dropped_settings(launch: LaunchCommand, started: int) -> list[str]:
    """Return the settings of `accelerate launch` that it ignored without a message.

    Args:
        launch: The command.
        started: The number of processes that it started.
    """
    problems = []
    machines = launch.settings.get("num_machines") or 1
    asked = max(launch.settings.get("num_processes") or 1, machines)
    if asked > started:
        problems.append(
            f"num_processes: {asked} on {machines} machine(s) requested, but Accelerate started {started}; use "
            f"accelerate launch --num_processes {asked} with --config_file accelerate_configs/cpu.yaml (CPUs, without "
            "--cpu) or accelerate_configs/multi_gpu.yaml"
        )
    accumulation = launch.options.get("gradient_accumulation_steps", 1)
    if accumulation != 1:
        problems.append(_accumulation_problem(accumulation))
    return problems


def unsupported_settings(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """Return the settings in Accelerate's environment variables that a run does itself or does not support."""
    problems = [
        f"distributed_type: {name} is not supported; use MULTI_GPU, or FSDP as in accelerate_configs/fsdp2.yaml"
        for name in ("DEEPSPEED", "MEGATRON_LM")
        if env_flag(environment, f"ACCELERATE_USE_{name}")
    ]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision: {precision} is not supported; use bf16, fp16 or no")
    if precision == "fp16" and not config.max_skipped:
        problems.append("mixed_precision: fp16 skips updates whose gradients overflow; set on_nonfinite: skip")
    dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if dynamo.upper() != "NO":
        problems.append(f"dynamo_backend: {dynamo} is not supported; remove it and use --compile true of train.py")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        problems.append(_accumulation_problem(accumulation))
    sharded = env_flag(environment, "ACCELERATE_USE_FSDP")
    for name in ("tp", "cp", "sp"):
        if (size := environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) != "1":
            problems.append(
                f"parallelism_config_{name}_size: {size} is not supported; use 1, and dp_replicate_size and "
                "dp_shard_size"
            )
    if (shards := environment.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")) != "1" and not sharded:
        problems.append(
            f"parallelism_config_dp_shard_size: {shards} needs distributed_type: FSDP, as in "
            "accelerate_configs/hsdp.yaml"
        )
    return problems + (_unsupported_fsdp(environment, config) if sharded else [])


def unusable_devices(environment: Mapping[str, str]) -> list[str]:
    """Return problems with the GPUs: present but unusable, fewer than processes, or without bf16."""
    if env_flag(environment, "ACCELERATE_USE_CPU"):
        return []
    if not torch.cuda.is_available():
        visible = environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")
        are_hidden = not any(name.strip()[:1].isalnum() for name in visible)  # empty, or -1
        if are_hidden or not glob.glob(NVIDIA_DEVICES):
            return []
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
        return [f"the GPU of this machine cannot be used: {reason}; to train on the CPU, set ACCELERATE_USE_CPU=true"]
    problems, num_gpus = [], torch.cuda.device_count()
    if (processes := int(environment.get("LOCAL_WORLD_SIZE", 1))) > num_gpus:
        problems.append(f"num_processes: {processes} on this machine, which has {num_gpus} GPU(s); use one per GPU")
    capability = torch.cuda.get_device_capability()
    if environment.get("ACCELERATE_MIXED_PRECISION") == "bf16" and capability < MIN_BF16_CAPABILITY:
        problems.append(
            f"mixed_precision: bf16 needs compute capability 8.0, and {torch.cuda.get_device_name()} has "
            f"{'.'.join(map(str, capability))}; use fp16 with on_nonfinite: skip, or no"
        )
    return problems


def _accumulation_problem(steps: int | str) -> str:
    return (
        f"gradient_accumulation_steps: {steps} is not supported; set global_batch_size of the run, from which "
        "accumulation is derived"
    )


def _unsupported_fsdp(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    if (version := environment.get("FSDP_VERSION", "1")) != "2":
        return [f"fsdp_version: {version} is not supported; set fsdp_version: 2 in fsdp_config"]
    problems = []
    if config.exact:
        problems.append(
            "exact: true sums whole gradients in a tree over processes, and with FSDP no process has whole gradients; "
            "set exact: false or use distributed_type: MULTI_GPU"
        )
    if env_flag(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        problems.append(
            "fsdp_activation_checkpointing: true is not supported; remove it and use --activation_checkpointing true "
            "of train.py"
        )
    if environment.get("FSDP_IGNORED_MODULES"):
        problems.append("fsdp_ignored_modules: gradients of ignored modules are not summed over processes; remove it")
    return problems
