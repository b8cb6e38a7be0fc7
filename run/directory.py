"""The directory of a run, `<out_dir>/<name>/`: who may write in it, and where a start in it begins."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from checkpoint.identity import compare_facts, compare_summation_order, describe_code
from checkpoint.manifest import InvalidCheckpoint, newest_valid, read_manifest, readable_checkpoints, validate
from checkpoint.provenance import arrangement, network_size, provenance, uncommitted_changes
from checkpoint.tokenizer_files import keep_tokenizer
from config.errors import ConfigError, RunError
from config.paths import expanded
from config.resolve import with_stored_model
from config.schema import TrainConfig
from data.files import lock, move_aside, write_atomically
from distributed.signals import Preempted
from distributed.world import is_main_process
from run.metrics_log import read_rows, truncate_after_step
from run.resume import check_branch, check_resume, differences
from run.status import IN_USE, LOCK, Status, read_status, write_status
from run.stored_settings import complete_settings, read_settings

NONE_LEFT = "no valid checkpoint is left"


@dataclass(frozen=True)
class Start:
    """Where a start begins: at the beginning, or after the step of a checkpoint."""

    checkpoint: Path | None = None
    step: int = 0
    skipped: tuple[int, int] = (0, 0)
    metrics: dict[str, Any] = field(default_factory=dict)


class RunDirectory:
    """Config, status, metrics and checkpoints of one run. Only the main process writes."""

    def __init__(self, out_dir: str, name: str):
        self.path = Path(out_dir).expanduser() / name
        self.checkpoints = self.path / "checkpoints"
        self.metrics_file, self.samples_file = self.path / "metrics.jsonl", self.path / "generations.jsonl"
        self.status_file = self.path / "status.json"
        self.is_open = False
        self._checked_config: TrainConfig | None = None  # resolved; set once `check` accepts it
        self._lock_file: TextIO | None = None

    def stored_settings(self, config: TrainConfig) -> dict[str, Any] | None:
        """Flat settings of the run that this start resumes; None if it starts afresh.

        Raises:
            ConfigError: config.yaml is damaged.
        """
        return None if _starts_afresh(config) else read_settings(self.path / "config.yaml")

    def data_seed_of_branch(self, config: TrainConfig) -> int:
        """The data seed of the checkpoint that `branch_from` names, or 0; `check` refuses a wrong `branch_from`."""
        with suppress(ConfigError, InvalidCheckpoint):
            if config.branch_from is not None:
                return complete_settings(read_manifest(Path(config.branch_from)).config)["data.seed"]
        return 0

    def has_replaced_initial_model(self, config: TrainConfig, stored: dict[str, Any]) -> bool:
        """Return whether this run, initialised from the same `init_from`, has a checkpoint to resume from.

        Then the initial model is not read: it may have been trained since, or deleted.
        """
        is_same = stored["init_from"] == config.init_from and stored["init_hash"] is not None
        return is_same and bool(readable_checkpoints(self.checkpoints))

    def check(self, config: TrainConfig) -> None:
        """Refuse what cannot go on here. Every process calls it before anything is allocated; nothing is written.

        Raises:
            ConfigError: the directory cannot be written, or holds a run whose trajectory these settings would change.
        """
        self._check_writable(config)
        before = self.stored_settings(config)
        if before is None:
            self._check_beginning(config)
        else:
            self._check_going_on(config, before)
        self._checked_config = config

    def open(self, config: TrainConfig, accelerator: Accelerator) -> Start:
        """Choose the checkpoint to start from and write the resolved config; called by all processes together.

        Raises:
            ConfigError: on all processes alike, when no valid checkpoint is left or it does not fit the settings.
            RunError: on all processes alike, when the directory cannot be read or written.
        """
        answer: list[Start | Exception] = [Start()]
        if accelerator.is_main_process:
            try:
                answer = [self._prepare(config, arrangement(accelerator) | provenance())]
            except OSError as error:
                answer = [RunError(f"{self.path} cannot be prepared: {error}")]
            except Exception as error:  # no process may wait for one that has failed
                answer = [error]
        answer = broadcast_object_list(answer)[0]
        if isinstance(answer, Exception):
            raise answer
        if not all(gather_object([(self.path / "config.yaml").exists()])):
            raise ConfigError(f"out_dir: {config.out_dir!r} is not the same directory on every machine of this run")
        return answer

    @contextmanager
    def outcome_recorded(self, config: TrainConfig) -> Iterator[None]:
        """Write down in status.json what became of a start: finished, preempted or failed.

        Also that it was refused, where the directory holds the run of these settings: whoever asks whether to start it
        again must not be told how an older start of it ended. Another run's status is left alone.
        """
        try:
            yield
        except Preempted as preempted:
            self._record("preempted", str(preempted))
            raise
        except BaseException as error:
            if self.is_open or (is_main_process() and self._may_be_claimed(config)):  # which the others do not write
                self._record("failed", f"{type(error).__name__}: {error}")
            raise
        else:
            self._record("finished")
        finally:
            if self._lock_file is not None:
                self._lock_file.close()

    def record_progress(self, step: int) -> None:
        """Write down in status.json that the run is running, and has done so many steps."""
        if is_main_process():
            write_status(self.status_file, Status("running", step))

    def _record(self, state: str, reason: str = "") -> None:
        if is_main_process():
            before = read_status(self.status_file)
            write_status(self.status_file, Status(state, before.step if before else 0, reason))

    def _check_writable(self, config: TrainConfig) -> None:
        existing = self.path
        try:
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise ConfigError(f"out_dir: {config.out_dir!r}: cannot write in {existing}: {error.strerror}") from None

    def _check_going_on(self, config: TrainConfig, before: dict[str, Any]) -> None:
        """Refuse settings that would change the trajectory of the run that has the settings `before`."""
        if config.branch_from != before["branch_from"]:
            problem = f"branch_from: {config.branch_from!r} starts a new run, but {self.path} already holds one"
            raise ConfigError(f"{problem}; choose another name, or --resume never moves that run aside")
        if different := differences(before, config):
            raise ConfigError(
                f"{self.path} holds a run with other settings, which going on would change half-way:\n  "
                + "\n  ".join(different)
                + "\nchoose another name, or start afresh with --resume never (that run is moved aside, not deleted)"
            )

    def _check_beginning(self, config: TrainConfig) -> None:
        """Refuse to begin from what is no checkpoint, from the run itself, or from what is moved aside with the run
        that lies here."""
        if config.branch_from is not None and not os.path.isdir(config.branch_from):
            raise ConfigError(f"branch_from: {config.branch_from!r} is not the directory of a checkpoint")
        asked = [("branch_from", config.branch_from), ("init_from", config.init_from), ("data.path", config.data.path)]
        asked += [("data.mix", corpus) for corpus in config.data.mix or []]
        own = self.path.resolve()
        for setting, value in asked:
            place = expanded(setting, value).resolve() if value else Path("/")
            if _starts_afresh(config) and place.exists() and own in (place, *place.parents):
                problem = f"{setting}: {value!r} is of the run that --resume never would move aside"
                raise ConfigError(f"{problem}; choose another name")
            if setting == "init_from" and place == own and place.exists():
                raise ConfigError(f"init_from: {value!r} is the directory of this run itself; choose another name")

    def _prepare(self, config: TrainConfig, now: dict[str, Any]) -> Start:
        self._lock()
        if _starts_afresh(config) and any(entry.name != LOCK for entry in self.path.iterdir()):
            print(f"The existing run was moved to {move_aside(self.path)}.")
            self._lock()
        self.is_open = True
        start = self._choose_start(config, now)
        self.checkpoints.mkdir(exist_ok=True)
        # Without a checkpoint the initial evaluation, step 0, is logged again.
        last_kept = start.step if start.checkpoint else -1
        truncate_after_step(self.metrics_file, last_kept, one_per_step=True)
        truncate_after_step(self.samples_file, start.step)
        truncate_after_step(
            self.path / "sessions.jsonl", config.steps
        )  # half a line, of a start that had no room for it
        write_atomically(self.path / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
        now |= network_size(config)
        if config.data.source == "text":
            from data.integrity import validation_text  # needs pyarrow, and sources other than text do not

            corpora = [Path(corpus).expanduser() for corpus in config.data.corpora]
            now["validation_text"] = validation_text(corpora)
            can_talk = [corpus for corpus in corpora if (corpus / "tokenizer" / "chat_template.jinja").exists()]
            keep_tokenizer((can_talk or corpora)[0], self.path)
        self._record_start(start, now | {"config": _plain(config)})
        self.record_progress(start.step)
        return start

    def _record_start(self, start: Start, now: dict[str, Any]) -> None:
        """Keep what this start computes, and with what: a line of sessions.jsonl, and what the commit there lacks.

        Of a branch also where it begins, for the checkpoint that branch_from names may be moved or deleted.
        """
        changes = uncommitted_changes()
        name = f"code-{sha256(changes.encode()).hexdigest()[:8]}.diff" if changes else None
        if name:
            write_atomically(self.path / name, changes + "\n")
        row = {"step": start.step, **now, "uncommitted_changes": name}
        if start.checkpoint and start.checkpoint.parent != self.checkpoints:
            parent = str(start.checkpoint.resolve().parent.parent)
            row["branched_from"] = {"run": parent, "step": start.step, "digest": start.metrics.get("state/digest")}
        with open(self.path / "sessions.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def _choose_start(self, config: TrainConfig, now: dict[str, Any]) -> Start:
        path, manifest, rejected = newest_valid(self.checkpoints)
        for reason in rejected:
            print(f"Checkpoint skipped: {reason}")
        if path is not None:
            if "mixed_precision" in compare_facts(vars(manifest), now):
                raise ConfigError(
                    f"mixed_precision: {now['mixed_precision']} of the launch, but {path} was trained with "
                    f"{manifest.mixed_precision}; use that, or a new run: --name NEW --branch_from {path}"
                )
            check_resume(config, path, manifest)
        elif rejected or self._had_saved():
            raise ConfigError(f"{NONE_LEFT} in {self.checkpoints}; mend one, or start afresh with --resume never")
        elif config.branch_from is not None:
            path = Path(config.branch_from)
            try:
                manifest = validate(path)
            except InvalidCheckpoint as invalid:
                raise ConfigError(f"branch_from: {invalid}") from None
            check_branch(config, path, manifest)
        if manifest is None:
            return Start()
        then = vars(manifest) | manifest.provenance
        if "code" in compare_facts(then, now):
            print(f"Other code: {path} was trained by {describe_code(then)}, and this is {describe_code(now)}.")
        if changed := compare_summation_order(then, now, config.exact):
            what = ", ".join(f"{now[name]} {name} instead of {then[name]}" for name in changed)
            print(f"Resumed with {what}: from here on the bits may differ by rounding.")
        return Start(path, manifest.step, manifest.skipped, manifest.metrics)

    def _had_saved(self) -> bool:
        """Whether a checkpoint was there for certain; a run that was killed may have been saving its first one."""
        starts, status = self.path / "sessions.jsonl", read_status(self.status_file)
        begins = {row["step"] for row in read_rows(starts)} if starts.exists() else set()
        if len(begins) > 1:
            return True  # one of these starts went on from a checkpoint
        if status is None:
            return False
        return (status.state in ("finished", "preempted") and status.step > 0) or NONE_LEFT in status.reason

    def _may_be_claimed(self, config: TrainConfig) -> bool:
        """Whether this is the run of these settings, and nobody else is running it."""
        with suppress(ConfigError, OSError):
            before = self.stored_settings(config)
            if before is not None and self._checked_config is not None:
                config = self._checked_config
            elif before is not None and config.init_from is not None:
                config = with_stored_model(config, before)
            same = before is not None and not differences(before, config)
            if same and config.branch_from in (None, before["branch_from"]):
                self._lock()
                return True
        return False

    def _lock(self) -> None:
        """Held until the start is over, however it ends. It lies inside, for the directory may have several names."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self.path / LOCK, "w")
        os.register_at_fork(after_in_child=self._lock_file.close)  # loaders of data outlive a kill for some seconds
        mine = False
        with suppress(FileNotFoundError):  # it was moved aside just now, by another that starts afresh
            mine = lock(self._lock_file) and os.path.samefile(self._lock_file.fileno(), self.path / LOCK)
        if not mine:
            raise ConfigError(f"{self.path} {IN_USE}; choose another name")


def _starts_afresh(config: TrainConfig) -> bool:
    # A launcher that restarts the job after a crash repeats the command: going on is meant, not starting again.
    return config.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0


def _plain(config: TrainConfig) -> dict[str, Any]:
    settings = json.loads(json.dumps(asdict(config)))  # tuples become lists, as YAML and JSON have them
    # never was meant for this start, not for those that read the file
    return settings | ({"resume": "auto"} if config.resume == "never" else {})
