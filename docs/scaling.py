"""A model of training on many GPUs: python -m docs.scaling [--matrix_flops_per_second 4e14]

Predictions, none of them measured: how long a step takes when the gradients of N parameters must be summed over n GPUs,
by DDP, by FSDP2 that shards over all of them, or over the GPUs of a machine only (hybrid). docs/scaling.md has the
formulas, their sources and what they leave out; `python -m benchmarks.page` puts the tables there. Every constant is an
option.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt

from benchmarks.page import markdown
from cli.scripts import run_and_exit
from model.config import GPTConfig
from model.gpt import GPTModel
from scaling import recipe

COUNTS, STRATEGIES = (8, 16, 64, 1024), ("DDP", "FSDP", "hybrid")
WANTED = 0.9  # efficiency


class Shape:
    """A model of the GPT-2 kind; `batch_tokens` are those of a step of GPT-3 at this size (Brown et al. 2020,
    arXiv:2005.14165, table 2.1), and with `recompute` the backward runs each block's forward again."""

    def __init__(self, name: str, config: GPTConfig, batch_tokens: int, recompute: bool = False):
        self.name, self.batch_tokens, self.recompute = name, batch_tokens, recompute
        self.layers, self.d_model, self.vocab_size = config.n_layers, config.d_model, config.vocab_size
        self.context = config.max_position_embeddings
        with torch.device("meta"):
            network = GPTModel(config)
        self.parameters, self.flops_per_token = network.num_parameters(), network.flops_per_token(self.context)
        self.layer_parameters = sum(parameter.numel() for parameter in network.blocks[0].parameters())
        self.root_parameters = self.parameters - self.layers * self.layer_parameters


