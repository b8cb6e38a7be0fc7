"""Train many runs: python sweep.py --optimizer.lr 1e-3,3e-4 --seed 0,1,2 [settings of train.py].

Every setting with several values, separated by commas, is swept: each combination is a run, whose name ends in the
swept values. Rerun the same command to resume. The table of compare.py is printed at the end.
"""

if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from cli.scripts import run_and_exit
    from jobs.settings import SweepConfig

    run_and_exit("sweep", SweepConfig, needs_torch=False)

import sys
from dataclasses import replace
from pathlib import Path

import compare
from checkpoint.identity import code_hash
from config.errors import RunError
from jobs.launch import Launch
from jobs.runner import JobRunner, Stopped, Training
from jobs.settings import SweepConfig
from jobs.sweep import is_finished, plan_sweep, run_path, write_run_config

TRAIN = str(Path(__file__).with_name("train.py"))


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
