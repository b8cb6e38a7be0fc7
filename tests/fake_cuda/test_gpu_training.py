"""Training by launch file on the fake devices of README.md: one GPU, DDP of two, FSDP2 of two.

Losses are those of the CPU, the host waits for nothing but the result of the step before, and nothing is copied from
pageable memory.
"""

import functools
import shutil

import pytest

from tests.conftest import TINY_STORIES, rewind, train
from tests.fake_cuda.launch import SETTINGS, Trained, train_on_gpus

LAUNCHES = {"one_gpu": 1, "multi_gpu": 2, "fsdp2": 2}
READ_OF_STEP_BEFORE = ("event", "trainer/results.py")


def train_on_cpu(*arguments, out_dir):
    done = train(*TINY_STORIES, *SETTINGS, *arguments, "--out_dir", out_dir)
    return Trained(out_dir / "run", done.stdout, done.stderr, {})


def assert_same_training(run: Trained, cpu: Trained):
    assert run.losses == pytest.approx(cpu.losses, rel=1e-6)
    assert run.grad_norms == pytest.approx(cpu.grad_norms, rel=1e-5)


def assert_steady(run: Trained, processes: int, *kernels: str):
    """In three steps the host waits twice, for the result of the step before; attention takes these kernels."""
    problems = {event: count for event, count in run.events.items() if event[0] in ("sync", "copy", "hazard")}
    assert run.of_kind("sync", "copy", "hazard") == {READ_OF_STEP_BEFORE}, problems
    assert sum(problems.values()) == 2 * processes, problems
    assert {kernel for kernel, _ in run.of_kind("attention")} == {*kernels}, run.events


@pytest.fixture(scope="module")
def cpu(folder):
    return train_on_cpu(out_dir=folder / "cpu")


@pytest.fixture(scope="module")
def on_gpus(folder):
    """Return the float32 run of a launch file."""
    return functools.cache(lambda name: train_on_gpus(name, LAUNCHES[name], out_dir=folder / name))


@pytest.mark.parametrize("launch_file, processes", LAUNCHES.items())
def test_losses_equal_cpu(launch_file, processes, cpu, on_gpus):
    """With dropout: each micro-batch has its own seed, so the number of processes changes no mask."""
    run = on_gpus(launch_file)
    assert f"{processes} x NVIDIA H100" in run.stdout
    assert "arning" not in run.stderr, run.stderr
    assert_same_training(run, cpu)
    assert_steady(run, processes, "efficient")


@pytest.mark.slow
def test_bf16_takes_flash_attention(on_gpus, folder):
    run = train_on_gpus("fsdp2", 2, out_dir=folder / "bf16", precision="bf16")
    assert run.losses == pytest.approx(on_gpus("fsdp2").losses, rel=1e-3)
    assert run.losses != on_gpus("fsdp2").losses
    assert_steady(run, 2, "flash")


@pytest.mark.parametrize("launch_file", [pytest.param("one_gpu", marks=pytest.mark.slow), "multi_gpu"])
def test_resume_with_dropout_gives_same_digest(launch_file, on_gpus, folder):
    out_dir = folder / "resumed" / launch_file
    rewind(shutil.copytree(on_gpus(launch_file).directory, out_dir / "run"), 4)
    run = train_on_gpus(launch_file, LAUNCHES[launch_file], out_dir=out_dir)
    assert "resumed at step 4 from" in run.stdout
    assert run.digest == on_gpus(launch_file).digest


@pytest.mark.slow
def test_exact_digest_ignores_number_of_gpus(folder):
    one, two = (
        train_on_gpus(name, LAUNCHES[name], "--exact", "true", out_dir=folder / "exact" / name, precision="bf16")
        for name in ("one_gpu", "multi_gpu")
    )
    assert one.digest == two.digest
    assert one.losses == two.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "packing, kernel", [("concat", "efficient"), ("padded", "efficient"), ("isolated", "efficient, dense mask")]
)
def test_text_with_workers_trains_as_on_cpu(packing, kernel, corpus, folder):
    settings = ["--data.source", "text", "--data.path", corpus, "--data.packing", packing]
    run = train_on_gpus("one_gpu", 1, *settings, "--data.num_workers", 1, "--tf32", "true", out_dir=folder / packing)
    assert "precision: fp32, TF32\n" in run.stdout
    assert_same_training(run, train_on_cpu(*settings, out_dir=folder / f"{packing}_cpu"))
    assert_steady(run, 1, kernel)
