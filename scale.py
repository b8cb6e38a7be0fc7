"""How does it grow? python scale.py --depth N prints a whole recipe from one number; --law trains a ladder of sizes and
budgets, fits how the loss falls and predicts a run four times the largest, which it then trains; --widths searches the
learning rate of several widths. Started again, it goes on where it was. docs/scaling_law.md has the rules and the law.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from config.errors import ConfigError, RunError
from config.paths import expanded
from data.files import write_atomically
from scaling import recipe

TIMES_RULE = (0.25, 0.5, 1, 2, 4)  # learning rates
FLAGS = ("--law", "--widths")
# Settings that are the ladder's own: with others its parameters, tokens and theory would be those of other runs.
OF_THE_LADDER = ("model.", "data.", "steps", "seq_len", "global_batch_size", "seed", "name", "out_dir")


@dataclass
class ScaleConfig:
    """Prints a recipe of a depth, or finds out how loss falls with size and data."""

    depth: PositiveInt | None = None
    """Layers: all else of the recipe follows, which is printed as a config file. 12 is the 124M class."""

    tokens_per_parameter: PositiveFloat = 20.0
    """With depth: how long to train."""

    family: Literal["qwen3", "gpt2"] = "qwen3"
    """With depth: which family of transformers."""

    corpus: str | None = None
    """With depth: a corpus that data.prepare made. null: stories of a world."""

    law: bool = False
    """Train the ladder, fit the law, predict a run and train that."""

    widths: bool = False
    """Train each size of the ladder and the next one, for the shortest budget, at learning rates around the rule's."""

    sizes: str = "16,32,64"
    """With law and widths: widths of the models, multiples of 16."""

    budgets: str = "400,800,1600,3200"
    """With law and widths: steps of 16 stories."""

    seeds: PositiveInt = 2
    """With law: runs of each size and budget."""

    first_seed: NonNegativeInt = 0
    """With law: the seed of the first of them, and of the run that is predicted."""

    jobs: PositiveInt | None = None
    """Runs at once. null: one with launch, else one for each GPU, or for each core, but not more than 8."""

    out_dir: str = "runs/law"
    """Where runs, figures and pictures go."""

    launch: str | None = None
    """What starts a run, as "accelerate launch --config_file X". null: python."""

    arguments: str = ""
    """Settings of train.py for all runs of the ladder."""


def main(config: ScaleConfig) -> None:
    """Do what was asked.

    Raises:
        ConfigError: nothing or several things were asked for, or a size or a budget is none.
        RunError: a run failed.
        SystemExit: with 75 after a signal: the same command goes on.
    """
    if (config.depth is not None) + config.law + config.widths != 1:
        raise ConfigError("scale.py: give one of --depth N, --law and --widths")
    if config.depth is not None:
        print_recipe(config)
        return
    sizes, budgets = (whole_numbers(name, getattr(config, name)) for name in ("sizes", "budgets"))
    if wrong := [size for size in sizes if size % 16]:
        raise ConfigError(f"sizes: {wrong[0]} is no multiple of 16, the width of a head")
    out_dir = expanded("out_dir", config.out_dir)
    if config.widths:
        search_learning_rates(config, [*sizes, 2 * sizes[-1]], budgets[0], out_dir)
    else:
        find_law(config, sizes, budgets, out_dir)


def print_recipe(config: ScaleConfig) -> None:
    """A config file on the screen."""
    if config.corpus:
        vocab_size = recipe.vocabulary_of(config.corpus)
    else:
        from data.synthetic.stories import get_story_generator

        vocab_size = len(get_story_generator(recipe.FACTS, 1.0, 0).vocabulary)
    lines = recipe.recipe(config.depth, config.tokens_per_parameter, config.family, config.corpus, vocab_size)
    print(recipe.as_yaml(lines), end="")


def whole_numbers(name: str, words: str) -> list[int]:
    """Of a setting with commas, growing.

    Raises:
        ConfigError: they are none, or fewer than two.
    """
    try:
        numbers = sorted({int(word) for word in words.split(",")})
    except ValueError:
        numbers = []
    if len(numbers) < 2 or numbers[0] < 1:
        raise ConfigError(f"{name}: {words!r} are no two or more whole numbers above 0 with commas between")
    return numbers


