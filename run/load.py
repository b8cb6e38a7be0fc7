"""What training leaves, for whoever uses it: `load_run` gives the model of a run, or that of a folder or a Hub name.

    from run.load import load_run
    config, model, tokenizer = load_run("runs/stories")

sample.py, evaluate.py, export.py and `init_from` stand on it.
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from checkpoint.manifest import (
    InvalidCheckpoint,
    Manifest,
    best_checkpoints,
    checkpoints_in,
    newest_valid,
    readable_checkpoints,
    validate,
)
from checkpoint.tokenizer_files import changed_files
from checkpoint.unshard import read_weights
from config.errors import ConfigError
from config.paths import expanded
from config.schema import TrainConfig
from data.corpus import Corpus, load_corpus
from data.files import reason_absent
from data.tokenizer import END_OF_TEXT
from distributed.world import is_main_process
from model.gpt import GPTModel
from model.hf import config_from_transformers, from_transformers
from run.stored_settings import USE_ITS_CODE, config_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


# Cut by almost every kind of rule.
PROBE = " Two  words, isn't it? 12345\n\tÄpfel 中文"


CAN_BE_OPENED = "the directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub"

# A folder with a tokenizer has at least one; that of the published GPT-2 has no tokenizer.json in some copies.
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "vocab.json"

# Of a run: those that its validation loss is of, or those that are trained.
Weights = Literal["evaluated", "trained"]


class Loaded(NamedTuple):
    """A model and what belongs to it."""

    config: TrainConfig | None
    """The settings of the run; None of a model that no run here has made."""
    model: GPTModel
    """In eval mode, in float32, on the CPU."""
    tokenizer: "PreTrainedTokenizerBase | None"
    """None where there is none, as for random tokens."""


def load_run(
    path: str | Path, checkpoint: str | int = "latest", setting: str = "run", weights: Weights = "evaluated"
) -> Loaded:
    """The model of a run, of one of its checkpoints, of a folder in transformers' format, or of a name on the Hub.

    Args:
        path: the directory of a run or of a checkpoint; else a folder or a name that transformers can open.
        checkpoint: of a run: latest, best (by validation loss), or a step.
        setting: what messages call the path.
        weights: evaluated: those that `val/loss` is of, which are the average with `evaluation.ema_decay`; or trained.

    Raises:
        ConfigError: there is no such model, it cannot be read, or it has settings that this one lacks.
    """
    return load_with_source(path, checkpoint, setting, weights)[0]


def load_with_source(
    path: str | Path, checkpoint: str | int = "latest", setting: str = "run", weights: Weights = "evaluated"
) -> tuple[Loaded, tuple[Path, Manifest] | None]:
    """As load_run; and the directory and the manifest of the checkpoint, None of a model that is no run's."""
    path = expanded(setting, path)
    if str(path).encode(errors="replace").decode() != str(path):
        raise ConfigError(f"{setting}: {str(path)!r} is not UTF-8, and safetensors opens nothing else; rename it")
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"{setting}: {str(path)!r} is a directory that this user may not read")
    if not is_run(path):
        return load_transformers(str(path), checkpoint, setting), None
    source = find_checkpoint(path, checkpoint)
    return load_checkpoint(*source, weights), source


def load_checkpoint(directory: Path, manifest: Manifest, weights: Weights = "evaluated") -> Loaded:
    """The model of a checkpoint that find_checkpoint gave.

    Raises:
        ConfigError: it is of a model that this version cannot build, or other tensors.
    """
    try:
        config = config_of(manifest.config)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None
    model = GPTModel(config.model).eval()
    read_weights(directory, manifest, model.state_dict(), averages(config, weights))
    return Loaded(config, model, run_tokenizer(directory, config, manifest.tokenizer))


def averages(config: TrainConfig, weights: Weights) -> bool:
    """Whether these weights of a run are an average of those that it trained."""
    return weights == "evaluated" and config.evaluation.ema_decay is not None


def is_run(path: Path) -> bool:
    """Whether it is a directory of ours: of a run, or of a checkpoint."""
    return any((path / name).exists() for name in ("config.yaml", "checkpoints", "manifest.json"))


