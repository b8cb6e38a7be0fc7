"""Settings of sample.py, evaluate.py and export.py; importable without torch."""

from dataclasses import dataclass
from typing import Literal

from model.field_types import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveUnitInterval


@dataclass
class SampleConfig:
    """Generates text with a trained model."""

    run: str
    """The directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub."""

    prompt: str | None = None
    """The prompt. Default null: read prompts from the terminal; without a terminal, generate from an empty prompt or,
    with chat, answer each line of the input."""

    special_tokens: bool = False
    """Encode special tokens in the prompt, such as <|endoftext|>, as these tokens. Default false: encode them as plain
    characters, as in the training text."""

    chat: bool = False
    """Hold a conversation: each line is a user message, formatted by the tokenizer's chat template."""

    system: str | None = None
    """With chat: the system message, which is never dropped from the context. null: none."""

    checkpoint: Literal["latest", "best"] | NonNegativeInt = "latest"
    """The checkpoint of a run: latest, best (by validation loss), or a step."""

    weights: Literal["evaluated", "trained"] = "evaluated"
    """For a run with evaluation.ema_decay: evaluated (the EMA weights, which val/loss measures) or trained (the
    weights that the optimizer updates). Without it both are the same."""

    num_samples: PositiveInt = 1
    """Samples for each prompt."""

    max_new_tokens: PositiveInt = 200
    """Maximum number of generated tokens; generation stops earlier at an end-of-text or end-of-turn token."""

    temperature: NonNegativeFloat = 0.8
    """0: greedy decoding. 1: sample from the model's distribution. Higher values flatten the distribution."""

    top_k: PositiveInt | None = None
    """Sample from this many most likely tokens. null: from all."""

    top_p: PositiveUnitInterval = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with at least this total probability."""

    seed: NonNegativeInt = 0
    """Random seed; sample i of a prompt is a function of the seed and i."""


@dataclass
class EvaluateConfig:
    """Measures a trained model on the validation split of a corpus."""

    run: str
    """The directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub."""

    data: str | None = None
    """A corpus made by data.prepare, with the model's tokenizer. null: what the run was trained on."""

    checkpoint: Literal["latest", "best"] | NonNegativeInt = "latest"
    """The checkpoint of a run: latest, best (by validation loss), or a step."""

    weights: Literal["evaluated", "trained"] = "evaluated"
    """For a run with evaluation.ema_decay: evaluated (the EMA weights, which val/loss measures) or trained (the
    weights that the optimizer updates). Without it both are the same."""

    seq_len: PositiveInt | None = None
    """Tokens in a window. null: the run's; of a model that is none, all positions that it has, but 1,024 at most."""

    num_samples: PositiveInt | None = None
    """Windows, evenly spread. null: of a text all; of a generated source, as many as in training."""

    micro_batch_size: PositiveInt | None = None
    """Windows in a forward pass. null: as many as have 256 MiB of logits."""

    out: str | None = None
    """Folder of evaluation.json and evaluation.png. null: into the run's directory; of a folder, into NAME.evaluation
    beside it; of a model of the Hub, into such a folder here."""


@dataclass
class ExportConfig:
    """Writes a trained model as a folder in transformers' format."""

    run: str
    """The directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub."""

    out: str
    """The folder to write. It must not exist yet."""

    checkpoint: Literal["latest", "best"] | NonNegativeInt = "latest"
    """The checkpoint of a run: latest, best (by validation loss), or a step."""

    weights: Literal["evaluated", "trained"] = "evaluated"
    """For a run with evaluation.ema_decay: evaluated (the EMA weights, which val/loss measures) or trained (the
    weights that the optimizer updates). Without it both are the same."""

    average: PositiveInt = 1
    """The mean of the weights of so many checkpoints, the newest ones, in place of one."""

    push: str | None = None
    """Also upload the folder to this repository of the Hub, as NAME/REPOSITORY; `hf auth login` comes before."""