class Bench:
    """Trains rungs, and says what they came to."""

    def __init__(self, config: ScaleConfig, out_dir: Path):
        from checkpoint.identity import code_hash
        from jobs.runner import JobRunner, launched_precision, launched_processes, parse_launcher
        from scaling.ladder import BATCH

        self.out_dir, self.launch = out_dir, tuple(parse_launcher(config.launch))
        share = max(1, BATCH // launched_processes([*self.launch]))
        self.settings = ("--micro_batch_size", str(share), *own_settings(config.arguments))
        self.trainings = JobRunner(config.jobs or (1 if config.launch else None))
        self.trainings.code = code_hash()
        precision = launched_precision([*self.launch])
        check_alike(out_dir, {"arguments": config.arguments, "precision": precision, "code": self.trainings.code})

    def points(self, rungs: Iterable) -> list:
        """Of the rungs, when all are trained."""
        from jobs.runner import Failed, Stopped

        wanted = [(rung, rung.training(self.out_dir, self.settings, self.launch)) for rung in rungs]
        try:
            self.trainings.train([training for _, training in wanted])
        except Stopped:
            print("stopped as asked; the same command goes on from there", file=sys.stderr)
            raise SystemExit(75) from None
        except Failed as failed:
            raise RunError(f"{failed.training.directory}: {failed}") from None
        return [rung.point(training) for rung, training in wanted]


def own_settings(arguments: str) -> list[str]:
    """The words of settings for all runs.

    Raises:
        ConfigError: one is the ladder's.
    """
    words = arguments.split()
    for word in words:
        if word.startswith(tuple(f"--{name}" for name in OF_THE_LADDER)):
            raise ConfigError(f"arguments: {word} is the ladder's own; sizes, budgets and seeds are its settings")
    return words


def check_alike(out_dir: Path, now: dict[str, str | None]) -> None:
    """Keep what all runs of a ladder have in common, whose names do not say it.

    Raises:
        ConfigError: those that lie there have something else, so that what is finished would be taken for these.
    """
    kept = out_dir / "ladder.json"
    then = json.loads(kept.read_text()) if kept.exists() else now
    differ = [name for name in now if then.get(name) != now[name]]
    if differ:
        others = "; ".join(f"{name} {then.get(name)!r} there, {now[name]!r} now" for name in differ)
        raise ConfigError(f"out_dir: {out_dir} has runs of another ladder ({others}); name another directory")
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(now), by_several=True)


def search_learning_rates(config: ScaleConfig, sizes: list[int], steps: int, out_dir: Path) -> None:
    """Where the best learning rate of each width lies, with the rule and without."""
    from scaling import plots
    from scaling.ladder import Rung

    wide_first = sizes[::-1]  # so none is left alone at the end
    rungs = [Rung(width, steps, times * recipe.learning_rate(width)) for width in wide_first for times in TIMES_RULE]
    points = Bench(config, out_dir).points(rungs)
    curves = {size: [] for size in sizes}
    for rung, point in zip(rungs, points, strict=True):
        curves[rung.width].append((rung.lr, point.excess("all")))
    for width, curve in curves.items():
        best, rule = recipe.best_of(curve), recipe.learning_rate(width)
        limit = {curve[0][0]: " or less", curve[-1][0]: " or more"}.get(best, "")
        print(f"width {width}: best learning rate {best:.2g}{limit}, {best / rule:.2g} times the rule's {rule:.2g}")
    print(plots.draw_learning_rates(curves, out_dir / "learning_rates.png"))


def find_law(config: ScaleConfig, sizes: list[int], budgets: list[int], out_dir: Path) -> None:
    """The ladder, the law, the prediction, and then its outcome."""
    from scaling import plots
    from scaling.ladder import ladder, target
    from scaling.report import Report, table

    bench = Bench(config, out_dir)
    rungs = ladder(sizes, budgets, range(config.first_seed, config.first_seed + config.seeds))
    points, beyond = bench.points(rungs), target(rungs)
    print("\n".join(table(points)))
    reports = [Report(points, beyond, kind) for kind in ("all", "answers")]
    for report in reports:
        print("\n".join(report.lines()), flush=True)
    figures = {"points": [point._asdict() for point in points]}
    predicted = figures | {report.kind: report.figures() for report in reports}
    write_atomically(out_dir / "prediction.json", json.dumps(predicted, indent=1))
    (outcome,) = bench.points([beyond])
    print()
    for report in reports:
        print("\n".join(report.outcome(outcome)))
        print(plots.draw_law(report, outcome, out_dir / f"law_{report.kind}.png"))
        print(plots.draw_floors(report, outcome, out_dir / f"floor_{report.kind}.png"))
    found = figures | {report.kind: report.figures(outcome) for report in reports}
    write_atomically(out_dir / "law.json", json.dumps(found, indent=1))


if __name__ == "__main__":
    from cli.scripts import run_and_exit

    words = sys.argv[1:]
    bare = [word in FLAGS and words[i : i + 1] not in (["true"], ["false"]) for i, word in enumerate(words, start=1)]
    sys.argv[1:] = [f"{word}=true" if alone else word for word, alone in zip(words, bare, strict=True)]
    run_and_exit("scale", ScaleConfig, needs_torch=False)
