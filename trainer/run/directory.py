"""A run on disk, the directory `<out_dir>/<name>/`: its settings, rows, sessions, checkpoints, status and lock.

Nothing here imports torch. trainer/run/start.py starts a training in the directory.
"""

import json
import math
import os
import statistics
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from data.sampler import BatchSizes, TokenCount
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import read_settings
from runtime.files import flush_to_disk, lock, open_no_link, open_regular, write_atomically
from runtime.json_objects import from_json, parse_object
from trainer.checkpoint.manifest import Manifest, readable_checkpoints
from trainer.run.metrics_log import read_newest_row, read_rows

LOCK_FILE = ".lock"
MAX_REASON_CHARACTERS = 1000  # so that status.json fits into one block of the disk, see Run.write_status


@dataclass(frozen=True)
class Status:
    """Content of status.json, for programs that decide whether to restart a run."""

    state: str
    """running, finished, preempted or failed."""
    step: int
    """The step from which the run can resume: of the newest complete checkpoint, else the one it started from."""
    reason: str = ""
    """Why the run was preempted or failed, for people."""
    kind: str | None = None
    """The same for programs, of a failed run: see runtime/config/errors.py."""


@dataclass(frozen=True)
class Branch:
    """The checkpoint that a branch was started from; `run` is the absolute path of its run directory at that time."""

    run: str
    step: int
    digest: str | None = None
    """`state/digest` of that step."""
    tokens: int = 0
    """Training tokens until that step."""


@dataclass(frozen=True)
class Session:
    """A row of sessions.jsonl: the settings, code and launch of one execution of train.py. None: not recorded."""

    step: int
    """Completed steps when the session starts."""
    config: dict[str, Any] | None = None
    """The resolved settings, nested."""
    device: str | None = None
    """cpu, cuda or mps."""
    mixed_precision: str | None = None
    processes: int | None = None
    shards: int | None = None
    """Processes that share one replica of the weights."""
    threads: int | None = None
    """CPU threads of each process; None on a GPU."""
    processor: str | None = None
    """The model of the processor, or of the GPU."""
    code: str | None = None
    """Hash of the sources that train (trainer/checkpoint/identity.py)."""
    git_commit: str | None = None
    python: str | None = None
    torch: str | None = None
    accelerate: str | None = None
    parameters: int | None = None
    flops_per_token: int | None = None
    validation_text: str | None = None
    """Hash of the validation documents of a text corpus, whatever the tokenizer."""
    corpus_stamp: str | None = None
    """Hash of the sizes and times of the files of a text corpus; of each copy of it, joined by +."""
    uncommitted_changes: str | None = None
    """Name of the patch in the run directory."""
    branched_from: Branch | None = None
    """On the first session of a branch."""


