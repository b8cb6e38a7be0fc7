"""The directory of a run, `<out_dir>/<name>/`: what lies in it, and whether these settings may go on in it."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from config import ConfigError, ScheduleConfig, TrainConfig
from plot import save_loss_curve
from training import checkpoint
from training.cli import num_processes
from training.schedule import lr_scale
from training.signals import Preempted

# What may change when a run goes on: nothing here moves the trajectory by more than rounding. `steps` and `schedule`
# are compared by the learning rates that they gave so far; the corpus at data.path, by data.hash.
FREE_SETTINGS = {
    *("name", "out_dir", "resume", "steps", "schedule", "compile", "on_nonfinite", "max_skipped_in_a_row"),
    *("check_replicas_every", "timeout_seconds", "activation_checkpointing", "chunked_loss", "profile"),
    *("checkpoint", "evaluation", "tracking", "data.num_workers", "data.path"),
}


class RunDirectory:
    """Config, status, metrics and checkpoints of one run. Only the main process writes."""

    def __init__(self, config: TrainConfig):
        self.path = Path(config.out_dir).expanduser() / config.name
        self.checkpoints = self.path / "checkpoints"
        self.metrics_file = self.path / "metrics.jsonl"

    def check(self, config: TrainConfig) -> None:
        """Refuse what cannot go on here. Every process calls it before anything is allocated; nothing is written.

        A `global_batch_size` of None becomes a number here: that of the run's first start.

        Raises:
            ConfigError: the directory cannot be written, or holds a run whose trajectory these settings would change.
        """
        try:
            existing = next(path for path in (self.path, *self.path.parents) if path.exists())
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            raise ConfigError(f"out_dir: {config.out_dir!r}: cannot write in {existing}: {error.strerror}") from None
        old = None if self._starts_afresh(config) else self._stored_config()
        if config.global_batch_size is None:
            config.global_batch_size = old["global_batch_size"] if old else config.micro_batch_size * num_processes()
            if problems := config.problems(num_processes()):
                raise ConfigError("\n".join(problems))
        if old is None:
            if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
                raise ConfigError(f"resume: {config.resume!r} is neither auto, never nor the directory of a checkpoint")
            return
        if config.resume == "auto":
            config.resume = old["resume"]  # a run that began from another's checkpoint still did
        elif config.resume not in ("never", old["resume"]):
            raise ConfigError(
                f"resume: {config.resume!r} starts a new run, but {self.path} already holds one; choose another name, "
                "or --resume never moves that run aside"
            )
        before, now = _flatten(old), _flatten(asdict(config))
        different = [
            f"{key}: {before.get(key)} there, {now.get(key)} now"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and not FREE_SETTINGS & {key, key.split(".")[0]}
        ]
        if different:
            raise ConfigError(
                f"{self.path} holds a run with other settings, which going on would change half-way:\n  "
                + "\n  ".join(different)
                + "\nchoose another name, or start afresh with --resume never (that run is moved aside, not deleted)"
            )

    def open(self, config: TrainConfig, accelerator: Accelerator) -> tuple[Path | None, int, tuple[int, int]]:
        """Choose the checkpoint to start from and write the resolved config; called by all processes together.

        Returns:
            The checkpoint's path, its step, and how many updates were skipped until then (in all, in a row until the
            last); (None, 0, (0, 0)) for a run that starts from the beginning.

        Raises:
            ConfigError: on all processes alike, when no valid checkpoint is left or it does not fit the settings.
        """
        answer: list[Any] = [None]
        if accelerator.is_main_process:
            try:
                answer = [self._prepare(config, accelerator.mixed_precision)]
            except OSError as error:
                answer = [ConfigError(str(error))]
            except Exception as error:  # no process may wait for one that has failed
                answer = [error]
        answer = broadcast_object_list(answer)[0]
        if isinstance(answer, Exception):
            raise answer
        if not all(gather_object([(self.path / "config.yaml").exists()])):
            raise ConfigError(f"out_dir: {config.out_dir!r} is not the same directory on every machine of this run")
        return answer

    @contextmanager
    def status(self, step: int, accelerator: Accelerator) -> Iterator["Status"]:
        """Keep status.json true: running while inside, then finished, preempted or failed."""
        status = Status(self.path / "status.json" if accelerator.is_main_process else None)
        status.write("running", step)
        try:
            yield status
        except Preempted as preempted:
            status.write("preempted", status.step, str(preempted))
            raise
        except BaseException as error:
            status.write("failed", status.step, f"{type(error).__name__}: {error}")
            raise
        status.write("finished", status.step)

    def finish(self, step: int, accelerator: Accelerator) -> None:
        """Bring the status and the picture up to date: the run may have been killed after its last save."""
        if accelerator.is_main_process:
            Status(self.path / "status.json").write("finished", step)
            save_loss_curve(self.path)
        accelerator.wait_for_everyone()

    def _prepare(self, config: TrainConfig, mixed_precision: str) -> tuple[Path | None, int, tuple[int, int]]:
        self._lock()
        if self.path.exists() and self._starts_afresh(config):
            aside = next(
                path for n in range(1, 10**6) if not (path := self.path.with_name(f"{self.path.name}.old-{n}")).exists()
            )
            os.rename(self.path, aside)
            print(f"The existing run was moved to {aside}.")
        path, manifest, rejected = checkpoint.newest_valid(self.checkpoints)
        for reason in rejected:
            print(f"Checkpoint passed over: {reason}")
        if path is None and rejected:
            raise ConfigError(
                f"no valid checkpoint is left in {self.checkpoints}; mend one, or start afresh with --resume never"
            )
        if path is not None:
            if manifest["mixed_precision"] != mixed_precision:
                raise ConfigError(
                    f"mixed_precision: {mixed_precision} of the launch, but {path} was trained with "
                    f"{manifest['mixed_precision']}; use that, or continue it as a new run: --name NEW --resume {path}"
                )
            _check_learning_rates(config, path, manifest)
        elif config.resume not in ("auto", "never"):
            path, manifest = Path(config.resume), _validate_foreign(config)
            if config.steps <= manifest["step"]:
                raise ConfigError(f"steps: {config.steps} leaves nothing to do after the {manifest['step']} of {path}")
        step = manifest["step"] if manifest else 0
        if config.steps < step:
            raise ConfigError(f"steps: {config.steps} is less than the {step} that {path} has already done")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._forget_metrics_after(step)
        checkpoint.write_atomically(self.path / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
        return path, step, tuple(manifest["skipped"]) if manifest else (0, 0)

    def _lock(self) -> None:
        """Held until this process ends, however it ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self.path.with_name(f".{self.path.name}.lock"), "w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path} is in use: another training is running in it; choose another name"
            ) from None

    def _starts_afresh(self, config: TrainConfig) -> bool:
        # A launcher that restarts the job after a crash repeats the command: going on is meant, not starting again.
        return config.resume == "never" and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0

    def _stored_config(self) -> dict | None:
        file = self.path / "config.yaml"
        try:
            stored = yaml.safe_load(file.read_text())
            return stored | {key: stored[key] for key in ("global_batch_size", "resume")}
        except FileNotFoundError:
            return None
        except (yaml.YAMLError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{file} is damaged ({error}); --resume never moves that run aside") from None

    def _forget_metrics_after(self, step: int) -> None:
        """The steps after the checkpoint are done again: without this they would stand in the file twice."""
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text().splitlines(keepends=True):
            try:
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
            except ValueError:
                pass  # half a line, from a process that was killed while writing it
        checkpoint.write_atomically(self.metrics_file, "".join(kept))


class Status:
    """status.json: how a run stands, for whoever decides whether to start it again."""

    def __init__(self, path: Path | None):
        self.path, self.step = path, 0

    def write(self, state: str, step: int, reason: str = "") -> None:
        """`state` is running, finished, preempted or failed; `step` the last one done or saved."""
        self.step = step
        if self.path is not None:
            status = {"state": state, "step": step, "reason": reason}
            checkpoint.write_atomically(self.path, json.dumps(status) + "\n")


def _validate_foreign(config: TrainConfig) -> dict:
    try:
        manifest = checkpoint.validate(Path(config.resume))
    except checkpoint.InvalidCheckpoint as invalid:
        raise ConfigError(f"resume: {invalid}") from None
    theirs, ours = manifest["config"]["model"], asdict(config.model)
    different = [
        f"model.{key}: {theirs.get(key)} there, {ours[key]} now" for key in ours if theirs.get(key) != ours[key]
    ]
    if different:
        raise ConfigError(f"resume: {config.resume} is a checkpoint of another model:\n  " + "\n  ".join(different))
    return manifest


def _check_learning_rates(config: TrainConfig, path: Path, manifest: dict) -> None:
    old_steps, old_schedule = manifest["config"]["steps"], ScheduleConfig(**manifest["config"]["schedule"])
    for step in range(min(manifest["step"], config.steps)):
        before, now = lr_scale(old_schedule, step, old_steps), lr_scale(config.schedule, step, config.steps)
        if before != now:
            raise ConfigError(
                f"steps: {config.steps} (before: {old_steps}) and schedule: {asdict(config.schedule)} would have given "
                f"step {step} of this run {now:.6g} of the peak learning rate, but it had {before:.6g}; a run can be "
                "extended only until its decay begins (schedule.name: constant or wsd), or be continued as a new one: "
                f"--name NEW --resume {path}"
            )


def _plain(config: TrainConfig) -> dict:
    settings = json.loads(json.dumps(asdict(config)))  # tuples become lists, as YAML and JSON have them
    if config.resume == "never":
        settings["resume"] = "auto"  # it was meant for this start, not for those that read the file
    return settings


def _flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
