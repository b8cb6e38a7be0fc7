"""What is asked of `accelerate launch` happens, or is refused: never another run than the one that was asked for."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from config.errors import ConfigError, RunError
from config.schema import DataConfig, TrainConfig
from distributed import launch_checks, rendezvous
from distributed.environment import normalize_environment
from distributed.launch import uses_cpu
from model import attention
from tests.conftest import ROOT, TINY_STORIES, environment, what_is_started
from tests.forked import Launch, free_port, run
from training.prepare_model import no_compiler

FILES = ROOT / "accelerate_configs"
CPU, MULTI_GPU, FSDP2, HSDP = (str(FILES / f"{name}.yaml") for name in ("cpu", "multi_gpu", "fsdp2", "hsdp"))
TWO = ["--num_processes", "2"]
MACHINES = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", "29511"]


def refusals(*flags, exact=False, **extra):
    """What a run says to such a launch."""
    told = what_is_started(*flags) | extra
    _, asked = launch_checks.parse_launch_command([*flags, "train.py"], str(ROOT))
    return "\n".join(
        launch_checks.dropped_processes(told, asked) + launch_checks.unsupported(told, asked, TrainConfig(exact=exact))
    )


@pytest.fixture
def launch_file(tmp_path):
    """A function that writes one, from another with changes."""

    def write(base, **changes):
        path = tmp_path / "launch.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(Path(base).read_text()) | changes))
        return str(path)

    return write


@pytest.mark.parametrize("path", sorted(FILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_launch_files_are_accepted(path):
    extra = ["--main_process_port", "29511"] if path.stem == "multi_node" else []
    assert refusals("--config_file", str(path), *extra) == ""


def test_restarts_that_would_not_happen_are_refused():
    alone = refusals("--cpu", "--max_restarts", "3")
    assert alone.startswith("max_restarts: 3 asked for, but") and alone.count("accelerate_configs/") == 2
    for launch_file in ("cpu", "one_gpu"):
        flags = ["--config_file", str(FILES / f"{launch_file}.yaml"), "--num_processes", "1", "--max_restarts", "3"]
        assert refusals(*flags, TORCHELASTIC_RUN_ID="none") == ""


def test_the_answers_to_the_questionnaire_are_read_unless_they_are_overruled(launch_file, monkeypatch):
    answers = launch_file(FILES / "cpu.yaml", num_processes=3)
    monkeypatch.setattr(launch_checks, "default_config_file", answers)
    path, asked = launch_checks.parse_launch_command(["train.py"], str(ROOT))
    assert (str(path), asked["num_processes"]) == (answers, 3)
    path, asked = launch_checks.parse_launch_command(["--num_processes", "4", "train.py"], str(ROOT))
    assert (str(path), asked["num_processes"]) == (answers, 4)
    path, asked = launch_checks.parse_launch_command(
        ["--cpu", "train.py"], str(ROOT)
    )  # then Accelerate does not read them
    assert path is None and "num_processes" not in asked


QUESTIONNAIRE = {  # what Accelerate 1.15 wrote for the answers in the name, and what we say to it
    **{"cpu": "", "one_gpu": "", "multi_gpu": "", "fsdp2": "", "fsdp1": "fsdp_version: 1 is not supported"},
    "multi_cpu": "num_processes: 2 on 1 machine(s) were asked for, but the launcher started 1",
}


@pytest.mark.parametrize("answers", QUESTIONNAIRE)
def test_files_of_the_questionnaire(answers):
    """With the empty class name that the questionnaire leaves for FSDP."""
    message = refusals("--config_file", str(ROOT / "tests" / "launch_files" / f"questionnaire_{answers}.yaml"))
    assert QUESTIONNAIRE[answers] in message and bool(message) == bool(QUESTIONNAIRE[answers])


@pytest.mark.parametrize(
    "flags",
    [TWO, ["--cpu", *TWO], ["--config_file", CPU, "--cpu"], [*MACHINES, "--machine_rank", "1"], [*TWO, *MACHINES]],
    ids=" ".join,
)
def test_fewer_processes_than_asked_for_are_refused(flags):
    message = refusals(*flags)
    count = 2 if "--config_file" in flags or "--num_processes" in flags else 1
    assert f"num_processes: {count} on" in message and "the launcher started 1." in message
    assert f"accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes {count} " in message
    assert ("--main_process_ip" in message) == ("--num_machines" in flags)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--gradient_accumulation_steps", "4"], ["gradient_accumulation_steps: 4", "global_batch_size"]),
        (["--parallelism_config_cp_size", "2"], ["parallelism_config_cp_size: 2", "use 1"]),
        (["--parallelism_config_tp_size", "2"], ["parallelism_config_tp_size: 2"]),
        (["--parallelism_config_dp_shard_size", "2"], ["x parallelism_config_dp_shard_size: 2", "needs", "FSDP"]),
        (["--dynamo_backend", "inductor"], ["dynamo_backend: INDUCTOR", "--compile true"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_a_run_does_itself_or_not_at_all_is_refused_on_the_command_line(flags, words):
    message = refusals("--config_file", CPU, *flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"fsdp_version": 1}, ["fsdp_version: 1", "2"]),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, ["SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP"]),
        ({"fsdp_transformer_layer_cls_to_wrap": "Block,Blok"}, ["fsdp_transformer_layer_cls_to_wrap: Blok", "Block"]),
        ({"fsdp_activation_checkpointing": True}, ["fsdp_activation_checkpointing", "--activation_checkpointing true"]),
        ({"fsdp_ignored_modules": "token_embedding"}, ["fsdp_ignored_modules", "remove"]),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, ["fsdp_reshard_after_forward: full_shard", "true or false"]),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]),
        ({"fsdp_offload_params": True}, ["fsdp_offload_params", "no GPU"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_sharding_that_would_be_another_is_refused(changes, words, launch_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = launch_file(FSDP2, fsdp_config=yaml.safe_load(Path(FSDP2).read_text())["fsdp_config"] | changes)
    message = refusals("--config_file", file)
    assert message.count("\n") == 0 and all(word in message for word in words), message


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((2, 4, 1), ["dp_replicate_size: 2 x parallelism_config_dp_shard_size: 4", "num_processes: 4"]),
        ((4, 1, 1), ["shards nothing", "MULTI_GPU"]),
        ((2, 2, 2), ["parallelism_config_tp_size: 2"]),
    ],
)
def test_replicas_and_shards_are_those_of_the_processes(sizes, words, launch_file):
    names = [f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp")]
    message = refusals("--config_file", launch_file(HSDP, parallelism_config=dict(zip(names, sizes, strict=True))))
    assert message.count("\n") == 0 and all(word in message for word in words), message


def test_exact_is_refused_where_models_are_sharded():
    message = refusals("--config_file", FSDP2, exact=True)
    assert "exact: true" in message and "MULTI_GPU" in message
    assert refusals("--config_file", CPU, exact=True) == ""


@pytest.mark.parametrize("name", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"])
def test_engines_that_are_not_ours_are_refused(name):
    message = refusals("--config_file", CPU, **{name: "true"})
    assert name.removeprefix("ACCELERATE_USE_") in message and "FSDP" in message


def test_fp8_is_refused():
    assert "mixed_precision: fp8" in refusals("--config_file", CPU, ACCELERATE_MIXED_PRECISION="fp8")


# What a run makes of the devices


def test_a_gpu_that_cannot_be_used_is_said(monkeypatch):
    monkeypatch.setattr(launch_checks, "NVIDIA_DEVICES", str(ROOT / "train.p[y]"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "init", init)
    (message,) = launch_checks.missing_devices({})
    assert "driver on your system is too old; to train on the CPU, set ACCELERATE_USE_CPU=true" in message
    for asked in ({"ACCELERATE_USE_CPU": "True"}, {"CUDA_VISIBLE_DEVICES": "-1,-1"}, {"CUDA_VISIBLE_DEVICES": ""}):
        assert launch_checks.missing_devices(asked) == []
    assert launch_checks.missing_devices({"CUDA_VISIBLE_DEVICES": "0"}) == [message]


def test_gpus_that_are_too_few_or_too_old_are_said(monkeypatch):
    facts = {"is_available": True, "device_count": 2, "get_device_capability": (7, 5), "get_device_name": "Tesla T4"}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    told = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "ACCELERATE_MIXED_PRECISION": "bf16"}
    few, old = launch_checks.missing_devices(told)
    assert "num_processes: 4 on this machine, which has 2 GPU(s)" in few
    assert "bf16 needs compute capability 8.0, and Tesla T4 has 7.5; use fp16" in old
    assert launch_checks.missing_devices(told | {"ACCELERATE_USE_CPU": "true"}) == []
    assert launch_checks.missing_devices({"LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch_checks.missing_devices({}) == [], "python train.py starts one process"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert launch_checks.missing_devices({"ACCELERATE_MIXED_PRECISION": "bf16"}) == [], "an A100 is not too old"
    assert not uses_cpu({}) and uses_cpu({"ACCELERATE_USE_CPU": "true"})
    with pytest.raises(ConfigError, match="ACCELERATE_USE_CPU: 'maybe' of the environment must be true or false"):
        uses_cpu({"ACCELERATE_USE_CPU": "maybe"})


# Real launches


def launch(flags, runs, **env):
    program = [sys.executable, Path(sys.executable).parent / "accelerate", "launch"]
    command = [*program, *flags, "train.py", *TINY_STORIES, "--out_dir", runs]
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=300
    )


def test_a_real_launch_of_what_cannot_be_honoured_is_refused(launch_file, runs):
    """All that is wrong with its file and its flags in one message."""
    wrong = {"mixed_precision": "fp16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}, "fsdp_config": {"fsdp_x": 2}}
    done = launch(["--config_file", launch_file(CPU, **wrong), "--cpu"], runs)
    assert done.returncode == 1 and "returned non-zero exit status 2" in done.stderr, done.stderr
    assert done.stderr.count("train.py: error:") == 1 and not runs.exists()
    lines = done.stderr.partition("train.py: error:")[2].splitlines()[:4]
    for words in ("fsdp_config.fsdp_x", "num_processes: 2 on 1", "fp16 on_nonfinite: skip", "INDUCTOR --compile"):
        assert any(all(word in line for word in words.split(" ")) for line in lines), (words, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["--cpu", *TWO], TWO, ["--config_file", CPU, "--cpu"], [*MACHINES, "--machine_rank", "1"]],
    ids=" ".join,
)
def test_a_real_launch_of_fewer_processes_is_refused(flags, runs):
    done = launch(flags, runs)
    assert done.returncode == 1 and "returned non-zero exit status 2" in done.stderr, done.stderr
    assert len(re.findall("error: num_processes: . on . machine", done.stderr)) == 1 and not runs.exists()


@pytest.mark.slow
@pytest.mark.parametrize("answers", [answers for answers, message in QUESTIONNAIRE.items() if not message])
def test_a_real_launch_by_a_file_of_the_questionnaire(answers, runs):
    done = launch(["--config_file", ROOT / "tests" / "launch_files" / f"questionnaire_{answers}.yaml"], runs)
    assert done.returncode == 0 and done.stdout.endswith("Training finished.\n"), done.stderr
    assert f"{2 if answers in ('multi_gpu', 'fsdp2') else 1} x cpu" in done.stdout
    assert ("1 replica(s) x 2 shards" in done.stdout) == (answers == "fsdp2")
    assert ("precision: fp32" in done.stdout) == (answers == "cpu")


@pytest.mark.slow
def test_a_machine_whose_peer_never_comes_ends_when_it_is_told_to(runs):
    """By torch's launcher, before any process of ours: what docs/launching.md says of it."""
    done = launch(["--config_file", CPU, *MACHINES, "--machine_rank", "0", "--rdzv_conf", "timeout=5"], runs)
    assert done.returncode == 1 and "1/2 clients joined" in done.stderr, done.stderr


