"""From one number, the depth, to a whole recipe: the rules of scale.py, each with its reason.

docs/scaling_law.md shows what they were chosen by. Nothing here needs torch.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from config.errors import ConfigError
from model.config import GPTConfig

WIDTH_PER_LAYER = 64  # of GPT-2 124M, 768 / 12, and of nanochat's --depth
HEAD_DIM = 64
LR, LR_WIDTH, LR_POWER = 4e-3, 128, -1.0
BATCH_TOKENS, BATCH_BUDGET = 1536, 2.3e6  # tokens of a step, and of the run, of configs/stories.yaml
WARMUP_SHARE = 0.05
PROCESSES = 8  # that can share a step, where it has as many sequences
LARGEST_MICRO_BATCH = 8192  # tokens: what a small GPU holds of a model of the 124M class
MAX_VOCAB_SIZE = 1e18
STORY_TOKENS, TEXT_TOKENS = 96, 1024
FACTS = 65536
FAMILIES = {
    "qwen3": {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "bias": False},
    "gpt2": {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False, "bias": True},
}


class Line(NamedTuple):
    """A setting as section.name, its value, and why."""

    name: str
    value: object
    reason: str = ""


def model_of(depth: int, family: str, vocab_size: int, seq_len: int) -> GPTConfig:
    """The network of a depth: its width is a multiple of its heads' and grows with it."""
    width = WIDTH_PER_LAYER * depth
    swiglu = FAMILIES[family]["mlp"] == "swiglu"
    d_ff = 64 * math.ceil(width * 8 / 3 / 64) if swiglu else 4 * width
    sizes = {"n_layers": depth, "n_heads": width // HEAD_DIM, "d_model": width, "d_ff": d_ff, "dropout": 0.0}
    return GPTConfig(vocab_size=vocab_size, max_position_embeddings=seq_len, **sizes, **FAMILIES[family])


def multiplied(model: GPTConfig) -> int:
    """Weights that a token is multiplied by: not those that are looked up."""
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
    if model.position == "learned":
        looked_up += model.max_position_embeddings * model.d_model
    return model.num_weights - looked_up


def flops_per_token(model: GPTConfig, seq_len: int) -> float:
    """To train on one token, forward and backward (PaLM, appendix B, arXiv:2204.02311)."""
    return 6 * multiplied(model) + 12 * model.n_layers * model.n_heads * model.head_size * seq_len


def learning_rate(width: int) -> float:
    """Of AdamW, at its peak, to two digits."""
    return float(f"{LR * (width / LR_WIDTH) ** LR_POWER:.2g}")


def batch_size(tokens: float, seq_len: int) -> int:
    """Sequences of a step, a power of two: as many tokens as the root of those of the whole run."""
    wanted = BATCH_TOKENS * math.sqrt(tokens / BATCH_BUDGET) / seq_len
    return 2 ** max(0, round(math.log2(wanted)))


def recipe(depth: int, tokens_per_parameter: float, family: str, corpus: str | None, vocab_size: int) -> list[Line]:
    """All settings of a run of this depth, on the prepared `corpus` or else on stories of a world."""
    seq_len = TEXT_TOKENS if corpus else STORY_TOKENS
    model = model_of(depth, family, vocab_size, seq_len)
    parameters = multiplied(model)
    tokens = tokens_per_parameter * parameters
    if not 1 <= tokens < MAX_VOCAB_SIZE:
        asked = f"{tokens_per_parameter:g} for each of {short(parameters)} parameters"
        raise ConfigError(f"tokens_per_parameter: {asked} are {tokens:.0e} tokens; use 20, or what you can afford")
    batch = batch_size(tokens, seq_len)
    steps = math.ceil(tokens / (batch * seq_len))
    micro_batch = max(1, min(batch // PROCESSES, 2 ** int(math.log2(LARGEST_MICRO_BATCH / seq_len))))
    warmup = math.ceil(WARMUP_SHARE * steps)
    every = max(1, steps // 10)
    lines = [
        Line("name", f"depth-{depth}"),
        Line("steps", steps, f"{tokens_per_parameter:g} tokens for each of {short(parameters)} parameters that are "
             f"multiplied: {short(tokens)} (Chinchilla, arXiv:2203.15556)"),
        Line("global_batch_size", batch, "sequences: tokens of a step grow as the root of those of the run, below what"
             " would cost tokens (arXiv:2410.21676)"),
        Line("micro_batch_size", micro_batch, f"{micro_batch * seq_len:,} tokens at once in a process"),
        Line("seq_len", seq_len, "a story" if corpus is None else "that of GPT-2"),
        Line("model.max_position_embeddings", seq_len),
        Line("model.n_layers", depth),
        Line("model.d_model", model.d_model, f"{WIDTH_PER_LAYER} a layer, as GPT-2 124M and nanochat's --depth"),
        Line("model.n_heads", model.n_heads, f"{HEAD_DIM} wide each"),
        Line("model.d_ff", model.d_ff, "8/3 x d_model, rounded up to a multiple of 64: three matrices instead of two"
             if model.mlp == "swiglu" else "4 x d_model"),
        Line("model.dropout", 0.0, "no sequence is read often"),
        *(Line(f"model.{name}", value) for name, value in FAMILIES[family].items()),
        *((Line("data.source", "text"), Line("data.path", corpus)) if corpus else (
            Line("data.source", "stories"),
            Line("data.facts", FACTS, "a corpus that does not end"),
            Line("data.num_samples", steps * batch, "each is read once"),
        )),
        Line("optimizer.lr", learning_rate(model.d_model), f"{LR:g} at a width of {LR_WIDTH}, and falls as its power "
             f"{LR_POWER:g}: docs/scaling_law.md"),
        Line("optimizer.weight_decay", 0.1, "of GPT-3, with its betas"),
        Line("optimizer.betas", [0.9, 0.95]),
        Line("schedule.name", "linear", "to zero (arXiv:2502.15938)"),
        Line("schedule.warmup_steps", warmup, f"{WARMUP_SHARE:.0%} of the steps"),
        Line("evaluation.every", every),
        Line("checkpoint.every", every),
        Line("tracking.log_every", max(1, steps // 100)),
    ]  # fmt: skip
    flops = flops_per_token(model, seq_len) * steps * batch * seq_len
    said = f"depth {depth}: {short(parameters)} parameters, {short(tokens)} tokens, {flops:.1e} FLOP"
    return [Line("", said), *lines]


def vocabulary_of(corpus: str) -> int:
    """The number of tokens of a prepared corpus.

    Raises:
        ConfigError: it is none.
    """
    try:
        return json.loads((Path(corpus).expanduser() / "metadata.json").read_text())["tokenizer"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"corpus: {corpus} is not one that data.prepare made") from None


def as_yaml(lines: list[Line]) -> str:
    """A config file, with the reasons as comments."""
    text, section = [], ""
    for name, value, reason in lines:
        if not name:
            text.append(f"# {reason or value}")
            continue
        above, _, own = name.rpartition(".")
        if above != section:
            text.append(f"\n{above}:")
            section = above
        written = json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and "." not in written:
            written = written.replace("e", ".0e")  # which YAML takes for a number
        entry = f"{'  ' if above else ''}{own}: {written}"
        text.append(f"{entry}  # {reason}" if reason else entry)
    return "\n".join(text) + "\n"


def short(count: float) -> str:
    """A count in thousands, millions or billions, with three digits."""
    power = max(0, min(4, int(math.log10(max(1, count))) // 3))
    return f"{count / 1000**power:.3g}{['', 'K', 'M', 'B', 'T'][power]}"


def best_of(curve: list[tuple[float, float]]) -> float:
    """The learning rate of the least loss: of a parabola, over its logarithm, through the best one and its neighbours.

    Given as (learning rate, loss), growing.
    """
    best = min(range(len(curve)), key=lambda index: curve[index][1])
    if best in (0, len(curve) - 1):
        return curve[best][0]
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(lr), loss) for lr, loss in curve[best - 1 : best + 2])
    slopes = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (slopes[1] - slopes[0]) / (x2 - x0)
    return math.exp((x0 + x1) / 2 - slopes[0] / (2 * curvature)) if curvature > 0 else curve[best][0]
