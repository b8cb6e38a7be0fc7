"""Load a trained model: of a run, one of its checkpoints, a folder in transformers' format or a name on the Hub.

Example:
    config, model, tokenizer = load_run("runs/stories")
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from model.gpt import GPTModel
from runtime.config.errors import ConfigError
from runtime.config.paths import expand_user_path
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import config_of
from runtime.distributed.world import is_main_process
from trainer.checkpoint.manifest import (
    MANIFEST,
    InvalidCheckpoint,
    Manifest,
    best_checkpoints,
    checkpoints_in,
    manifest_problem,
    newest_valid,
    readable_checkpoints,
    validate,
)
from trainer.checkpoint.unshard import read_weights
from trainer.pretrained.load_transformers import load_transformers
from trainer.pretrained.tokenizer import load_run_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LoadedModel(NamedTuple):
    """A model with its settings and tokenizer."""

    config: TrainConfig | None
    """Settings of the run; None for a model that is not from a run."""
    model: GPTModel
    """In eval mode, in float32, on the CPU."""
    tokenizer: "PreTrainedTokenizerBase | None"
    """None if there is none, as for random tokens."""


def load_run(
    path: str | Path, checkpoint: str | int = "latest", setting: str = "run", weights: str = "evaluated"
) -> LoadedModel:
    """Load the model at `path`: a run, a checkpoint, a folder in transformers' format, or a name on the Hub.

    `checkpoint` of a run is latest, best (lowest validation loss), or a step. Raise ConfigError, which names `setting`,
    if there is no such model, it cannot be read, or it has settings that this code does not have.
    """
    return load_with_source(path, checkpoint, setting, weights)[0]


def load_with_source(
    path: str | Path, checkpoint: str | int = "latest", setting: str = "run", weights: str = "evaluated"
) -> tuple[LoadedModel, tuple[Path, Manifest] | None]:
    """Load a model as load_run does, with the directory and manifest of its checkpoint if it is from a run."""
    path = expand_user_path(setting, path)
    if not any((path / name).exists() for name in ("config.yaml", "checkpoints", MANIFEST)):  # not a run
        if checkpoint != "latest":
            raise ConfigError(f"checkpoint: {checkpoint!r}, but {str(path)!r} is not a run; leave it out")
        return LoadedModel(None, *load_transformers(str(path), setting)), None
    directory, manifest = find_checkpoint(path, checkpoint)
    return load_model_from_checkpoint(directory, manifest, weights), (directory, manifest)


def load_model_from_checkpoint(directory: Path, manifest: Manifest, weights: str = "evaluated") -> LoadedModel:
    """Load the model of a validated checkpoint."""
    try:
        config = config_of(manifest.config)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None
    model = GPTModel(config.model).eval()
    read_weights(directory, manifest, model.state_dict(), weights == "evaluated")
    return LoadedModel(config, model, load_run_tokenizer(directory, config, manifest.tokenizer))


def copy_initial_weights(network: GPTModel, initial: LoadedModel) -> None:
    """Copy the weights of `initial` into a new network; raise ConfigError if the network lacks some of them.

    Parameters that `initial` lacks, such as those that a fork adds, keep their random initial values.
    """
    lacking, unexpected = network.load_state_dict(initial.model.state_dict(), strict=False)
    if unexpected:
        raise ConfigError(f"init_from: {len(unexpected)} of its tensors are not in the model, such as {unexpected[0]}")
    if lacking and is_main_process():
        print(f"init_from: it lacks {len(lacking)} tensors, which are initialised at random, such as {lacking[0]}")


def hash_weights(weights: dict[str, Tensor]) -> str:
    """Return a hash of the weights and their names, in 32 hexadecimal digits, independent of the files' format."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def find_checkpoint(path: Path, checkpoint: str | int = "latest") -> tuple[Path, Manifest]:
    """Find a checkpoint of the run at `path`, or the one at `path` itself, and validate it.

    Return its directory and manifest; a running train.py may remove it afterwards. The main process prints which
    damaged ones are skipped. Raise ConfigError if none is left.
    """
    is_checkpoint = (path / MANIFEST).exists()
    if is_checkpoint and checkpoint != "latest":
        raise ConfigError(f"checkpoint: {checkpoint!r}, but {str(path)!r} is a checkpoint itself; leave it out")

    # The newest valid checkpoint of a run.
    if checkpoint == "latest" and not is_checkpoint:
        newest, manifest, rejected = newest_valid(path / "checkpoints")
        if newest is None or manifest is None:
            raise ConfigError("\n  ".join([f"{path} has no valid checkpoint", *rejected]))
        report_skipped(rejected)
        return newest, manifest

    # The best checkpoint of a run, or that of a step, which the manifests tell; then its files are checked.
    directory = path
    if not is_checkpoint:
        manifests = readable_checkpoints(path / "checkpoints")
        others = [c for c in checkpoints_in(path / "checkpoints") if c not in manifests and c.exists()]
        report_skipped(filter(None, map(manifest_problem, others)))
        best = best_checkpoints(manifests)
        if checkpoint == "best":
            chosen = best[:1]
            report_skipped(f"{other}: its loss was measured on another validation set" for other in best[1:])
        else:
            chosen = [directory for directory, manifest in manifests.items() if manifest.step == checkpoint]
        if not chosen:
            steps = ", ".join(str(manifest.step) for manifest in manifests.values())
            contents = f"{path} has the steps {steps}" + ("" if best else ", none with a validation loss")
            raise ConfigError(f"checkpoint: {checkpoint!r}: {contents}; use one of these, latest or best")
        directory = chosen[0]
    try:
        return directory, validate(directory)
    except InvalidCheckpoint as invalid:
        raise ConfigError(str(invalid)) from None


def report_skipped(reasons: Iterable[str]) -> None:
    """Print on the main process why checkpoints are skipped; each reason begins with the checkpoint."""
    for reason in reasons if is_main_process() else ():
        print(f"Checkpoint skipped: {reason}", file=sys.stderr)
