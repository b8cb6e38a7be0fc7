"""More ways to train, the other scripts, and the tests marked `cuda`, on the fake devices of README.md."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from tests.conftest import ROOT, TINY_STORIES, environment, rewind
from tests.fake_cuda.launch import fake_gpus, train_on_gpus
from tests.fake_cuda.test_gpu_training import assert_same_training, assert_steady, train_on_cpu
from tests.support import forked

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]
EIGHT = ["--global_batch_size", 8]
WIDE = ["--model.dropout", 0, "--model.d_model", 32]  # heads of 16, which flex attention supports


@pytest.mark.parametrize(
    "launch_file, processes, settings",
    [
        ("hsdp", 4, EIGHT),
        ("multi_gpu", 8, EIGHT),
        ("multi_gpu", 2, ["--evaluation.ema_decay", 0.9]),
        ("one_gpu", 1, ["--compile", "true", "--activation_checkpointing", "true", "--model.dropout", 0]),
        ("fsdp2", 2, ["--compile", "true", "--chunked_loss", "true"]),
        ("one_gpu", 1, ["--tracking.block_stats", "true"]),
    ],
)
def test_losses_equal_cpu(launch_file, processes, settings, tmp_path):
    run = train_on_gpus(launch_file, processes, *settings, out_dir=tmp_path)
    assert_same_training(run, train_on_cpu(*settings, out_dir=tmp_path / "cpu"))
    assert "UserWarning" not in run.stderr and "FutureWarning" not in run.stderr, run.stderr
    assert_steady(run, processes, *([] if "--compile" in settings else ["efficient"]))
    if processes > 1:
        assert run.of_kind("group") == {("timeout 120 s", "")}


def test_muon_losses_are_close_to_cpu(tmp_path):
    """Muon multiplies in bfloat16 on a GPU."""
    muon = ["--optimizer.name", "muon"]
    cpu = train_on_cpu(*muon, out_dir=tmp_path / "cpu")
    for launch_file, processes in (("one_gpu", 1), ("fsdp2", 2)):
        run = train_on_gpus(launch_file, processes, *muon, out_dir=tmp_path / launch_file)
        assert run.losses == pytest.approx(cpu.losses, rel=2e-3)
        assert_steady(run, processes, "efficient")


def test_fp16_skips_overflow_and_resumes(tmp_path):
    fp16 = ["--on_nonfinite", "skip"]
    run = train_on_gpus("multi_gpu", 2, *fp16, out_dir=tmp_path / "whole", precision="fp16")
    assert run.losses == pytest.approx(train_on_cpu(*fp16, out_dir=tmp_path / "cpu").losses, rel=5e-3)
    rewind(shutil.copytree(run.directory, tmp_path / "resumed" / "run"), 4)
    resumed = train_on_gpus("multi_gpu", 2, *fp16, out_dir=tmp_path / "resumed", precision="fp16")
    assert "resumed at step 4" in resumed.stdout and resumed.digest == run.digest


@pytest.mark.parametrize("settings", [["--data.packing", "isolated"], ["--model.window", 32]])
def test_flex_attention_equals_cpu(settings, corpus, tmp_path):
    settings = [*WIDE, *settings, "--data.source", "text", "--data.path", corpus, "--model.position", "rope"]
    run = train_on_gpus("one_gpu", 1, *settings, out_dir=tmp_path)
    assert_same_training(run, train_on_cpu(*settings, out_dir=tmp_path / "cpu"))
    assert run.of_kind("sync") == {("event", "trainer/results.py")}


def test_logged_step_waits_once_per_kind_of_result(tmp_path):
    """Not for each block, call and name; the evaluation of stories waits for each batch, to score its tokens."""
    settings = "--tracking.log_every 2 --tracking.block_stats true --evaluation.every 6 --model.n_layers 4".split()
    run = train_on_gpus("fsdp2", 2, *settings, out_dir=tmp_path)
    waits: Counter[str] = Counter()
    for (kind, _, place), count in run.events.items():
        waits[place.partition(":")[0]] += count / 2 * (kind == "sync")
    assert waits["trainer/block_stats.py"] == 2, "norms and activations"
    assert waits["trainer/evaluation.py"] == 1 and waits["data/synthetic/excess.py"] == 2, run.events


@pytest.fixture(scope="module")
def run(folder):
    return train_on_gpus("one_gpu", 1, "--model.dropout", 0, out_dir=folder / "for_scripts").directory


def outcome(script, *arguments, processes=0, gpus=1, cpu=False):
    env = environment() if cpu else fake_gpus(gpus)
    done = forked.run(script, [str(word) for word in arguments], processes, env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("processes", [0, 2])
def test_verify_passes(processes, tmp_path):
    printed = outcome("verify.py", *TINY_STORIES, "--out_dir", tmp_path, processes=processes, gpus=2)
    assert f"{max(1, processes)} x cuda" in printed and printed.endswith("Everything holds.\n")


def test_sample_equals_cpu(run):
    words = [run, "--max_new_tokens", 20, "--temperature", 0]
    assert outcome("sample.py", *words) == outcome("sample.py", *words, cpu=True)


def test_evaluate_equals_cpu(run, tmp_path):
    losses = []
    for cpu in (False, True):
        outcome("evaluate.py", run, "--out", tmp_path / str(cpu), cpu=cpu)
        losses.append(json.loads((tmp_path / str(cpu) / "evaluation.json").read_text())["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_export_equals_cpu(run, tmp_path):
    for cpu in (False, True):
        outcome("export.py", run, tmp_path / str(cpu), cpu=cpu)
    ours, theirs = ((tmp_path / str(cpu) / "model.safetensors").read_bytes() for cpu in (False, True))
    assert ours == theirs


def programs(gpus: int) -> dict[str, str]:
    """Environment in which every Python program has fake GPUs from its start."""
    return fake_gpus(gpus, PYTHONPATH=os.pathsep.join([str(ROOT / "tests/fake_cuda/site"), str(ROOT)]))


def test_launched_programs_train(tmp_path):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/multi_gpu.yaml"]
    command = [sys.executable, *launcher, "--num_processes", "2", "train.py", *TINY_STORIES, "--out_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=programs(2), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "2 x NVIDIA H100" in done.stdout, done.stdout + done.stderr


def test_trial_needs_no_second_gpu():
    """It trains its two processes on the CPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.trial"], cwd=ROOT, env=programs(1), capture_output=True, text=True
    )
    assert done.returncode == 0 and "resumed run: the same metrics" in done.stdout, done.stdout + done.stderr


def test_inductor_fuses_block_and_loss(tmp_path):
    """A change that breaks fusion changes these numbers; products and attention alone are not Triton's."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "triton==3.9.0"]
    if subprocess.run(install).returncode:
        pytest.skip("Triton cannot be installed")
    env = fake_gpus(1, PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    command = [sys.executable, "tests/fake_cuda/inductor.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    generated = json.loads(done.stdout.splitlines()[-1])
    assert generated["kernels"] == {"forward": 8, "backward": 12, "loss": 2}
    assert generated["failed"] == []
    attention = "torch.ops.aten._scaled_dot_product_flash_attention"
    products = {"extern_kernels.addmm": 6, "extern_kernels.mm": 12}
    assert generated["called"] == products | {f"{attention}.default": 1, f"{attention}_backward.default": 1}
