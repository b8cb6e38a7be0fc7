"""What makes a directory a checkpoint: a manifest that vouches for every file beside it, and for itself.

A directory without a valid manifest is no checkpoint. Reading one can run no code: it is safetensors and JSON.
"""

import hashlib
import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from config.schema import CheckpointConfig, flat_settings
from data.files import sha256, write_atomically
from data.json_objects import parse_object, typed

FORMAT = 1
MANIFEST = "manifest.json"


class InvalidCheckpoint(Exception):
    """A directory that is not a whole checkpoint, with the reason."""


@dataclass(frozen=True)
class File:
    """What a manifest says of a file beside it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint besides its tensors. The loop's state is `step` and `skipped`."""

    step: int
    """Updates that were done."""
    skipped: tuple[int, int]
    """Updates that were skipped until then: in all, and in a row until the last."""
    metrics: dict[str, Any]
    """Of that step, as in metrics.jsonl."""
    config: dict[str, Any]
    """The settings of the run."""
    mixed_precision: str
    files: dict[str, File]
    processes: int
    """How many trained it."""
    shards: int
    """How many processes shared a replica."""
    threads: int | None
    """Of each process, on a CPU: how many share a sum decides its order."""
    provenance: dict[str, Any]
    tokenizer: dict[str, str] | None
    """SHA-256 of the files in `tokenizer` of the run; None without any."""

    def write(self, directory: Path) -> None:
        """Write it into the directory whose files it names, with a digest of everything that it says."""
        facts = {"format": FORMAT, **asdict(self)}
        write_atomically(directory / MANIFEST, json.dumps(facts | {"digest": _digest(facts)}, indent=2))

    @property
    def val_loss(self) -> float | None:
        """The validation loss, where one was measured and is finite."""
        loss = self.metrics.get("val/loss")
        return loss if isinstance(loss, float) and math.isfinite(loss) else None


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return checkpoints / f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, which is what was written; its files are not looked at.

    Raises:
        InvalidCheckpoint: something in it is missing, was changed or is of another format; the message says what.
    """
    try:
        if (newest := checkpoints_in(path / "checkpoints")) and not (path / MANIFEST).exists():
            raise InvalidCheckpoint(f"{path} is a run; name one of its checkpoints, such as {newest[0]}")
        facts = parse_object((path / MANIFEST).read_bytes())
        digest = facts.pop("digest", None)
        if facts.get("format") != FORMAT:
            raise ValueError(f"format {facts.get('format')!r} instead of {FORMAT}")
        if digest != _digest(facts):
            raise ValueError("its content does not match its digest")
        manifest = typed(facts, Manifest, "manifest")
        if path.name.startswith("step-") and path.name != step_directory(path, manifest.step).name:
            raise ValueError(f"it is of step {manifest.step}")
        if not manifest.files:
            raise ValueError("it names no files")
        for name in manifest.files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"it names {name!r}, which is not a safetensors file beside it")
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path}: no valid {MANIFEST}: {error}") from None
    return manifest


def validate(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, after checking every byte of it.

    Raises:
        InvalidCheckpoint: something is missing, damaged, foreign or cannot be read; the message says what.
    """
    manifest = read_manifest(path)
    try:
        if foreign := {found.name for found in path.glob("*.safetensors")} - manifest.files.keys():
            raise InvalidCheckpoint(f"{path}: {sorted(foreign)} stand beside the files that {MANIFEST} names")
        for name, expected in manifest.files.items():
            file = path / name
            if file.is_symlink() or not file.is_file():
                raise InvalidCheckpoint(f"{file}: missing")
            if file.stat().st_size != expected.bytes:
                raise InvalidCheckpoint(f"{file}: {file.stat().st_size} bytes instead of {expected.bytes}")
            if sha256(file) != expected.sha256:
                raise InvalidCheckpoint(f"{file}: the content does not match its checksum")
            with safe_open(file, "np"):  # reads the header, which must describe the file exactly
                pass
    except (OSError, SafetensorError) as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None
    return manifest


def checkpoints_in(directory: Path) -> list[Path]:
    """Everything that may be a checkpoint, the newest first."""
    return sorted(directory.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def readable_checkpoints(directory: Path) -> dict[Path, Manifest]:
    """Every checkpoint whose manifest can be read, the newest first."""
    manifests = {}
    for path in checkpoints_in(directory):
        with suppress(InvalidCheckpoint):
            manifests[path] = read_manifest(path)
    return manifests


def newest_valid(checkpoints: Path) -> tuple[Path | None, Manifest | None, list[str]]:
    """Find the newest valid checkpoint, also while a training adds and removes some.

    Returns:
        Its directory and manifest, None if there is none; and for each newer one the reason why it is not valid.
    """
    rejected: dict[Path, str] = {}
    while remaining := [path for path in checkpoints_in(checkpoints) if path not in rejected]:
        path = remaining[0]
        try:
            return path, validate(path), list(rejected.values())
        except InvalidCheckpoint as invalid:
            rejected[path] = str(invalid) if path.exists() else f"{path}: removed while it was read"
    return None, None, list(rejected.values())


def best_checkpoints(manifests: dict[Path, Manifest]) -> list[Path]:
    """That with the lowest validation loss, of the checkpoints that were measured on as many sequences as the newest;
    then those of other numbers of sequences, for losses on other validation sets are not compared."""
    best: dict[str, Path] = {}
    for path, manifest in manifests.items():
        loss, measured_on = manifest.val_loss, str(flat_settings(manifest.config).get("evaluation.num_samples"))
        if loss is not None and (measured_on not in best or loss < manifests[best[measured_on]].val_loss):
            best[measured_on] = path
    return list(best.values())


def rotate(checkpoints: Path, step: int, config: CheckpointConfig) -> None:
    """Delete all checkpoints up to `step` but the `keep` newest, the one with the best validation loss (of each
    validation set, if it was changed), and those of every `keep_every` steps; main process only.

    Newer ones are left alone: they were found damaged, or `step` would not have been trained again. So are those
    without a valid manifest, for the user to look at.

    Raises:
        InvalidCheckpoint: that of `step`, just written, cannot be read back; then nothing is deleted.
    """
    manifests = {path: found for path, found in readable_checkpoints(checkpoints).items() if found.step <= step}
    kept = {*list(manifests)[: config.keep], *best_checkpoints(manifests)}
    if config.keep_every:
        kept |= {path for path, manifest in manifests.items() if manifest.step % config.keep_every == 0}
    if superfluous := manifests.keys() - kept:
        validate(step_directory(checkpoints, step))
    for path in superfluous:
        # Renamed first, so that an interrupted deletion does not leave a damaged checkpoint behind.
        doomed = path.with_name(f".deleting-{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _digest(facts: dict[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
