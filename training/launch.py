"""From a launch (`accelerate launch`, `torchrun`, `python`) to an Accelerator, and what of a launch is refused.

Accelerate places devices, makes process groups, wraps the model and casts. What this repository does itself (data
order, learning rate, accumulation, checkpoints, compilation) a launch file must not do a second time.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedDataParallelKwargs

from config import ConfigError, TrainConfig
from training.compute import prepare_cpu, prepare_exact
from training.rendezvous import fresh_store
from training.world import is_main_process, num_processes

# Sections of a launch file, and what Accelerate puts before their keys to find its own command-line argument.
LAUNCH_FILE_SECTIONS = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "mpirun_config": "",
    "parallelism_config": "",
    "megatron_lm_config": "",
    "deepspeed_config": "",
}


def check(exact: bool) -> None:
    """Refuse what a run does not support of its launch file and of the settings that the launcher passed on.

    Raises:
        ConfigError: with every such setting and the remedy.
    """
    environment = os.environ
    problems = []
    path = _launch_file()
    if path is not None:
        problems += [f"{path}: {problem}" for problem in _misspelt_keys(path)]
    refused = {
        "ACCELERATE_USE_DEEPSPEED": "distributed_type: DEEPSPEED is not supported; use MULTI_GPU",
        "ACCELERATE_USE_MEGATRON_LM": "distributed_type: MEGATRON_LM is not supported; use MULTI_GPU",
    }
    problems += [message for name, message in refused.items() if environment.get(name, "").lower() == "true"]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        problems.append(f"mixed_precision: {precision} is not supported; use bf16 or no")
    dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if dynamo.upper() != "NO":
        problems.append(f"dynamo_backend: {dynamo} is not supported; remove it and use --compile true of train.py")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        problems.append(
            f"gradient_accumulation_steps: {accumulation} is not supported; set global_batch_size of the run, from "
            "which accumulation is derived"
        )
    fsdp_version = environment.get("FSDP_VERSION", "1")
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        if fsdp_version != "2":
            problems.append(f"fsdp_version: {fsdp_version} is not supported; set fsdp_version: 2 in fsdp_config")
        if exact:
            problems.append("exact: true adds up the gradients of whole replicas; FSDP has none, so set it to false")
    if problems:
        raise ConfigError("\n".join(problems))


def start(config: TrainConfig) -> Accelerator:
    """The Accelerator of this process, with the process group up.

    On a machine without a CUDA device (or with an MPS device and several processes, which it cannot join) the CPU is
    used, through gloo.
    """
    use_cpu = not torch.cuda.is_available() and (num_processes() > 1 or not torch.backends.mps.is_available())
    if use_cpu:
        prepare_cpu()
    if config.exact:
        prepare_exact()
    if num_processes() > 1 and not dist.is_initialized():
        if is_main_process():
            print(f"waiting for all {num_processes()} processes ...", file=sys.stderr, flush=True)
        store, rank, world_size = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "gloo" if use_cpu else "nccl",
            store=fresh_store(store, rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )
    accelerator = Accelerator(
        cpu=use_cpu or None, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    if accelerator.num_processes != num_processes():
        raise ConfigError(
            f"num_processes: the launcher started {num_processes()}, but Accelerate found {accelerator.num_processes}; "
            "use distributed_type: MULTI_GPU in the launch file, as accelerate_configs/cpu.yaml does"
        )
    return accelerator


def _launch_file() -> Path | None:
    """The file that `accelerate launch` read, found on the command line of the process that started this one.

    Accelerate passes values on, but not where they came from, and drops the keys it does not know inside a section.
    """
    for ancestor in psutil.Process().parents():
        try:
            command = ancestor.cmdline()
        except psutil.Error:
            continue
        names = {Path(word).name for word in command}
        if {"accelerate", "launch"} <= names or names & {"accelerate-launch", "accelerate.commands.launch"}:
            for word, following in zip(command, command[1:] + [""], strict=True):
                if word.startswith("--config_file"):
                    return Path(ancestor.cwd(), word.partition("=")[2] or following)
            return Path(default_config_file) if os.path.isfile(default_config_file) else None
    return None


def _misspelt_keys(path: Path) -> list[str]:
    try:
        settings = yaml.safe_load(path.read_text())  # JSON, which Accelerate takes too, is YAML
    except (OSError, yaml.YAMLError):
        return []  # Accelerate itself has read it, so it was moved since
    known = {action.dest for action in launch_command_parser()._actions}
    problems = []
    for section, prefix in LAUNCH_FILE_SECTIONS.items():
        keys = settings.get(section) or {}
        for key in keys:
            if (key if key.startswith(prefix) else prefix + key) not in known:
                problems.append(f"{section}.{key} is not a setting of Accelerate")
    return problems
