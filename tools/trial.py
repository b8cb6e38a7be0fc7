"""Kill, resume and verify a fork: python -m tools.trial [--verify_steps N] [--base COMMIT] [SETTINGS]... (make trial).

1. Train 20 steps on two CPU processes without a stop.
2. Train them again, kill both processes half-way and resume. This must give the same metrics and the same digest of
   all weights and moments.
3. Run verify.py.
4. Train two short runs at the default settings, with the working tree and with HEAD (or the commit that --base names),
   and say whether their results differ: they do after an edit in place, and do not after a new setting at its default.

The exit code is 0 if 1 to 3 hold, 2 if a setting is refused, and otherwise 1, and the last line names the reason. This
process imports no torch.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from model.settings import PositiveInt, Settings
from runtime.config.errors import ConfigError, RunError
from runtime.config.help import PASSED_ON
from runtime.config.parser import parse_config
from tools.experiment.change import ROOT, Checkouts, git, resolve_commits
from trainer.run.directory import Run

# A run of seconds with everything in it that could go wrong: dropout, accumulation (three micro-batches a step and
# process), stories of different lengths, and a training set that ends within a batch.
TINY = """--global_batch_size 6 --micro_batch_size 1 --seq_len 128 --model.n_layers 2 --model.d_model 16
    --model.n_heads 2 --model.d_ff 32 --model.dropout 0.1 --data.source stories --data.num_samples 20
    --optimizer.lr 0.01 --schedule.name cosine --schedule.warmup_steps 2 --evaluation.num_samples 7
    --evaluation.micro_batch_size 2 --evaluation.num_scored_generations 0 --evaluation.num_logged_generations 0
    --tracking.wandb disabled --tracking.log_every 1"""
# An evaluation after each step leaves time to kill the processes.
TRIAL = f"{TINY} --steps 20 --checkpoint.every 5 --evaluation.every 1"
# The runs that are compared with those of the base commit; together they use most of the model's and optimizer's code.
SHORT = f"{TINY} --steps 4 --checkpoint.every 4 --evaluation.every 4 --exact true"
DEFAULTS = {
    "GPT-2": SHORT,
    "Qwen3, Muon": f"""{SHORT} --model.position rope --model.norm rmsnorm --model.mlp swiglu --model.n_kv_heads 1
        --model.qk_norm true --model.bias false --optimizer.name muon --chunked_loss true""",
}
# On the CPU, also where there are GPUs: two processes would need two of them, and their kernels repeat no bits.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "ACCELERATE_MIXED_PRECISION": "no"}


class TrialError(RunError):
    """A guarantee that the fork does not keep."""


class TrialConfig(Settings):
    """Kills, resumes and verifies a fork."""

    verify_steps: PositiveInt = 6
    """Steps that verify.py trains."""

    base: str = "HEAD"
    """The commit whose results at the default settings are compared with those of the working tree."""

    settings: Annotated[list[str], PASSED_ON] = []
    """Settings of train.py; the others are those of TRIAL in tools/trial.py."""


def read_rows(run: Path) -> list[dict]:
    """Rows of metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in lines]


def start_ranks(script: str, arguments: list[str]) -> list[subprocess.Popen[str]]:
    """Start a script on two processes, with the environment that torchrun would give them."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def run_ranks(script: str, arguments: list[str]) -> tuple[int, str, str]:
    """Run a script on two processes to its end; return the exit code, and the main process's output and errors."""
    processes = start_ranks(script, arguments)
    printed, errors = processes[0].communicate()
    processes[1].communicate()
    return processes[0].returncode or processes[1].returncode, printed, errors


def run_script(script: str, arguments: list[str]) -> str:
    """Run a script on two processes to its end and return what the main process printed."""
    code, printed, errors = run_ranks(script, arguments)
    if code:
        print(f"{printed}\nThe settings that you did not give are those of TRIAL in tools/trial.py.")
        raise TrialError(errors.strip() or f"{script}: exit code {code}")
    return printed


def train_and_kill(arguments: list[str], run: Path) -> None:
    """Train on two processes, and kill both after the checkpoint of step 5, while they train on."""
    processes = start_ranks("train.py", arguments)
    while not (run / "checkpoints" / "step-00000005").exists() or len(read_rows(run)) < 8:
        if any(process.poll() is not None for process in processes):
            raise TrialError(f"the second training ended before it was killed\n{processes[0].communicate()[1]}")
        time.sleep(0.02)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    if (run / "checkpoints" / "step-00000020").exists():
        raise TrialError("the second training was complete before it could be killed; give settings that train longer")


def compare_rows(uninterrupted: list[dict], resumed: list[dict]) -> None:
    """Raise TrialError for the first logged value that differs after a resume, and if there is nothing to compare."""
    if not uninterrupted:
        raise TrialError("the run logged no metrics, so nothing was compared; log with tracking.log_every")
    for expected, row in zip(uninterrupted, resumed, strict=False):
        for key in sorted(expected.keys() | row.keys()):
            if expected.get(key) != row.get(key):
                values = f"{row.get(key)} after a kill and a resume, {expected.get(key)} without"
                raise TrialError(f"step {expected['step']}: {key} is {values}; is all state saved?")
    if len(uninterrupted) != len(resumed):
        raise TrialError(f"{len(resumed)} rows after a kill and a resume, {len(uninterrupted)} without")
    if len({row["state/digest"] for row in resumed}) != len(resumed):
        raise TrialError("state/digest is the same at two steps; is every step an update?")


