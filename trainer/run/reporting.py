"""Log metrics and texts to the run directory and the screen, and texts to the trackers."""

import os
import re
import sys
from contextlib import AbstractContextManager, closing
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from runtime.config.schema import TrainConfig
from runtime.json_objects import finite_or_null
from trainer.run.directory import Run
from trainer.run.metrics_log import RowWriter
from trainer.throughput import Throughput

NUM_TEXTS_SHOWN = 3
TRAINING = ("train/", "perf/")  # prefixes of the metrics on the line of a training step
# Metrics that the line of an evaluation does not show as `name = value`; metrics.jsonl has them all.
NOT_SHOWN = re.compile(r"(train|perf|state|layers)/|\w+/(excess_loss|bytes$)")
FORMATS = {"train/lr": ".3g", "train/grad_norm": ".3f", "train/skipped": "d"}
FORMATS |= {"perf/tokens_per_second": ",.0f", "perf/mfu": ".1%"}
SHORT_NAMES = {"perf/tokens_per_second": "tokens/s"}


def format_metric(name: str, value: float) -> str:
    """Format the value of a metric for the screen."""
    return format(value, FORMATS.get(name, ".4f" if value == 0 or abs(value) >= 0.01 else ".3g"))


class Reporter(AbstractContextManager):
    """Logs metrics and prints, on the main process; on every other process its methods do nothing.

    At the end it finishes the trackers of Accelerate, whose `log` the training loop calls itself.

    The metrics of a training step are a line `[step 10 / 50] loss = 9.3437 ...`, on a terminal above a progress bar.
    """

    def __init__(
        self, config: TrainConfig, run: Run, step: int, accelerator: Accelerator, throughput: Throughput | None = None
    ):
        """Start at `step`. The time of a step and the time left are those of `throughput`."""
        self.first_step, self.steps = step, config.steps
        self.is_main_process = accelerator.is_main_process
        self.throughput = throughput
        if not self.is_main_process:
            return
        # Some containers have a terminal that is 0 columns wide, on which a bar shows nothing.
        has_room = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
        self.bar = tqdm(
            total=config.steps, initial=step, unit="step", dynamic_ncols=True, disable=not has_room, file=sys.stdout
        )
        self.metrics_file = RowWriter(run.path / "metrics.jsonl")
        self.generations_file = run.path / "generations.jsonl"
        self.trackers = accelerator.trackers

    def log(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step: a line of metrics.jsonl, and a line on the screen.

        Without metrics, only the progress bar advances.
        """
        if not self.is_main_process:
            return
        self.bar.update(completed_steps - self.bar.n)
        if not metrics:
            return
        try:
            self.metrics_file.append({"step": completed_steps, **finite_or_null(metrics)})
        except OSError as error:
            self.say(f"metrics.jsonl cannot be written ({error.strerror}); its rows are kept in memory.")

        # The line of a training step. An earlier session has printed it for the step at which this one starts: only an
        # evaluation is added to that.
        training = {
            SHORT_NAMES.get(name, name.partition("/")[2]): format_metric(name, value)
            for name, value in metrics.items()
            if completed_steps > self.first_step
            and name.startswith(TRAINING)
            and name not in ("train/tokens", "perf/peak_memory_bytes")
            and (value or name != "train/skipped")
        }
        if training and self.throughput:
            milliseconds = 1000 * self.throughput.seconds_per_step
            training["ms/step"] = format(milliseconds, ",.0f" if milliseconds >= 100 else ".3g")
            training["left"] = tqdm.format_interval(self.throughput.seconds_left(completed_steps, self.steps))
        if training:
            # Not in the bar: it would be cut at 80 columns, and would leave no history on the terminal.
            parts = [f"{name} = {value}" for name, value in training.items()]
            self.say(f"[step {completed_steps} / {self.steps}] " + " ".join(parts))

        # The line of an evaluation.
        shown = {name: value for name, value in metrics.items() if not NOT_SHOWN.match(name)}
        if parts := [f"{name} = {format_metric(name, value)}" for name, value in shown.items()]:
            if (excess := metrics.get("val/excess_loss")) is not None:
                entropy = metrics["val/entropy"]
                amount = f"{excess / entropy:.1%}" if entropy else f"{excess:.4f} nats"
                parts.append(f"({amount} above the entropy of the data)")
            self.say(f"[step {completed_steps} / {self.steps}] " + " ".join(parts))

    def sync(self) -> None:
        """Return once all rows of metrics.jsonl are on the disk; raise OSError if they cannot be written."""
        if self.is_main_process:
            self.metrics_file.sync()

    def log_texts(self, completed_steps: int, name: str, texts: list[str]) -> None:
        """Print the first sampled texts, and log all of them to generations.jsonl and the trackers."""
        if not self.is_main_process:
            return
        for text in texts[:NUM_TEXTS_SHOWN]:
            self.say("  | " + text.replace("\n", "\n  | "))
        try:
            with closing(RowWriter(self.generations_file)) as file:
                file.append(*({"step": completed_steps, name: text} for text in texts))
        except OSError as error:
            self.say(f"generations.jsonl cannot be written ({error.strerror}).")
        for tracker in self.trackers:
            tracker.log_texts(completed_steps, name, texts)

    def say(self, text: str) -> None:
        """Print above the progress bar."""
        if self.is_main_process:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def __exit__(self, exception_type, exception, traceback) -> None:
        if not self.is_main_process:
            return
        self.bar.close()
        self.metrics_file.close()
        for tracker in self.trackers:
            tracker.finish(exception)
