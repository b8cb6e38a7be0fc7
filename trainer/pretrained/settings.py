"""Settings of sample.py, evaluate.py and export.py; importable without torch."""

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import NonNegativeFloat, field_validator

from model.settings import NonNegativeInt, PositiveInt, Settings, Unused
from runtime.config.errors import ConfigError
from runtime.config.help import POSITIONAL
from runtime.config.paths import expand_user_path
from runtime.files import folder_problems

Weights = Literal["evaluated", "trained"]
GREEDY = Unused("temperature", 0)


class TrainedModelConfig(Settings):
    """Settings of every script that loads a model."""

    run: Annotated[str, POSITIONAL]
    """The directory of a run or of a checkpoint, a folder in transformers' format, or a name on the Hub."""

    checkpoint: Literal["latest", "best"] | NonNegativeInt = "latest"
    """The checkpoint of a run: latest, best (by validation loss), or a step."""

    weights: Weights = "evaluated"
    """For a run whose optimizer averages the weights, as with evaluation.ema_decay: evaluated (the average, which
    val/loss measures) or trained (the weights that the optimizer updates). For other runs both are the same."""

    @field_validator("run")
    @classmethod
    def _exists(cls, run: str) -> str:
        """Refuse a missing directory here, before the scripts import torch for seconds; `load_run` reads the model."""
        if problems := folder_problems(str(expand_user_path("run", run))):
            raise ConfigError(f"run: {problems[0]}; name one, or a model on the Hub")
        return run


class SampleConfig(TrainedModelConfig):
    """Generates text with a trained model."""

    prompt: str | None = None
    """The prompt. Default null: read prompts from the terminal; without a terminal, generate from an empty prompt or,
    with chat, answer each line of the input."""

    special_tokens: Annotated[bool, Unused("chat", True)] = False
    """Encode special tokens in the prompt, such as <|endoftext|>, as these tokens. Default false: encode them as plain
    characters, as in the training text. In a chat, only the chat template inserts them."""

    chat: bool = False
    """Hold a conversation: each line is a user message, formatted by the tokenizer's chat template."""

    system: Annotated[str | None, Unused("chat", False)] = None
    """The system message, which is never dropped from the context. null: none."""

    num_samples: Annotated[PositiveInt, Unused("chat", True)] = 1
    """Samples for each prompt. A chat generates one answer."""

    max_new_tokens: PositiveInt = 200
    """Maximum number of generated tokens; generation stops earlier at an end-of-text or end-of-turn token."""

    temperature: NonNegativeFloat = 0.8
    """0: greedy decoding. 1: sample from the model's distribution. Higher values flatten the distribution."""

    top_k: Annotated[PositiveInt | None, GREEDY] = None
    """Sample from this many most likely tokens, of equally likely ones those with the lowest ids. null: from all."""

    top_p: Annotated[float, Gt(0), Le(1), GREEDY] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with at least this total probability."""

    seed: Annotated[NonNegativeInt, GREEDY] = 0
    """Random seed; sample i of a prompt is a function of the seed and i."""


class EvaluateConfig(TrainedModelConfig):
    """Measures a trained model on the validation split of a corpus."""

    data: str | None = None
    """A corpus made by data.prepare, with the model's tokenizer. null: what the run was trained on."""

    seq_len: PositiveInt | None = None
    """Tokens in a window. null: as in the run; for other models, their context length, but 1,024 at most."""

    num_samples: PositiveInt | None = None
    """Windows, evenly spread. null: all of a text corpus; for generated data, evaluation.num_samples of the run."""

    micro_batch_size: PositiveInt | None = None
    """Windows in a forward pass. null: as many as produce 256 MiB of logits."""

    out: str | None = None
    """Folder for evaluation.json. null: the run's directory; for a folder NAME, NAME.evaluation beside it; for a model
    of the Hub, OWNER--NAME.evaluation in the current directory."""


class ExportConfig(TrainedModelConfig):
    """Writes a trained model as a folder in transformers' format."""

    out: Annotated[str, POSITIONAL]
    """The folder to write. It must not exist yet."""

    average: PositiveInt = 1
    """Average the weights of this many of the newest checkpoints."""

    push: str | None = None
    """Also upload the folder to this repository of the Hub, NAME/REPOSITORY; needs `hf auth login`."""