# Processes that no launcher of torch has started


def test_what_mpirun_says_is_taken_over():
    told = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PATH": "/bin"}
    told |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    normalize_environment(told)
    expected = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "PATH": "/bin"}
    assert told.items() >= expected.items()
    intel = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    with pytest.raises(ConfigError, match="PMI_SIZE: 2 processes, but MASTER_ADDR of the environment is not set"):
        normalize_environment(dict(intel))
    there = intel | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    normalize_environment(there)
    assert (there["RANK"], there["LOCAL_RANK"], there["MASTER_PORT"]) == ("1", "0", "1234")


def test_launchers_of_torch_come_before_mpi():
    for told in ({}, {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        before = dict(told)
        normalize_environment(told)
        assert told == before
    told = {"WORLD_SIZE": "1", "RANK": "0", "PMI_SIZE": "2"}
    normalize_environment(told)
    assert told == {"WORLD_SIZE": "1", "RANK": "0"}, "for Accelerate would believe the rest"
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT"):
        normalize_environment({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"RANK": "2"}, "RANK: 2 of the environment, but WORLD_SIZE is 2; ranks are counted from 0"),
        ({"WORLD_SIZE": "0"}, "RANK: 1 of the environment, but WORLD_SIZE is 0"),
        ({"WORLD_SIZE": ""}, "RANK: 1 of the environment, but WORLD_SIZE is not set"),
        ({"MASTER_PORT": "tcp"}, "MASTER_PORT: 'tcp' of the environment is no whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: '70000' of the environment is no whole number below 65,536"),
    ],
    ids=lambda value: " ".join(map("=".join, value.items())) if isinstance(value, dict) else "",
)
def test_processes_that_are_counted_wrong_are_told_so(wrong, message):
    """By hand or by a script with a variable that is empty: not with a traceback, or after ten minutes of waiting."""
    told = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=message):
        normalize_environment(told | wrong)


