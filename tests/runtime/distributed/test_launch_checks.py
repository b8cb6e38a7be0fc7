"""Options of `accelerate launch` take effect, or the run is refused."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

from runtime.config.errors import ConfigError
from runtime.config.schema import DataConfig, TeacherConfig, TrainConfig
from runtime.distributed import launch_checks, world
from runtime.distributed.launch import uses_cpu
from tests.conftest import ROOT, TINY_STORIES, environment, train, what_is_started
from tests.support import forked
from tests.support.forked import Launch, free_port
from trainer.checkpoint.identity import code_hash

FILES = ROOT / "accelerate_configs"
CPU, MULTI_GPU, FSDP2, HSDP = (str(FILES / f"{name}.yaml") for name in ("cpu", "multi_gpu", "fsdp2", "hsdp"))
TWO = ["--num_processes", "2"]
MACHINES = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", "29511"]


def problems(*flags, exact=False, cuda_graph=None, **extra):
    """Return the problems that a run finds in such a launch, one a line."""
    config = TrainConfig(exact=exact, cuda_graph=cuda_graph)
    return "\n".join(launch_checks.launch_problems(what_is_started(*flags) | extra, config))


@pytest.fixture
def write_launch_file(tmp_path):
    """Return a function that writes a copy of a launch file with changes."""

    def write(base, **changes):
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(Path(base).read_text()) | changes))
        return str(path)

    return write


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_launch_files_are_accepted(path):
    extra = ["--main_process_port", "29511"] if path.stem == "multi_node" else []
    assert problems("--config_file", str(path), *extra) == ""


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_launch_files_have_no_unknown_section_keys(path):
    """Accelerate ignores them."""
    known = {action.dest for action in launch_command_parser()._actions}
    sections = {
        name: content for name, content in yaml.safe_load(path.read_text()).items() if isinstance(content, dict)
    }
    assert {key for content in sections.values() for key in content} <= known


ONE_PROCESS = "num_processes: accelerate launch started one process instead of several; use --config_file"

# What Accelerate 1.15 writes for the answers in the name, and the problem that a run finds in it.
QUESTIONNAIRE = {
    **{"cpu": "", "one_gpu": "", "multi_gpu": "", "fsdp2": "", "fsdp1": "fsdp_version: 1 is not supported"},
    "multi_cpu": ONE_PROCESS,
}


@pytest.mark.parametrize("answers", QUESTIONNAIRE)
def test_questionnaire_files_are_accepted_or_refused(answers):
    message = problems(
        "--config_file", str(ROOT / "tests" / "support" / "launch_files" / f"questionnaire_{answers}.yaml")
    )
    assert QUESTIONNAIRE[answers] in message
    assert bool(message) == bool(QUESTIONNAIRE[answers])


@pytest.mark.parametrize(
    "flags",
    [TWO, ["--cpu", *TWO], ["--config_file", CPU, "--cpu"], [*MACHINES, "--machine_rank", "1"], [*TWO, *MACHINES]],
    ids=" ".join,
)
def test_fewer_processes_than_requested_are_refused(flags):
    assert problems(*flags).startswith(f"{ONE_PROCESS} accelerate_configs/cpu.yaml (without --cpu)")


@pytest.mark.parametrize("flags", [[], ["--cpu"], ["--num_processes", "1"]], ids=" ".join)
def test_one_requested_process_is_accepted(flags):
    assert problems(*flags) == ""


@pytest.mark.parametrize("name", ["ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"])
def test_flag_that_is_neither_true_nor_false_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: 'maybe' is neither true nor false; set it to one of them"):
        launch_checks.launch_problems({name: "maybe"}, TrainConfig())
    assert launch_checks.launch_problems({name: "NO"}, TrainConfig()) == []
    assert launch_checks.launch_problems({"ACCELERATE_USE_DEEPSPEED": "FALSE"}, TrainConfig()) == []


def test_incomplete_environment_is_refused():
    environment = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    (message,) = launch_checks.launch_problems(environment, TrainConfig())
    assert message.startswith("WORLD_SIZE: 2 processes, but LOCAL_RANK, MASTER_PORT not set in the environment; use")
    complete = {"LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    assert launch_checks.launch_problems(environment | complete, TrainConfig()) == []


def test_numbers_of_processes_that_are_wrong_are_refused():
    complete = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}
    (message,) = launch_checks.launch_problems(complete | {"RANK": "2"}, TrainConfig())
    assert message.startswith("RANK: 2, but of WORLD_SIZE: 2 processes the last one is 1; use accelerate launch")
    assert launch_checks.launch_problems({"RANK": "2"}, TrainConfig()) == [], "left behind in a shell"
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE: 'two' is not a number; unset it"):
        launch_checks.launch_problems(complete | {"RANK": "1", "LOCAL_WORLD_SIZE": "two"}, TrainConfig())


def test_tasks_of_srun_without_a_launcher_are_refused():
    """Each task would train the whole run alone."""
    (message,) = launch_checks.launch_problems({"SLURM_STEP_NUM_TASKS": "2"}, TrainConfig())
    assert message.startswith("SLURM_STEP_NUM_TASKS: srun started 2 tasks, but no launcher connects them")
    assert "slurm.sh" in message and "unset SLURM_STEP_NUM_TASKS" in message
    assert launch_checks.launch_problems({"SLURM_STEP_NUM_TASKS": "1"}, TrainConfig()) == []
    assert problems("--config_file", CPU, SLURM_STEP_NUM_TASKS="2") == ""


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, ["gradient_accumulation_steps: 4", "global_batch_size"]),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["dynamo_backend: INDUCTOR", "--compile true"]),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, ["use_deepspeed: true is not supported", "FSDP"]),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, ["use_megatron_lm: true is not supported", "FSDP"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, ["mixed_precision: fp8", "bf16"]),
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, ["mixed_precision: BF16 is not supported", "use bf16"]),
        ({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, ["ACCELERATE_TORCH_DEVICE: cuda:1", "CUDA_VISIBLE_DEVICES"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_unsupported_variables_are_refused(variables, parts):
    message = problems("--config_file", CPU, **variables)
    assert message.count("\n") == 0
    assert all(part in message for part in parts), message


def test_fp16_needs_a_gpu_and_skipping():
    message = problems("--config_file", CPU, ACCELERATE_MIXED_PRECISION="fp16")
    on_cpu, skipping = message.splitlines()
    assert on_cpu == "mixed_precision: fp16 needs a GPU, and this run trains on the CPU; use bf16 or no"
    assert skipping.startswith("mixed_precision: fp16") and skipping.endswith("set on_nonfinite: skip")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"fsdp_version": 1}, ["fsdp_version: 1", "2"]),
        ({"fsdp_activation_checkpointing": True}, ["fsdp_activation_checkpointing", "--activation_checkpointing true"]),
        ({"fsdp_ignored_modules": "token_embedding"}, ["fsdp_ignored_modules: token_embedding is not supported"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_unsupported_fsdp_settings_are_refused(changes, parts, write_launch_file):
    file = write_launch_file(FSDP2, fsdp_config=yaml.safe_load(Path(FSDP2).read_text())["fsdp_config"] | changes)
    message = problems("--config_file", file)
    assert message.count("\n") == 0
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("name", ["tp", "cp", "sp"])
def test_other_parallelism_than_data_parallel_is_refused(name, write_launch_file):
    sizes = yaml.safe_load(Path(HSDP).read_text())["parallelism_config"] | {f"parallelism_config_{name}_size": 2}
    message = problems("--config_file", write_launch_file(HSDP, parallelism_config=sizes))
    assert message.count("\n") == 0
    assert f"parallelism_config_{name}_size: 2 is not supported; use dp_replicate_size" in message
    assert ('tp_plan="auto" (docs/using.md)' in message) == (name == "tp")


def test_shards_without_fsdp_are_refused(write_launch_file):
    """Accelerate would train replicas."""
    file = write_launch_file(CPU, parallelism_config={"parallelism_config_dp_shard_size": 2})
    message = problems("--config_file", file)
    assert (
        message == "parallelism_config_dp_shard_size: 2 is not supported; use distributed_type: FSDP, as in hsdp.yaml"
    )


def test_exact_is_refused_under_fsdp_only():
    message = problems("--config_file", FSDP2, exact=True)
    assert message == "exact: true sums whole gradients, which FSDP shards; use distributed_type: MULTI_GPU"
    assert problems("--config_file", CPU, exact=True) == ""


def test_cuda_graph_needs_gpu_without_fsdp(monkeypatch):
    needs_gpu = "cuda_graph: true needs an NVIDIA GPU; set it to false"
    assert problems("--config_file", MULTI_GPU, cuda_graph=True) == needs_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch_checks, "device_problems", lambda environment: [])
    assert problems("--config_file", MULTI_GPU, cuda_graph=True) == ""
    assert problems("--config_file", CPU, cuda_graph=True, ACCELERATE_USE_CPU="true") == needs_gpu
    captures = "cuda_graph: true captures no collectives, which FSDP needs; use distributed_type: MULTI_GPU"
    assert problems("--config_file", FSDP2, cuda_graph=True) == captures


# Devices


def test_unusable_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(launch_checks, "NVIDIA_DEVICES", str(ROOT / "train.p[y]"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (message,) = launch_checks.device_problems({})
    assert "cannot use the GPU of this machine; to train on the CPU, set ACCELERATE_USE_CPU=true" in message
    for variables in ({"ACCELERATE_USE_CPU": "True"}, {"CUDA_VISIBLE_DEVICES": "-1,-1"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert launch_checks.device_problems(variables) == []
    assert launch_checks.device_problems({"CUDA_VISIBLE_DEVICES": "0"}) == [message]


@pytest.fixture
def two_old_gpus(monkeypatch):
    facts = {"is_available": True, "device_count": 2, "is_bf16_supported": False, "get_device_name": "Tesla T4"}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value, including_emulation=True: value)


def test_missing_gpus_and_missing_bf16_are_refused(two_old_gpus, monkeypatch):
    launched = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "ACCELERATE_MIXED_PRECISION": "bf16"}
    few, old = launch_checks.device_problems(launched)
    assert "num_processes: 4 on this machine, which has 2 GPU(s)" in few
    assert "bf16 is emulated by Tesla T4; use fp16" in old
    on_cpu = launched | {"ACCELERATE_USE_CPU": "true"}
    assert launch_checks.device_problems(on_cpu | {"LOCAL_WORLD_SIZE": "2"}) == []
    (barrier,) = launch_checks.device_problems(on_cpu)
    assert "ACCELERATE_USE_CPU: 4 processes on this machine, which has 2 GPU(s); set CUDA_VISIBLE_DEVICES=-1" in barrier
    assert launch_checks.device_problems({"LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}) == []
    assert launch_checks.device_problems({}) == [], "python train.py starts one process"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert launch_checks.device_problems({"ACCELERATE_MIXED_PRECISION": "bf16"}) == []


def test_launch_for_absent_gpus_is_announced_once(monkeypatch, capsys):
    """Eight processes in bf16 would train on a CPU without a word."""
    monkeypatch.setattr(launch_checks, "NVIDIA_DEVICES", "/no/such/device")
    for flags, warned in (["--config_file", MULTI_GPU], True), (["--config_file", CPU], False), ([], False):
        monkeypatch.setattr(launch_checks.os, "environ", what_is_started(*flags))
        launch_checks.os.environ.pop("CUDA_VISIBLE_DEVICES" if warned else "", None)  # which hides GPUs from tests
        capsys.readouterr()
        for _ in range(2):
            launch_checks.check_launch(TrainConfig())
        warning = "no GPU was found, so 8 process(es) train on the CPU, with mixed_precision bf16; for a CPU use"
        assert capsys.readouterr().err == (f"warning: {warning} accelerate_configs/cpu.yaml\n" if warned else "")


def test_uses_cpu_reads_the_environment(two_old_gpus):
    assert not uses_cpu({})
    assert uses_cpu({"ACCELERATE_USE_CPU": "true"})


def test_mac_gpu_needs_an_explicit_choice(monkeypatch):
    """By default a Mac trains on its CPU, with one process as with several."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    chosen = {"ACCELERATE_TORCH_DEVICE": "mps"}
    assert uses_cpu({}) and uses_cpu({"WORLD_SIZE": "2"}) and not uses_cpu(chosen)
    monkeypatch.setattr(launch_checks, "NVIDIA_DEVICES", "/no/such/device")
    assert launch_checks.launch_problems(chosen, TrainConfig()) == []
    two = dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")
    refused = [(TrainConfig(exact=True), {}), (TrainConfig(compile=True), {}), (TrainConfig(), two)]
    refused += [(TrainConfig(activation_checkpointing=True), {})]
    for config, launched in refused:
        (problem,) = launch_checks.launch_problems(chosen | launched, config)
        assert problem.startswith("ACCELERATE_TORCH_DEVICE: mps, but ")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "no MPS in this torch" in launch_checks.launch_problems(chosen, TrainConfig())[0]


