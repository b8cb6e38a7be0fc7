"""The command `start`: begin a chain on a recipe."""

import os
from pathlib import Path

from chain.baseline import describe_baseline, measure_baseline
from chain.code import current_branch, require_clean_tree, tip
from chain.ledger import locked_ledger
from chain.report import print_result, training, with_json_errors
from chain.settings import StartConfig
from chain.state import Chain
from config.errors import ConfigError
from config.paths import expand_user_path
from experiments import change
from experiments.change import git
from experiments.sequential_test import MIN_SEEDS


@with_json_errors
def main(config: StartConfig) -> None:
    """Create the branch and the ledger, train the baseline and print it; again after a stop, resume.

    Raises:
        ConfigError: the lab has another chain, the branch exists, or the working tree has changes.
        RunError: the baseline does not train.
        SystemExit: with code 75 after a signal.
    """
    if config.seeds < MIN_SEEDS:
        raise ConfigError(f"seeds: {config.seeds} must be at least {MIN_SEEDS}, to estimate the noise")
    recipe, lab = tracked_recipe(config.config), expand_user_path("lab", config.lab)
    branch = config.branch or f"research/{Path(recipe).stem}"
    with locked_ledger(lab) as ledger:
        if ledger.rows:
            chain = Chain(lab, ledger.rows)
            if (chain.recipe, chain.branch) != (recipe, branch) or chain.ideas:
                raise ConfigError(f"lab: {config.lab} has a chain on {chain.branch} already; choose another --lab")
        else:
            require_clean_tree()
            if tip(branch):
                raise ConfigError(f"branch: {branch} exists; choose another --branch, or delete it")
            commit = git("rev-parse", "HEAD")
            git("branch", branch, commit)
            ledger.append(
                kind="start",
                commit=commit,
                idea=branch,
                settings=recipe,
                note=config.note,
                status="strict" if config.strict else "online FDR",
                seeds_baseline=config.seeds,
            )
            chain = Chain(lab, ledger.rows)
    if current_branch() != branch:
        require_clean_tree()
        git("switch", "--quiet", branch)
    with training(config, lab):
        row = measure_baseline(config, chain)
    print_result(config, chain.summary() | row, [f"branch: {branch}", *describe_baseline(row)])


def tracked_recipe(name: str) -> str:
    """Return the path of a config file in the repository.

    Raises:
        ConfigError: git does not track it.
    """
    path = Path(os.path.abspath(expand_user_path("config", name)))
    if not path.is_relative_to(change.ROOT) or not git("ls-files", "--", str(path)):
        raise ConfigError(
            f"config: {name!r} must be a config file that git tracks, for the chain commits settings to it"
        )
    return path.relative_to(change.ROOT).as_posix()
