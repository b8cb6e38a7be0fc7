"""Checkpoints: weights, moments and the step, as safetensors and JSON. Reading one can run no code.

A checkpoint is written into a temporary sibling, its manifest (checkpoint/manifest.py) last, and then renamed.
checkpoint/storage.py writes and reads the tensors.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from checkpoint.manifest import File, InvalidCheckpoint, Manifest, rotate, step_directory
from checkpoint.provenance import arrangement, provenance
from checkpoint.tokenizer_files import expected_hashes, hash_files
from checkpoint.unsaved_state import UnsavedState, check_optimizer_state
from config.errors import ConfigError, RunError
from config.schema import TrainConfig
from data.files import fsync, sha256
from data.json_objects import finite_or_null
from distributed.cores import lower_thread_priority
from training.metrics import StepMetrics

SPARE_BYTES = 2**20  # for the headers of the files, the manifest and the metrics


class SaveError(RunError):
    """A checkpoint could not be written; those before it are untouched."""


class Saver(AbstractContextManager):
    """Saves checkpoints while training goes on: the state is copied in CPU memory, and a thread writes the copy.

    With `checkpoint.asynchronous: false` the same is done while training waits. All processes call it together.
    """

    def __init__(
        self, checkpoints: Path, config: TrainConfig, accelerator: Accelerator, sync_metrics: Callable[[], None]
    ):
        """`sync_metrics` puts what was logged on the disk: no checkpoint is there before the rows that belong to it."""
        self.checkpoints, self.config, self.sync_metrics = checkpoints, config.checkpoint, sync_metrics
        self.facts = {"config": asdict(config), "provenance": provenance(), **arrangement(accelerator)}
        self.rank, self.timeout_seconds = accelerator.process_index, config.timeout_seconds
        if self.rank == 0:
            run = checkpoints.parent
            self.facts["tokenizer"] = expected_hashes(run) or hash_files(run / "tokenizer") or None
        # The thread's messages must not mix with those of training: a group of its own, on CPU whatever the device.
        self.group = None
        if dist.is_initialized():  # as it may be for one process
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_seconds))
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=lower_thread_priority)
        self.pending: Future[None] | None = None
        self.unsaved: UnsavedState | None = None

    def watch(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note the state before training, so that the first save can refuse what a checkpoint would lose."""
        self.unsaved = UnsavedState(network, optimizer)

    def __exit__(self, exception_type, exception, traceback) -> None:
        # After any other, a process may be gone, and nothing would come of waiting.
        if isinstance(exception, RunError | ConfigError):
            try:
                self.wait()
            except RunError as error:
                if self.rank == 0:
                    print(error, file=sys.stderr)

    def save(self, step: int, model, optimizer, metrics: dict[str, float], totals: StepMetrics) -> None:
        """Begin to write the checkpoint of `step`, once the one before is there; then delete superfluous ones.

        The new checkpoint is there wholly, or not at all.

        Raises:
            SaveError: the checkpoint before could not be written, as in `wait`.
            ConfigError: the model or the optimizer has state that a checkpoint does not hold.
        """
        self.wait()
        if self.unsaved is not None:
            check_optimizer_state(self.unsaved.network, optimizer)
            self.unsaved.check()
        from checkpoint import storage  # slow to import, and not needed before

        tensors = storage.state_tensors(model, optimizer, with_moments=bool(optimizer.state))
        state = {"step": step, "skipped": (totals.skipped, totals.skipped_in_a_row), "metrics": finite_or_null(metrics)}
        copy = storage.copy_to_cpu(tensors) if self.config.asynchronous else tensors
        self.pending = self.executor.submit(self._write, copy, state)
        if not self.config.asynchronous:
            wait([self.pending], self.timeout_seconds)  # the method `wait` judges how that ended

    @property
    def failed(self) -> bool:
        """Whether the run is to stop because its last checkpoint could not be written; `wait` says why."""
        done = self.pending is not None and self.pending.done()
        return done and self.pending.exception() is not None and self.config.stops_on_failure

    def wait(self, must_succeed: bool = False) -> None:
        """Return once the last checkpoint is there.

        Raises:
            SaveError: on all processes, when it could not be completed and the run is not to go on without it.
            RunError: it takes longer than `timeout_seconds`.
        """
        pending, self.pending = self.pending, None
        if pending is not None and not wait([pending], self.timeout_seconds).done:
            # Nor may the run go on without it: what is being written is a copy that the next save would replace.
            raise RunError(
                f"a checkpoint is not written after another {self.timeout_seconds} s (timeout_seconds); is the disk of "
                f"{self.checkpoints} slow, or gone?"
            )
        try:
            if pending is not None:
                pending.result()
        except SaveError as error:
            if must_succeed or self.config.stops_on_failure:
                raise
            if self.rank == 0:
                print(f"Training goes on without a checkpoint: {error}", file=sys.stderr)

    def _write(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        final = step_directory(self.checkpoints, state["step"])
        temporary = self.checkpoints / f".writing-{final.name}"
        try:
            with self._all_succeed(final):
                if self.rank == 0:
                    for leftover in self.checkpoints.glob(".*step-*"):  # of a process killed while writing or deleting
                        shutil.rmtree(leftover)
                    num_bytes = SPARE_BYTES + sum(t.numel() * t.element_size() for t in tensors.values())
                    free_bytes = shutil.disk_usage(self.checkpoints).free
                    if free_bytes < num_bytes:
                        raise OSError(f"{num_bytes / 1e6:,.2f} MB are needed, but {free_bytes / 1e6:,.2f} MB are free")
                    temporary.mkdir()
            files: dict[str, File] = {}
            from checkpoint import storage

            with self._all_succeed(final):
                storage.write(temporary, tensors, self.group)
                # Each process reads back only what it wrote itself: the shards are numbered by rank, from 1.
                for path in sorted(temporary.glob(f"shard-{self.rank + 1:05d}-*.safetensors")):
                    files[path.name] = File(path.stat().st_size, sha256(path))
            files = {name: file for part in self._gather(files) for name, file in part.items()}
            with self._all_succeed(final):
                if self.rank == 0:
                    Manifest(**state, **self.facts, files=files).write(temporary)
                    self.sync_metrics()
                    shutil.rmtree(final, ignore_errors=True)  # only an invalid one: a valid one was resumed from
                    os.rename(temporary, final)
                    fsync(self.checkpoints)
                    rotate(self.checkpoints, state["step"], self.config)
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
        if errors := [found for found in self._gather(error) if found is not None]:
            remedy = "Older checkpoints are untouched; mend it or choose another out_dir, and start again"
            if not (self.checkpoints.parent / "config.yaml").exists():
                remedy = "The directory of the run is gone"
            raise SaveError(f"cannot write the checkpoint {final}: {errors[0]}. {remedy}")

    def _gather(self, mine):
        if self.group is None:
            return [mine]
        gathered = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered


def load_checkpoint(path: Path, model, optimizer) -> None:
    """Read weights and moments into the prepared model and optimizer; called by all processes together.

    Raises:
        ConfigError: it holds other tensors than they have, or cannot be read.
    """
    from checkpoint import storage

    storage.read(path, model, optimizer)
