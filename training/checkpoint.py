"""Checkpoints: weights, moments and the step, as safetensors and JSON. Reading one can run no code.

A checkpoint is written into a temporary sibling, its manifest (files, sizes, checksums, step, config) last, and then
renamed: a directory without a valid manifest is no checkpoint. training/shards.py writes and reads the tensors.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator

from config import CheckpointConfig, ConfigError, RunError, TrainConfig
from training.provenance import provenance
from training.step_totals import StepTotals

FORMAT = 1
MANIFEST = "manifest.json"
SPARE_BYTES = 2**20  # for the headers of the files, the manifest and the metrics


class InvalidCheckpoint(Exception):
    """A directory that is not a whole checkpoint, with the reason."""


class SaveError(RunError):
    """A checkpoint could not be written; those before it are untouched."""


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by `text` so that a crash leaves either the old or the new content, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync_directory(path.parent)


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return checkpoints / f"step-{step:08d}"


class Saver:
    """Saves checkpoints while training goes on: the state is copied in CPU memory, and a thread writes the copy.

    With `checkpoint.asynchronous: false` the same is done while training waits. All processes call it together.
    """

    def __init__(self, checkpoints: Path, config: TrainConfig, accelerator: Accelerator):
        self.checkpoints, self.config, self.mixed_precision = checkpoints, config, accelerator.mixed_precision
        self.rank = accelerator.process_index
        # The thread's messages must not mix with those of training: a group of its own, on CPU whatever the device.
        self.group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        # After any other, a process may be gone, and nothing would come of waiting.
        if isinstance(exception, RunError | ConfigError):
            self.wait()

    def save(self, step: int, model, optimizer, metrics: dict[str, float], totals: StepTotals) -> None:
        """Begin to write the checkpoint of `step`, once the one before is there; then delete superfluous ones.

        The new checkpoint is there wholly, or not at all.

        Raises:
            SaveError: as `wait` does, of the one before.
        """
        self.wait()
        from training import shards  # slow to import, and not needed before

        tensors = shards.state_tensors(model, optimizer)
        manifest = {
            "format": FORMAT,
            "step": step,
            "skipped": [totals.skipped, totals.skipped_in_a_row],
            "metrics": metrics,
            "config": asdict(self.config),
            "mixed_precision": self.mixed_precision,
            "provenance": provenance(),
        }
        asynchronous = self.config.checkpoint.asynchronous
        copy = shards.copy_to_cpu(tensors) if asynchronous else tensors
        self.pending = self.executor.submit(self._write, step, copy, manifest)
        if not asynchronous:
            self.pending.exception()  # returns when it is written; `wait` judges how that ended

    @property
    def failed(self) -> bool:
        """Whether the run is to stop because its last checkpoint could not be written; `wait` says why."""
        done = self.pending is not None and self.pending.done()
        return done and self.pending.exception() is not None and self.config.checkpoint.on_failure == "stop"

    def wait(self, must_succeed: bool = False) -> None:
        """Return once the last checkpoint is there.

        Raises:
            SaveError: on all processes, when it could not be completed and the run is not to go on without it.
        """
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except SaveError as error:
            if must_succeed or self.config.checkpoint.on_failure == "stop":
                raise
            if self.rank == 0:
                print(f"Training goes on without a checkpoint: {error}", file=sys.stderr)

    def _write(self, step: int, tensors: dict[str, torch.Tensor], manifest: dict) -> None:
        final = step_directory(self.checkpoints, step)
        temporary = self.checkpoints / f".writing-{final.name}"
        try:
            with self._all_succeed(final):
                if self.rank == 0:
                    for leftover in self.checkpoints.glob(".*step-*"):  # of a process killed while writing or deleting
                        shutil.rmtree(leftover)
                    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                    free_bytes = shutil.disk_usage(self.checkpoints).free
                    if free_bytes < num_bytes + SPARE_BYTES:
                        raise OSError(f"{num_bytes / 1e6:,.1f} MB are needed, but {free_bytes / 1e6:,.1f} MB are free")
                    temporary.mkdir()
            files: dict[str, dict] = {}
            from training import shards

            with self._all_succeed(final):
                shards.write(temporary, tensors, self.group)
                # Each process reads back only what it wrote itself: the shards are numbered by rank, from 1.
                for path in sorted(temporary.glob(f"shard-{self.rank + 1:05d}-*.safetensors")):
                    files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            manifest["files"] = {name: facts for part in self._gather(files) for name, facts in part.items()}
            with self._all_succeed(final):
                if self.rank == 0:
                    write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=2))
                    shutil.rmtree(final, ignore_errors=True)  # only an invalid one: a valid one was resumed from
                    os.rename(temporary, final)
                    _fsync_directory(self.checkpoints)
                    rotate(self.checkpoints, step, self.config.checkpoint)
        except SaveError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    @contextmanager
    def _all_succeed(self, final: Path) -> Iterator[None]:
        """Leave together: an error inside, on any process, becomes the SaveError of all of them."""
        error = None
        try:
            yield
        except (OSError, InvalidCheckpoint) as problem:
            error = str(problem)
        errors = [found for found in self._gather(error) if found is not None]
        if errors:
            raise SaveError(
                f"cannot write the checkpoint {final}: {errors[0]}. Older checkpoints are untouched; free space or "
                "choose another out_dir, and start again"
            )

    def _gather(self, mine):
        if self.group is None:
            return [mine]
        gathered = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered


def validate(path: Path) -> dict:
    """The manifest of the checkpoint at `path`, after checking every byte of it.

    Raises:
        InvalidCheckpoint: something is missing, damaged or foreign; the message says what.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, step = manifest["files"], manifest["step"]
        supported = manifest["format"] == FORMAT and isinstance(step, int)
        expected = {name: (facts["bytes"], facts["sha256"]) for name, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"{path}: no valid {MANIFEST} ({type(error).__name__}: {error})") from None
    if not supported or not expected:
        raise InvalidCheckpoint(f"{path}: {MANIFEST} is not of format {FORMAT}, or names no files")
    for name in expected:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidCheckpoint(f"{path}: {MANIFEST} names {name!r}, which is not a safetensors file beside it")
    if foreign := {found.name for found in path.glob("*.safetensors")} - set(expected):
        raise InvalidCheckpoint(f"{path}: {sorted(foreign)} stand beside the files that {MANIFEST} names")
    for name, (num_bytes, sha256) in expected.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise InvalidCheckpoint(f"{file}: missing")
        if file.stat().st_size != num_bytes:
            raise InvalidCheckpoint(f"{file}: {file.stat().st_size} bytes instead of {num_bytes}")
        if _sha256(file) != sha256:
            raise InvalidCheckpoint(f"{file}: the content does not match its checksum")
    return manifest