# Real launches


def launch(flags, runs, **env):
    program = [sys.executable, Path(sys.executable).parent / "accelerate", "launch"]
    command = [*program, *flags, "train.py", *TINY_STORIES, "--out_dir", runs]
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_launched_run_reports_all_problems_together(write_launch_file, runs):
    wrong = {"mixed_precision": "fp16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    done = launch(["--config_file", write_launch_file(CPU, **wrong), "--cpu"], runs)
    assert done.returncode == 1
    assert "returned non-zero exit status 2" in done.stderr, done.stderr
    assert done.stderr.count("train.py: error:") == 1
    assert not runs.exists()
    lines = done.stderr.partition("train.py: error:")[2].splitlines()[:4]
    for words in ("num_processes: one", "fp16 needs a GPU", "fp16 on_nonfinite: skip", "INDUCTOR --compile"):
        assert any(all(word in line for word in words.split(" ")) for line in lines), (words, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["--cpu", *TWO], TWO, ["--config_file", CPU, "--cpu"], [*MACHINES, "--machine_rank", "1"]],
    ids=" ".join,
)
def test_launched_run_refuses_fewer_processes(flags, runs):
    done = launch(flags, runs)
    assert done.returncode == 1
    assert "returned non-zero exit status 2" in done.stderr, done.stderr
    assert done.stderr.count(f"error: {ONE_PROCESS}") == 1
    assert not runs.exists()


