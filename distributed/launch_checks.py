"""What was asked of the launcher: it happens, or one message says why not."""

import glob
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import gather_object
from torch import nn

from config.errors import ConfigError
from config.schema import TrainConfig, flat_settings
from distributed.launch import is_on, uses_cpu
from model import gpt

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
SIZES = "parallelism_config_"
SIZE_NAMES = [f"{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")]
# Where things lie, and what no result depends on: each machine may have its own.
MAY_DIFFER_BY_MACHINE = {"out_dir", "resume", "branch_from", "init_from", "data.path", "data.num_workers"}
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"


def check_request(config: TrainConfig) -> None:
    """Refuse what a run does not support of its launch file and of the settings that the launcher passed on.

    Raises:
        ConfigError: with every such setting and the remedy.
    """
    path, asked = launch_settings()
    if asked.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"  # Accelerate tells this to a single process only
    problems = [f"{path}: {problem}" for problem in _misspelt_keys(path)] if path else []
    problems += (
        dropped_processes(os.environ, asked) + unsupported(os.environ, asked, config) + missing_devices(os.environ)
    )
    if problems:
        raise ConfigError("\n".join(problems))


def check_same_settings(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse processes that were started with different settings or versions, as by hand on each machine; called by all
    together.

    Nothing else would find it: of other data, each process adds up its own.

    Raises:
        ConfigError: on all processes alike, with every such setting.
    """
    mine = flat_settings(asdict(config)) | {"mixed_precision": accelerator.mixed_precision}
    mine["data.mix"] = config.data.mix and list(config.data.mix.values())  # its keys are paths
    mine |= {"torch": torch.__version__, "accelerate": accelerate.__version__}
    first, *others = gather_object([mine])
    different = {
        name: f"{name}: {first.get(name)} in process 0, {theirs.get(name)} in process {rank}"
        for rank, theirs in reversed([*enumerate(others, start=1)])
        for name in (first.keys() | theirs.keys()) - MAY_DIFFER_BY_MACHINE
        if first.get(name) != theirs.get(name)
    }
    if different:
        lines = [different[name] for name in sorted(different)]
        raise ConfigError("\n  ".join(["the processes of this run have different settings or versions:", *lines]))


def dropped_processes(environment: Mapping[str, str], asked: dict[str, Any]) -> list[str]:
    """Processes that the launcher was asked for, and without a word did not start, or will not start again."""
    restarts, started, machines = asked.get("max_restarts"), _started(environment), asked.get("num_machines") or 1
    count = asked.get("num_processes") or started
    if count == started and machines <= started:
        if restarts and "TORCHELASTIC_RUN_ID" not in environment:
            return [
                f"max_restarts: {restarts} asked for, but without a launch file Accelerate starts one process only "
                "once; on a CPU: --config_file accelerate_configs/cpu.yaml --num_processes 1, on a GPU: "
                "--config_file accelerate_configs/one_gpu.yaml"
            ]
        return []
    machine = " --num_machines M --machine_rank R --main_process_ip IP --main_process_port PORT" * (machines > 1)
    return [
        f"num_processes: {count} on {machines} machine(s) were asked for, but the launcher started {started}. On CPUs: "
        f"accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes {count}{machine} ... without "
        "--cpu; on GPUs the same with accelerate_configs/multi_gpu.yaml"
    ]


def _started(environment: Mapping[str, str]) -> int:
    return int(environment.get("WORLD_SIZE", 1))


def unsupported(environment: Mapping[str, str], asked: dict[str, Any], config: TrainConfig) -> list[str]:
    """What a run does itself, or nobody does for it."""
    problems = [
        f"distributed_type: {name} is not supported; use MULTI_GPU, or FSDP as accelerate_configs/fsdp2.yaml does"
        for name in ("DEEPSPEED", "MEGATRON_LM")
        if is_on(environment, f"ACCELERATE_USE_{name}")
    ]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision: {precision} is not supported; use bf16, fp16 or no")
    if precision == "fp16" and not config.max_skipped:
        problems.append("mixed_precision: fp16 leaves out updates whose gradients overflow; set on_nonfinite: skip")
    dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if dynamo.upper() != "NO":
        problems.append(f"dynamo_backend: {dynamo} is not supported; remove it and use --compile true of train.py")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", asked.get("gradient_accumulation_steps"))
    if str(accumulation or 1) != "1":
        problems.append(
            f"gradient_accumulation_steps: {accumulation} is not supported; set global_batch_size of the run, from "
            "which accumulation is derived"
        )
    problems += _unsupported_parallelism(environment, asked)
    return problems + (_unsupported_sharding(environment, config.exact) if _is_sharded(environment) else [])


def _is_sharded(environment: Mapping[str, str]) -> bool:
    return is_on(environment, "ACCELERATE_USE_FSDP")


def _unsupported_parallelism(environment: Mapping[str, str], asked: dict[str, Any]) -> list[str]:
    """Of parallelism_config: how many processes share the model, and how many replicas of it there are."""
    sizes = {}
    for name in SIZE_NAMES:
        of_launcher = asked.get(SIZES + name) or 1
        sizes[name] = int(environment.get((SIZES + name).upper(), of_launcher))
    problems = [
        f"{SIZES}{name}: {sizes[name]} is not supported; use 1, and dp_replicate_size and dp_shard_size"
        for name in ("tp_size", "cp_size", "sp_size")
        if sizes[name] != 1
    ]
    replicas, shards, processes = sizes["dp_replicate_size"], sizes["dp_shard_size"], _started(environment)
    sharded = _is_sharded(environment)
    in_use = sharded and is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG")
    if (replicas, shards) == (1, 1) and not in_use:
        return problems
    given = f"{SIZES}dp_replicate_size: {replicas} x {SIZES}dp_shard_size: {shards}"
    if not sharded:
        problems.append(f"{given} needs distributed_type: FSDP, as accelerate_configs/hsdp.yaml has it")
    elif replicas * shards != processes:
        problems.append(f"{given} must be num_processes: {processes}")
    elif shards == 1:
        problems.append(f"{given} shards nothing; use distributed_type: MULTI_GPU for replicas alone")
    return problems


def _unsupported_sharding(environment: Mapping[str, str], exact: bool) -> list[str]:
    """Of FSDP; `environment` has what Accelerate made of fsdp_config."""
    if environment.get("FSDP_VERSION", "1") != "2":
        version = environment.get("FSDP_VERSION", "1")
        return [f"fsdp_version: {version} is not supported; set fsdp_version: 2 in fsdp_config"]
    problems = []
    if exact:
        problems.append(
            "exact: true adds up whole gradients in a tree of processes; with FSDP none has a whole one, so set it to "
            "false or use distributed_type: MULTI_GPU"
        )
    if environment.get("FSDP_RESHARD_AFTER_FORWARD", "true") not in ("true", "false"):
        reshard = environment["FSDP_RESHARD_AFTER_FORWARD"]
        problems.append(f"fsdp_reshard_after_forward: {reshard} is of fsdp_version 1; use true or false")
    if environment.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "SIZE_BASED_WRAP":
        problems.append("fsdp_auto_wrap_policy: SIZE_BASED_WRAP cuts blocks apart; use TRANSFORMER_BASED_WRAP")
    for name in filter(None, environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")):
        module = getattr(gpt, name, None)
        if not (isinstance(module, type) and issubclass(module, nn.Module)):
            problems.append(
                f"fsdp_transformer_layer_cls_to_wrap: {name} is not in the model; use Block or leave it out"
            )
    if is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        problems.append(
            "fsdp_activation_checkpointing: true is not supported; remove it and use --activation_checkpointing true "
            "of train.py"
        )
    if environment.get("FSDP_IGNORED_MODULES"):
        problems.append("fsdp_ignored_modules: what is ignored has gradients that nobody adds up; remove it")
    if environment.get("FSDP_STATE_DICT_TYPE") == "LOCAL_STATE_DICT":
        problems.append("fsdp_state_dict_type: LOCAL_STATE_DICT is of fsdp_version 1; use SHARDED_STATE_DICT")
    if is_on(environment, "FSDP_OFFLOAD_PARAMS") and uses_cpu(environment):
        problems.append("fsdp_offload_params: true moves weights from a GPU to the CPU, and here is no GPU; remove it")
    return problems


def missing_devices(environment: Mapping[str, str]) -> list[str]:
    """GPUs that are here and cannot be used, or that are needed and are not here."""
    if is_on(environment, "ACCELERATE_USE_CPU"):
        return []
    if not torch.cuda.is_available():
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = [] if visible is None else visible.split(",")
        are_hidden = visible is not None and not any(name.strip()[:1].isalnum() for name in names)  # empty, or -1
        if are_hidden or not glob.glob(NVIDIA_DEVICES):
            return []
        try:
            torch.cuda.init()
            reason = "torch.cuda.is_available() is False"
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
        return [f"the GPU of this machine cannot be used: {reason}; to train on the CPU, set ACCELERATE_USE_CPU=true"]
    problems, here = [], torch.cuda.device_count()
    if (processes := int(environment.get("LOCAL_WORLD_SIZE", 1))) > here:
        problems.append(f"num_processes: {processes} on this machine, which has {here} GPU(s): one process for each")
    capability = torch.cuda.get_device_capability()
    if environment.get("ACCELERATE_MIXED_PRECISION") == "bf16" and capability < (8, 0):
        problems.append(
            f"mixed_precision: bf16 needs compute capability 8.0, and {torch.cuda.get_device_name()} has "
            f"{'.'.join(map(str, capability))}; use fp16 with on_nonfinite: skip, or no"
        )
    return problems


def launch_settings() -> tuple[Path | None, dict[str, Any]]:
    """The launch file that `accelerate launch` read, and its settings with those of the command line.

    They are found on the command line of the process that started this one: Accelerate passes values on, but not all,
    not where they came from, and it drops the keys of a section that it does not know.
    """
    for ancestor in psutil.Process().parents():
        try:
            command, directory = ancestor.cmdline(), ancestor.cwd()
        except psutil.Error:
            continue
        names = [Path(word).name for word in command]
        if "accelerate" in names and "launch" in names:
            return parse_launch_command(command[names.index("launch") + 1 :], directory)
        if launcher := {"accelerate-launch", "accelerate.commands.launch"} & {*names}:
            return parse_launch_command(command[names.index(*launcher) + 1 :], directory)
    return None, {}


def parse_launch_command(arguments: list[str], directory: str) -> tuple[Path | None, dict[str, Any]]:
    """The launch file, and the settings of it and of these arguments of `accelerate launch`, started in `directory`."""
    given = launch_command_parser().parse_known_args(arguments)[0]
    path = None
    if given.config_file is not None:
        path = Path(directory, given.config_file)
    elif os.path.isfile(default_config_file) and not given.cpu:
        path = Path(default_config_file)
    settings = _read(path)
    for section in LAUNCH_FILE_SECTIONS:
        settings |= settings.pop(section, None) or {}
    return path, settings | {name: getattr(given, name) for name in getattr(given, "nondefault", ())}


def _read(path: Path | None) -> dict[str, Any]:
    try:
        return yaml.safe_load(path.read_text()) if path else {}  # JSON, which Accelerate takes too, is YAML
    except (OSError, yaml.YAMLError):
        return {}  # Accelerate itself has read it, so it was moved since


def _misspelt_keys(path: Path) -> list[str]:
    known, settings = {action.dest for action in launch_command_parser()._actions}, _read(path)
    return [
        f"{section}.{key} is not a setting of Accelerate"
        for section, prefix in LAUNCH_FILE_SECTIONS.items()
        for key in settings.get(section) or {}
        if (key if key.startswith(prefix) else prefix + key) not in known
    ]
