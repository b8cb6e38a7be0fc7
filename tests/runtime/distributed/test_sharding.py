"""FSDP2 and hybrid sharding by launch file train as DDP does, with each process holding a part of the model."""

import re
import shutil
import subprocess

import pytest
import torch

from runtime.distributed.state_hash import digest_tensors
from tests.conftest import (
    ROOT,
    TINY_STORIES,
    assert_same_bits,
    environment,
    metrics,
    rewind,
    tensors,
    train,
    train_command,
    what_is_started,
)
from tests.support import forked
from trainer.checkpoint.unshard import whole_tensors
from trainer.pretrained.load import find_checkpoint

LAUNCH_FILES = ROOT / "accelerate_configs"
STEPS = 8
# Eight micro-batches per step; one batch of generations, so that one process generates and the others do not.
WORDS = (
    "--name run --global_batch_size 8 --checkpoint.every 2 --evaluation.num_scored_generations 40 --timeout_seconds 60"
)
RUN = [*TINY_STORIES, *WORDS.split()]


def launcher_environment(kind, *flags):
    """Return the variables that `accelerate launch` with this file and these flags sets."""
    started = what_is_started("--config_file", str(LAUNCH_FILES / f"{kind}.yaml"), *flags)
    return {name: started[name] for name in started if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}


def sharded(kind, processes, *arguments, precision="no", **options):
    env = launcher_environment(kind, "--mixed_precision", precision, "--num_processes", str(processes))
    return train(*arguments, processes=processes, **env, **options)


def stories(done):
    return [line for line in done.stdout.splitlines() if line.startswith("  | ")]


def rows_agree(ours, theirs, rel):
    """Compare metrics but not digests, since bits may differ."""
    for mine, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert mine.keys() == other.keys() and mine.pop("state/digest") and other.pop("state/digest")
        assert mine == pytest.approx(other, rel=rel, abs=1e-12)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """A DDP run on two processes: its directory and the completed process."""
    out_dir = tmp_path_factory.mktemp("ddp")
    return out_dir / "run", train(*RUN, "--out_dir", out_dir, processes=2)


def launched(kind, processes, out_dir, in_forks=False):
    """Train under the real launcher, as a program or as a fork; each process prints how much state it holds."""
    words = [*RUN, "--out_dir", out_dir]
    launch_file = LAUNCH_FILES / f"{kind}.yaml"
    command = train_command(
        *words, processes=processes, launch_file=launch_file, script="tests/programs/faulty_train.py"
    )
    command[command.index("--max_restarts") : command.index("--max_restarts")] = ["--mixed_precision", "no"]
    env = environment(FAULTS="weigh:all:3")
    if in_forks:
        done = forked.run(command[1], command[2:], 0, env)
    else:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not re.search("warning", done.stderr, re.IGNORECASE), done.stdout + done.stderr
    return out_dir / "run", done


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory):
    return launched("fsdp2", 2, tmp_path_factory.mktemp("fsdp2"), in_forks=True)


def assert_sharded_like_ddp(kind, processes, run, done, ddp):
    """Each process holds only its part of the weights and moments; the metrics are those of DDP."""
    held = re.findall(r"process (\d) holds (\d+) weights and (\d+) moments", done.stdout)
    assert sorted(int(rank) for rank, *_ in held) == list(range(processes))
    num_weights = int(re.search("([\\d,]+) parameters", done.stdout)[1].replace(",", ""))
    shards = 2 if kind == "hsdp" else processes
    weights, moments = ([int(of) for of in group] for group in list(zip(*held, strict=True))[1:])
    assert sum(weights) == num_weights * processes // shards and max(weights) < 1.02 * num_weights / shards
    assert moments == [2 * count for count in weights]
    rows_agree(run, ddp[0], rel=2e-6)
    assert stories(done) == stories(ddp[1]) and stories(done)
    checkpoint, manifest = find_checkpoint(run)
    digest = str(digest_tensors(whole_tensors(checkpoint, manifest)))
    assert manifest.metrics["state/digest"] == digest, (
        "the digest summed over shards differs from that of whole tensors"
    )


@pytest.mark.slow
def test_fsdp2_launch_file_shards(fsdp2, ddp):
    assert "2 x cpu, 1 thread(s) each, gloo, 1 replica(s) x 2 shards\n    precision: fp32\n" in fsdp2[1].stdout
    assert_sharded_like_ddp("fsdp2", 2, *fsdp2, ddp)


