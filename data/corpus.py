"""Training and validation sets. See docs/forking_reference.md to add a source."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never, cast

from tokenizers import Tokenizer
from torch import Tensor

from data.sampler import BatchSizes, GlobalBatches, MixedBatches, apportion, mix_quotas
from data.synthetic.excess import build_excess_loss_score
from data.synthetic.random_tokens import RandomTokensDataset
from data.synthetic.stories import StoriesDataset, get_story_generator
from model.loss import MetricSums
from runtime.config.errors import ConfigError
from runtime.config.schema import TrainConfig


class SampleDataset(Protocol):
    """A map-style dataset whose samples are sequences of T = `seq_len` tokens.

    A sample is {"input_ids": int64 [T], "labels": int64 [T]}.

    With packing "isolated" a sample also has "position_ids", int64 [T], which restart from 0 at each document.
    Other keys, which a fork may add, are arguments of GPTModel.forward too. The model does not get those that begin
    with "score_": they may have any shape, the same in all samples, and only `score_logits` and `score_model` read
    them.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


@dataclass
class Corpus:
    """A training and a validation set, their tokenizer, and optional metrics of the model, its logits and its texts."""

    train: SampleDataset
    validation: SampleDataset | None
    """None for source text without evaluations. The dataset may have more attributes:

    - `entropy_nats`: the negative log-probability of all targets under the distribution that generated them, which no
      model can beat on average.
    - `num_bytes`: the size of the text of the targets, for bits per byte.
    - `num_targets`: the number of targets that the other two attributes cover. An evaluation that counts another
      number, for example because a fork changes the labels, ignores those two.
    - `draw_until`: a method that an evaluation calls before each batch, with the number of samples up to its end. It
      may do a part of the work of these attributes, so that a signal need not wait for all of it.
    """
    tokenizer: Tokenizer | None
    """None for random tokens."""
    vocab_size: int
    """Size of the model's vocabulary, at least that of the tokenizer."""
    quotas: list[int] | None = None
    """For a mixture: the number of sequences from each corpus in every MIX_BLOCK training sequences."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of a run that the corpus determines, such as {"data.hash": ...}."""
    file_sizes: list[int] = field(default_factory=list)
    """Bytes of each file, whose sum is printed at the start of a run; [] for generated data."""
    score_logits: Callable[[Tensor, dict[str, Tensor]], MetricSums] | None = None
    """(logits [B, T, V], batch) -> more validation metrics, logged as val/NAME. The logits at position t predict
    label t + 1."""
    score_model: Callable[[Any, dict[str, Tensor]], MetricSums] | None = None
    """(model, batch) -> more validation metrics, logged as val/NAME, such as the exact match of generated answers. The
    model is the bare GPTModel in eval mode, not sharded. The metrics must be deterministic: sample nothing."""
    end_of_text: int | None = None
    """Id of the token that separates texts, from which generation starts; None: the tokenizer's <|endoftext|>."""
    describe_text: Callable[[str], str] | None = None
    """Generated text -> a remark that is logged with the text, such as its log-probability, or that it is not valid."""
    has_conversations: bool = False
    """Whether a corpus has conversations, of which only the answers are targets."""
    notes: dict[str, str] = field(default_factory=dict)
    """Lines of the summary at the start of a run, by their label: how documents became sequences, and what is left
    out."""
    score_texts: Callable[[list[str]], MetricSums] | None = None
    """Generated texts -> metrics, logged as generation/NAME at the end of a run."""

    def fill_in(self, config: TrainConfig) -> TrainConfig:
        """Set the settings of a run that the corpus determines."""
        return config.replace(**{"model.vocab_size": self.vocab_size}, **self.settings)

    def global_batches(self, config: TrainConfig) -> GlobalBatches:
        """Return the order of the training data of a run."""
        sizes = BatchSizes.from_config(config)
        num_offsets = config.seq_len - 1 if config.data.crops == "shifted" else 1
        if self.quotas is None:
            return GlobalBatches(len(self.train), sizes, config.seed, self.train, num_offsets)
        corpus_sizes = [len(dataset) for dataset in cast(Any, self.train).datasets]  # a mixture is a MixedDataset
        return MixedBatches(corpus_sizes, self.quotas, sizes, config.seed, self.train, num_offsets)


def load_corpus(config: TrainConfig) -> Corpus:
    """Load the corpus that `config.data` selects, as sequences of `config.seq_len` tokens.

    Raises:
        ConfigError: the settings do not fit the corpus, or the corpus is damaged.
    """
    seed = config.data.seed or 0
    sizes = {"train": config.data.num_samples, "validation": config.evaluation.num_samples}
    match config.data.source:
        case "random":
            vocab_size = config.model.vocab_size
            assert vocab_size is not None, "config.problems requires it for random tokens"
            splits = [RandomTokensDataset(name, size, seed, config.seq_len, vocab_size) for name, size in sizes.items()]
            return Corpus(*splits, tokenizer=None, vocab_size=vocab_size)
        case "text":
            return _load_text(config)
        case "stories":
            generator = get_story_generator(config.data.facts, config.data.zipf, seed)
            splits = [StoriesDataset(name, size, seed, config.seq_len, generator) for name, size in sizes.items()]
            tokenizer = generator.build_tokenizer()
            return Corpus(
                *splits,
                tokenizer=tokenizer,
                vocab_size=_checked_vocab_size(config, tokenizer.get_vocab_size()),
                score_logits=build_excess_loss_score(generator),
                score_texts=generator.score_texts,
                describe_text=generator.describe_text,
            )
        case other:
            assert_never(other)


