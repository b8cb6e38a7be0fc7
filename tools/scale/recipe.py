"""Rules of tools.scale from the depth of a model to a whole recipe, each with its reason.

docs/scaling_law.md has the measurements behind them.
"""

import functools
import json
import math
from typing import NamedTuple

from data.synthetic.world import MAX_FACTS
from model.config import FAMILIES, GPTConfig
from runtime.config.errors import ConfigError

WIDTH_PER_LAYER = 64  # as in GPT-2 124M (768 / 12) and for nanochat's --depth
HEAD_DIM = 64
LR, LR_WIDTH, LR_POWER = 4e-3, 128, -1.0  # of AdamW
MUON_LR = 1e-2  # of Muon, at the same width
BATCH_TOKENS, BATCH_BUDGET = 1536, 2.3e6  # tokens of a step and of the run, in configs/stories.yaml
WARMUP_FRACTION = 0.05
PROCESSES = 8  # the global batch can be split among this many, if it has as many sequences
MAX_MICRO_BATCH_TOKENS = 8192  # fits the memory of a small GPU with a model of the 124M class
MAX_TOKENS = 1e18
STORY_TOKENS, TEXT_TOKENS = 96, 1024


class Line(NamedTuple):
    """A setting as section.name, its value, and the reason for it."""

    name: str
    value: object
    reason: str = ""


class NetworkSize(NamedTuple):
    """Non-embedding parameters, and the FLOPs to train on one token."""

    parameters: int
    flops_per_token: int


@functools.cache
def measure_network(model: GPTConfig, seq_len: int) -> NetworkSize:
    """Count the parameters and FLOPs of a network, as GPTModel defines them, without memory for its weights."""
    from model.gpt import build_on_meta_device  # imports torch, which takes seconds

    network = build_on_meta_device(model)
    return NetworkSize(network.num_matmul_parameters(), network.flops_per_token(seq_len))


