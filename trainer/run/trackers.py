"""Log a run to W&B or TensorBoard, in addition to the run directory."""

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

from accelerate.tracking import GeneralTracker, on_main_process
from tqdm import tqdm

from model.hf import exported_family
from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from runtime.distributed.signals import Preempted, StopSignal
from runtime.files import write_atomically
from runtime.json_objects import finite_or_null
from trainer.checkpoint.identity import ROOT
from trainer.run.directory import Run
from trainer.run.metrics_log import read_rows

STOPPING_SECONDS = 10  # how long a run waits for its tracker after a stop signal
POLL_SECONDS = 0.2  # between looks at the stop signal
CONNECTING_SECONDS = 5  # how long W&B's server may take to answer before the run is logged offline


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def check(config: TrainConfig) -> None:
    """Raise ConfigError for tracking settings that would fail later.

    The tracker is not installed, W&B would ask for an API key at the terminal, or the model to be logged cannot be
    exported to transformers.
    """
    tracking = config.tracking
    if tracking.tracker == "tensorboard" and find_spec("tensorboard") is None:
        raise ConfigError("tracking.tracker: tensorboard is not installed: pip install tensorboard")
    if tracking.wandb == "online" and not is_disabled_by_environment():
        with suppress(ImportError):
            if not import_module("wandb").api.api_key:
                raise ConfigError(
                    "tracking.wandb: online needs an API key: run `wandb login`, set WANDB_API_KEY, or use offline"
                )
    if tracking.log_model:
        try:
            exported_family(config.model)
        except ValueError as error:
            raise ConfigError(f"tracking.log_model: true exports the model, but {error}") from None


def build_tracker(config: TrainConfig, run: Run) -> "Tracker | None":
    """Return the tracker of a run, for `Accelerator(log_with=...)`; `accelerator.init_trackers` starts it."""
    is_off = config.tracking.tracker == "wandb" and config.tracking.wandb == "disabled"
    return None if is_off else Tracker(config, run.path)


def is_disabled_by_environment() -> bool:
    """Return whether WANDB_MODE turns W&B off; wandb.init ignores it, because it is given a mode."""
    return os.environ.get("WANDB_MODE", "").lower() == "disabled"


def wait_until(is_done: Callable[[], bool], deadline: float) -> bool:
    """Wait for `is_done()` until the time `deadline`, or STOPPING_SECONDS after a stop signal; return its value."""
    is_stopping = False
    while not (done := is_done()) and monotonic() < deadline:
        if StopSignal.received and not is_stopping:
            is_stopping, deadline = True, min(deadline, monotonic() + STOPPING_SECONDS)
        sleep(POLL_SECONDS)
    return done


