"""Print a recipe, search learning rates, or find a scaling law."""

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.config.errors import ConfigError, RunError
from runtime.config.paths import expand_user_path
from runtime.files import sha256, write_atomically
from runtime.json_objects import parse_object
from tools.jobs.launch import Launch
from tools.jobs.runner import JobRunner
from tools.scale import recipe
from tools.scale.settings import ScaleConfig
from trainer.checkpoint.identity import code_hash

# Modules that import torch are imported where they are used, so that wrong settings are refused at once.
if TYPE_CHECKING:
    from tools.scale.ladder import LadderRun, Measurement

LEARNING_RATE_FACTORS = (0.25, 0.5, 1, 2, 4)  # relative to the rule's
# Settings that the ladder sets itself, because its numbers of parameters and tokens and its theory depend on them.
LADDER_SETTINGS = (
    *("config", "model.", "data.", "steps", "seq_len", "global_batch_size", "seed", "name", "out_dir"),
    *("optimizer.lr", "schedule.warmup_steps", "schedule.batch_warmup", "evaluation.every"),
)


def main(config: ScaleConfig) -> None:
    """Print a recipe, search learning rates or find the law.

    Raises:
        ConfigError: not exactly one of the three was requested, or a setting is out of range.
        RunError: a run failed.
        SystemExit: with 75 after a signal; the same command resumes.
    """
    if (config.depth is not None) + config.law + config.widths != 1:
        raise ConfigError("give one of --depth N, --law and --widths")
    if config.depth is not None:
        print_recipe(config)
        return
    sizes, budgets = (parse_integers(name, getattr(config, name)) for name in ("sizes", "budgets"))
    if wrong := [size for size in sizes if size % 16]:
        raise ConfigError(f"sizes: {wrong[0]} is not a multiple of 16, the width of a head")
    out_dir = expand_user_path("out_dir", config.out_dir)
    if config.widths:
        search_learning_rates(config, [*sizes, 2 * sizes[-1]], budgets[0], out_dir)
    else:
        find_law(config, sizes, budgets, out_dir)


def print_recipe(config: ScaleConfig) -> None:
    assert config.depth is not None
    if config.corpus:
        from data.integrity import read_metadata  # imports pyarrow, which is slow

        vocab_size = read_metadata(expand_user_path("corpus", config.corpus))["tokenizer"]["vocab_size"]
    else:
        from data.synthetic.stories import get_story_generator

        vocab_size = len(get_story_generator(recipe.MAX_FACTS, 1.0, 0).vocabulary)
    lines = recipe.make_recipe(
        config.depth, config.tokens_per_parameter, config.family, config.optimizer, config.corpus, vocab_size
    )
    print(recipe.as_yaml(lines), end="")


def parse_integers(name: str, text: str) -> list[int]:
    """Parse comma-separated positive integers and return them sorted; raise ConfigError unless two or more differ."""
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if len(numbers) < 2 or numbers[0] < 1:
        raise ConfigError(f"{name}: {text!r} must be two or more positive integers separated by commas")
    return numbers


