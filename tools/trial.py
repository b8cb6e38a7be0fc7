"""Try a fork: python -m tools.trial [--verify_steps N] [--base COMMIT] [SETTINGS]... (make trial).

Train 20 steps on two processes without a stop; train them again, kill both processes half-way and resume, which must
give the same metrics and the same digest of all weights and moments; run verify.py; then train the short runs of
tests/support/golden.py with the code of the fork and of the commit that it began from, which must end with the same
digests, because a new setting changes nothing at its default. The exit code is 0 if all of it holds; otherwise 1, and
the last line names what does not hold. The processes are forks of one (tests/support/forked.py); this one imports no
torch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from config.errors import ConfigError
from tests.support import forked
from tools.experiment.change import Change, checked_out, git, resolve_commits

# An evaluation after each step leaves time to kill the processes.
TRIAL = ["--config", "tests/support/tiny_stories.yaml", "--steps", "20"]
TRIAL += ["--checkpoint.every", "5", "--evaluation.every", "1"]
UPSTREAM = ("upstream/main", "origin/main", "main")


class TrialError(Exception):
    """A guarantee that the fork does not keep."""


def read_rows(run: Path) -> list[dict]:
    """Rows of metrics.jsonl without timings."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in lines]


def run_script(script: str, arguments: list[str]) -> str:
    """Run a script on two processes to its end and return what it printed."""
    done = forked.run(script, arguments, 2, dict(os.environ))
    if done.returncode:
        print(done.stdout)
        raise TrialError(done.stderr.strip() or f"{script}: exit code {done.returncode}")
    return done.stdout


def compare_rows(uninterrupted: list[dict], resumed: list[dict]) -> None:
    """Raise TrialError for the first logged value that differs after a resume."""
    for expected, row in zip(uninterrupted, resumed, strict=False):
        for key in sorted(expected.keys() | row.keys()):
            if expected.get(key) != row.get(key):
                found = f"{row.get(key)} after a kill and a resume, {expected.get(key)} without"
                raise TrialError(f"step {expected['step']}: {key} is {found}; is all state saved?")
    if len(uninterrupted) != len(resumed):
        raise TrialError(f"{len(resumed)} rows after a kill and a resume, {len(uninterrupted)} without")
    if len({row["state/digest"] for row in resumed}) != len(resumed):
        raise TrialError("state/digest is the same at two steps; is every step an update?")


def find_base(ref: str | None) -> str:
    """Return the commit at which the fork left `ref`, by default the first of UPSTREAM that exists.

    Raises:
        ConfigError: there is no such commit.
    """
    if ref is None:
        existing = git("for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/remotes").splitlines()
        ref = next((name for name in UPSTREAM if name in existing), "HEAD")
    return git("merge-base", "HEAD", ref)


def train_at_defaults(*folders: Path) -> list[dict[str, dict]]:
    """Train the runs of golden.py with the code in each folder, at the same time; return their last metrics."""
    with TemporaryDirectory(prefix="defaults-") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.golden", str(Path(out, str(number)))],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, folder in enumerate(folders)
        ]
        outputs = [process.communicate() for process in processes]
    for folder, process, (_, errors) in zip(folders, processes, outputs, strict=True):
        if process.returncode:
            print(errors)
            raise TrialError(f"the {folder.name} does not train at its defaults; its error is above")
    return [yaml.safe_load(printed) for printed, _ in outputs]


def compare_defaults(base: dict[str, dict], fork: dict[str, dict]) -> None:
    """Raise TrialError if a run of the fork at its defaults ends with other metrics than the base."""
    moved = [
        f"{kind}: {name} is {metrics.get(name)}, {expected[name]} before"
        for kind, metrics in fork.items()
        if (expected := base.get(kind))
        for name in expected
        if metrics.get(name) != expected[name]
    ]
    if moved:
        raise TrialError(
            f"defaults moved: {'; '.join(moved[:2])}; a new setting must change nothing at its default. If the fork "
            "means to change them, commit and give --base HEAD"
        )


def check_defaults(ref: str | None) -> None:
    """Compare the fork at its defaults, uncommitted changes included, with the commit that it began from."""
    try:
        base = find_base(ref)
        _, fork = resolve_commits(".")
        if git("rev-parse", f"{base}^{{tree}}") == git("rev-parse", f"{fork}^{{tree}}"):
            print(f"defaults: not compared: no code differs from {base[:12]}; --base COMMIT names an earlier one")
            return
        with checked_out(Change(base=base, commit=fork)) as folders:
            compare_defaults(*train_at_defaults(*folders))
        print(f"defaults: the same as those of {base[:12]}")
    except ConfigError as error:
        print(f"defaults: not compared: {str(error).removeprefix('idea: ')}; --base COMMIT names a commit")


def main(out_dir: str, verify_steps: str, base: str | None, settings: list[str]) -> None:
    """Try the fork with these settings; raise TrialError for the first guarantee that it does not keep."""
    arguments = [*TRIAL, *settings, "--out_dir", out_dir]
    uninterrupted, killed = (Path(out_dir, name) for name in ("uninterrupted", "killed"))
    run_script("train.py", [*arguments, "--name", "uninterrupted"])
    launch = forked.Launch("train.py", [*arguments, "--name", "killed"], 2, dict(os.environ))
    saved = killed / "checkpoints" / "step-00000005"  # written in the background, while training goes on
    while not saved.exists() or len(read_rows(killed)) < 8:
        if not all(process.is_alive() for process in launch.processes):
            raise TrialError(f"the second training ended before it was killed\n{launch.output()}")
        time.sleep(0.02)
    for process in launch.processes:
        process.kill()
        process.join()
    if (killed / "checkpoints" / "step-00000020").exists():
        raise TrialError("the second training was complete before it could be killed; give settings that train longer")
    if "resumed at step" not in run_script("train.py", [*arguments, "--name", "killed"]):
        raise TrialError("the third training did not resume from the checkpoint of step 5 or later")
    compare_rows(read_rows(uninterrupted), read_rows(killed))
    print(json.dumps(read_rows(killed)[-1]))
    shutil.rmtree(out_dir)  # verify.py makes runs of its own there
    print(run_script("verify.py", [*arguments, "--verify_steps", verify_steps]))
    check_defaults(base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6", help="steps that verify.py trains")
    parser.add_argument("--base", help="a commit of upstream; by default the first of " + ", ".join(UPSTREAM))
    own, settings = parser.parse_known_args()
    with TemporaryDirectory(prefix="trial-") as folder:
        try:
            main(str(Path(folder, "runs")), own.verify_steps, own.base, settings)
        except TrialError as error:
            sys.exit(f"tools.trial: error: {error}")