class Tracker(GeneralTracker):
    """Logs to W&B or TensorBoard, as a tracker of Accelerate; only the main process calls its methods.

    With Accelerate's own W&B tracker, a run without a server ends at its start, and may wait at its end without limit.
    Here all calls run in order in a thread of their own, so that training does not wait for them. After the first
    error, which is printed, nothing more is logged. The settings and W&B's project are those of the run, not arguments
    of `init_trackers`.
    """

    requires_logging_directory = False

    def __init__(self, config: TrainConfig, directory: Path):
        self.name = config.tracking.tracker
        super().__init__()
        self.config, self.directory = config, directory
        self.has_failed = self.is_finished = False

    @property
    def tracker(self) -> Any:
        """The run of W&B or the writer of TensorBoard, once it is started."""
        self.started.result()
        return self.run.run

    @on_main_process
    def start(self) -> None:
        """Begin to start the tracker; `sessions.jsonl` has the settings and the first step of this session."""
        if self.name == "wandb" and is_disabled_by_environment():
            self.has_failed = True
            say("W&B is off by the environment variable WANDB_MODE=disabled: metrics go to metrics.jsonl only.")
        # The points after the rows of metrics.jsonl are logged again: without a row, which has metrics, from step 0 on.
        newest = Run(self.directory).newest_metrics()
        self.first_step = newest["step"] + (len(newest) > 1)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tracker")
        self.started = self._submit(self._start)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Log the metrics of a step, if there are any."""
        if values:
            self._submit(lambda: self.run.log(step, values))

    @on_main_process
    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Log generated texts."""
        self._submit(lambda: self.run.log_texts(step, name, texts))

    @on_main_process
    def finish(self, failure: BaseException | None = None) -> None:
        """Return when everything is written; `failure` is the exception that ended the run, if any.

        It returns after a timeout too, with the export of the model, since other processes are waiting, and soon after
        a stop signal, since a scheduler is.
        """
        if self.is_finished:
            return
        self.is_finished = True
        start = monotonic()
        seconds = STOPPING_SECONDS if isinstance(failure, Preempted) else 0.75 * self.config.timeout_seconds
        if failure is None and self.config.tracking.log_model:
            self._log_model()
        last = self._submit(lambda: self.run.finish(failure is not None))  # runs after all queued actions
        if not wait_until(last.done, start + seconds):
            say(f"{self.name} has not finished after {monotonic() - start:.0f} s; metrics.jsonl has everything.")

    def _start(self) -> None:
        *_, session = read_rows(self.directory / "sessions.jsonl")
        settings = {**session.pop("config"), **session}  # with the launch, the versions and the commit
        self.run = TRACKERS[self.name](self.config, self.directory, settings, self.first_step)

    def _start_again(self) -> None:
        """Start W&B again, and log all rows of this session: its process has ended, and had not written the last ones.

        A scheduler may signal all processes of a job, and that of W&B, unlike a run, ends at once. A point that it had
        written is there twice, with the same values.
        """
        with suppress(Exception):
            import_module("wandb").teardown(exit_code=1)  # also unregisters its exit handler, which would fail
        self._start()
        for row in Run(self.directory).metrics():
            if row["step"] >= self.first_step:
                self.run.log(row.pop("step"), row)

    def _submit(self, action: Callable[[], object]) -> Future[None]:
        """Queue `action` for the thread; its first error is printed and ends the tracking."""

        def call() -> None:
            if self.has_failed:
                return
            try:
                try:
                    action()
                except Exception as error:
                    if not is_lost_process(error):
                        raise
                    self._start_again()
                    action()
            except Exception as error:  # no error of a tracker may stop the training
                self.has_failed = True
                missing = isinstance(error, ImportError)
                reason = "is not installed" if missing else f"has failed ({type(error).__name__}: {error})"
                say(f"{self.name} {reason}: metrics go to metrics.jsonl only.")

        return self.thread.submit(call)

    def _log_model(self) -> None:
        """Export the newest checkpoint, and log the folder."""
        manifests = Run(self.directory).manifests()
        if not manifests:
            say(f"The model is not logged: {self.directory} has no valid checkpoint")
            return
        checkpoint, manifest = next(iter(manifests.items()))  # the newest
        folder = self.directory / "exports" / checkpoint.name
        if not folder.exists():
            # In a process of its own, so that training does not depend on what an export imports.
            command = [sys.executable, str(ROOT / "export.py"), str(checkpoint), str(folder)]
            start, limit = monotonic(), self.config.timeout_seconds / 2  # the other processes wait for this one
            with TemporaryFile("w+") as errors:
                export = subprocess.Popen(command, stdout=DEVNULL, stderr=errors, start_new_session=True)
                if not wait_until(lambda: export.poll() is not None, start + limit):
                    export.kill()
                    export.wait()
                    say(f"The model is not logged: its export had not ended after {monotonic() - start:.0f} s")
                    return
                errors.seek(0)
                if export.returncode:  # the run has finished nevertheless
                    say(f"The model is not logged: {errors.read().strip().rpartition('error: ')[2]}")
                    return
        metadata = {"step": manifest.step, **finite_or_null(manifest.metrics), **manifest.provenance}
        self._submit(lambda: self.run.log_model(folder, metadata))