def model_of_depth(depth: int, family: str, vocab_size: int, seq_len: int) -> GPTConfig:
    """Return the network of a depth, whose width and number of heads are proportional to it."""
    width = WIDTH_PER_LAYER * depth
    swiglu = FAMILIES[family]["mlp"] == "swiglu"
    d_ff = 64 * math.ceil(width * 8 / 3 / 64) if swiglu else 4 * width
    sizes = {"n_layers": depth, "n_heads": width // HEAD_DIM, "d_model": width, "d_ff": d_ff, "dropout": 0.0}
    return GPTConfig(vocab_size=vocab_size, max_position_embeddings=seq_len, **sizes, **FAMILIES[family])


def learning_rate(width: int, lr: float = LR) -> float:
    """Return the peak learning rate for a width, to two digits; by default that of AdamW."""
    return float(f"{lr * (width / LR_WIDTH) ** LR_POWER:.2g}")


def batch_size(tokens: float, seq_len: int) -> int:
    """Return the sequences of a step, a power of two, for so many training tokens.

    The tokens of a step are proportional to the square root of those of the run.
    """
    sequences = BATCH_TOKENS * math.sqrt(tokens / BATCH_BUDGET) / seq_len
    return 2 ** max(0, round(math.log2(sequences)))


def make_recipe(
    depth: int, tokens_per_parameter: float, family: str, optimizer: str, corpus: str | None, vocab_size: int
) -> list[Line]:
    """Return all settings of a run of this depth, on the prepared `corpus` or else on stories with facts.

    Raises:
        ConfigError: tokens_per_parameter is too small or too large.
    """
    seq_len = TEXT_TOKENS if corpus else STORY_TOKENS
    model = model_of_depth(depth, family, vocab_size, seq_len)
    parameters, flops_per_token = measure_network(model, seq_len)  # pyright: ignore
    tokens = tokens_per_parameter * parameters
    if not 1 <= tokens < MAX_TOKENS:
        product = f"{tokens_per_parameter:g} for each of {format_count(parameters)} parameters"
        raise ConfigError(f"tokens_per_parameter: {product} are {tokens:.0e} tokens; use 20, or what you can afford")
    batch = batch_size(tokens, seq_len)
    steps = math.ceil(tokens / (batch * seq_len))
    micro_batch = max(1, min(batch // PROCESSES, 2 ** int(math.log2(MAX_MICRO_BATCH_TOKENS / seq_len))))
    peak = MUON_LR if optimizer == "muon" else LR
    warmup = math.ceil(WARMUP_FRACTION * steps)
    every = max(1, steps // 10)
    lines = [
        Line("name", f"depth-{depth}"),
        Line("steps", steps, f"{tokens_per_parameter:g} tokens per non-embedding parameter, of which there are "
             f"{format_count(parameters)}: {format_count(tokens)} tokens (Chinchilla, arXiv:2203.15556)"),
        Line("global_batch_size", batch, "sequences: tokens of a step grow as the square root of those of the run, "
             "below the critical batch size (arXiv:2410.21676)"),
        Line("micro_batch_size", micro_batch, f"{micro_batch * seq_len:,} tokens in a forward of one process"),
        Line("seq_len", seq_len, "one story" if corpus is None else "as GPT-2"),
        Line("model.max_position_embeddings", seq_len),
        Line("model.n_layers", depth),
        Line("model.d_model", model.d_model, f"{WIDTH_PER_LAYER} per layer, as GPT-2 124M and nanochat's --depth"),
        Line("model.n_heads", model.n_heads, f"head size {HEAD_DIM}"),
        Line("model.d_ff", model.d_ff, "8/3 x d_model, rounded up to a multiple of 64: three matrices instead of two"
             if model.mlp == "swiglu" else "4 x d_model"),
        Line("model.dropout", 0.0, "few epochs"),
        *(Line(f"model.{name}", value) for name, value in FAMILIES[family].items()),
        *((Line("data.source", "text"), Line("data.path", corpus)) if corpus else (
            Line("data.source", "stories"),
            Line("data.facts", MAX_FACTS, "more than a run can learn"),
            Line("data.num_samples", steps * batch, "a single epoch"),
        )),
        Line("optimizer.name", optimizer, "for the linear layers of the blocks; AdamW for the others"
             if optimizer == "muon" else ""),
        Line("optimizer.lr", learning_rate(model.d_model, peak), f"{peak:g} (width / {LR_WIDTH})^{LR_POWER:g}: "
             "docs/scaling_law.md"),
        Line("optimizer.weight_decay", 0.1, "as GPT-3, with its betas"),
        Line("optimizer.betas", [0.9, 0.95]),
        Line("schedule.name", "linear", "to zero (arXiv:2502.15938)"),
        Line("schedule.warmup_steps", warmup, f"{WARMUP_FRACTION:.0%} of the steps"),
        Line("evaluation.every", every),
        Line("checkpoint.every", every),
        Line("tracking.log_every", max(1, steps // 100)),
    ]  # fmt: skip
    flops = flops_per_token * steps * batch * seq_len
    size = f"{format_count(parameters)} non-embedding parameters, {format_count(tokens)} tokens"
    return [Line("", f"depth {depth}: {size}, {flops:.1e} FLOPs"), *lines]


def as_yaml(lines: list[Line]) -> str:
    """Format a config file, with the reasons as comments."""
    text, section = [], ""
    for name, value, reason in lines:
        if not name:
            text.append(f"# {value}")
            continue
        parent, _, key = name.rpartition(".")
        if parent != section:
            text.append(f"\n{parent}:")
            section = parent
        written = json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and "." not in written:
            written = written.replace("e", ".0e")  # YAML reads 8e-05 as a string
        entry = f"{'  ' if parent else ''}{key}: {written}"
        text.append(f"{entry}  # {reason}" if reason else entry)
    return "\n".join(text) + "\n"


def format_count(count: float) -> str:
    """Format a count in thousands, millions, billions or trillions, with three digits."""
    power = max(0, min(4, int(math.log10(max(1, count))) // 3))
    return f"{count / 1000**power:.3g}{['', 'K', 'M', 'B', 'T'][power]}"


def find_best_learning_rate(curve: list[tuple[float, float]]) -> float:
    """Return the minimum of a parabola in log(learning rate) through the best point and its neighbours.

    `curve` has (learning rate, loss), by increasing learning rate.
    """
    best = min(range(len(curve)), key=lambda index: curve[index][1])
    if best in (0, len(curve) - 1):
        return curve[best][0]
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(lr), loss) for lr, loss in curve[best - 1 : best + 2])
    slopes = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (slopes[1] - slopes[0]) / (x2 - x0)
    return math.exp((x0 + x1) / 2 - slopes[0] / (2 * curvature)) if curvature > 0 else curve[best][0]
