"""Kill, resume and verify a fork: python -m tools.trial [--verify_steps N] [--base COMMIT] [SETTINGS]... (make trial).

Train 20 steps on two processes without a stop; train them again, kill both processes half-way and resume, which must
give the same metrics and the same digest of all weights and moments; run verify.py. The exit code is 0 if all of it
holds; otherwise 1, and the last line names what does not hold. Then train the short runs of tests/support/golden.py at
the default settings, with the working tree and with HEAD (or the commit that --base names), and say whether their
results differ: they do after an edit in place, and do not after a new setting at its default. The processes are forks
of one (tests/support/forked.py); this one imports no torch.
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
from run.directory import Run
from tests.support import forked
from tools.experiment.change import Checkouts, git, resolve_commits

# An evaluation after each step leaves time to kill the processes.
TRIAL = ["--config", "tests/support/tiny_stories.yaml", "--steps", "20"]
TRIAL += ["--checkpoint.every", "5", "--evaluation.every", "1"]


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
        print(f"{done.stdout}\nThe settings that you did not give are those of {TRIAL[1]}.")
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
            raise TrialError(f"commit {folder.name} does not train at its defaults; its error is above")
    return [yaml.safe_load(printed) for printed, _ in outputs]


def changed_results(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """Return the final metrics that differ, with both values."""
    return [
        f"{kind}: {name} is {metrics.get(name)}, {before[kind][name]} before"
        for kind, metrics in after.items()
        if kind in before
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
            changed = changed_results(*train_at_defaults(checkouts.folder(base), checkouts.folder(tree)))
    except ConfigError as error:
        print(f"defaults: not compared: {error}; --base COMMIT names a commit")
        return
    if changed:
        print(f"defaults: other results than {base[:12]}, as after an edit in place: {'; '.join(changed[:2])}")
    else:
        print(f"defaults: the same bits as {base[:12]}")


def main(out_dir: str, verify_steps: str, base: str, settings: list[str]) -> None:
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
    run_script("train.py", [*arguments, "--name", "killed"])
    if Run(killed).sessions()[-1].step < 5:
        raise TrialError("the third training did not resume from the checkpoint of step 5 or later")
    compare_rows(read_rows(uninterrupted), read_rows(killed))
    print(json.dumps(read_rows(killed)[-1]))
    shutil.rmtree(out_dir)  # verify.py makes runs of its own there
    print(run_script("verify.py", [*arguments, "--verify_steps", verify_steps]))
    report_defaults(base)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("tools.trial", description="Kill, resume and verify a fork.", allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6", help="steps that verify.py trains")
    parser.add_argument("--base", default="HEAD", help="the commit to compare the defaults with; default: HEAD")
    own, settings = parser.parse_known_args()
    with TemporaryDirectory(prefix="trial-") as folder:
        try:
            main(str(Path(folder, "runs")), own.verify_steps, own.base, settings)
        except TrialError as error:
            sys.exit(f"tools.trial: error: {error}")