class WandbRun:
    """A W&B run, which all sessions of a run directory share."""

    def __init__(self, config: TrainConfig, directory: Path, settings: dict[str, Any], first_step: int):
        import wandb

        tracking, self.name = config.tracking, config.name
        id_file = directory / "wandb" / "run_id"
        if not id_file.exists():
            id_file.parent.mkdir(exist_ok=True)
            write_atomically(id_file, uuid4().hex)
        # By default W&B stages uploads, such as tables, in the user's home directory.
        os.environ.setdefault("WANDB_DATA_DIR", str(id_file.parent.resolve()))
        start = partial(
            wandb.init,
            project=tracking.project or os.environ.get("WANDB_PROJECT") or "mini-gpt",
            name=config.name,
            group=tracking.group,
            tags=tracking.tags,
            id=id_file.read_text(),
            resume="allow",
            dir=directory,
            config=settings,
            settings=wandb.Settings(
                silent=True,
                console="off",
                # By default it waits forever without a network, while the other processes wait for this one.
                finish_timeout=config.timeout_seconds / 2,
                finish_timeout_raises=True,
            ),
        )
        self.run = start_online(start, directory) if tracking.wandb == "online" else start(mode="offline")
        # W&B's own step cannot decrease, so it would drop the points of steps that are trained again after a resume.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int | None, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step."""
        self.run.log({"step": step, **metrics} if step is not None else metrics)

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Log a table."""
        table = import_module("wandb").Table(["step", "text"], [[step, text] for text in texts])
        self.run.log({"step": step, name: table})

    def log_model(self, folder: Path, metadata: dict[str, Any]) -> None:
        """Log the files of an exported model as an artifact."""
        wandb = import_module("wandb")
        model = wandb.Artifact(wandb.util.make_artifact_name_safe(self.name), type="model", metadata=metadata)
        model.add_dir(str(folder.resolve()), policy="immutable")  # the run directory keeps it for a later `wandb sync`
        self.run.log_artifact(model)

    def finish(self, failed: bool) -> None:
        """Return when everything is written or uploaded."""
        self.run.finish(exit_code=int(failed))


def is_lost_process(error: Exception) -> bool:
    """Return whether an error of W&B means that its process has ended."""
    return isinstance(error, ConnectionError) or type(error).__name__ in ("HandleAbandonedError", "MailboxClosedError")


def start_online(start: Callable[..., Any], directory: Path) -> Any:
    """Start a W&B run with mode=online; if the server cannot be used, say so and start it with mode=offline."""
    import wandb

    # wandb.init itself would try for 90 s to reach the server.
    problem = connection_problem(wandb.setup().settings.base_url)
    if problem is None:
        try:
            return start(mode="online")
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            wandb.teardown(exit_code=1)  # otherwise the id of the run stays in use
    say(f"W&B cannot be used online ({problem}): upload this session with wandb sync {directory}/wandb/offline-run-*")
    return start(mode="offline")


def connection_problem(url: str) -> str | None:
    """Return why `url` sends no HTTP response in a few seconds; None if it sends any, such as an error."""
    try:
        urlopen(url, timeout=CONNECTING_SECONDS).close()
    except HTTPError:
        return None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        # W&B may know certificates that Python does not know.
        return None if isinstance(reason, ssl.SSLError) else f"{url}: {reason}"


class TensorBoardRun:
    """An event file in RUN/tensorboard for each session."""

    def __init__(self, config: TrainConfig, directory: Path, settings: dict[str, Any], first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides the points of steps that an earlier session logged and that are trained again.
        self.run = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)
        self.run.add_text("settings", as_code(json.dumps(settings, indent=1)), first_step)

    def log(self, step: int | None, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step."""
        for name, value in metrics.items():
            if isinstance(value, int | float):  # not the digest
                self.run.add_scalar(name, value, step)

    def log_texts(self, step: int, name: str, texts: list[str]) -> None:
        """Log generated texts."""
        self.run.add_text(name, as_code(*texts), step)

    def finish(self, failed: bool) -> None:
        """Return when everything is written."""
        self.run.close()


def as_code(*texts: str) -> str:
    """Return Markdown that shows each text verbatim, with a rule between them."""
    return "\n\n---\n\n".join("\n".join("    " + line for line in text.splitlines()) for text in texts)


TRACKERS = {"wandb": WandbRun, "tensorboard": TensorBoardRun}