def test_processes_of_mpirun_train_together_and_what_does_not_fit_them_is_said(runs):
    def mpirun(*arguments):
        port, launches = str(free_port()), []
        for rank in ("0", "1"):
            told = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank, "MASTER_PORT": port}
            words = [str(word) for word in (*TINY_STORIES, "--out_dir", runs, "--name", "run", *arguments)]
            launches.append(Launch("train.py", words, 0, environment(**told)))
        code = launches[0].wait(120)
        launches[1].end()  # as mpirun does
        return code, *launches[0].output()

    code, out, err = mpirun("--steps", 3, "--schedule.warmup_steps", 0)
    assert code == 0 and "2 x cpu" in out and "2 processes x 3 accumulation" in out, err
    code, _, err = mpirun("--global_batch_size", 5)
    assert code == 2 and "global_batch_size: 5 is not a multiple" in err


def test_processes_of_different_settings_are_refused(runs):
    """Each would add up its own data, and the run be that of neither; where things lie may differ."""

    def start_both(*theirs):
        told = environment(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        words = [*TINY_STORIES, "--steps", "2", "--out_dir", str(runs), "--name", "run"]
        launches = [
            Launch("train.py", [*words, *own], 0, told | {"RANK": rank, "LOCAL_RANK": rank})
            for rank, own in (("0", ()), ("1", theirs))
        ]
        code = launches[0].wait(120)
        launches[1].end()
        return code, launches[0].output()[1]

    code, err = start_both("--seed", "1", "--evaluation.num_samples", "9")
    assert code == 2 and not runs.exists()
    assert "evaluation.num_samples: 7 in process 0, 9 in process 1\n  seed: 0 in process 0, 1 in process 1\n" in err
    code, err = start_both("--data.num_workers", "1", "--out_dir", str(runs / "." / ".." / runs.name))
    assert code == 0, err


@pytest.fixture
def earlier(monkeypatch):
    """What the processes have told that were checked before; the one that is checked now is process 0."""
    settings = []

    def gather_object(mine):
        settings[:0] = mine
        return settings

    monkeypatch.setattr(launch_checks, "gather_object", gather_object)
    return settings


def test_the_corpora_of_a_mixture_may_lie_elsewhere_on_each_machine(earlier):
    def told(*mixes):
        earlier.clear()
        for mix in mixes:
            config = TrainConfig(data=DataConfig(source="text", mix=mix))
            launch_checks.check_same_settings(config, SimpleNamespace(mixed_precision="no"))

    told({"/here/one": 2.0, "/here/two": 1.0}, {"/there/one": 2.0, "/there/two": 1.0})
    with pytest.raises(ConfigError, match=r"data.mix: \[3.0, 1.0\] in process 0, \[2.0, 1.0\] in process 1"):
        told({"/here/one": 2.0, "/here/two": 1.0}, {"/here/one": 3.0, "/here/two": 1.0})


@pytest.mark.parametrize("package", ["torch", "accelerate"])
def test_processes_of_other_versions_are_refused(earlier, monkeypatch, package):
    """Their bits would differ, or the run wait for ever in an exchange that the other one does not know."""
    launch_checks.check_same_settings(TrainConfig(), SimpleNamespace(mixed_precision="no"))
    here = getattr(launch_checks, package).__version__
    monkeypatch.setattr(getattr(launch_checks, package), "__version__", "0.1")
    with pytest.raises(ConfigError, match=f"{package}: 0.1 in process 0, {re.escape(here)} in process 1"):
        launch_checks.check_same_settings(TrainConfig(), SimpleNamespace(mixed_precision="no"))


def test_a_machine_without_fcntl_is_told_where_this_runs():
    code = "import sys, runpy; sys.modules['fcntl'] = None; runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Linux and macOS" in done.stderr and "WSL" in done.stderr
    assert done.stderr.count("\n") == 1


def test_who_is_waited_for_is_said_and_the_wait_ends(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "SILENT_SECONDS", 0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match="waited 1 s for all 3 processes"):
        rendezvous.fresh_store(0, 3, 1)
    assert "still waiting for process(es) [1, 2] to be started, on 127.0.0.1" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match="process 1 finds no meeting place at MASTER_ADDR 127.0.0.1"):
        rendezvous.fresh_store(1, 2, 1)