def find_checkpoint(path: Path, checkpoint: str | int = "latest") -> tuple[Path, Manifest]:
    """The directory and the manifest of a checkpoint of the run at `path`, or of that at `path` itself.

    The main process says which damaged ones are passed over.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if (path / "manifest.json").exists():
        if checkpoint != "latest":
            raise ConfigError(f"checkpoint: {checkpoint!r} is of runs, and {str(path)!r} is a checkpoint; leave it out")
        directory = path
    elif checkpoint == "latest":
        directory, manifest, rejected = newest_valid(path / "checkpoints")
        if directory is None:
            raise ConfigError("\n  ".join([f"{path} has no valid checkpoint", *rejected]))
        say_passed_over(rejected)
        return directory, manifest
    else:
        manifests = readable_checkpoints(path / "checkpoints")
        rejected = [found for found in checkpoints_in(path / "checkpoints") if found not in manifests]
        say_passed_over(f"{found}: its manifest is missing or damaged" for found in rejected)
        best = best_checkpoints(manifests)
        chosen = [found for found, manifest in manifests.items() if manifest.step == checkpoint]
        if checkpoint == "best":
            chosen = best[:1]
            say_passed_over(f"{other}: its loss is of another validation set than the newest's" for other in best[1:])
        if not chosen:
            there = ", ".join(str(manifest.step) for manifest in manifests.values())
            why = f"{path} has those of steps {there}" + (", none with a validation loss" if not best else "")
            raise ConfigError(f"checkpoint: {checkpoint!r}: {why}; use one of these, latest or best")
        directory = chosen[0]
    try:
        return directory, validate(directory)
    except InvalidCheckpoint as invalid:
        raise ConfigError(str(invalid)) from None


def say_passed_over(reasons: Iterable[str], what: str = "Checkpoint") -> None:
    """Name what is not taken, and why; on the main process."""
    for reason in reasons if is_main_process() else ():
        print(f"{what} passed over: {reason}", file=sys.stderr)


def run_tokenizer(
    directory: Path, config: TrainConfig, expected: dict[str, str] | None
) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of the run that a checkpoint lies in, or of its corpus; with the files that the checkpoint expects.

    Raises:
        ConfigError: there is none, or it is another.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # slow to import

    if config.data.source != "text":
        try:
            data = load_corpus(config)
        except ConfigError as error:  # as of a source that a fork has
            remedy = "" if Path(config.data.path or "").exists() else ", or put its data back where they were"
            raise ConfigError(
                f"the tokenizer of {directory} is not known here: {error}; {USE_ITS_CODE}{remedy}"
            ) from None
        if data.tokenizer is None:
            return None
        end = END_OF_TEXT if data.end_of_text is None else data.tokenizer.id_to_token(data.end_of_text)
        return PreTrainedTokenizerFast(
            tokenizer_object=data.tokenizer, eos_token=end, clean_up_tokenization_spaces=False
        )
    places = directory.resolve().parent.parent / "tokenizer", Path(config.data.corpora[0]).expanduser() / "tokenizer"
    problems = []
    for place in filter(Path.exists, places):
        changed = expected and changed_files(place, expected)
        try:
            tokenizer = None if changed else AutoTokenizer.from_pretrained(place)
        except Exception as error:  # tokenizers raises nothing more special
            problems.append(f"{place} cannot be read: {error}")
            continue
        if tokenizer is not None:
            say_passed_over(problems, "Tokenizer")
            return tokenizer
        problems.append(f"{place} is not what it was trained with ({changed})")
    if problems:
        remedy = "started again, the run makes its tokenizer anew from the corpus"
        raise ConfigError("\n  ".join([f"{directory} has no tokenizer any more; {remedy}", *problems]))
    raise ConfigError(f"the tokenizer of {directory} is neither in {places[0]} nor in {places[1]}")


def load_transformers(name: str, checkpoint: str | int = "latest", setting: str = "run") -> Loaded:
    """The model and the tokenizer of a folder in transformers' format, or of a name on the Hub; as load_run."""
    if checkpoint != "latest":
        raise ConfigError(f"checkpoint: {checkpoint!r} is of runs, and {name!r} is none")
    local = Path(name).is_dir()
    if (Path(name) / "adapter_config.json").exists():
        raise ConfigError(
            f"{setting}: {name!r} is an adapter that PEFT made, a part of a model; merge it first: from peft import "
            f"AutoPeftModelForCausalLM; AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload()"
            ".save_pretrained(FOLDER), with its tokenizer in FOLDER too (docs/using.md), and name FOLDER"
        )
    what = f"{name!r} has no model" if local and not (Path(name) / "config.json").exists() else reason_absent(name)
    if what:  # no need to ask the Hub
        raise ConfigError(f"{setting}: {what}; name {CAN_BE_OPENED}{similar(Path(name))}")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # slow to import

    found = local
    try:
        # First, for another model need not be downloaded. Its code would be refused too, after a question to nobody.
        hf_config, found = AutoConfig.from_pretrained(name, trust_remote_code=False), True
        config_from_transformers(hf_config)
        settings = {"config": hf_config, "dtype": torch.float32, "output_loading_info": True}
        hf_model, loading = AutoModelForCausalLM.from_pretrained(name, **settings)
        tokenizer = None
        if not local or any((Path(name) / file).exists() for file in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(name)
        model = from_transformers(hf_model)
    except Exception as error:  # as many kinds as there are ways to fail at a download
        where = "" if found else "; it is no directory here, and no name on the Hub that could be read"
        raise ConfigError(f"{setting}: {name!r} cannot be opened{where}: {error}") from None
    if lacking := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise ConfigError(f"{setting}: {name!r} lacks {len(lacking)} tensors of its model, such as {lacking[0]}")
    return Loaded(None, model, tokenizer)


def similar(path: Path) -> str:
    """What can be opened of the folder `path` or, if that is none, beside it: the names most like it, in brackets."""
    folder = path if path.is_dir() else path.parent
    with suppress(OSError):
        names = [found.name for found in folder.iterdir() if is_run(found) or (found / "config.json").exists()]
        if near := get_close_matches(path.name, sorted(names), n=5, cutoff=0):
            return f" (in {folder} there are {len(names)}, such as {', '.join(near)})"
    return ""


def copy_initial_weights(network: GPTModel, initial: Loaded) -> None:
    """Give a new model the weights of another. What that lacks, as a fork's LoRA, stays as it is, and is named.

    Raises:
        ConfigError: the new one lacks some of them.
    """
    lacking, unknown = network.load_state_dict(initial.model.state_dict(), strict=False)
    if unknown:
        raise ConfigError(f"init_from: the model has no place for {len(unknown)} of its tensors, such as {unknown[0]}")
    if lacking and is_main_process():
        print(f"init_from: {len(lacking)} tensors are not in it and begin as in a new model, such as {lacking[0]}")


def weights_hash(weights: dict[str, Tensor]) -> str:
    """Of the weights by their names, however they are stored."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def check_tokenizer(name: str, loaded: Loaded, corpus: Corpus) -> None:
    """Refuse a corpus whose tokens mean something else to the model called `name`.

    Raises:
        ConfigError: its tokenizer is another than the model's, or has more tokens.
    """
    what, size = "", loaded.model.config.vocab_size
    if loaded.tokenizer is not None and corpus.tokenizer is not None:
        ours, theirs = corpus.tokenizer, loaded.tokenizer.backend_tokenizer
        if different := set(ours.get_vocab().items()) ^ set(theirs.get_vocab().items()):
            what = f"{len(different)} entries differ, such as {min(different, key=lambda entry: entry[1])}"
        elif cut(ours) != cut(theirs):
            what = f"they cut {PROBE!r} differently"
    if not what and corpus.vocab_size > size:  # as where tokens were added, and the embedding was not resized
        what = f"it has {corpus.vocab_size} tokens, and the model {size}"
    if what:
        raise ConfigError(
            f"data: the tokenizer of the corpus is not that of {name}: {what}; prepare the corpus with the model's, "
            "--tokenizer and the name or folder"
        )


def cut(tokenizer: "Tokenizer") -> list[int]:
    """The tokens of PROBE; [] if there are none for it, as there are none for words that a tokenizer of words lacks."""
    try:
        return tokenizer.encode(PROBE, add_special_tokens=False).ids
    except Exception:  # tokenizers raises nothing more special
        return []