def gpt2(vocab_size: int, context: int, layers: int, d_model: int, tied: bool) -> GPTConfig:
    sizes = {"n_layers": layers, "n_heads": d_model // 64, "d_model": d_model, "d_ff": 4 * d_model}
    return GPTConfig(vocab_size, context, **sizes, bias=False, tie_embeddings=tied)


SHAPES = (
    Shape("124M", gpt2(50304, 1024, 12, 768, tied=True), 2**19),
    Shape("1.3B", gpt2(50304, 4096, 24, 2048, tied=True), 2**20),
    Shape("7B", gpt2(32000, 4096, 32, 4096, tied=False), 2**21, recompute=True),
)


class Reported(NamedTuple):
    """What others report of a whole run on eight GPUs."""

    name: str
    flops: float
    seconds: float
    data_sheet: float  # FLOP/s of a GPU in bf16
    loss: str


REPORTED = (
    Reported("nanoGPT, 124M, 300B tokens", SHAPES[0].flops_per_token * 3e11, 4 * 86400, 312e12, "2.85 nats a token"),
    Reported("nanochat, depth 24, 2026-01-29", 4.330784e19, 10949.5, 989e12, "0.748 bits a byte"),
)
DEPTHS, VOCABULARY, DOLLARS_AN_HOUR, H100_BYTES = (8, 12, 16, 20, 24), 32768, 3, 80e9


class Step(NamedTuple):
    """What is predicted of a step on n GPUs."""

    compute_seconds: float
    efficiency: float  # speed over n times that of one GPU that does not communicate, at the same tokens of each
    efficiency_without_overlap: float
    memory_bytes: float  # of one GPU at its peak, the end of the forward


@dataclass(frozen=True)
class Machines:
    """Machines of 8 H200 with a network card of 400 Gbit/s for each GPU, and how NCCL uses them.

    Bandwidths are those of one direction; the hops, the launch and tree_share are from NCCL's tuning table.
    """

    matrix_flops_per_second: PositiveFloat = 790e12  # a large bf16 product, measured on one H200 (data sheet: 989e12)
    achieved_share: PositiveFloat = 0.5  # of it in a step without communication, recomputation counted: assumed
    memory_bytes: PositiveFloat = 141e9  # of one GPU, by its data sheet
    gpus_per_machine: PositiveInt = 8
    nvlink_bytes_per_second: PositiveFloat = 450e9  # from a GPU to the others of its machine, by the data sheet
    network_bytes_per_second: PositiveFloat = 50e9  # from a GPU's network card: 400 Gbit/s
    nvlink_hop_seconds: NonNegativeFloat = 3.4e-6  # a step of a ring within a machine
    network_hop_seconds: NonNegativeFloat = 14e-6  # a step between machines, of a ring or a tree
    launch_seconds: NonNegativeFloat = 8.4e-6  # a collective operation of nothing at all
    tree_share: PositiveFloat = 0.92  # of a ring's bandwidth
    bucket_bytes: PositiveFloat = 25 * 2**20  # DDP sums gradients in buckets of this size, PyTorch's default
    gradient_bytes: PositiveInt = 4  # a number that DDP sums: float32 under autocast, as the parameters are
    gather_bytes: PositiveInt = 2  # a parameter that FSDP gathers: bf16
    scatter_bytes: PositiveInt = 4  # a number that FSDP sums: float32, whatever is multiplied in bf16
    tokens: PositiveInt = 16384  # of one GPU in one step

    def ring(self, gpus: int) -> tuple[float, float]:
        """Bytes a second that each GPU sends on, where all cards of a machine carry what leaves it, and the latency of
        going round."""
        between = math.ceil(gpus / self.gpus_per_machine) - 1
        network = self.network_bytes_per_second * self.gpus_per_machine if between else math.inf
        latency = (gpus - 1 - between) * self.nvlink_hop_seconds + between * self.network_hop_seconds
        return min(self.nvlink_bytes_per_second, network), latency

    def gather_or_scatter_seconds(self, size_bytes: float, gpus: int) -> float:
        """Once round the ring: NCCL's logarithmic algorithm is for a single GPU a machine."""
        bytes_per_second, latency = self.ring(gpus)
        seconds = self.launch_seconds + latency + (gpus - 1) / gpus * size_bytes / bytes_per_second
        return seconds if gpus > 1 else 0.0

    def all_reduce_seconds(self, size_bytes: float, gpus: int) -> float:
        """Twice round the ring, or by a tree where that is faster, as NCCL chooses."""
        ring = 2 * self.gather_or_scatter_seconds(size_bytes, gpus) - self.launch_seconds
        levels = math.ceil(math.log2(math.ceil(gpus / self.gpus_per_machine)))
        hops = (min(gpus, self.gpus_per_machine) - 1) * self.nvlink_hop_seconds + levels * self.network_hop_seconds
        tree = self.launch_seconds + 2 * hops + 2 * size_bytes / (self.tree_share * self.ring(gpus)[0])
        return min(ring, tree) if gpus > 1 else 0.0

    def ddp(self, shape: Shape, gpus: int, backward_seconds: float) -> tuple[float, float]:
        """Communication, and what of it the backward does not hide.

        The gradient of the token embedding is complete last, whether or not it is the output projection too, and lies
        in one bucket however large it is: that one, with what did not fill one before it, nothing hides.
        """
        embedding_bytes = self.gradient_bytes * shape.vocab_size * shape.d_model
        rest_bytes = self.gradient_bytes * shape.parameters - embedding_bytes
        buckets, remainder_bytes = divmod(rest_bytes, self.bucket_bytes)
        seconds, ready = (
            self.all_reduce_seconds(self.bucket_bytes, gpus),
            backward_seconds * self.bucket_bytes / rest_bytes,
        )
        last = self.all_reduce_seconds(remainder_bytes + embedding_bytes, gpus)
        # The last full bucket waits for all before it, from the first one on, or only for its own gradients.
        end = max(ready + buckets * seconds, buckets * ready + seconds) if buckets else 0.0
        return buckets * seconds + last, max(0.0, end - backward_seconds) + last

    def fsdp(self, shape: Shape, gpus: int, shards: int, forward: float, backward: float) -> tuple[float, float]:
        """The same, sharded over so many GPUs. The next block is gathered while one computes, and in the backward the
        gradients of the last one are summed; nothing hides the first gather and the last sum, of what is outside
        blocks. Replicas are summed by the GPUs that have the same place in each machine, each with its own card."""

        def times(parameters: int) -> tuple[float, float]:
            size_bytes, between = self.scatter_bytes * parameters, replace(self, gpus_per_machine=1)
            replicas = between.all_reduce_seconds(size_bytes / shards, math.ceil(gpus / shards))
            gather = self.gather_or_scatter_seconds(self.gather_bytes * parameters, shards)
            return gather, gather + self.gather_or_scatter_seconds(size_bytes, shards) + replicas

        (in_forward, in_backward), (_, ends) = times(shape.layer_parameters), times(shape.root_parameters)
        exposed = [max(0.0, shape.layers * in_forward - forward), max(0.0, shape.layers * in_backward - backward)]
        return ends + shape.layers * (in_forward + in_backward), ends + sum(exposed)

    def step(self, strategy: str, shape: Shape, gpus: int, tokens: int) -> Step:
        """`tokens` are those of each GPU."""
        forward = tokens * shape.flops_per_token / (self.matrix_flops_per_second * self.achieved_share) / 3
        backward = forward * (3 if shape.recompute else 2)
        shards = {"DDP": 1, "FSDP": gpus, "hybrid": min(gpus, self.gpus_per_machine)}[strategy]
        activations = tokens * shape.d_model * (4 * shape.layers + 36 if shape.recompute else 36 * shape.layers)
        logits = 3 * min(2**29, 4 * tokens * shape.vocab_size) + 4 * shape.vocab_size * shape.d_model
        memory = 16 * shape.parameters / shards + activations + logits
        if strategy == "DDP":
            communication, exposed = self.ddp(shape, gpus, backward)
        else:
            communication, exposed = self.fsdp(shape, gpus, shards, forward, backward)
            memory += self.gather_bytes * (shape.root_parameters + 2 * shape.layer_parameters)
        compute = forward + backward
        return Step(compute, compute / (compute + exposed), compute / (compute + communication), memory)

    def tokens_that_pay(self, strategy: str, shape: Shape, gpus: int) -> int:
        """The fewest tokens of a GPU and step, in whole sequences, that reach the efficiency; or more than 2**24."""
        counts = range(shape.context, 2**24 + 1, shape.context)
        pays = bisect_left(counts, WANTED, key=lambda tokens: self.step(strategy, shape, gpus, tokens).efficiency)
        return shape.context * (pays + 1)

    def gpus_that_pay(self, strategy: str, shape: Shape) -> int:
        """The largest power of two of GPUs that share `batch_tokens`, in whole sequences, that well; 0: none fits."""
        counts = (2**power for power in range((shape.batch_tokens // shape.context).bit_length()))
        steps = {gpus: self.step(strategy, shape, gpus, shape.batch_tokens // gpus) for gpus in counts}
        fit = {gpus: step for gpus, step in steps.items() if step.memory_bytes <= self.memory_bytes}
        return max((gpus for gpus, step in fit.items() if step.efficiency >= WANTED), default=0)


def by_strategy(row: Callable[[str, Shape], Iterable[str]], *more: str) -> str:
    rows = [[shape.name, strategy, *row(strategy, shape)] for shape in SHAPES for strategy in STRATEGIES]
    return markdown([["model", "strategy", *(f"{gpus:,}" for gpus in COUNTS), *more], *rows])


def efficiencies(machines: Machines, strategy: str, shape: Shape) -> list[str]:
    steps = [machines.step(strategy, shape, gpus, machines.tokens) for gpus in COUNTS]
    shown = [f"{step.efficiency:.0%} ({step.efficiency_without_overlap:.0%})" for step in steps]
    fits = [step.memory_bytes <= machines.memory_bytes for step in steps]
    sizes = " / ".join(f"{step.memory_bytes / 1e9:,.0f}" for step in (steps[0], steps[-1]))
    return [*(one if fit else "-" for one, fit in zip(shown, fits, strict=True)), sizes]


def batches(machines: Machines, strategy: str, shape: Shape) -> Iterable[str]:
    for gpus in COUNTS:
        tokens = machines.tokens_that_pay(strategy, shape, gpus)
        step, total = machines.step(strategy, shape, gpus, tokens), tokens * gpus
        pays = step.memory_bytes <= machines.memory_bytes and step.efficiency >= WANTED
        shown = f"{total / 1e6:.1f}M" if total >= 1e6 else f"{total / 1e3:.0f}k"
        yield f"{tokens // shape.context} ({shown})" if pays else "-"


class WholeRun:
    """One that `scale.py --depth N --corpus TEXT` prints, and what it costs on a number of GPUs with DDP."""

    def __init__(self, depth: int):
        lines = recipe.recipe(depth, 20, "qwen3", "a text", VOCABULARY)
        self.settings = {line.name: line.value for line in lines}
        self.batch_tokens = self.settings["global_batch_size"] * self.settings["seq_len"]
        self.micro_tokens = self.settings["micro_batch_size"] * self.settings["seq_len"]
        config = recipe.model_of(depth, "qwen3", VOCABULARY, self.settings["seq_len"])
        self.shape = Shape(str(depth), config, self.batch_tokens)
        self.tokens = self.settings["steps"] * self.batch_tokens
        self.flops = self.tokens * self.shape.flops_per_token

    def hours(self, machines: Machines, gpus: int) -> float:
        """Micro-batches but for the last one have nothing to wait for."""
        step = machines.step("DDP", self.shape, gpus, min(self.micro_tokens, self.batch_tokens // gpus))
        waiting = step.compute_seconds / step.efficiency - step.compute_seconds
        computing = self.flops / gpus / (machines.matrix_flops_per_second * machines.achieved_share)
        return (computing + self.settings["steps"] * waiting) / 3600


def whole_runs(machines: Machines) -> str:
    header = "depth, parameters, tokens, tokens a step, FLOP, hours on one, dollars, hours on eight, GB of a GPU"
    rows = [header.split(", ")]
    for run in map(WholeRun, DEPTHS):
        one, eight = (run.hours(machines, gpus) for gpus in (1, 8))
        memory = machines.step("DDP", run.shape, 1, run.micro_tokens).memory_bytes
        sizes = [run.shape.name, recipe.short(run.shape.parameters), recipe.short(run.tokens)]
        sizes += [recipe.short(run.batch_tokens), f"{run.flops:.2g}"]
        cost = [f"{one:,.2g}" if one < 10 else f"{one:,.0f}", f"{DOLLARS_AN_HOUR * one:,.0f}"]
        fits = f"{memory / 1e9:,.0f}" if memory <= H100_BYTES else "-"
        rows.append([*sizes, *cost, f"{eight:,.2g}" if eight < 10 else f"{eight:,.0f}", fits])
    return markdown(rows)


def reported(machines: Machines) -> str:
    """How fast they were, and how long it would have taken at the rate that is assumed here."""
    rows = [
        "what they report, FLOP, hours, TFLOP/s a GPU, of its data sheet, hours on eight H100 by it, loss".split(", ")
    ]
    for run in REPORTED:
        achieved = run.flops / run.seconds / 8
        here = run.flops / 8 / (machines.matrix_flops_per_second * machines.achieved_share) / 3600
        hours = f"{run.seconds / 3600:.3g}", f"{here:.3g}"
        share = f"{achieved / run.data_sheet:.0%}"
        rows.append([run.name, f"{run.flops:.2g}", hours[0], f"{achieved / 1e12:.0f}", share, hours[1], run.loss])
    return markdown(rows)


def tables(machines: Machines) -> str:
    """All of it as markdown."""
    tokens, slow = machines.tokens, replace(machines, network_bytes_per_second=100e9 / 8 / 8)
    values = [[f"`{name}`", f"{n:,}" if isinstance(n, int) else f"{n:.4g}"] for name, n in asdict(machines).items()]
    shapes = "model, layers x width, context, parameters, GFLOP a token, recomputes, ms a step, in the last bucket"
    shapes, limits = [shapes.split(", ")], [["model", "tokens a step", "sequences a step", *STRATEGIES]]
    for s in SHAPES:
        size = [s.name, f"{s.layers} x {s.d_model}", f"{s.context:,}", f"{s.parameters / 1e6:,.0f}M"]
        cost = [f"{s.flops_per_token / 1e9:.3g}", "yes" if s.recompute else "no"]
        cost += [f"{1e3 * machines.step('DDP', s, 1, tokens).compute_seconds:,.0f}"]
        shapes.append([*size, *cost, f"{s.vocab_size * s.d_model / s.parameters:.0%}"])
        limits.append([s.name, f"{s.batch_tokens / 2**20:g} x 2^20", f"{s.batch_tokens // s.context:,}"])
        limits[-1] += [str(machines.gpus_that_pay(name, s) or "-") for name in STRATEGIES]
    captions = {
        "The constants:": markdown([["constant", "value"], *values]),
        f"The models, and their step of {tokens:,} tokens on one GPU:": markdown(shapes),
        f"Predicted efficiency on n GPUs at {tokens:,} tokens a GPU and step, in parentheses if nothing were hidden, "
        "and memory of a GPU (`-`: does not fit):": by_strategy(partial(efficiencies, machines), "GB at 8 / 1,024"),
        "Fewest sequences a GPU and step for a predicted efficiency of 90% on n GPUs, and in parentheses the tokens of "
        "all GPUs in such a step (`-`: no batch that fits):": by_strategy(partial(batches, machines)),
        "The same if the 8 GPUs of a machine share one card of 100 Gbit/s:": by_strategy(partial(batches, slow)),
        "Most GPUs that share a batch of GPT-3's size at a predicted efficiency of 90% (`-`: none fits):": markdown(
            limits
        ),
        "Whole runs of `scale.py --depth N --corpus CORPUS` for a vocabulary of 32,768, on one H100 and on eight with "
        f"DDP, and what one costs at {DOLLARS_AN_HOUR} dollars an hour of a GPU:": whole_runs(machines),
        "And what others report of eight GPUs, A100s and H100s, beside the same arithmetic:": reported(machines),
    }
    return "\n\n".join(f"{caption}\n\n{table}" for caption, table in captions.items())


def main(machines: Machines) -> None:
    print(tables(machines))


if __name__ == "__main__":
    run_and_exit("docs.scaling", Machines, needs_torch=False)
