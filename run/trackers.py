"""Log a run to W&B, TensorBoard or Trackio, in addition to the run directory."""

import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any
from uuid import uuid4

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import patch_environment

from checkpoint.identity import ROOT, SUMMATION_ORDER
from checkpoint.provenance import provenance
from config.errors import ConfigError, unhandled_choice
from config.schema import TrainConfig
from data.json_objects import finite_or_null
from distributed.signals import Preempted
from model.hf import get_family
from run.directory import RunDirectory, settings_to_store
from run.metrics_log import read_rows
from training.results import NonFiniteError

STOPPING_SECONDS = 10  # how long a run that was stopped by a signal waits for its tracker
Say = Callable[[str], None]  # prints a line


def check(config: TrainConfig) -> None:
    """Raise ConfigError for tracking settings that would fail later.

    The tracker is not installed, W&B would ask for an API key at the terminal, or the model to be logged cannot be
    exported to transformers.
    """
    tracking = config.tracking
    if tracker_class(tracking.tracker) is TrackerRun:
        if tracking.tracker not in map(str, get_available_trackers()):
            raise ConfigError(f"tracking.tracker: {tracking.tracker} is not installed: pip install {tracking.tracker}")
    elif tracking.wandb == "online" and not disabled_by_environment():
        with suppress(ImportError):
            if not import_module("wandb").api.api_key:
                raise ConfigError(
                    "tracking.wandb: online needs an API key: run `wandb login`, set WANDB_API_KEY, or use offline"
                )
    if tracking.log_model:
        try:
            get_family(config.model)
        except ValueError as error:
            raise ConfigError(f"tracking.log_model: true exports the model, but {error}") from None


def start_tracker(config: TrainConfig, run: RunDirectory, step: int, say: Say) -> "TrackerRun | None":
    """Start the tracker of the config after `step` completed steps; None if it is off."""
    tracking = config.tracking
    if tracking.tracker == "wandb" and tracking.wandb == "disabled":
        return None
    if tracking.tracker == "wandb" and (variable := disabled_by_environment()):
        say(f"W&B is off by the environment variable {variable}: metrics go to metrics.jsonl only.")
        return None
    return tracker_class(tracking.tracker)(config, run, step, say)


def disabled_by_environment() -> str | None:
    """Return the environment variable that turns W&B off, with its value; None if it is on."""
    if (mode := os.environ.get("WANDB_MODE", "")).lower() == "disabled":
        return f"WANDB_MODE={mode}"
    if (disabled := os.environ.get("WANDB_DISABLED", "")).lower() in ("true", "1", "yes", "on"):
        return f"WANDB_DISABLED={disabled}"
    return None


def tracker_class(tracker: str) -> "type[TrackerRun]":
    """Return the class that logs to the tracker."""
    match tracker:
        case "wandb":
            return WandbRun
        case "tensorboard" | "trackio":
            return TrackerRun
        case other:
            raise unhandled_choice("tracking.tracker", other)


