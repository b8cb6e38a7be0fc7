"""The manifest of a checkpoint: sizes and checksums of all files, the step and the settings.

A directory without a valid manifest is not a checkpoint. Its files are safetensors and JSON: reading them runs no code.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.config.schema import CheckpointConfig, flat_settings
from runtime.distributed.signals import never_stop
from runtime.files import hash_files, write_atomically
from runtime.json_objects import from_json, parse_object

FORMAT = 1
MANIFEST = "manifest.json"


class InvalidCheckpoint(Exception):
    """The directory is not a complete, undamaged checkpoint; the message has the reason."""


@dataclass(frozen=True)
class File:
    """Entry of a manifest for a file beside it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Facts about a checkpoint in addition to its tensors. `step` and `skipped` are the state of the training loop."""

    step: int
    """Completed steps."""
    tokens: int
    """Training tokens until `step`."""
    skipped: tuple[int, int]
    """Skipped updates so far: in all, and in a row until this step."""
    metrics: dict[str, Any]
    """Metrics of this step, as in metrics.jsonl; those of an evaluation are added when it has ended."""
    config: dict[str, Any]
    """Settings of the run, nested."""
    mixed_precision: str
    files: dict[str, File]
    processes: int
    shards: int
    """Processes that share one replica of the weights."""
    threads: int | None
    """CPU threads of each process, which determine the order of sums; None on a GPU."""
    provenance: dict[str, Any]
    processor: str | None = None
    """The model of the processor, or of the GPU; None: not recorded."""
    tokenizer: dict[str, Any] | None = None
    """Of a run on text: properties of its tokenizer, as by data.tokenizer.load_tokenizer; {} if its data have none."""
    conversations: bool | None = None
    """Whether the training data are conversations; None: not recorded."""
    evaluated: bool = True
    """False until the evaluation that is due at this step has ended; a resumed run makes up for it."""

    def write(self, directory: Path) -> None:
        """Write manifest.json into the directory."""
        facts = {"format": FORMAT, **asdict(self)}
        write_atomically(directory / MANIFEST, json.dumps({**facts, "digest": facts_digest(facts)}, indent=2))


def facts_digest(facts: dict[str, Any]) -> str:
    """Return a hash of the facts in a manifest, in 16 hexadecimal digits, so that a damaged one is recognised."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def step_directory(checkpoints: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return checkpoints / f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`, but no other file; raise InvalidCheckpoint."""
    try:
        if not (path / MANIFEST).exists() and (newest := checkpoints_in(path / "checkpoints")):
            raise InvalidCheckpoint(f"{path} is a run; name one of its checkpoints, such as {newest[0]}")
        facts = parse_object((path / MANIFEST).read_bytes())
        if facts.get("format") != FORMAT:
            raise ValueError(f"format {facts.get('format')!r} instead of {FORMAT}")
        if facts.pop("digest", None) not in (None, facts_digest(facts)):  # None: of an earlier version
            raise ValueError("its content does not match its digest")
        manifest = from_json(facts, Manifest)
        if path.name.startswith("step-") and path.name != step_directory(path, manifest.step).name:
            raise ValueError(f"it is for step {manifest.step}")
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{path}: no valid {MANIFEST}: {error}") from None
    return manifest


def manifest_problem(path: Path) -> str:
    """Return why the manifest of the checkpoint at `path` is not valid; "" if it is."""
    try:
        read_manifest(path)
    except InvalidCheckpoint as invalid:
        return str(invalid)
    return ""


def validate(path: Path, should_stop: Callable[[], bool] = never_stop) -> Manifest:
    """Read the manifest of the checkpoint at `path` and check every byte of its files.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or cannot be read.
        Interrupted: `should_stop()` is true.
    """
    manifest = check_sizes(path)
    files = {path / name: expected.sha256 for name, expected in manifest.files.items()}
    try:
        for file, content in zip(files, hash_files([*files], should_stop), strict=True):
            if content != files[file]:
                raise InvalidCheckpoint(f"{file}: the content does not match its checksum")
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None
    return manifest


