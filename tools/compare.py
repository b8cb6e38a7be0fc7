"""Compare runs: python -m tools.compare RUN RUN... [--x tokens] [--out FILE].

Print a table with a row for each configuration: the final validation loss over its seeds, whether the best one is
better by more than noise, and what a run cost. Plot the curves. docs/comparing.md explains both.
"""

from typing import Annotated, Literal

from model.settings import Settings
from runtime.config.help import POSITIONAL


class CompareConfig(Settings):
    """Compares runs: the final validation losses and costs of configurations over their seeds, and their curves."""

    runs: Annotated[list[str], POSITIONAL]
    """Run directories."""

    x: Literal["steps", "tokens", "flops", "seconds"] = "steps"
    """The x axis of the curves: optimizer steps, training tokens, training FLOPs, or seconds of training."""

    out: str | None = "compare.png"
    """The file of the curves (PNG). null: do not plot."""


if __name__ == "__main__":  # before anything slow is imported; it calls `main` below and never returns
    from runtime.cli.scripts import run_and_exit

    run_and_exit("tools.compare", CompareConfig, needs_torch=False)

import json
import math
import os.path
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.cli.output import aligned, printable
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from tools import plot
from trainer.run.directory import Run, Session, surviving_sessions
from trainer.run.resume import FREE_SETTINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS = ("seed", "data.seed")
# Runs of one configuration may differ in settings of `evaluation` other than EVALUATION_SETTINGS, and in these.
IGNORED_SETTINGS = FREE_SETTINGS - {"steps", "on_nonfinite", "max_skipped_in_a_row"} | {"branch_from"}
EVALUATION_SETTINGS = ("evaluation.num_samples", "evaluation.ema_decay")
# Settings that select the sequences on which the validation loss is measured, for each data.source, except data.seed. A
# source that a fork added may read any of `data`. The paths of a mixture may change.
VALIDATION_SETTINGS = ("data.source", "evaluation.num_samples", "seq_len", "data.packing")
SOURCE_SETTINGS = {"random": ("model.vocab_size",), "text": ("data.hash", "data.mix"), "stories": ("data.facts",)}
OTHER_DATA_SETTINGS = ("data.seed", "data.num_samples", "data.num_workers")
EXCESS_LOSS = "val/excess_loss"
# Metrics that are compared, and their names in the picture.
METRICS = {
    "val/loss": "validation loss (nats/token)",
    "val/bits_per_byte": "validation loss (bits per byte)",
    EXCESS_LOSS: "excess validation loss (nats/token)",
}
MAX_LABEL_SETTINGS = 6
SIGNIFICANCE_LEVEL = 0.05
NUM_SIMULATIONS = 10_000
BYTES_TOLERANCE = 0.01  # relative, between evaluations of one text

Configurations = dict[str, list["ComparedRun"]]
"""Runs by the label of their configuration."""


