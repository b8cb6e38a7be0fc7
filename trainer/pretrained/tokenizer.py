"""Load the tokenizer of a run, and compare it with the tokenizer of a corpus."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.corpus import Corpus, load_corpus
from data.tokenizer import END_OF_TEXT, find_difference, load_tokenizer, open_tokenizer
from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig
from runtime.config.stored_settings import USE_ITS_CODE
from runtime.distributed.world import is_main_process

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def load_run_tokenizer(
    directory: Path, config: TrainConfig, recorded: dict[str, Any] | None
) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a checkpoint's run, or if it cannot be used, of its corpus; None if its data have none.

    `recorded` is in the manifest: for a run on text the properties that its tokenizer must have, {} if the data have no
    tokenizer. None: there is one, or an earlier version recorded nothing. Raise ConfigError if none can be used.
    """
    if recorded == {}:
        return None
    from transformers import PreTrainedTokenizerFast  # slow to import

    if config.data.source != "text":
        try:
            data = load_corpus(config)
        except ConfigError as error:  # such as a data source of a fork
            remedy = "" if Path(config.data.path or "").exists() else ", or restore its data"
            raise ConfigError(f"{directory} has no tokenizer here: {error}; {USE_ITS_CODE}{remedy}") from None
        if data.tokenizer is None:
            return None
        end = END_OF_TEXT if data.end_of_text is None else data.tokenizer.id_to_token(data.end_of_text)
        return PreTrainedTokenizerFast(
            tokenizer_object=data.tokenizer, eos_token=end, clean_up_tokenization_spaces=False
        )
    places = directory.resolve().parent.parent / "tokenizer", Path(config.data.corpora[0]).expanduser() / "tokenizer"
    problems = []
    for place in filter(Path.exists, places):
        try:
            tokenizer = open_tokenizer(place)
            found = load_tokenizer(place)[1] if recorded else {}
            if different := [name for name, value in (recorded or {}).items() if found.get(name) != value]:
                raise ConfigError(f"it is not the tokenizer that the run was trained with ({different[0]})")
        except Exception as error:  # tokenizers raises nothing more specific
            problems.append(f"{place} cannot be used: {error}")
            continue
        for problem in problems if is_main_process() else ():
            print(f"Tokenizer skipped: {problem}", file=sys.stderr)
        return tokenizer
    if problems:
        remedy = f"copy that of its corpus to {places[0]}"
        raise ConfigError("\n  ".join([f"{directory} has no usable tokenizer; {remedy}", *problems]))
    raise ConfigError(f"the tokenizer of {directory} is neither in {places[0]} nor in {places[1]}")


def check_tokenizer(
    name: str, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int | None, corpus: Corpus
) -> None:
    """Raise ConfigError if the corpus has another tokenizer than the model `name`, or a larger vocabulary."""
    problem = ""
    if tokenizer is not None and corpus.tokenizer is not None:
        ours: Tokenizer = corpus.tokenizer
        theirs: Tokenizer = tokenizer.backend_tokenizer  # pyright: ignore[reportAssignmentType] untyped there
        if different := set(ours.get_vocab().items()) ^ set(theirs.get_vocab().items()):
            problem = f"{len(different)} entries differ, such as {min(different, key=lambda entry: entry[1])}"
        elif (probe := find_difference(ours, theirs)) is not None:
            problem = f"they encode or decode {probe!r} differently"
    # Tokens may have been added without resizing the embedding.
    if not problem and vocab_size is not None and corpus.vocab_size > vocab_size:
        problem = f"it has {corpus.vocab_size} tokens, and the model {vocab_size}"
    if problem:
        raise ConfigError(
            f"data: the tokenizer of the corpus differs from that of {name}: {problem}; train on a text "
            "corpus that data.prepare made with the model's: --tokenizer NAME_OR_FOLDER"
        )