def check_sizes(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`; raise InvalidCheckpoint unless all files have their sizes."""
    manifest = read_manifest(path)
    try:
        for file, expected in ((path / name, expected) for name, expected in manifest.files.items()):
            if not file.is_file():
                raise InvalidCheckpoint(f"{file}: missing")
            if (size := file.stat().st_size) != expected.bytes:
                raise InvalidCheckpoint(f"{file}: {size} bytes instead of {expected.bytes}")
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: {error}") from None
    return manifest


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the directories that may be checkpoints, newest first; raise OSError if the folder may not be read."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.scandir(directory).close()  # glob would find nothing in a folder of another user
    return sorted(directory.glob("step-*"), key=lambda path: (len(path.name), path.name), reverse=True)


def readable_checkpoints(directory: Path) -> dict[Path, Manifest]:
    """Return the checkpoints whose manifest is valid, newest first; their other files are not read."""
    manifests = {}
    for path in checkpoints_in(directory):
        with suppress(InvalidCheckpoint):
            manifests[path] = read_manifest(path)
    return manifests


def newest_valid(
    checkpoints: Path, should_stop: Callable[[], bool] = never_stop
) -> tuple[Path | None, Manifest | None, list[str]]:
    """Find the newest valid checkpoint, even while training adds and removes some.

    Return its directory and manifest (None if there is none), and the reason why each newer one is not valid. Raise
    Interrupted if `should_stop()` is true.
    """
    rejected: dict[Path, str] = {}
    while remaining := [path for path in checkpoints_in(checkpoints) if path not in rejected]:
        path = remaining[0]
        try:
            return path, validate(path, should_stop), list(rejected.values())
        except InvalidCheckpoint as invalid:
            rejected[path] = str(invalid) if path.exists() else f"{path}: removed while it was read"
    return None, None, list(rejected.values())


def best_checkpoints(manifests: dict[Path, Manifest]) -> list[Path]:
    """Return the checkpoint with the lowest validation loss on each validation set (`evaluation.num_samples`).

    `manifests` are sorted newest first, and the result begins with the newest set. Losses on different sets are not
    compared.
    """
    best: dict[str, tuple[float, Path]] = {}
    for path, manifest in manifests.items():
        loss = manifest.metrics.get("val/loss")
        num_samples = str(flat_settings(manifest.config).get("evaluation.num_samples"))
        if isinstance(loss, float) and math.isfinite(loss) and loss < best.get(num_samples, (math.inf, path))[0]:
            best[num_samples] = loss, path
    return [path for _, path in best.values()]


def rotate(checkpoints: Path, step: int, config: CheckpointConfig) -> None:
    """Delete old checkpoints up to `step`, which was just saved; called by the main process alone.

    Keep the `keep` newest, the best of each validation set, those of every `keep_every` steps, those after `step`,
    which were found damaged when the run resumed, and those without a valid manifest. If the checkpoint of `step` is
    not complete, raise InvalidCheckpoint and delete nothing. Its contents are not read again: each process has read
    its own files back before the manifest was written, and here the others wait for this one.
    """
    manifests = {path: m for path, m in readable_checkpoints(checkpoints).items() if m.step <= step}
    kept = {*list(manifests)[: config.keep], *best_checkpoints(manifests)}
    if config.keep_every:
        kept |= {path for path, manifest in manifests.items() if manifest.step % config.keep_every == 0}
    if superfluous := manifests.keys() - kept:
        check_sizes(step_directory(checkpoints, step))
    for path in superfluous:
        # Renamed first, so that an interrupted deletion does not leave a damaged checkpoint.
        renamed = path.with_name(f".deleting-{path.name}")
        os.rename(path, renamed)
        shutil.rmtree(renamed, ignore_errors=True)  # what is left is removed by the next save