def newest_valid(checkpoints: Path) -> tuple[Path | None, dict | None, list[str]]:
    """The newest valid checkpoint, its manifest, and why each newer one was passed over. (None, None, ...) if none."""
    rejected = []
    for path in sorted(checkpoints.glob("step-*"), reverse=True):
        try:
            return path, validate(path), rejected
        except InvalidCheckpoint as invalid:
            rejected.append(str(invalid))
    return None, None, rejected


def load(path: Path, model, optimizer) -> None:
    """Read weights and moments into the prepared model and optimizer; called by all processes together."""
    from training import shards

    shards.read(path, model, optimizer)


def rotate(checkpoints: Path, step: int, config: CheckpointConfig) -> None:
    """Delete all checkpoints up to `step` but the `keep` newest, the one with the best validation loss, and those of
    every `keep_every` steps; main process only.

    Newer ones are left alone: they were found damaged, or `step` would not have been trained again.

    Raises:
        InvalidCheckpoint: that of `step`, just written, cannot be read back; then nothing is deleted.
    """
    manifests = {}
    for path in sorted(checkpoints.glob("step-*"), reverse=True):
        if path > step_directory(checkpoints, step):
            continue
        try:
            manifests[path] = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError):
            continue  # an invalid one is left for the user to look at
    losses = {path: m["metrics"]["val/loss"] for path, m in manifests.items() if "val/loss" in m["metrics"]}
    kept = {*list(manifests)[: config.keep], *sorted(losses, key=losses.get)[:1]}
    if config.keep_every:
        kept |= {path for path, m in manifests.items() if m["step"] % config.keep_every == 0}
    superfluous = manifests.keys() - kept
    if superfluous:
        validate(step_directory(checkpoints, step))
    for path in superfluous:
        # Renamed first, so that an interrupted deletion does not leave a damaged checkpoint behind.
        doomed = path.with_name(f".deleting-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
