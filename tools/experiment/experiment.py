"""Screen several ideas, or compare one with the baseline; print the result."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.paths import expand_user_path
from tools.experiment import log, report
from tools.experiment.change import Idea, Worktrees, idea_texts, parse_ideas
from tools.experiment.comparison import Comparison, Result
from tools.experiment.screen import Screen
from tools.experiment.settings import ExperimentConfig, LabConfig
from tools.jobs.runner import EXIT_STOPPED, JobRunner


def main(config: ExperimentConfig) -> None:
    """Run an experiment.

    Raises:
        ConfigError: an idea or a setting is refused.
        RunError: the baseline cannot be trained, or the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, run_experiment)


def run_with_json(config: LabConfig, run: Callable[[Any, Path, JobRunner], None]) -> None:
    """Call `run` with the config, the lab and a job runner; with --json, print one object also for an error."""
    jobs = JobRunner(config.jobs or (1 if config.launch else None))
    if not (config.launch or jobs.gpus):
        jobs.threads = 1  # runs with more threads than free cores take several times as long
    try:
        run(config, expand_user_path("lab", config.lab), jobs)
    except BaseException as error:
        if config.print_json:
            exit_code = {ConfigError: 2, SystemExit: EXIT_STOPPED, KeyboardInterrupt: 130}.get(type(error), 1)
            message = "stopped by a signal" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            print(json.dumps({"verdict": None, "exit_code": exit_code, "message": message}))
        raise


def run_experiment(config: ExperimentConfig, lab: Path, jobs: JobRunner) -> None:
    """Run an experiment and print its result."""
    if not config.ideas:
        raise ConfigError('idea: name at least one, before other options; quote settings: "--model.mlp relu2"')
    with Worktrees() as trees:
        ideas = parse_ideas(config.ideas)
        if len(ideas) == 1 and idea_texts(config.ideas) == config.ideas:  # no folder or text file
            comparison = Comparison(config, ideas[0], lab, trees, jobs)
            row = make_row(ideas[0], comparison, comparison.run())
            ideas[0].save_diff(lab / "diffs")
            log.append(lab, row)
            print(json.dumps(row) if config.print_json else "\n".join(report.comparison_lines(row)))
            return
        screen = Screen(config, lab, trees, jobs)
        screen.run()
    name, record = screen.folder.name, screen.record
    result = report.analyze(record, lab)
    picture = report.draw_screen(screen.folder, result)
    if config.print_json:
        print(json.dumps(report.screen_json(name, result, record, lab)))
    else:
        print("\n".join([*report.screen_lines(name, result, record, lab), f"picture: {picture}"]))


def make_row(idea: Idea, comparison: Comparison, results: list[Result]) -> dict[str, Any]:
    """Return a comparison as plain JSON, with the results of the first size at its top."""
    arms, config = (comparison.baseline, comparison.candidate), comparison.config
    sizes = [asdict(result) for result in results]
    what = config.first_seed, config.metric, config.margin, config.sizes, config.tune
    return {
        "key": " ".join([arms[0].name, arms[1].name, *map(str, what)]),
        "idea": idea.text,
        **sizes[0],
        "baseline": arms[0].name,
        "candidate": arms[1].name,
        "diff_lines": idea.num_lines,
        "sizes": sizes[1:],
    }