NOTEBOOK = f"""
from accelerate import notebook_launcher
from cli.scripts import run_in_notebook
words = [*{TINY_STORIES!r}, "--name", "run", "--out_dir", OUT, *MORE]
notebook_launcher(run_in_notebook, ("train", *words), PROCESSES, mixed_precision="bf16", use_port=PORT)
print("the notebook goes on")
"""


def run_notebook(runs, processes, *more):
    """The kernel is a fork, and several processes are forks of it, as always in a notebook."""
    told = f"OUT, PROCESSES, PORT, MORE = {str(runs)!r}, {processes}, {str(free_port())!r}, {more}"
    return run("-c", [told + NOTEBOOK], 0, environment())


def test_two_processes_from_a_notebook(runs):
    done = run_notebook(runs, 2)
    assert done.returncode == 0 and done.stdout.endswith("the notebook goes on\n"), done.stdout + done.stderr
    assert "2 x cpu" in done.stdout and "precision: bf16" in done.stdout and "Training finished." in done.stdout


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "more, message",
    [
        (("--optimizer.lr", "-1"), "train.py: error: optimizer.lr: -1 must be a number of at least 0"),
        (("--stop_after", "2"), "stopped as asked after step 2; the same command goes on from there"),
    ],
    ids=["wrong", "stopped"],
)
def test_a_cell_whose_training_does_not_come_to_its_end_fails_with_one_message(more, message, processes, runs):
    """The second of two processes says nothing, also not after its wait for the first to fail."""
    done = run_notebook(runs, processes, *more)
    assert done.returncode and "the notebook goes on" not in done.stdout
    assert (done.stdout + done.stderr).count(message) == 1 and done.stderr.count("train.py: error") < 2, done.stderr


def test_without_triton_nothing_is_compiled_for_a_gpu(monkeypatch):
    monkeypatch.setattr(attention, "HAS_TRITON", False)
    assert no_compiler(torch.device("cuda")) == "no Triton" and no_compiler(torch.device("cpu")) != "no Triton"


def test_importing_train_loads_nothing_that_is_slow_and_not_always_needed():
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo")
    slow += ("transformers", "datasets", "wandb", "matplotlib")
    code = f"import sys, train, model.hf; print([name for name in sys.modules if name.startswith({slow})])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_imported_leaves_a_gpu_to_forks():
    """A process that has looked for a GPU has none in its forks, as a notebook makes them, and tests/forked.py."""
    code = "import torch; torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = lambda: 1 / 0\n"
    code += "import train, verify, replay, sample, export, evaluate, checkpoint.storage"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