def main(config: CompareConfig) -> None:
    """Print the table and plot the curves.

    Raises:
        ConfigError: None of the paths is a run, or the curves cannot be plotted.
    """
    runs, skipped = read_runs([expand_user_path("runs", run) for run in config.runs])
    for reason in skipped:
        print(f"skipped: {printable(reason)}")
    if not runs:
        raise ConfigError("runs: none of these is the directory of a run")
    configurations = group_by_configuration(runs)
    metric, reason = choose_metric(runs)
    if reason:
        print(reason)
    for line in table(configurations, metric or "val/loss", are_comparable=metric is not None):
        print(line)
    if config.out:
        out = expand_user_path("out", config.out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            save_picture(configurations, metric or "val/loss", config.x, out)
        except OSError as error:
            raise ConfigError(f"out: {config.out!r} cannot be written: {error}") from None
        print(f"curves: {printable(str(out))}")


def describe_changes(sessions: Sequence[Session], name: str) -> str | None:
    """Return a fact of sessions, such as `torch`; if it changed, all its values with their first steps."""
    changes = [next(same) for _, same in groupby(sessions, key=attrgetter(name))]
    values = [getattr(session, name) for session in changes]
    if len(changes) < 2:
        return values[0] if values else None
    return ", ".join(
        f"{value} from step {session.step + 1}" if number else str(value)
        for number, (session, value) in enumerate(zip(changes, values, strict=True))
    )


class ComparedRun:
    """A run as it is on disk. Raise ConfigError if it is not a run directory, or damaged.

    Attributes:
        label: the name of its directory.
        settings: flat, as `section.name`, with the facts `mixed_precision`, `torch` and `code` of its sessions.
        rows: rows of metrics.jsonl by step; for a branch, only those after `branch.step`.
        branch: the checkpoint that a branch was started from.
    """

    def __init__(self, path: Path):
        run = Run(path)
        self.path, self.label = path, printable(path.resolve().name)
        self.status, sessions = run.status(), run.sessions()
        self.branch = run.branch()
        begin = self.branch.step if self.branch else -1
        self.rows = {row["step"]: row for row in run.metrics() if row["step"] > begin}
        sessions = surviving_sessions(sessions, self.completed_steps())
        self.validation_text = sessions[-1].validation_text if sessions else None
        facts = {name: describe_changes(sessions, name) for name in ("mixed_precision", "torch", "code")}
        self.settings: dict[str, Any] = run.settings | facts

    @cached_property
    def parent(self) -> "ComparedRun | None":
        """The run that a branch was started from; None if it is gone, or has been trained again with other bits."""
        if self.branch is not None:
            with suppress(ConfigError):
                parent = ComparedRun(Path(self.branch.run))
                row = parent.rows.get(self.branch.step)
                if row is not None and row.get("state/digest") == self.branch.digest:
                    return parent
        return None

    def completed_steps(self) -> int:
        """Return the newest logged step."""
        return max(self.rows, default=0)

    def curve(self, metric: str) -> dict[int, float]:
        """Return the finite values of a metric by step."""
        return {step: row[metric] for step, row in sorted(self.rows.items()) if plot.is_finite(row.get(metric))}

    def final(self, metric: str) -> float | None:
        """Return a metric after the last step; None if the run is not there yet or the value is not finite."""
        return self.curve(metric).get(self.settings["steps"])

    def positions(self, x: str, steps: float | Sequence[float]) -> NDArray[np.float64]:
        """Return the positions of steps on an axis of X_AXES, with its parent's cost for a branch; NaN if unknown."""
        try:
            to_x = plot.step_to_x(x, self.path)
        except ConfigError:
            return np.full(np.shape(steps), np.nan)
        if self.parent is None or self.branch is None or x == "steps":
            return to_x(steps)
        return to_x(steps) - to_x(self.branch.step) + self.parent.positions(x, self.branch.step)

    def validation_set(self) -> dict[str, Any]:
        """Return the settings that determine the validation sequences; losses are comparable if they are equal.

        Without data.seed: choose_metric compares that of configurations, whose runs may have several.
        """
        names = [name for name in self.settings if name.startswith("data.") and name not in OTHER_DATA_SETTINGS]
        if self.settings.get("data.hash"):
            names = [name for name in names if name != "data.path"]
        names = (*VALIDATION_SETTINGS, *SOURCE_SETTINGS.get(self.settings["data.source"], names))
        names += ("data.zipf",) if self.settings["data.facts"] else ()
        settings = {name: self.settings.get(name) for name in names}
        if isinstance(mix := settings.get("data.mix"), dict):
            settings["data.mix"] = [*mix.values()]
        return settings

    def configuration(self) -> str:
        """Return a key that is equal for runs that differ in their seeds alone.

        The key of a branch includes its parent's or, if the parent is gone, the state that the branch was started from.
        """
        settings = {name: value for name, value in self.settings.items() if belongs_to_configuration(name)}
        origin = self.branch and (self.parent.configuration() if self.parent else self.branch.digest or self.branch.run)
        return json.dumps([settings, self.branch and self.branch.step, origin], sort_keys=True)

    def seeds(self) -> tuple[Any, ...]:
        """Return the seeds of all steps; runs of one configuration with equal seeds are the same run, repeated."""
        origin = self.branch and (self.parent.seeds() if self.parent else self.branch.digest or self.branch.run)
        return *(self.settings[name] for name in SEEDS), origin


def belongs_to_configuration(name: str) -> bool:
    """Return whether a setting affects the loss by more than noise and rounding."""
    return name not in SEEDS and (name in EVALUATION_SETTINGS or not IGNORED_SETTINGS & {name, name.partition(".")[0]})


def read_runs(paths: list[Path]) -> tuple[list[ComparedRun], list[str]]:
    """Return the runs among directories, and why the others are not runs."""
    runs, skipped = [], []
    for path in dict.fromkeys(paths):
        # In a pattern such as runs/lr/*: tools.sweep writes the output of its runs there.
        if path.name == "logs" and not (path / "config.yaml").exists():
            continue
        try:
            runs.append(ComparedRun(path))
        except ConfigError as error:
            skipped.append(str(error))
    labels = [run.label for run in runs]
    for run in runs:
        if labels.count(run.label) > 1:
            run.label = printable(str(run.path))
    return runs, skipped


def group_by_configuration(runs: list[ComparedRun]) -> Configurations:
    """Group runs that differ by their seeds alone.

    A label names the settings in which configurations differ or, if these are too many, the runs.
    """
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(run.configuration(), []).append(run)
    firsts = [members[0] for members in groups.values()]
    names = [name for name in differing([run.settings for run in firsts]) if belongs_to_configuration(name)]
    labelled: Configurations = {}
    for members in groups.values():
        first = members[0]
        values = [printable(json.dumps(first.settings.get(name), ensure_ascii=False)).strip('"') for name in names]
        parts = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        parts = parts if len(names) <= MAX_LABEL_SETTINGS else [common_name(members)]
        parts += [f"from step {first.branch.step}"] if first.branch else []
        label = ", ".join(parts) or common_name(members)
        labelled[label if label not in labelled else f"{label}, {first.label}"] = members
    return labelled


def differing(settings_of_runs: list[dict[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for settings in settings_of_runs for name in settings)
    return [name for name in names if len({json.dumps(settings.get(name)) for settings in settings_of_runs}) > 1]


def common_name(runs: list[ComparedRun]) -> str:
    """Name a configuration by the common prefix of its runs' names or, without one, by its first run."""
    names = [run.label for run in runs]
    prefix = re.sub(r"[-_.]*(seed)?[-_.]*$", "", os.path.commonprefix(names)) if len(names) > 1 else ""
    return prefix or names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def choose_metric(runs: list[ComparedRun]) -> tuple[str | None, str]:
    """Return the metric by which runs are comparable, None if there is none, and a sentence if it is not the loss."""
    finished = [run for run in runs if run.final("val/loss") is not None]
    different = differing([run.validation_set() for run in finished])
    # The runs of a configuration may have several data seeds, if those of each other one have them too.
    data_seeds: dict[str, set[Any]] = {}
    for run in finished:
        data_seeds.setdefault(run.configuration(), set()).add(run.settings["data.seed"])
    different += ["data.seed"] if len({frozenset(seeds) for seeds in data_seeds.values()}) > 1 else []
    names = ", ".join(different)
    if not names:
        return "val/loss", ""
    texts = {run.validation_text for run in finished}
    is_whole = all(run.settings["evaluation.num_samples"] is None for run in finished)
    # The windows of another tokenizer end at other bytes, so the last part of the text may be missing.
    num_bytes = [run.final("val/bytes") or 0.0 for run in finished]
    same_bytes = min(num_bytes) > 0 and math.isclose(min(num_bytes), max(num_bytes), rel_tol=BYTES_TOLERANCE)
    if len(texts) == 1 and None not in texts and is_whole and same_bytes:
        return "val/bits_per_byte", f"One text as different tokens ({names}): runs are compared by bits per byte."
    return None, f"The validation losses are not comparable, because they are of different data ({names})."


def table(configurations: Configurations, metric: str, are_comparable: bool) -> list[str]:
    """Format a row for each configuration with a finished run, the best first if they are comparable."""
    rows, left_out = [], []
    for label, runs in configurations.items():
        finished = [run for run in runs if run.final(metric) is not None]
        left_out += [describe_unfinished(run, metric) for run in runs if run not in finished]
        if losses := average_by_seed(finished, metric):
            costs = [[run.positions(x, run.completed_steps()) for x in plot.X_AXES] for run in finished]
            rows.append((label, losses, average_by_seed(finished, EXCESS_LOSS), np.mean(costs, axis=0)))
    p_values: list[float | None] = [None for _ in rows]
    if are_comparable:
        rows.sort(key=lambda row: statistics.fmean(row[1]))
        p_values = p_values_against_best([losses for _, losses, *_ in rows])
    best = next((index for index, p in enumerate(p_values) if p is not None), None)  # rows are in order of their means
    cells = [["configuration", "seeds", metric, "std", "excess", "p", "tokens", "FLOPs", "hours"]]
    for index, ((label, losses, excess, (_, tokens, flops, seconds)), p) in enumerate(zip(rows, p_values, strict=True)):
        std = statistics.stdev(losses) if len(losses) > 1 else None
        cells.append([label, str(len(losses)), format_number(statistics.fmean(losses)), format_number(std)])
        cells[-1] += [format_number(statistics.fmean(excess) if excess else None)]
        cells[-1] += ["best" if index == best else format_number(p, ".2g"), format_number(tokens, ",.0f")]
        cells[-1] += [format_number(flops, ".3g"), format_number(seconds / 3600, ".3g")]
    lines = aligned(cells) if rows else []
    num_tested = sum(p is not None for p in p_values)
    if num_tested:
        test = f"Welch's t-test against the best of {num_tested}, corrected for its choice by these losses"
        lines.append(f"p: {test}; significant below {SIGNIFICANCE_LEVEL}")
    elif are_comparable and len(rows) > 1:
        lines.append("p: needs two configurations with at least two seeds")
    return lines + left_out


def describe_unfinished(run: ComparedRun, metric: str) -> str:
    state, newest = run.status.state if run.status else "unknown", next(reversed(run.curve(metric).values()), None)
    progress = f"step {run.completed_steps()} of {run.settings['steps']}"
    return f"left out: {run.label} ({state}, {progress}, {metric} {format_number(newest)})"


def format_number(number: float | None, form: str = ".4f") -> str:
    """Format a number, or a dash for None and NaN."""
    return "-" if number is None or math.isnan(number) else format(number, form)


def average_by_seed(runs: list[ComparedRun], metric: str) -> list[float]:
    """Return a final metric for each seed: repeating a run adds no sample, though it may differ by rounding."""
    by_seed: dict[tuple[Any, ...], list[float]] = {}
    for run in runs:
        if (value := run.final(metric)) is not None:
            by_seed.setdefault(run.seeds(), []).append(value)
    return [statistics.fmean(values) for values in by_seed.values()]


def p_values_against_best(samples: list[list[float]]) -> list[float | None]:
    """Return the p-value of the difference between each sample and the one with the lowest mean.

    For two samples it is that of Welch's t-test. For more, the lowest mean is the best by chance too, which correcting
    for the number of comparisons ignores. The p-value is then the probability that among samples of equal means, with
    these deviations and numbers of seeds, any differs from its best by so small a p-value of Welch's test: the minP
    adjustment of Westfall and Young ("Resampling-based multiple testing", 1993), whose null distribution is simulated
    as in the parametric bootstrap of Krishnamoorthy, Lu and Mathew ("A parametric bootstrap approach for ANOVA with
    unequal variances", 2007). The probability that a table of equal means has any p-value below 0.05 is about 0.05.

    Returns:
        The p-values, 1 for the best; None for a single value, which is neither tested nor the best.
    """
    tested = [i for i, sample in enumerate(samples) if len(sample) > 1]
    p_values: list[float | None] = [None for _ in samples]
    if len(tested) < 2:
        return p_values
    counts = np.array([len(samples[i]) for i in tested])
    variances = np.array([statistics.variance(samples[i]) for i in tested]) / counts
    observed = welch_p_values(np.array([statistics.fmean(samples[i]) for i in tested]), variances, counts)
    adjusted = observed
    if len(tested) > 2:
        generator = np.random.default_rng(0)
        shape = NUM_SIMULATIONS, len(tested)
        means = generator.standard_normal(shape) * np.sqrt(variances)
        simulated = variances * generator.chisquare(counts - 1, shape) / (counts - 1)
        smallest = np.sort(welch_p_values(means, simulated, counts).min(axis=-1))
        fraction = (1 + np.searchsorted(smallest, observed, side="right")) / (1 + NUM_SIMULATIONS)
        adjusted = np.maximum(observed, fraction)
    for i, p in zip(tested, adjusted, strict=True):
        p_values[i] = float(p)
    return p_values


def welch_p_values(means: NDArray, variances: NDArray, counts: NDArray) -> NDArray:
    """Return the two-sided p-values of Welch's t-test between each sample and the one with the lowest mean.

    Args:
        means: shape [..., samples].
        variances: of the means, of the same shape.
        counts: the size of each sample.
    """
    from scipy.special import stdtr  # the import takes longer than the rest of tools.compare

    best = means.argmin(axis=-1, keepdims=True)
    best_variance = np.take_along_axis(variances, best, -1)
    difference, variance = means - np.take_along_axis(means, best, -1), variances + best_variance
    with np.errstate(divide="ignore", invalid="ignore"):  # samples without any deviation
        freedom = variance**2 / (variances**2 / (counts - 1) + best_variance**2 / (counts[best] - 1))
        p_values = 2 * stdtr(freedom, -difference / np.sqrt(variance))
    p_values = np.where(variance > 0, p_values, difference == 0)
    np.put_along_axis(p_values, best, 1.0, -1)
    return p_values


def save_picture(configurations: Configurations, metric: str, x: str, path: Path) -> None:
    """Plot the training loss, and beside it the validation loss, or the excess loss where every run knows it.

    The finished runs of a configuration are one curve, their mean, in a band from the lowest to the highest. The mean
    would jump where a run ends, so each unfinished run is a curve of its own in the same colour.

    Raises:
        OSError: The file cannot be written.
        ConfigError: A run logged too little for the x axis.
    """
    from matplotlib.lines import Line2D

    runs = [run for members in configurations.values() for run in members]
    if metric == "val/loss" and all(run.curve(EXCESS_LOSS) or not run.curve(metric) for run in runs):
        metric = EXCESS_LOSS
    figure = plot.new_figure(11, 4.4 + 0.1 * len(configurations))
    panels = figure.subplots(1, 2, sharex=True)
    legend = []
    for index, (label, members) in enumerate(configurations.items()):
        finished = [run for run in members if run.final("val/loss") is not None]
        for curve in filter(None, [finished, *([run] for run in members if run not in finished)]):
            plot_mean(panels[0], curve, "train/loss", x, index, plot.THIN)
            plot_mean(panels[1], curve, metric, x, index, plot.THICK)
        style = plot.run_style(index) | plot.THICK | plot.markers(index)
        legend.append(Line2D([], [], **style, label=plot.fit_label(label)))
    for axes, name in zip(panels, ("training loss (nats/token)", METRICS[metric]), strict=True):
        plot.style_loss_axes(axes, x)
        axes.set_ylabel(name)
    figure.legend(handles=legend, loc="outside lower center", fontsize="small", handlelength=4, ncols=2)
    plot.save(figure, path)


def plot_mean(axes: "Axes", runs: list[ComparedRun], metric: str, x: str, index: int, width: dict[str, Any]) -> None:
    """Plot the mean of a metric over runs at the steps that all of them logged, in a band from lowest to highest."""
    curves = [run.curve(metric) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    positions = np.mean([run.positions(x, steps) for run in runs], axis=0)
    if np.isnan(positions).any():
        raise ConfigError(f"x: {x}: {', '.join(run.label for run in runs)} did not log it; use --x steps")
    values = np.array([[curve[step] for step in steps] for curve in curves])
    style = plot.run_style(index) | width
    has_markers = width is plot.THICK or len(steps) == 1  # a single point has no line
    axes.plot(positions, values.mean(axis=0), **style, **(plot.markers(index, len(steps)) if has_markers else {}))
    if len(runs) > 1:
        axes.fill_between(
            positions, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.2, linewidth=0
        )
