"""Train the runs of a sweep and compare them."""

import sys
from dataclasses import replace
from pathlib import Path

from checkpoint.identity import code_hash
from config.errors import RunError
from tools import compare
from tools.jobs.launch import Launch
from tools.jobs.runner import JobRunner, Stopped, Training
from tools.sweep.grid import is_finished, plan_sweep, run_path, write_run_config
from tools.sweep.settings import SweepConfig

TRAIN = str(Path(__file__).parents[2] / "train.py")


def main(config: SweepConfig) -> None:
    """Train the runs that are not finished, then compare all.

    Raises:
        ConfigError: a setting of one of the runs is wrong; none was started.
        RunError: a run has failed; the others were trained.
        SystemExit: with code 75 after a signal, or where a run was stopped; rerun the same command to resume.
    """
    launch = Launch.parse(config.launch)
    facts = {"mixed_precision": launch.precision, "code": code_hash()}
    runs = plan_sweep(config.arguments, facts)
    runner = JobRunner(config.jobs or (1 if config.launch else None))
    runner.code, runner.show_output = facts["code"], runner.max_running == 1
    wanted, outcomes, error = {}, {}, None
    for settings in runs:
        path = run_path(settings)
        if is_finished(settings) and launch.precision is not None:
            outcomes[path] = "finished before"
        else:
            command = (*launch.command, TRAIN, "--config", str(write_run_config(settings)))
            training = Training(path, settings.steps, command)
            wanted[path] = replace(training, restart=training.is_finished())
    try:
        runner.train(wanted.values(), until_failure=False)
    except Stopped:  # recorded in the outcomes, too
        pass
    except RunError as raised:
        error = raised
    outcomes |= {path: runner.outcomes.get(training, "not started") for path, training in wanted.items()}
    paths = [run_path(settings) for settings in runs]
    for path in paths:
        print(f"{path.name}: {outcomes[path]}")
    if not runner.signal and (trained := [str(path) for path in paths if (path / "config.yaml").exists()]):
        print()
        compare.main(compare.CompareConfig(trained, out=None))
    if num_failed := [*outcomes.values()].count("failed"):
        raise RunError(f"{num_failed} of {len(runs)} runs failed; see their own messages")
    if error:
        raise error
    if "stopped" in outcomes.values() or runner.signal:
        print("stopped by a signal; rerun the same command to resume", file=sys.stderr)
        raise SystemExit(75)
