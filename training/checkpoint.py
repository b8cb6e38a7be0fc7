"""Checkpoints: weights, moments and the step, as safetensors and JSON. Reading one can run no code.

A checkpoint is written into a temporary sibling, its manifest (files, sizes, checksums, step, config) last, and then
renamed: a directory without a valid manifest is no checkpoint. Tensors are named `model.*` and `optimizer.*`. The
format is that of torch.distributed.checkpoint's Hugging Face storage, so any number of processes reads what any other
number wrote, and under DDP every file opens in whatever reads safetensors.
"""

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from training.config import TrainConfig
from training.provenance import provenance

FORMAT = 1
MANIFEST = "manifest.json"
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class InvalidCheckpoint(Exception):
    """A directory that is not a whole checkpoint, with the reason."""


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


def save(
    checkpoints: Path,
    step: int,
    model,
    optimizer,
    accelerator: Accelerator,
    config: TrainConfig,
    metrics: dict[str, float],
) -> None:
    """Write the checkpoint of `step` and delete superfluous ones; called by all processes together.

    The new checkpoint is there wholly, or not at all.

    Raises:
        RuntimeError: on all processes, when the main process could not complete it.
    """
    final = step_directory(checkpoints, step)
    temporary = checkpoints / f".writing-{final.name}"
    if accelerator.is_main_process:
        for leftover in checkpoints.glob(".*step-*"):  # of a process that was killed while writing or deleting
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it says that one process is one process
        dcp.save(
            _tensors(model, optimizer), storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        )
    # Each process reads back only what it wrote itself: the shards are numbered by rank, from 1.
    own = sorted(temporary.glob(f"shard-{accelerator.process_index + 1:05d}-*.safetensors"))
    files = gather_object([(path.name, {"bytes": path.stat().st_size, "sha256": _sha256(path)}) for path in own])
    error = None
    if accelerator.is_main_process:
        manifest = {
            "format": FORMAT,
            "step": step,
            "files": dict(files),
            "metrics": metrics,
            "config": asdict(config),
            "mixed_precision": accelerator.mixed_precision,
            "provenance": provenance(),
        }
        try:
            write_atomically(temporary / MANIFEST, json.dumps(manifest, indent=2))
            shutil.rmtree(final, ignore_errors=True)  # only an invalid one can be there: a valid one was resumed from
            os.rename(temporary, final)
            _fsync_directory(checkpoints)
            rotate(checkpoints, step, config.checkpoint.keep)
        except (OSError, InvalidCheckpoint) as problem:
            error = f"cannot complete the checkpoint {final}: {problem}"
    if error := broadcast_object_list([error])[0]:
        raise RuntimeError(error)


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
    tensors = _tensors(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    weights, moments = get_state_dict(model, optimizer.optimizer, options=FLATTENED)
    weights.update({name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")})
    moments.update({name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")})
    set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments, options=FLATTENED)


def rotate(checkpoints: Path, step: int, keep: int) -> None:
    """Delete all checkpoints but the `keep` up to `step` and the one with the best validation loss; main process only.

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
    superfluous = manifests.keys() - {*list(manifests)[:keep], *sorted(losses, key=losses.get)[:1]}
    if superfluous:
        validate(step_directory(checkpoints, step))
    for path in superfluous:
        # Renamed first, so that an interrupted deletion does not leave a damaged checkpoint behind.
        doomed = path.with_name(f".deleting-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _tensors(model, optimizer) -> dict[str, torch.Tensor]:
    # Learning rates, betas and the like are left out: they are functions of the config and the step.
    weights, moments = get_state_dict(model, optimizer.optimizer, options=FLATTENED)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {f"optimizer.{name}": value for name, value in moments.items() if torch.is_tensor(value)}
    return state


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