def _load_text(config: TrainConfig) -> Corpus:
    from data.text import MixedDataset, TextCorpus, TextDataset  # pyarrow is slow to import

    data = config.data
    corpora = [TextCorpus(path) for path in data.corpora]
    content_hash = "+".join(corpus.metadata["hash"] for corpus in corpora)
    if data.hash not in (None, content_hash):
        problem = f"data.hash: {data.hash}, but the corpus has the hash {content_hash}"
        raise ConfigError(f"{problem}; set data.hash to the latter, or null")
    if len({corpus.metadata["tokenizer"]["hash"] for corpus in corpora}) > 1:
        problem = f"{', '.join(data.mix or ())} were made with different tokenizers"
        raise ConfigError(f"data.mix: {problem}; prepare them with one --tokenizer")
    paths_of_hash: dict[str, list[str]] = {}
    for path, corpus in zip(data.corpora, corpora, strict=True):
        paths_of_hash.setdefault(corpus.metadata["hash"], []).append(path)
    if same := [paths for paths in paths_of_hash.values() if len(paths) > 1]:
        raise ConfigError(f"data.mix: {' and '.join(same[0])} are the same corpus; name it once")
    # A mixture has one packing, and conversations are isolated from each other.
    has_conversations = any(corpus.has_conversations for corpus in corpora)
    packing = "isolated" if has_conversations and data.packing == "concat" else data.packing
    if has_conversations and data.crops == "shifted":
        raise ConfigError(
            "data.crops: shifted has no effect on conversations, which are not cut into windows; leave it out"
        )
    quotas = mix_quotas(list(data.mix.values()) if data.mix else [1.0])
    if 0 in quotas:
        raise ConfigError(f"data.mix: {data.mix} leaves a corpus none of 1,000 samples; raise its weight")

    def load_split(split: str, num_samples: int | None) -> TextDataset | MixedDataset:
        datasets = [TextDataset(corpus, split, config.seq_len, packing) for corpus in corpora]
        if num_samples is not None:
            if num_samples < len(datasets):
                problem = f"evaluation.num_samples: {num_samples} is fewer than the {len(datasets)} corpora of data.mix"
                raise ConfigError(f"{problem}; raise it, or set it to null for all")
            sizes = apportion(num_samples, quotas, [len(dataset) for dataset in datasets])
            for dataset, size in zip(datasets, sizes, strict=True):
                dataset.num_samples = size
        return MixedDataset(datasets) if data.mix else datasets[0]

    train, validation = load_split("train", None), None
    if config.evaluation.every:
        validation = load_split("validation", config.evaluation.num_samples)
    return Corpus(
        train,
        validation,
        tokenizer=corpora[0].tokenizer,
        vocab_size=_checked_vocab_size(config, corpora[0].vocab_size),
        quotas=quotas if data.mix else None,
        settings={"data.hash": content_hash, "data.packing": packing},
        file_sizes=[entry["bytes"] for corpus in corpora for entry in corpus.metadata["files"].values()],
        end_of_text=corpora[0].end_of_text,
        has_conversations=has_conversations,
        notes=_describe_text(corpora, {"train": train, "validation": validation}),
    )


def _describe_text(corpora: list[Any], splits: dict[str, Any]) -> dict[str, str]:
    """Return lines about the documents: how conversations became rows, the tokens in no row, and shared documents."""
    from data.text import count_shared_documents

    notes = {"conversations": splits["train"].packing_note}
    tokens = {name: sum(corpus.metadata[name]["tokens"] for corpus in corpora) for name in splits}
    unused = [f"{data.num_unused:,} of {tokens[name]:,} in {name}" for name, data in splits.items() if data is not None]
    if any(data is not None and data.num_unused for data in splits.values()):
        notes["unused tokens"] = f"{', '.join(unused)}: too few for one more sequence"
    if splits["validation"] is None:
        return notes
    shared, documents = count_shared_documents(corpora)
    remedy = "prepare all of them with one --validation hash:FRACTION"
    if shared and shared == documents:
        problem = "other corpora train on all documents that validation holds, so a loss on them says nothing about"
        raise ConfigError(f"data.mix: {problem} new text; {remedy}")
    if shared:
        problem = f"{shared:,} of {documents:,} validation documents are in the training data of another corpus"
        notes["shared"] = f"{problem}; {remedy}"
    return notes


def _checked_vocab_size(config: TrainConfig, num_tokens: int) -> int:
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size < num_tokens:
        remedy = "set it to null for the tokenizer's size"
        if config.init_from:
            remedy = f"use a corpus with the tokenizer of {config.init_from}"
        raise ConfigError(f"model.vocab_size: {vocab_size} is less than the tokenizer's {num_tokens}; {remedy}")
    return vocab_size or num_tokens