def find_lost_state(arguments: list[str]) -> str:
    """Return what verify.py says of a resume: which attributes of the model and the optimizer lost their values."""
    _, printed, errors = run_ranks("verify.py", arguments)
    lines = [line for line in printed.splitlines() if "resuming is bitwise" in line]
    return "verify.py: " + (lines or [errors.strip()])[0]


def trial_words(settings: list[str]) -> list[str]:
    """Return the settings of the trial for train.py: those of TRIAL, overridden by the given ones.

    With `init_from` the initial model decides its sizes, so those of TRIAL are left out.

    Raises:
        ConfigError: all wrong settings at once.
    """
    words = [*TRIAL.split(), *settings]
    if parse_config(words, num_processes=2).init_from is None:
        return words
    options = zip(TRIAL.split()[::2], TRIAL.split()[1::2], strict=True)
    kept = [pair for pair in options if not pair[0].startswith("--model.") or pair[0] == "--model.dropout"]
    return [*chain(*kept), *settings]


def train_at_defaults(folder: Path) -> dict[str, dict]:
    """Train the runs of DEFAULTS with the code in a folder; return the last metrics of each."""
    with TemporaryDirectory(prefix="defaults-") as out:
        for number, settings in enumerate(DEFAULTS.values()):
            command = [sys.executable, "train.py", *settings.split(), "--out_dir", out, "--name", str(number)]
            environment = os.environ | ENVIRONMENT | {"PYTHONPATH": ""}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr)
                raise TrialError(f"commit {folder.name} does not train at its defaults; its error is above")
        return {name: read_rows(Path(out, str(number)))[-1] for number, name in enumerate(DEFAULTS)}


def changed_results(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """Describe each metric of `before` that differs; a missing digest counts, since nothing replaces it."""
    without_digest = [
        f"{kind}: state/digest is not logged, so the bits cannot be compared"
        for kind, metrics in before.items()
        if metrics.get("state/digest") is None
    ]
    return without_digest + [
        f"{kind}: {name} is {metrics.get(name)}, {before[kind][name]} before"
        for kind, metrics in after.items()
        for name in before[kind]
        if metrics.get(name) != before[kind][name]
    ]


def report_defaults(base: str) -> None:
    """Say whether the working tree trains at its defaults as the commit `base` does."""
    try:
        base, (_, tree) = git("rev-parse", "--verify", f"{base}^{{commit}}"), resolve_commits(".")
        if git("rev-parse", f"{base}^{{tree}}") == git("rev-parse", f"{tree}^{{tree}}"):
            print(f"defaults: no code differs from {base[:12]}; --base COMMIT names an earlier one")
            return
        with Checkouts() as checkouts:
            before, after = (train_at_defaults(checkouts.folder(commit)) for commit in (base, tree))
    except ConfigError as error:
        print(f"defaults: not compared: {error}; --base COMMIT names a commit")
        return
    if changed := changed_results(before, after):
        print(f"defaults: other results than {base[:12]}, as after an edit in place: {'; '.join(changed[:2])}")
    else:
        print(f"defaults: the same bits as {base[:12]}")


def main(config: TrialConfig) -> None:
    """Try the fork with these settings.

    Raises:
        ConfigError: a setting is refused.
        TrialError: the first guarantee that it does not keep.
    """
    words = trial_words(config.settings)
    with TemporaryDirectory(prefix="trial-") as folder:
        out_dir = Path(folder, "runs")
        arguments = [*words, "--out_dir", str(out_dir)]
        verify_arguments = [*arguments, "--verify_steps", str(config.verify_steps)]
        uninterrupted, killed = out_dir / "uninterrupted", out_dir / "killed"
        print("training without and with a kill ...", file=sys.stderr, flush=True)
        run_script("train.py", [*arguments, "--name", "uninterrupted"])
        train_and_kill([*arguments, "--name", "killed"], killed)
        run_script("train.py", [*arguments, "--name", "killed"])
        if Run(killed).sessions()[-1].step < 5:
            raise TrialError("the third training did not resume from the checkpoint of step 5 or later")
        try:
            compare_rows(read_rows(uninterrupted), read_rows(killed))
        except TrialError as error:
            raise TrialError(f"{error}\n{find_lost_state(verify_arguments)}") from None
        print(f"resumed run: the same metrics as without the kill, at the end {json.dumps(read_rows(killed)[-1])}")
        shutil.rmtree(out_dir)  # verify.py makes runs of its own there
        print(run_script("verify.py", verify_arguments))
    report_defaults(config.base)


if __name__ == "__main__":
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.trial", TrialConfig, needs_torch=False)
