"""Screen several ideas, or compare one with the baseline; print the result."""

import json
from collections.abc import Callable
from typing import Any

from config.errors import ConfigError
from config.paths import expand_user_path
from storage.files import write_once
from tools.experiment import report
from tools.experiment.arm import Recipe
from tools.experiment.change import Checkouts, head_commit, idea_texts, parse_idea
from tools.experiment.comparison import Comparison
from tools.experiment.screen import Screen
from tools.experiment.settings import ONE_IDEA_ONLY, SCREEN_ONLY, ExperimentConfig, IdeasConfig
from tools.jobs.launch import Launch
from tools.jobs.runner import EXIT_STOPPED, JobRunner


def main(config: ExperimentConfig) -> None:
    """Run an experiment.

    Raises:
        ConfigError: an idea or a setting is refused.
        RunError: the baseline cannot be trained, or the environment failed, for example by a full disk.
        SystemExit: with code 75 after a signal; run the same command again to resume.
    """
    run_with_json(config, run_experiment)


def run_with_json(config: IdeasConfig, run: Callable[[Any, Recipe, JobRunner], list[str]]) -> None:
    """Print the lines of `run`, called with the config, its recipe and a job runner; with --json, also errors."""
    jobs = JobRunner(config.jobs or (1 if config.launch else None))
    if not (config.launch or jobs.gpus):
        jobs.threads = 1  # runs with more threads than free cores take several times as long
    try:
        with Checkouts() as checkouts:
            lab, launch = expand_user_path("lab", config.lab), Launch.parse(config.launch)
            print("\n".join(run(config, Recipe(lab, head_commit(), config.common, launch, checkouts), jobs)))
    except BaseException as error:
        if config.print_json:
            exit_code = {ConfigError: 2, SystemExit: EXIT_STOPPED, KeyboardInterrupt: 130}.get(type(error), 1)
            message = "stopped by a signal" if isinstance(error, SystemExit) else str(error) or type(error).__name__
            print(json.dumps({"verdict": None, "exit_code": exit_code, "message": message}))
        raise


def run_experiment(config: ExperimentConfig, recipe: Recipe, jobs: JobRunner) -> list[str]:
    """Run an experiment and return its result as lines."""
    if not config.ideas:
        raise ConfigError('idea: name at least one, before other options; quote settings: "--model.mlp relu2"')
    is_screen = len(config.ideas) > 1 or idea_texts(config.ideas) != config.ideas  # a folder or a text file
    if unused := config.model_fields_set & (ONE_IDEA_ONLY if is_screen else SCREEN_ONLY):
        raise ConfigError(f"{min(unused)}: is for {'one idea' if is_screen else 'several ideas'}; leave it out")
    if not is_screen:
        idea = parse_idea(config.ideas[0])
        comparison = Comparison(config, idea, recipe, jobs)
        result, lines = comparison.run(), report.comparison_lines
        options = config.metric, config.margin, config.sizes, config.tune
        report.save_result(recipe.lab, result, result["baseline"], result["candidate"], *options)
        if idea.diff:
            write_once(recipe.lab / "diffs" / f"{idea.key}.diff", idea.diff.encode(errors="surrogateescape"))
    else:
        screen = Screen(config, recipe, jobs)
        screen.run()
        result, lines = report.report_screen(screen.folder, recipe.lab), report.screen_lines
    return [json.dumps(result)] if config.print_json else lines(result)