@pytest.mark.slow
@pytest.mark.parametrize("answers", [answers for answers, message in QUESTIONNAIRE.items() if not message])
def test_launched_run_accepts_questionnaire_files(answers, runs):
    done = launch(
        ["--config_file", ROOT / "tests" / "support" / "launch_files" / f"questionnaire_{answers}.yaml"], runs
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Training finished.\n")
    assert f"{2 if answers in ('multi_gpu', 'fsdp2') else 1} x cpu" in done.stdout
    assert ("1 replica(s) x 2 shards" in done.stdout) == (answers == "fsdp2")
    assert ("precision: fp32" in done.stdout) == (answers == "cpu")


@pytest.mark.slow
def test_launcher_rendezvous_timeout_ends_the_launch(runs):
    """A machine whose peer never comes waits in torch's launcher, before any process of this repository starts."""
    done = launch(["--config_file", CPU, *MACHINES, "--machine_rank", "0", "--rdzv_conf", "timeout=5"], runs)
    assert done.returncode == 1
    assert "1/2 clients joined" in done.stderr, done.stderr


# Processes that were started with different settings


def test_different_settings_are_refused_on_all_processes(runs):
    """Each process would train on its own data; paths may differ."""

    def start_both(*theirs):
        env = environment(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        words = [*TINY_STORIES, "--steps", "2", "--out_dir", str(runs), "--name", "run"]
        launches = [
            Launch("train.py", [*words, *own], 0, env | {"RANK": rank, "LOCAL_RANK": rank})
            for rank, own in (("0", ()), ("1", theirs))
        ]
        code = launches[0].wait(120)
        launches[1].end()
        return code, launches[0].output()[1]

    code, err = start_both("--seed", "1", "--evaluation.num_samples", "9")
    assert code == 2
    assert not runs.exists()
    assert "evaluation.num_samples: 7 in process 0, 9 in process 1\n  seed: 0 in process 0, 1 in process 1\n" in err
    code, err = start_both("--data.num_workers", "1", "--out_dir", str(runs / "." / ".." / runs.name))
    assert code == 0, err
    copied = shutil.copytree(runs, runs.with_name("copied"))  # to the disk of another machine, with an earlier run
    code, err = start_both("--out_dir", str(copied))
    assert code == 2 and "is not the same directory on every machine of this run" in err


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_RANK PMI_SIZE"),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_RANK RANK WORLD_SIZE"),
    ],
    ids=str,
)
def test_variables_left_by_a_launcher_are_named(variables, named, runs):
    """torch, Accelerate and int() each raise another error."""
    done = train(*TINY_STORIES, "--out_dir", runs, exit_code=2, **variables)
    assert "Traceback" not in done.stderr and f"run `unset {named}`, or use accelerate launch" in done.stderr, (
        done.stderr
    )


