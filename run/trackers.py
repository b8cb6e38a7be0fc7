"""Where a run is followed besides the screen and its own files: W&B, or another of Accelerate's trackers."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from uuid import uuid4

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import patch_environment

from checkpoint.identity import ROOT, SUMMATION_ORDER, training_sources
from checkpoint.manifest import Manifest
from checkpoint.provenance import provenance
from config.errors import ConfigError, unhandled_choice
from config.schema import TrainConfig
from data.json_objects import finite_or_null
from distributed.signals import Preempted
from model.hf import get_family
from run.directory import RunDirectory
from run.metrics_log import read_rows
from training.metrics import NonFiniteError

STOPPING_SECONDS = 10  # for which a run that was asked to stop waits for its tracker
ExportNewest = Callable[[Path], tuple[Path, Manifest]]  # from a run's directory to the folder, and what it is of


def check(config: TrainConfig) -> None:
    """Refuse what could not be tracked, before anything is allocated.

    Raises:
        ConfigError: the tracker is not installed, W&B would ask at the terminal who the user is, or transformers has no
            model like the one that is to be exported.
    """
    tracking = config.tracking
    if kind_of(tracking.tracker) is TrackerRun:
        if tracking.tracker not in map(str, get_available_trackers()):
            raise ConfigError(f"tracking.tracker: {tracking.tracker} is not installed: pip install {tracking.tracker}")
    elif tracking.wandb == "online" and not disabled_by_environment():
        with suppress(ImportError):
            if not import_module("wandb").api.api_key:
                raise ConfigError(
                    "tracking.wandb: online needs an API key: run `wandb login`, or set WANDB_API_KEY; offline needs "
                    "none"
                )
    if tracking.log_model:
        try:
            get_family(config.model)
        except ValueError as error:
            raise ConfigError(f"tracking.log_model: true is an export, but {error}") from None


def start_tracker(
    config: TrainConfig,
    run: RunDirectory,
    step: int,
    say: Callable[[str], None],
    export_newest: ExportNewest | None,
) -> "TrackerRun | None":
    """What the settings ask for, of a start after `step`; `say` prints, and `export_newest` is that of export.py."""
    tracking = config.tracking
    if tracking.tracker == "wandb" and tracking.wandb == "disabled":
        return None
    if tracking.tracker == "wandb" and (variable := disabled_by_environment()):
        say(f"W&B is off, as {variable} of the environment says: metrics go to metrics.jsonl only.")
        return None
    return kind_of(tracking.tracker)(config, run, step, say, export_newest)


def disabled_by_environment() -> str | None:
    """The variable, with its value, by which people turn W&B off for all that they start; None if it is on."""
    if (mode := os.environ.get("WANDB_MODE", "")).lower() == "disabled":
        return f"WANDB_MODE={mode}"
    if (disabled := os.environ.get("WANDB_DISABLED", "")).lower() in ("true", "1", "yes", "on"):
        return f"WANDB_DISABLED={disabled}"
    return None


def kind_of(tracker: str) -> "type[TrackerRun]":
    """What follows a run with the tracker of this name."""
    match tracker:
        case "wandb":
            return WandbRun
        case "tensorboard" | "trackio":
            return TrackerRun
        case other:
            raise unhandled_choice("tracking.tracker", other)


class TrackerRun:
    """One run of a tracker of Accelerate's. After an error of it nothing is logged any more; `say` tells why, once."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        step: int,
        say: Callable[[str], None],
        export_newest: ExportNewest | None,
    ):
        self.config, self.directory, self.say, self.export_newest = config, run.path, say, export_newest
        self.run = None
        self._try(lambda: self._start(step), starting=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add a point."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        self._try(lambda: self.run.log(numbers, step=step))

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Add texts, as the tracker has them."""
        match self.config.tracking.tracker:
            case "tensorboard":
                self._try(lambda: self.run.log({name: as_code(*texts)}, step=step))
            case "trackio":
                rows = [[text] for text in texts]
                self._try(lambda: self.run.log({name: import_module("trackio").Table(["text"], rows)}, step=step))

    def finish(self, failure: BaseException | None) -> None:
        """Return when all is written; `failure` is what ended the run, if it was not its last step."""
        self._finish_in_time(lambda: self._try(lambda: self.run.finish()), failure)

    def _finish_in_time(self, action: Callable[[], object], failure: BaseException | None) -> None:
        """Leave it behind when it takes too long: the other processes wait for this one, and so does a stop."""
        seconds = STOPPING_SECONDS if isinstance(failure, Preempted) else 0.75 * self.config.timeout_seconds
        thread = Thread(target=action, daemon=True, name="tracker")
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            name = self.config.tracking.tracker
            self.say(f"{name} has not finished after {seconds:g} s: what it lacks is in metrics.jsonl.")

    def _try(self, action: Callable[[], object], starting: bool = False) -> None:
        if self.run is None and not starting:
            return
        name = self.config.tracking.tracker
        try:
            action()
        except ImportError:
            self.say(f"{name} is not installed: metrics go to metrics.jsonl only.")
        except Exception as error:  # whatever it is, it is no reason to stop training
            self.run = None
            self.say(f"{name} has failed, metrics go to metrics.jsonl only: {type(error).__name__}: {error}")

    def _settings(self) -> dict[str, Any]:
        """The run's settings, and what this start computes them with."""
        *_, start = read_rows(self.directory / "sessions.jsonl")
        arrangement = {name: start[name] for name in (*SUMMATION_ORDER, "mixed_precision")}
        return {**asdict(self.config), **arrangement, "provenance": provenance()}

    def _start(self, step: int) -> None:
        name, kind = self.config.tracking.tracker, LOGGER_TYPE_TO_CLASS[self.config.tracking.tracker]
        # A branch begins after a step as well, but not in the run of its name that was moved aside.
        goes_on = step and len(list(read_rows(self.directory / "sessions.jsonl"))) > 1
        options = {
            # what a start before this one has logged of the steps that are done again is not shown any more
            "tensorboard": {"logging_dir": self.directory, "purge_step": step + 1},
            "trackio": {
                "name": self.config.name,
                "resume": "allow" if goes_on else "never",
                "config": self._settings(),
            },
        }
        run = kind("tensorboard" if name == "tensorboard" else self.config.tracking.project, **options[name])
        run.start()
        if name == "tensorboard":  # its table of hyperparameters would be a second run
            run.log({"settings": as_code(json.dumps(self._settings(), indent=1))}, step=step)
        self.run = run


def as_code(*texts: str) -> str:
    """Markdown that shows each of the texts as it is, with a line between them."""
    return "\n\n---\n\n".join("\n".join("    " + line for line in text.splitlines()) for text in texts)


class WandbRun(TrackerRun):
    """One run of W&B over all starts of ours, with what only W&B has: samples, code, an alert and the model.

    In a thread of its own: it takes seconds to start, for which training need not wait. What is logged before waits.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory, *others):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="wandb")
        self.samples = list(read_rows(run.generations_file)) if run.generations_file.exists() else []
        self.num_given = len(self.samples)
        self.until_finished = ExitStack()
        super().__init__(config, run, *others)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add a point."""
        self._try(lambda: self.run.log({"step": step, **metrics}))

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Add rows to the table of texts, which W&B is given anew: its own growing ones begin again offline.

        A long one only when it has grown by a fiftieth, and at the end: W&B keeps them all.
        """
        self.samples += [{"step": step, name: text} for text in texts]
        if len(self.samples) >= 1.02 * self.num_given:
            self._give_samples()

    def finish(self, failure: BaseException | None) -> None:
        """Return when all is written: with an alert after a loss that is no number, else with the model if asked."""
        if len(self.samples) > self.num_given:
            self._give_samples()
        if isinstance(failure, NonFiniteError):
            title = f"{self.config.name}: the loss is no number"[-63:]
            self._try(lambda: self.run.alert(title, str(failure), level="ERROR"))
        elif failure is None and self.config.tracking.log_model:
            self._log_model()
        self._try(lambda: self.run.finish(exit_code=int(failure is not None)))
        self._finish_in_time(self.thread.shutdown, failure)
        self.until_finished.close()

    def _try(self, *arguments, **named) -> None:
        self.thread.submit(super()._try, *arguments, **named)

    def _give_samples(self) -> None:
        self.num_given, step = len(self.samples), self.samples[-1]["step"]
        name = next(key for key in self.samples[-1] if key != "step")
        rows = [[row["step"], row[name]] for row in self.samples if name in row]
        self._try(lambda: self.run.log({"step": step, name: import_module("wandb").Table(["step", "text"], rows)}))

    def _log_model(self) -> None:
        """Export the newest checkpoint, and log that folder as an artifact."""
        try:
            folder, manifest = self.export_newest(self.directory)
        except Exception as error:  # the run is no less finished
            self.say(f"The model is not logged: {error}")
            return
        metadata = {"step": manifest.step, **finite_or_null(manifest.metrics), **manifest.provenance}

        def log() -> None:
            wandb = import_module("wandb")
            name = wandb.util.make_artifact_name_safe(self.config.name)
            model = wandb.Artifact(name, type="model", metadata=metadata)
            for file in folder.resolve().iterdir():
                model.add_file(str(file), policy="immutable")  # the run directory keeps it for a later `wandb sync`
            self.run.log_artifact(model)

        self._try(log)

    def _log_code(self, run) -> None:
        """What trains, as W&B keeps code, and what of it the commits of all starts lack."""
        with TemporaryDirectory() as folder:
            for file in training_sources():  # log_code itself would walk all data and runs
                copy = Path(folder, file.relative_to(ROOT))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
            run.log_code(folder)
        for changes in self.directory.glob("code-*.diff"):
            run.save(shutil.copy(changes, run.dir), base_path=run.dir, policy="now", glob=False)

    def _start(self, step: int) -> None:
        import wandb

        tracking = self.config.tracking
        (self.directory / "wandb").mkdir(exist_ok=True)
        id_file = self.directory / "wandb" / "run_id"
        if not id_file.exists():
            id_file.write_text(uuid4().hex)
        # Else W&B has what is to be uploaded later, as code and tables, below the user's home.
        own = str(id_file.parent.resolve())
        self.until_finished.enter_context(patch_environment(wandb_data_dir=os.environ.get("WANDB_DATA_DIR", own)))
        run = wandb.init(
            project=tracking.project,
            name=self.config.name,
            group=tracking.group,
            tags=tracking.tags,
            id=id_file.read_text(),
            resume="allow",
            dir=self.directory,
            mode=tracking.wandb,
            config=self._settings(),
            settings=wandb.Settings(
                silent=True,
                console="off",
                git_root=str(ROOT),
                # Without a network it would wait for ever, and the other processes wait for this one.
                finish_timeout=self.config.timeout_seconds / 2,
                finish_timeout_raises=True,
            ),
        )
        # W&B's own step can only grow, so after a rewind it would drop the points that are done again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if run.settings.save_code is not False:  # WANDB_DISABLE_CODE
            self._log_code(run)
        self.run = run
