"""Read a run directory: its settings, rows, sessions, checkpoints and status; importable without torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from checkpoint.manifest import Manifest, readable_checkpoints
from config.errors import ConfigError
from data.json_objects import from_json
from run.lock import is_locked
from run.metrics_log import read_newest_row, read_rows
from run.status import Status, read_status
from run.stored_settings import read_settings


@dataclass(frozen=True)
class Branch:
    """The checkpoint that a branch was started from; `run` is the absolute path of its run directory at that time."""

    run: str
    step: int
    digest: str | None = None
    """`state/digest` of that step."""


@dataclass(frozen=True)
class Session:
    """A row of sessions.jsonl: the settings, code and launch of one execution of train.py. None: not recorded."""

    step: int
    """Completed steps when the session starts."""
    config: dict[str, Any] | None = None
    """The resolved settings, nested."""
    mixed_precision: str | None = None
    processes: int | None = None
    shards: int | None = None
    """Processes that share one replica of the weights."""
    threads: int | None = None
    """CPU threads of each process; None on a GPU."""
    code: str | None = None
    """Hash of the sources that train (checkpoint/identity.py)."""
    git_commit: str | None = None
    python: str | None = None
    torch: str | None = None
    accelerate: str | None = None
    parameters: int | None = None
    flops_per_token: int | None = None
    validation_text: str | None = None
    """Hash of the validation documents of a text corpus, whatever the tokenizer."""
    uncommitted_changes: str | None = None
    """Name of the patch in the run directory."""
    branched_from: Branch | None = None
    """On the first session of a branch."""


class RunReader:
    """Reads a run directory; an absent file counts as empty, except config.yaml.

    Methods read the disk at each call, so that a run can be watched while it trains, and raise ConfigError if a file
    cannot be read. `settings` is read once.
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The flat settings (`section.name: value`) of config.yaml."""
        settings = read_settings(self.path / "config.yaml", remedy="")
        if settings is None:
            raise ConfigError(f"run: {str(self.path)!r} is not the directory of a run: it has no config.yaml")
        return settings

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, oldest first."""
        return self._rows("metrics.jsonl")

    def newest_metrics(self) -> dict[str, Any]:
        """Return the newest row of metrics.jsonl, {"step": 0} if there is none; fast also for a long file."""
        return next(iter(self._rows("metrics.jsonl", read_newest_row)), {"step": 0})

    def generations(self) -> list[dict[str, Any]]:
        """Return the rows of generations.jsonl, oldest first."""
        return self._rows("generations.jsonl")

    def sessions(self) -> list[Session]:
        """Return the rows of sessions.jsonl, oldest first."""
        try:
            return [from_json(row, Session, "session") for row in self._rows("sessions.jsonl")]
        except ValueError as error:
            raise ConfigError(f"run: {self.path / 'sessions.jsonl'} is damaged: {error}") from None

    def manifests(self) -> dict[Path, Manifest]:
        """Return the checkpoints whose manifest is valid, newest first; their other files are not read."""
        return readable_checkpoints(self.path / "checkpoints")

    def status(self) -> Status | None:
        """Return the content of status.json; None if it is absent or damaged."""
        return read_status(self.path / "status.json")

    def is_locked(self) -> bool:
        """Return whether a process, on any machine, is training in this directory."""
        return is_locked(self.path)

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