@pytest.mark.parametrize("value", ["", "two", "0"])
def test_number_of_processes_is_a_positive_number(value, runs):
    """It is read before torch is imported."""
    done = train(*TINY_STORIES, "--out_dir", runs, exit_code=2, WORLD_SIZE=value)
    assert done.stderr.startswith("train.py: error: WORLD_SIZE: ") and done.stderr.count("\n") == 1
    assert "; unset it, or use accelerate launch" in done.stderr


def test_rank_without_other_processes_is_ignored(monkeypatch):
    """Otherwise its errors would be printed after 30 s, in which the main process could print them."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world.process_rank() == 0 and world.is_main_process()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world.process_rank() == 1 and not world.is_main_process()


@pytest.mark.slow
def test_processes_of_mpirun_are_refused(runs):
    """Accelerate joins them on a CPU, but each has been configured as the only process."""
    common = {"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [*map(str, TINY_STORIES), "--out_dir", str(runs), "--name", "run"]
    ranks = [environment(**common, OMPI_COMM_WORLD_RANK=rank) for rank in ("0", "1")]
    launches = [Launch("train.py", words, 0, env) for env in ranks]
    code = launches[0].wait(120)
    launches[1].end()
    message = "error: WORLD_SIZE: 1 process(es), but Accelerate started 2; use accelerate launch or torchrun"
    assert code == 2 and message in launches[0].output()[1], launches[0].output()
    assert not runs.exists()


ACCELERATOR = SimpleNamespace(mixed_precision="no", distributed_type="MULTI_CPU")


@pytest.fixture
def checked_processes(monkeypatch):
    """Settings of the processes that were checked before; the one that is checked now is process 0."""
    settings = []

    def gather_object(mine):
        settings[:0] = mine
        return settings

    monkeypatch.setattr(launch_checks, "gather_object", gather_object)
    return settings


def test_corpora_of_a_mixture_may_have_other_paths(checked_processes):
    def check(*mixes):
        checked_processes.clear()
        for mix in mixes:
            config = TrainConfig(data=DataConfig(source="text", mix=mix))
            launch_checks.check_same_settings(config, ACCELERATOR, "c0de")

    check({"/here/one": 2.0, "/here/two": 1.0}, {"/there/one": 2.0, "/there/two": 1.0})
    with pytest.raises(ConfigError, match=r"data.mix: \[3.0, 1.0\] in process 0, \[2.0, 1.0\] in process 1"):
        check({"/here/one": 2.0, "/here/two": 1.0}, {"/here/one": 3.0, "/here/two": 1.0})


def test_teacher_may_have_another_path_but_not_weights(checked_processes):
    def check(**teacher):
        config = TrainConfig(teacher=TeacherConfig(**teacher))
        launch_checks.check_same_settings(config, ACCELERATOR, "c0de")

    check(path="/here", hash="a")
    check(path="/there", hash="a")
    with pytest.raises(ConfigError, match="teacher.hash: b in process 0, a in process 1"):
        check(path="/there", hash="b")


@pytest.mark.parametrize("package", ["torch", "accelerate"])
def test_different_versions_are_refused(checked_processes, monkeypatch, package):
    """Their bits would differ, or one would wait forever in a collective operation that the other lacks."""
    launch_checks.check_same_settings(TrainConfig(), ACCELERATOR, "c0de")
    here = getattr(launch_checks, package).__version__
    monkeypatch.setattr(getattr(launch_checks, package), "__version__", "0.1")
    with pytest.raises(ConfigError, match=f"{package}: 0.1 in process 0, {re.escape(here)} in process 1"):
        launch_checks.check_same_settings(TrainConfig(), ACCELERATOR, "c0de")


def test_different_sharding_is_refused(checked_processes):
    """Each machine may have a launch file of its own; one that shards the weights would wait for the other forever."""
    launch_checks.check_same_settings(TrainConfig(), ACCELERATOR, "c0de")
    sharded = SimpleNamespace(
        mixed_precision="no", distributed_type=DistributedType.FSDP, parallelism_config=None, num_processes=2
    )
    with pytest.raises(ConfigError, match="shards: 2 in process 0, 1 in process 1"):
        launch_checks.check_same_settings(TrainConfig(), sharded, "c0de")


def test_different_code_is_refused(checked_processes, monkeypatch):
    """Two machines with other copies of the repository would train a mixture of both, and the replicas stay equal."""
    launch_checks.check_same_settings(TrainConfig(), ACCELERATOR, "c0de")
    monkeypatch.setattr(launch_checks.platform, "python_version_tuple", lambda: ("3", "0", "1"))
    with pytest.raises(ConfigError) as refused:
        launch_checks.check_same_settings(TrainConfig(), ACCELERATOR, "0ther")
    assert "\n  code: 0ther in process 0, c0de in process 1\n  python: 3.0 in process 0, 3." in str(refused.value)


OTHER_CODE = """
from runtime.cli import scripts
from runtime.distributed import launch_checks
launch_checks.gather_object = lambda own: [*own, own[0] | {"code": "another copy"}]
scripts.run_and_exit("train")
"""


def test_run_compares_the_code_of_its_processes(runs):
    done = forked.run("-c", [OTHER_CODE, *TINY_STORIES, "--out_dir", str(runs), "--name", "run"], 0, environment())
    assert done.returncode == 2 and not runs.exists()
    assert f"\n  code: {code_hash()} in process 0, another copy in process 1\n" in done.stderr
