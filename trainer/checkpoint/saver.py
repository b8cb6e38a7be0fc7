"""Save checkpoints in the background: weights, optimizer state and the step, as safetensors and JSON.

A checkpoint is written into a temporary sibling directory, its manifest (trainer/checkpoint/manifest.py) last, and then
renamed. trainer/checkpoint/tensor_files.py writes and reads the tensors.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from runtime.config.errors import ConfigError, RunError, error_kind
from runtime.config.schema import TrainConfig
from runtime.distributed.state_hash import state_digest
from runtime.files import fsync, sha256
from runtime.json_objects import finite_or_null
from runtime.machine.cores import lower_thread_priority
from trainer.checkpoint.manifest import File, InvalidCheckpoint, Manifest, read_manifest, rotate, step_directory
from trainer.checkpoint.provenance import launch_facts, provenance
from trainer.results import Skipped
from trainer.state import TrainState

SPARE_BYTES = 2**20  # for the headers of the files, the manifest and the metrics


class SaveError(RunError):
    """A checkpoint could not be written; older ones are untouched."""

    def __init__(self, message: str, kind: str = "error"):
        super().__init__(message)
        self.kind = kind


class Saver(AbstractContextManager):
    """Saves checkpoints: the state is copied to CPU memory, and a thread writes the copy while training continues.

    With `checkpoint.asynchronous: false` training waits for the thread. All processes call the methods together.

    Args:
        checkpoints: The directory of the checkpoints.
        config: The resolved config, which every checkpoint contains.
        accelerator: Of this process.
        count_tokens: Returns the training tokens until a step.
        sync_metrics: Flushes the logged rows to disk; called before a checkpoint, or its evaluation, is complete.
        record_progress: Called with the step of a checkpoint when it is complete.
        has_tokenizer: False: the manifest records that the data have no tokenizer, so that nothing looks for one.
        has_conversations: Whether the training data are conversations, which the manifest records.
        saved_step: The step of the newest valid checkpoint in this directory.
    """

    def __init__(
        self,
        checkpoints: Path,
        config: TrainConfig,
        accelerator: Accelerator,
        count_tokens: Callable[[int], int],
        sync_metrics: Callable[[], None],
        record_progress: Callable[[int], None],
        has_tokenizer: bool = True,
        has_conversations: bool = False,
        saved_step: int | None = None,
    ):
        self.checkpoints, self.config, self.saved_step = checkpoints, config.checkpoint, saved_step
        self.count_tokens, self.sync_metrics, self.record_progress = count_tokens, sync_metrics, record_progress
        self.facts = {"config": config.model_dump(mode="json"), "provenance": provenance(), **launch_facts(accelerator)}
        self.facts["conversations"] = has_conversations
        if config.data.source == "text":
            from data.integrity import read_metadata  # imports pyarrow

            corpus = read_metadata(Path(config.data.corpora[0]).expanduser())  # the tokenizers of a mixture are equal
            self.facts["tokenizer"] = {name: corpus["tokenizer"][name] for name in ("hash", "end_of_text")}
        elif not has_tokenizer:
            self.facts["tokenizer"] = {}
        self.rank, self.timeout_seconds = accelerator.process_index, config.timeout_seconds
        # A separate process group, always gloo, keeps the thread's collectives apart from those of training.
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():  # also with one process, under a launcher
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_seconds))
            assert isinstance(group, dist.ProcessGroup), "every process is a member"
            self.group = group
        self.executor = futures.ThreadPoolExecutor(1, "checkpoint", initializer=lower_thread_priority)
        self.pending: futures.Future[None] | None = None
        self.error: SaveError | None = None  # of the newest checkpoint, if it could not be written

    def __exit__(self, exception_type, exception, traceback) -> None:
        # After any other exception a process may be gone, and waiting would end in a timeout.
        if isinstance(exception, RunError | ConfigError):
            try:
                self.wait()
            except RunError as error:
                if self.rank == 0:
                    print(error, file=sys.stderr)

    def save(
        self, completed_steps: int, state: TrainState, metrics: Mapping[str, float | str], evaluated: bool = True
    ) -> None:
        """Begin to write the checkpoint of a step, once the previous one is complete, and delete old ones.

        Do nothing if this has been called for this step already. `evaluated` is False if an evaluation of this step is
        still to come: `add_evaluation` then adds its metrics.

        Raise SaveError for the previous checkpoint, as `wait` does, and ConfigError for values in `optimizer.state`
        that are not tensors.
        """
        if self.saved_step == completed_steps:
            return
        self.wait()
        self.error = None
        from trainer.checkpoint import tensor_files  # slow to import, and not needed before

        tensors = tensor_files.state_tensors(state.model, state.optimizer, with_moments=bool(state.optimizer.state))
        copy = tensor_files.copy_to_cpu(tensors) if self.config.asynchronous else tensors
        rest = {"step": completed_steps, "tokens": self.count_tokens(completed_steps)}
        rest |= {"skipped": state.results.skipped, "metrics": finite_or_null(metrics), "evaluated": evaluated}
        self._submit(self._write, copy, rest)
        self.saved_step = completed_steps

    def add_evaluation(self, completed_steps: int, metrics: Mapping[str, float | str]) -> None:
        """Begin to add the evaluation of a step to its checkpoint, if it was saved; `metrics` are all of the step."""
        if self.saved_step == completed_steps and self.error is None:
            self._submit(self._add_evaluation, completed_steps, finite_or_null(metrics), self.pending)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Let the thread call a function, after those that are still pending."""
        self.pending = self.executor.submit(function, *arguments)
        if not self.config.asynchronous:
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether the run must stop because its last checkpoint could not be written; `wait` raises the reason.

        With `checkpoint.on_failure: continue` it is always False.
        """
        if self.pending is None or not self.pending.done():
            return False
        return self.pending.exception() is not None and self.config.on_failure == "stop"

    def wait(self, must_succeed: bool = False) -> None:
        """Return once the last checkpoint is complete.

        Raise SaveError on all processes if it could not be written, and `must_succeed` or `checkpoint.on_failure`
        requires a stop; otherwise print the error. Raise RunError after `timeout_seconds`.
        """
        self._wait_for_thread()
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except SaveError as error:
            self.error = error
            if self.config.on_failure == "stop":
                raise
            if self.rank == 0 and not must_succeed:
                print(f"Training continues without a checkpoint: {error}", file=sys.stderr)
        if must_succeed and self.error:
            raise self.error

    def _wait_for_thread(self) -> None:
        """Return once the thread has written the checkpoint or failed; raise RunError after `timeout_seconds`.

        `checkpoint.on_failure: continue` cannot help then: the thread still reads the state that it writes.
        """
        if self.pending is not None and not futures.wait([self.pending], self.timeout_seconds).done:
            self.pending = None
            raise RunError(
                f"a checkpoint was not written within {self.timeout_seconds} s (timeout_seconds); is the disk of "
                f"{self.checkpoints} slow or gone, or has another process ended?"
            )

    def _write(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint; runs in the background thread."""
        final = step_directory(self.checkpoints, state["step"])
        temporary = self.checkpoints / f".writing-{final.name}"
        try:
            with self._all_succeed(final):
                if self.rank == 0:
                    for leftover in self.checkpoints.glob(".*step-*"):  # left by a process that was killed
                        shutil.rmtree(leftover, ignore_errors=True)  # macOS puts files here, too: ._step-00000001
                    num_bytes = SPARE_BYTES + sum(t.numel() * t.element_size() for t in tensors.values())
                    free_bytes = shutil.disk_usage(self.checkpoints).free
                    if 0 < free_bytes < num_bytes:  # 0 where a file system does not know, as Azure's BlobFuse
                        needed = f"{num_bytes / 1e6:,.2f} MB are needed, but {free_bytes / 1e6:,.2f} MB are free"
                        raise OSError(errno.ENOSPC, needed)
                    temporary.mkdir()
            from trainer.checkpoint import tensor_files

            own_files: dict[str, File] = {}
            with self._all_succeed(final):
                tensor_files.write(temporary, tensors, self.group)
                # Each process reads back only its own files: shards are numbered by rank, from 1.
                for path in sorted(temporary.glob(f"shard-{self.rank + 1:05d}-*.safetensors")):
                    own_files[path.name] = File(path.stat().st_size, sha256(path))
            files = {name: file for part in self._gather(own_files) for name, file in part.items()}
            with self._all_succeed(final):
                if self.rank == 0:
                    Manifest(**state, **self.facts, files=files).write(temporary)
                    self.sync_metrics()
                    shutil.rmtree(final, ignore_errors=True)  # invalid, or the run would have resumed from it
                    os.rename(temporary, final)
                    fsync(self.checkpoints)
                    self.record_progress(state["step"])
                    rotate(self.checkpoints, state["step"], self.config)
        except SaveError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _add_evaluation(self, step: int, metrics: dict[str, Any], writing: futures.Future[None] | None) -> None:
        """Write the metrics into the manifest of a checkpoint; runs in the background thread."""
        if writing is not None:
            writing.result()  # raises the error of a checkpoint that could not be written
        if self.rank > 0:
            return
        final = step_directory(self.checkpoints, step)
        try:
            self.sync_metrics()
            replace(read_manifest(final), metrics=metrics, evaluated=True).write(final)
            rotate(self.checkpoints, step, self.config)  # the best checkpoint may be another one now
        except (OSError, InvalidCheckpoint) as error:  # the checkpoint itself is complete
            print(f"The evaluation of step {step} is not in {final}: {error}", file=sys.stderr)

    @contextmanager
    def _all_succeed(self, final: Path) -> Iterator[None]:
        """Wait for all processes at the end; if any of them failed in the block, raise SaveError on all."""
        error = None
        try:
            yield
        except (OSError, InvalidCheckpoint) as problem:
            text = problem.strerror if isinstance(problem, OSError) and not problem.filename else None
            error = text or str(problem), error_kind(problem)
        if errors := [error for error in self._gather(error) if error is not None]:
            remedy = "Older checkpoints are untouched; free the disk or choose another out_dir, and start again"
            if not (self.checkpoints.parent / "config.yaml").exists():
                remedy = "The directory of the run is gone"
            message, kind = errors[0]
            raise SaveError(f"cannot write the checkpoint {final}: {message}. {remedy}", kind)

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.group is None:
            return [value]
        gathered = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered


def load_checkpoint(path: Path, state: TrainState) -> None:
    """Load a valid checkpoint into the state; called by all processes together.

    Raise RunError if the loaded weights and optimizer state have another digest than the manifest records.
    """
    from trainer.checkpoint import tensor_files  # slow to import, and not needed without a checkpoint

    manifest = read_manifest(path)
    tensor_files.read(path, state.model, state.optimizer)
    state.results.skipped = Skipped(*manifest.skipped)
    digest, saved = str(state_digest(state.network, state.optimizer)), manifest.metrics.get("state/digest")
    if digest != saved:
        raise RunError(f"{path}: the loaded state has the digest {digest}, but the manifest says {saved}")