class LadderTrainer:
    """Trains runs of a ladder in one folder."""

    def __init__(self, config: ScaleConfig, out_dir: Path):
        from tools.scale.ladder import CONFIG, base_config

        self.out_dir, self.launch = out_dir, Launch.parse(config.launch)
        self.precisions: set[str | None] = set()  # as the runs recorded them: that of a launch script is unknown before
        micro_batch_size = max(1, base_config().micro_batch_size // (self.launch.processes or 1))
        words = config.arguments.split()
        for word in words:
            if word.startswith(tuple(f"--{name}" for name in LADDER_SETTINGS)):
                raise ConfigError(f"arguments: {word} is set by the ladder; use sizes, budgets and seeds")
        self.settings = ("--micro_batch_size", str(micro_batch_size), *words)
        self.runner = JobRunner(config.jobs or (1 if config.launch else None))
        self.runner.code = code_hash()
        common = {"arguments": config.arguments, "precision": self.launch.precision, "torch": version("torch")}
        check_same_ladder(out_dir, common | {"code": self.runner.code, "config": sha256(CONFIG)})

    def train(self, runs: "Iterable[LadderRun]") -> "list[Measurement]":
        """Train the runs that are not finished; return the results of all.

        Raises:
            RunError: a run failed, its loss is not above the entropy of its data, or another run has another precision.
        """
        pairs = [(run, run.job(self.out_dir, self.settings, self.launch.command)) for run in runs]
        self.runner.train([job for _, job in pairs])
        self.precisions |= {row.mixed_precision for _, job in pairs for row in job.run.sessions()}
        if len(self.precisions) > 1:
            precisions = " and ".join(sorted(map(str, self.precisions)))
            raise RunError(f"out_dir: {self.out_dir} has runs with mixed precision {precisions}; name another folder")
        measurements = [run.measurement(job.run) for run, job in pairs]
        for (_, job), measured in zip(pairs, measurements, strict=True):
            if not min(measured.excess_loss(scope) for scope in ("all", "answers")) > 0:
                raise RunError(
                    f"{job.run.path}: validation loss {measured.loss:.4f} is not above the entropy of its data; "
                    "a law cannot be fitted: use smaller budgets or more validation samples"
                )
        return measurements


def check_same_ladder(out_dir: Path, common: dict[str, str | None]) -> None:
    """Store what all runs of a ladder share; raise ConfigError if the folder has runs of another ladder.

    They would be mistaken for finished runs of this one.
    """
    file = out_dir / "ladder.json"
    try:
        stored = parse_object(file.read_text()) if file.exists() else common
    except ValueError as error:
        raise ConfigError(f"out_dir: {file} is damaged ({error}); name another folder") from None
    if different := [name for name in common if stored.get(name) != common[name]]:
        details = "; ".join(f"{name} {stored.get(name)!r} there, {common[name]!r} now" for name in different)
        raise ConfigError(f"out_dir: {out_dir} has runs of another ladder ({details}); name another folder")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(common))
    except OSError as error:
        raise ConfigError(f"out_dir: {str(out_dir)!r} cannot be written: {error.strerror}; name another one") from None


def search_learning_rates(config: ScaleConfig, widths: list[int], steps: int, out_dir: Path) -> None:
    """Find the best learning rate of each width and compare it with the rule's."""
    from tools.scale import plots
    from tools.scale.ladder import LadderRun

    widest_first = widths[::-1]  # so that no long run is left for the end
    runs = [
        LadderRun(width, steps, factor * recipe.learning_rate(width))
        for width in widest_first
        for factor in LEARNING_RATE_FACTORS
    ]
    measurements = LadderTrainer(config, out_dir).train(runs)
    curves: dict[int, list[tuple[float, float]]] = {width: [] for width in widths}
    for run, measured in zip(runs, measurements, strict=True):
        curves[run.width].append((run.lr, measured.excess_loss("all")))
    for width, curve in curves.items():
        best, rule = recipe.find_best_learning_rate(curve), recipe.learning_rate(width)
        limit = {curve[0][0]: " or less", curve[-1][0]: " or more"}.get(best, "")
        print(f"width {width}: best learning rate {best:.2g}{limit}, {best / rule:.2g} times the rule's {rule:.2g}")
    print(plots.draw_learning_rates(curves, out_dir / "learning_rates.png"))


def find_law(config: ScaleConfig, widths: list[int], budgets: list[int], out_dir: Path) -> None:
    """Train the ladder, fit the law, store its prediction of a larger run, then train that and compare."""
    from tools.scale import plots
    from tools.scale.ladder import build_ladder, extrapolate
    from tools.scale.report import SCOPES, Report, format_table

    trainer = LadderTrainer(config, out_dir)
    runs = build_ladder(widths, budgets, range(config.first_seed, config.first_seed + config.seeds))
    measurements, target = trainer.train(runs), extrapolate(runs)
    print("\n".join(format_table(measurements)))
    reports = [Report(measurements, target, scope) for scope in SCOPES]
    for report in reports:
        print("\n".join(report.lines()), flush=True)
    results = {"runs": [measured._asdict() for measured in measurements]}
    prediction = results | {report.scope: report.as_dict() for report in reports}
    write_atomically(out_dir / "prediction.json", json.dumps(prediction, indent=1))
    (outcome,) = trainer.train([target])
    print()
    for report in reports:
        print("\n".join(report.outcome_lines(outcome)))
        print(plots.draw_law(report, outcome, out_dir / f"law_{report.scope}.png"))
    law = results | {report.scope: report.as_dict(outcome) for report in reports}
    write_atomically(out_dir / "law.json", json.dumps(law, indent=1))
