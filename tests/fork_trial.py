"""What a fork is put through: `make trial`, or python -m tests.fork_trial [--verify_steps N] [SETTINGS]... here.

20 steps on two processes in one go; the same killed half-way and resumed, to the same numbers and the same digest of
all weights and moments; then verify.py. Exit code 0: all of it holds. The processes are forks of one (tests/forked.py),
and this one imports no torch.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import forked

# An evaluation after each step leaves time to kill it.
TRIAL = "--config tests/tiny_stories.yaml --steps 20 --checkpoint.every 5 --evaluation.every 1".split()


def rows(run: Path) -> list[dict]:
    """Those of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in lines]


def run(script: str, words: list[str]) -> str:
    """Run it on two processes to its end; what it printed."""
    done = forked.run(script, words, 2, dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main(out_dir: str, verify_steps: str, settings: list[str]) -> None:
    words = [*TRIAL, *settings, "--out_dir", out_dir]
    unbroken, killed = (Path(out_dir, name) for name in ("unbroken", "killed"))
    run("train.py", [*words, "--name", "unbroken"])
    launch = forked.Launch("train.py", [*words, "--name", "killed"], 2, dict(os.environ))
    saved = killed / "checkpoints" / "step-00000005"  # in the background, while steps go on
    while not saved.exists() or len(rows(killed)) < 8:
        assert all(process.is_alive() for process in launch.processes), launch.output()
        time.sleep(0.02)
    for process in launch.processes:
        process.kill()
        process.join()
    assert not (killed / "checkpoints" / "step-00000020").exists(), "it was to be killed before its end"
    assert "resumed at step" in run("train.py", [*words, "--name", "killed"])
    assert rows(killed) == rows(unbroken) and len({row["state/digest"] for row in rows(killed)}) == 20
    print(json.dumps(rows(killed)[-1]))
    shutil.rmtree(out_dir)  # verify.py makes its own runs there
    print(run("verify.py", [*words, "--verify_steps", verify_steps]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Puts a fork through what breaks forks.", allow_abbrev=False)
    parser.add_argument("--verify_steps", default="6", help="steps that verify.py trains")
    own, settings = parser.parse_known_args()
    with TemporaryDirectory(prefix="trial-") as folder:
        main(str(Path(folder, "runs")), own.verify_steps, settings)