@pytest.mark.slow
def test_fsdp2_trains_on_after_evaluating_ema(runs):
    """Without a save or generations after the evaluation, which would reshard the gathered EMA weights."""
    words = [*TINY_STORIES, "--name", "run", "--evaluation.ema_decay", 0.9, "--evaluation.every", 2]
    words += ["--steps", 4, "--checkpoint.every", 4, "--model.dropout", 0]
    sharded("fsdp2", 2, *words, "--out_dir", runs / "fsdp2")
    train(*words, "--out_dir", runs / "ddp", processes=2)
    rows_agree(runs / "fsdp2" / "run", runs / "ddp" / "run", rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_launch_file_shards_over_four_processes(kind, runs, ddp):
    assert_sharded_like_ddp(kind, 4, *launched(kind, 4, runs), ddp)


@pytest.mark.slow
def test_runs_resume_between_ddp_fsdp2_and_hsdp(runs, ddp, fsdp2):
    """DDP -> FSDP2 -> hybrid -> one process, each for two steps; and FSDP2 -> FSDP2 with the same bits."""
    out = ["--out_dir", runs]
    run = runs / "run"
    outputs = [
        train(*RUN, *out, "--stop_after", 2, processes=2, exit_code=1).stdout,
        sharded("fsdp2", 2, *RUN, *out, "--stop_after", 4, exit_code=1).stdout,
        sharded("hsdp", 4, *RUN, *out, "--stop_after", 6, exit_code=1).stdout,
        train(*RUN, *out).stdout,
    ]
    assert (
        "2 shards instead of 1:" in outputs[1] and "4 x cpu" in outputs[2] and "2 replica(s) x 2 shards" in outputs[2]
    )
    assert "resumed at step 6" in outputs[3]
    rows_agree(run, ddp[0], rel=2e-6)
    shards_again = ["--out_dir", runs / "again"]
    shutil.copytree(fsdp2[0], runs / "again" / "run")
    rewind(runs / "again" / "run", 4)
    assert "resumed at step 4" in sharded("fsdp2", 2, *RUN, *shards_again).stdout
    assert_same_bits(tensors(runs / "again" / "run", STEPS), tensors(fsdp2[0], STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("kind, processes", [("fsdp2", 2), ("hsdp", 4)])
def test_bf16_sharding_sums_gradients_in_float32(kind, processes, runs):
    words = "--checkpoint.every 1 --steps 3 --model.dropout 0 --optimizer.grad_clip null".split()
    arguments = [*RUN, *words, "--evaluation.num_scored_generations", 0, "--out_dir"]
    done = sharded(kind, processes, *arguments, runs / "sharded", precision="bf16")
    assert "precision: bf16, weights gathered in bf16, stored weights and sums of gradients in fp32\n" in done.stdout
    train(*arguments, runs / "ddp", processes=2, ACCELERATE_MIXED_PRECISION="bf16")
    train(*arguments, runs / "fp32", processes=2)
    ours, ddp, fp32 = (metrics(runs / name / "run") for name in ("sharded", "ddp", "fp32"))
    assert [row["train/loss"] for row in ours] != [row["train/loss"] for row in fp32], "it did not compute in bf16"
    for mine, other in zip(ours, ddp, strict=True):
        assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
        assert mine["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=2e-2)
    averages = [x for name, x in tensors(runs / "sharded" / "run", 1).items() if name.endswith("exp_avg")]
    gradient = torch.cat(
        [(x / 0.1).flatten() for x in averages if x.dim() > 1]
    )  # exp_avg after one step is 0.1 * gradient
    gradient = gradient[gradient != 0]
    assert ((gradient.bfloat16() / gradient - 1).abs() < 1e-6).float().mean() < 0.5, "gradients were summed in bf16"


@pytest.mark.slow
def test_hsdp_replicas_are_compared(runs):
    done = sharded("hsdp", 4, *RUN, "--check_replicas_every", 1, "--out_dir", runs, exit_code=1, faults="flip:3:3")
    assert "step 3: the state differs between processes, in 1 of " in done.stderr, done.stderr
    assert "first in model.blocks.1.mlp.down_proj.weight: process(es) [0, 1] from process(es) [2, 3]" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind, processes", [("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)])
def test_verify_passes_under_launch_file(kind, processes, runs):
    launch_file = LAUNCH_FILES / f"{kind}.yaml"
    command = train_command(
        *TINY_STORIES, "--global_batch_size", 8, "--out_dir", runs,
        processes=processes, launch_file=launch_file, script="verify.py",
    )  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("Everything holds.\n"), done.stdout + done.stderr
    assert f"{processes} x cpu" in done.stdout and "bf16" in done.stdout
    assert ("PASS  replicas are equal" in done.stdout) == (kind == "hsdp")