@dataclass(unsafe_hash=True)
class Run:
    """The directory of a run; an absent file counts as empty, except config.yaml.

    Methods read the disk at each call, so that a run can be watched while it trains, and raise ConfigError if a file
    cannot be read. `settings` is read once. Two runs are equal if their paths are.
    """

    path: Path
    _lock: TextIO | None = field(default=None, init=False, repr=False, compare=False)
    _status_lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, config: TrainConfig) -> "Run":
        """Return the run that this config trains."""
        return cls(expand_user_path("out_dir", config.out_dir) / config.run_name)

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The flat settings (`section.name: value`) of config.yaml."""
        settings = read_settings(self.path / "config.yaml")
        if settings is None:
            raise ConfigError(f"run: {str(self.path)!r} is not the directory of a run: it has no config.yaml")
        return settings

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, oldest first."""
        return self._rows("metrics.jsonl")

    def newest_metrics(self) -> dict[str, Any]:
        """Return the newest row of metrics.jsonl, {"step": 0} if there is none; fast also for a long file."""
        return next(iter(self._rows("metrics.jsonl", read_newest_row)), {"step": 0})

    def sessions(self) -> list[Session]:
        """Return the rows of sessions.jsonl, oldest first."""
        rows = self._rows("sessions.jsonl")
        try:
            return [from_json(row, Session) for row in rows]
        except ValueError as error:
            raise ConfigError(f"run: {self.path / 'sessions.jsonl'} is damaged: {error}") from None

    def branch(self) -> Branch | None:
        """Return the checkpoint that the run was started from with `branch_from`, None for other runs."""
        return next(filter(None, (session.branched_from for session in self.sessions())), None)

    def first_step(self) -> int:
        """Return the number of steps that a branch shares with its parent, 0 for other runs."""
        branch = self.branch()
        return branch.step if branch else 0

    def manifests(self) -> dict[Path, Manifest]:
        """Return the checkpoints whose manifest is valid, newest first; their other files are not read."""
        return readable_checkpoints(self.checkpoints)

    def tokens(self, step: int) -> int:
        """Return the training tokens until a step, not before the one from which a branch was started."""
        sizes, branch = BatchSizes.from_settings(self.settings), self.branch()
        known = (branch.step, branch.tokens) if branch else (0, 0)
        return TokenCount(sizes, self.settings["seq_len"], *known)(step)

    def tokens_per_second(self) -> float:
        """Return the median of the logged speeds, without the first, which includes one-time work; NaN if unknown."""
        speeds = [row["perf/tokens_per_second"] for row in self.metrics() if "perf/tokens_per_second" in row]
        return statistics.median(speeds[1:] or speeds or [math.nan])

    def status(self) -> Status | None:
        """Return the content of status.json; None if it is absent or damaged."""
        try:
            with open(self.path / "status.json", "rb", opener=open_regular) as file:
                return from_json(parse_object(file.read()), Status)
        except (OSError, ValueError):
            return None

    def is_finished(self, steps: int) -> bool:
        """Return whether all `steps` steps are completed."""
        status = self.status()
        return status is not None and status.state == "finished" and status.step >= steps

    def write_status(self, status: Status) -> None:
        """Replace status.json. An OSError is only printed: it must not hide the error that ended the run."""
        file = self.path / "status.json"
        text = json.dumps(asdict(status) | {"reason": status.reason[:MAX_REASON_CHARACTERS]}) + "\n"
        try:
            try:
                write_atomically(file, text)
            except OSError:
                # A full disk has no room for a second file, but the existing file has its block.
                with open(file, "rb+", buffering=0, opener=open_no_link) as opened:
                    opened.write(text.encode())
                    opened.truncate()
                    flush_to_disk(opened.fileno())
        except OSError as error:
            if self.path.is_dir():
                print(f"{file} cannot be written: {error.strerror}", file=sys.stderr)

    def write_outcome(self, state: str, reason: str = "", kind: str | None = None) -> None:
        """Write how the run ended into status.json; the step stays."""
        self._update_status(state=state, reason=reason, kind=kind)

    def record_progress(self, step: int) -> None:
        """Write into status.json that the checkpoint of `step` is complete."""
        self._update_status(step=step)

    def _update_status(self, **changes: Any) -> None:
        with self._status_lock:  # the thread that saves checkpoints may still do so when the run ends
            self.write_status(replace(self.status() or Status("running", 0), **changes))

    def lock(self) -> bool:
        """Lock the directory, and create it if it is absent; return False if another process, anywhere, has locked it.

        A lock that is held already is released: that directory has been moved aside. The file is inside the directory,
        because several paths may name the directory.
        """
        self.unlock()
        self.path.mkdir(parents=True, exist_ok=True)
        file = None
        with suppress(FileNotFoundError):  # another training that starts afresh has just moved the directory aside
            file = open(self.path / LOCK_FILE, "a", opener=open_no_link)  # noqa: SIM115 - open while it is locked
            os.register_at_fork(after_in_child=file.close)  # data loader processes may outlive a killed run by seconds
            if lock(file) and os.path.samefile(file.fileno(), self.path / LOCK_FILE):
                self._lock = file
        if self._lock is None and file is not None:
            file.close()
        return self._lock is not None

    def unlock(self) -> None:
        """Release the lock, if this process holds it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_lock(self) -> bool:
        """Return whether this object holds the lock."""
        return self._lock is not None

    def is_locked(self) -> bool:
        """Return whether a process, on any machine, is training in this directory."""
        file = self.path / LOCK_FILE
        if not file.is_file() or file.is_symlink():  # no process could lock it: `lock` raises an error that says why
            return False
        with open(file, "a", opener=open_no_link) as opened:
            return not lock(opened)

    def _rows(self, name: str, read=read_rows) -> list[dict[str, Any]]:
        try:
            return list(read(self.path / name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"run: {self.path / name} cannot be read: {error.strerror}") from None


def surviving_sessions(sessions: list[Session], step: int) -> list[Session]:
    """Return the sessions that trained the `step` steps of a run.

    A later session repeats the steps after its start; a session that starts after the last step trains none.
    """
    surviving: list[Session] = []
    for session in sessions:
        surviving = [earlier for earlier in surviving if earlier.step < session.step] + [session]
    return [session for session in surviving if session.step < step] or surviving[-1:]