class TrackerRun:
    """A run of one of Accelerate's trackers. After its first error, which is printed, nothing more is logged.

    All calls of the tracker run in order in one thread, so that training does not wait for them.
    """

    def __init__(self, config: TrainConfig, run: RunDirectory, step: int, say: Say):
        self.config, self.directory, self.say = config, run.path, say
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tracker")
        self.run: Any = None  # the run object of the tracker; None before it is started and after an error
        self._submit(lambda: self._start(step), starting=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step, without the digest."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        self._submit(lambda: self.run.log(numbers, step=step))

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Log generated texts, in the form that the tracker has for texts."""
        match self.config.tracking.tracker:
            case "tensorboard":
                self._submit(lambda: self.run.log({name: as_code(*texts)}, step=step))
            case "trackio":
                rows = [[text] for text in texts]
                self._submit(lambda: self.run.log({name: import_module("trackio").Table(["text"], rows)}, step=step))

    def finish(self, failure: BaseException | None) -> None:
        """Return when everything is written; `failure` is the exception that ended the run, if any.

        It returns after a timeout too, since other processes, or a scheduler that stops the run, are waiting.
        """
        last = self._submit(lambda: self._finish(failure))  # runs after all queued actions
        seconds = STOPPING_SECONDS if isinstance(failure, Preempted) else 0.75 * self.config.timeout_seconds
        if not wait([last], seconds).done:
            name = self.config.tracking.tracker
            self.say(f"{name} has not finished after {seconds:g} s; metrics.jsonl has everything.")

    def _submit(self, action: Callable[[], object], starting: bool = False) -> Future[None]:
        """Queue `action` for the thread; its first error is printed and ends the tracking."""
        name = self.config.tracking.tracker

        def call() -> None:
            try:
                if self.run is not None or starting:
                    action()
            except ImportError:
                self.say(f"{name} is not installed: metrics go to metrics.jsonl only.")
            except Exception as error:  # no error of a tracker may stop the training
                self.run = None
                self.say(f"{name} has failed, metrics go to metrics.jsonl only: {type(error).__name__}: {error}")

        return self.thread.submit(call)

    def _finish(self, failure: BaseException | None) -> None:
        self.run.finish()

    def _settings(self) -> dict[str, Any]:
        """Return the settings, launch and provenance of this session."""
        *_, session = read_rows(self.directory / "sessions.jsonl")
        launch_facts = {name: session[name] for name in (*SUMMATION_ORDER, "mixed_precision")}
        return {**settings_to_store(self.config), **launch_facts, "provenance": provenance()}

    def _start(self, step: int) -> None:
        name, kind = self.config.tracking.tracker, LOGGER_TYPE_TO_CLASS[self.config.tracking.tracker]
        # A branch starts after a step too, but must not resume the tracker run of a directory that was moved aside.
        is_resumed = step and len(list(read_rows(self.directory / "sessions.jsonl"))) > 1
        options = {
            # purge_step hides the points of steps that an earlier session logged and that are trained again.
            "tensorboard": {"logging_dir": self.directory, "purge_step": step + 1},
            "trackio": {
                "name": self.config.name,
                "resume": "allow" if is_resumed else "never",
                "config": self._settings(),
            },
        }
        run = kind("tensorboard" if name == "tensorboard" else self.config.tracking.project, **options[name])
        run.start()
        if name == "tensorboard":  # store_init_configuration would show a second run
            run.log({"settings": as_code(json.dumps(self._settings(), indent=1))}, step=step)
        self.run = run


def as_code(*texts: str) -> str:
    """Return Markdown that shows each text verbatim, with a rule between them."""
    return "\n\n---\n\n".join("\n".join("    " + line for line in text.splitlines()) for text in texts)


class WandbRun(TrackerRun):
    """A W&B run, which all sessions of a run share, with a table of texts, the code, an alert and the model."""

    def __init__(self, config: TrainConfig, run: RunDirectory, *others):
        self.samples = list(read_rows(run.generations_file)) if run.generations_file.exists() else []
        self.num_logged = len(self.samples)
        self.environment = ExitStack()
        super().__init__(config, run, *others)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._submit(lambda: self.run.log({"step": step, **metrics}))

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Add rows to the table of texts and log the whole table.

        W&B would start an incremental table over when an offline run resumes. It keeps every version of a table, so a
        long one is logged only after growing by 2%, and at the end.
        """
        self.samples += [{"step": step, name: text} for text in texts]
        if len(self.samples) >= 1.02 * self.num_logged:
            self._log_samples()

    def finish(self, failure: BaseException | None) -> None:
        """Return when everything is written; send an alert if the loss was not finite, else log the model."""
        if len(self.samples) > self.num_logged:
            self._log_samples()
        if isinstance(failure, NonFiniteError):
            title = f"{self.config.name}: the loss is not finite"[-63:]  # W&B requires fewer than 64 characters
            self._submit(lambda: self.run.alert(title, str(failure), level="ERROR"))
        elif failure is None and self.config.tracking.log_model:
            self._log_model()
        super().finish(failure)
        self.environment.close()

    def _finish(self, failure: BaseException | None) -> None:
        self.run.finish(exit_code=int(failure is not None))

    def _log_samples(self) -> None:
        self.num_logged, step = len(self.samples), self.samples[-1]["step"]
        name = next(key for key in self.samples[-1] if key != "step")
        rows = [[row["step"], row[name]] for row in self.samples if name in row]
        self._submit(lambda: self.run.log({"step": step, name: import_module("wandb").Table(["step", "text"], rows)}))

    def _log_model(self) -> None:
        """Export the newest checkpoint and log the folder as an artifact."""
        from run.export import export_newest  # imports transformers

        try:
            folder, manifest = export_newest(self.directory)
        except Exception as error:  # the run has finished nevertheless
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

        self._submit(log)

    def _start(self, step: int) -> None:
        import wandb

        tracking = self.config.tracking
        (self.directory / "wandb").mkdir(exist_ok=True)
        id_file = self.directory / "wandb" / "run_id"
        if not id_file.exists():
            id_file.write_text(uuid4().hex)
        # By default W&B stages uploads, such as code and tables, in the user's home directory.
        data_dir = os.environ.get("WANDB_DATA_DIR", str(id_file.parent.resolve()))
        self.environment.enter_context(patch_environment(wandb_data_dir=data_dir))
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
                # By default it waits forever without a network, while the other processes wait for this one.
                finish_timeout=self.config.timeout_seconds / 2,
                finish_timeout_raises=True,
            ),
        )
        # W&B's own step cannot decrease, so it would drop the points of steps that are trained again after a resume.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self.run = run
