"""The directory of a run, `<out_dir>/<name>/`, as train.py writes it."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object

from checkpoint.provenance import launch_facts, network_size, provenance, uncommitted_changes
from config.errors import ConfigError, RunError
from config.schema import TrainConfig
from data.files import copy_folder, move_aside, write_atomically
from distributed.collectives import broadcast_from_main
from distributed.signals import Preempted
from distributed.world import is_main_process
from run.lock import LOCK_FILE, RunLock
from run.metrics_log import truncate_after_step
from run.resume import (
    StartingPoint,
    check_existing_run,
    check_new_run,
    choose_starting_point,
    differing_settings,
    resumed_settings,
    starts_afresh,
    with_stored_model,
)
from run.status import Status, write_outcome, write_status


class RunDirectory:
    """Config, status, metrics and checkpoints of one run; all but checkpoints are written by the main process alone."""

    def __init__(self, out_dir: str, name: str):
        self.path = Path(out_dir).expanduser() / name
        self.checkpoints = self.path / "checkpoints"
        self.metrics_file, self.generations_file = self.path / "metrics.jsonl", self.path / "generations.jsonl"
        self.sessions_file, self.status_file = self.path / "sessions.jsonl", self.path / "status.json"
        self.lock = RunLock(self.path)
        self.is_open = False
        self._resolved_config: TrainConfig | None = None

    def check(self, config: TrainConfig) -> None:
        """Raise ConfigError if the directory cannot be written, or holds a run that these settings would change.

        Every process calls it before the process group exists; nothing is written.
        """
        self._resolved_config = config
        existing = self.path
        try:
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise ConfigError(f"out_dir: {config.out_dir!r}: cannot write in {existing}: {error.strerror}") from None
        stored = resumed_settings(self.path, config)
        if stored is None:
            check_new_run(self.path, config)
        else:
            check_existing_run(self.path, config, stored)

    def open(self, config: TrainConfig, accelerator: Accelerator) -> StartingPoint:
        """Choose the checkpoint to start from and write the resolved config; called by all processes together.

        On all processes, raise ConfigError if no valid checkpoint is left or it does not fit the settings, and RunError
        if the directory cannot be read or written.
        """
        start: StartingPoint | Exception = StartingPoint()
        if accelerator.is_main_process:
            try:
                start = self._prepare(config, launch_facts(accelerator) | provenance())
            except OSError as error:
                start = RunError(f"{self.path} cannot be prepared: {error}")
            except Exception as error:  # sent to the other processes, which would otherwise wait forever
                start = error
        start = broadcast_from_main(start)
        if isinstance(start, Exception):
            raise start
        if not all(gather_object([(self.path / "config.yaml").exists()])):
            raise ConfigError(f"out_dir: {config.out_dir!r} is not the same directory on every machine of this run")
        return start

    @contextmanager
    def record_outcome(self, config: TrainConfig) -> Iterator[None]:
        """Write the outcome of this session into status.json: finished, preempted or failed.

        A session that is refused before it trains is recorded too, so that a program that restarts runs does not read
        the outcome of the previous session; but only if the directory holds the run with these settings.
        """
        try:
            yield
        except Preempted as preempted:
            if is_main_process():
                write_outcome(self.status_file, "preempted", str(preempted))
            raise
        except BaseException as error:
            if is_main_process() and (self.is_open or self._lock_same_run(config)):
                write_outcome(self.status_file, "failed", f"{type(error).__name__}: {error}")
            raise
        else:
            if is_main_process():
                write_outcome(self.status_file, "finished")
        finally:
            self.lock.release()

    def record_progress(self, step: int) -> None:
        """Write into status.json that the run is running and has completed `step` steps."""
        if is_main_process():
            write_status(self.status_file, Status("running", step))

    def _prepare(self, config: TrainConfig, facts: dict[str, Any]) -> StartingPoint:
        """Lock the directory, move an old run aside with `resume: never`, choose the checkpoint and write all files."""
        self.lock.acquire()
        if starts_afresh(config) and any(entry.name != LOCK_FILE for entry in self.path.iterdir()):
            print(f"The existing run was moved to {move_aside(self.path)}.")
            self.lock.acquire()
        self.is_open = True
        start = choose_starting_point(self.path, config, facts)
        self.checkpoints.mkdir(exist_ok=True)
        last_kept = start.step if start.checkpoint else -1  # without a checkpoint step 0 is evaluated again
        truncate_after_step(self.metrics_file, last_kept, one_per_step=True)
        truncate_after_step(self.generations_file, start.step)
        truncate_after_step(self.sessions_file, config.steps)  # only to remove an incomplete line
        write_atomically(self.path / "config.yaml", yaml.safe_dump(settings_to_store(config), sort_keys=False))
        facts |= network_size(config)
        if config.data.source == "text":
            from data.integrity import hash_validation_text  # imports pyarrow, which other sources do not need

            corpora = [Path(corpus).expanduser() for corpus in config.data.corpora]
            facts["validation_text"] = hash_validation_text(corpora)
            if not (self.path / "tokenizer").exists():  # a copy, so that the model can be used without the corpus
                # The tokenizers of a mixture are equal, but one may lack a chat template.
                tokenizers = [corpus / "tokenizer" for corpus in corpora]
                with_template = [folder for folder in tokenizers if (folder / "chat_template.jinja").exists()]
                copy_folder((with_template or tokenizers)[0], self.path / "tokenizer")
        self._record_session(start, facts | {"config": settings_to_store(config)})
        self.record_progress(start.step)
        return start

    def _record_session(self, start: StartingPoint, facts: dict[str, Any]) -> None:
        """Append a row to sessions.jsonl, and write the uncommitted changes of the code into a file beside it."""
        name = None
        if changes := uncommitted_changes():
            name = f"code-{sha256(changes.encode()).hexdigest()[:8]}.diff"
            write_atomically(self.path / name, changes + "\n")
        row = {"step": start.step, **facts, "uncommitted_changes": name}
        if start.checkpoint and start.checkpoint.parent != self.checkpoints:  # the run is a branch
            parent = str(start.checkpoint.resolve().parent.parent)
            row["branched_from"] = {"run": parent, "step": start.step, "digest": start.metrics.get("state/digest")}
        with open(self.sessions_file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def _lock_same_run(self, config: TrainConfig) -> bool:
        """Lock the directory if it holds the run with these settings and is not in use; return whether it did."""
        with suppress(ConfigError, OSError):
            stored = resumed_settings(self.path, config)
            if stored is None:
                return False
            if self._resolved_config is not None:
                config = self._resolved_config
            elif config.init_from is not None:
                config = with_stored_model(config, stored)
            if not differing_settings(stored, config) and config.branch_from in (None, stored["branch_from"]):
                self.lock.acquire()
                return True
        return False


def settings_to_store(config: TrainConfig) -> dict[str, Any]:
    """Return the nested settings for YAML and JSON, with lists for tuples; `resume: never` becomes auto."""
    settings = config.model_dump(mode="json")
    return settings | ({"resume": "auto"} if config.resume == "never" else {})
