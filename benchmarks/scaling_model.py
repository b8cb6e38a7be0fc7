"""A model of training on many GPUs: python -m benchmarks.scaling_model [--write] [--matrix_flops_per_second 4e14]

Predictions, none of them measured: how long a step takes when the gradients of N parameters must be summed over n GPUs,
by DDP, by FSDP2 that shards over all of them, or over the GPUs of a machine only (hybrid). docs/scaling.md explains it,
and --write puts the tables there. Every constant is an option.

A step is the matrix products, and whatever communication they do not hide. Left out: the optimizer, loading data,
slow machines, other traffic on the network, and the part of a GPU that communication itself takes.
"""

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import torch

from benchmarks.measure import ROOT
from benchmarks.tables import markdown, renewed
from model.config import GPTConfig
from model.gpt import GPTModel
from plan import gathered_by_fsdp

PAGE, MARKER = ROOT / "docs" / "scaling.md", "python -m benchmarks.scaling_model"
COUNTS = (8, 16, 64, 1024)
Rows = list[list[str]]


@dataclass(frozen=True)
class Constants:
    """Machines of 8 H200 with a network card of 400 Gbit/s for each GPU, and how NCCL uses them.

    Bandwidths are those of one direction; the hops, the launch and tree_share are from NCCL's tuning table.
    """

    matrix_flops_per_second: float = 790e12  # a large bf16 product, measured on one H200 (its data sheet says 989e12)
    achieved_share: float = 0.5  # of it in a step without communication, recomputation counted: assumed
    memory_bytes: float = 141e9  # of one GPU, by its data sheet
    gpus_per_machine: int = 8
    nvlink_bytes_per_second: float = 450e9  # from a GPU to the others of its machine, by the data sheet
    network_bytes_per_second: float = 50e9  # from a GPU's network card: 400 Gbit/s
    nvlink_hop_seconds: float = 3.4e-6  # a step of a ring within a machine
    network_hop_seconds: float = 14e-6  # a step between machines, of a ring or a tree
    launch_seconds: float = 8.4e-6  # a collective operation of nothing at all
    tree_share: float = 0.92  # of a ring's bandwidth
    bucket_bytes: float = 25 * 2**20  # DDP sums gradients in buckets of this size, PyTorch's default
    gradient_bytes: int = 4  # a number that DDP sums: parameters are float32 under autocast, and so are their gradients
    gather_bytes: int = 2  # a parameter that FSDP gathers: bf16
    scatter_bytes: int = 4  # a number that FSDP sums: float32, whatever is multiplied in bf16
    tokens: int = 16384  # of one GPU in one step

    def machines(self, gpus: int) -> int:
        return math.ceil(gpus / self.gpus_per_machine)

    def ring_bytes_per_second(self, gpus: int) -> float:
        """What each GPU sends on, in a ring that passes through all GPUs of a machine before it leaves it.

        NCCL lays a ring for each network card, so that all cards of a machine carry what leaves it, an equal part each.
        """
        network = self.network_bytes_per_second * self.gpus_per_machine if self.machines(gpus) > 1 else math.inf
        return min(self.nvlink_bytes_per_second, network)

    def ring_hops_seconds(self, rounds: int, gpus: int) -> float:
        """The latency of going round the ring once or twice."""
        between = self.machines(gpus) - 1
        return rounds * ((gpus - 1 - between) * self.nvlink_hop_seconds + between * self.network_hop_seconds)

    def all_reduce_seconds(self, size_bytes: float, gpus: int) -> float:
        """The faster of a ring (Patarasuk and Yuan 2009: no algorithm sends less) and a tree, as NCCL chooses: a tree's
        latency grows with the logarithm of the machines."""
        if gpus == 1:
            return 0.0
        bytes_per_second = self.ring_bytes_per_second(gpus)
        ring = self.ring_hops_seconds(2, gpus) + 2 * (gpus - 1) / gpus * size_bytes / bytes_per_second
        within, levels = min(gpus, self.gpus_per_machine) - 1, math.ceil(math.log2(self.machines(gpus)))
        tree = 2 * (within * self.nvlink_hop_seconds + levels * self.network_hop_seconds)
        return self.launch_seconds + min(ring, tree + 2 * size_bytes / (self.tree_share * bytes_per_second))

    def gather_or_scatter_seconds(self, size_bytes: float, gpus: int) -> float:
        """Half an all-reduce, by a ring: NCCL's logarithmic one is for a single GPU a machine."""
        if gpus == 1:
            return 0.0
        sent = (gpus - 1) / gpus * size_bytes / self.ring_bytes_per_second(gpus)
        return self.launch_seconds + self.ring_hops_seconds(1, gpus) + sent

    def across_machines_seconds(self, size_bytes: float, gpus: int) -> float:
        """An all-reduce by the GPUs that have the same place in each machine, each with its own card."""
        return replace(self, gpus_per_machine=1).all_reduce_seconds(size_bytes, self.machines(gpus))


class Shape:
    """A model of the GPT-2 kind."""

    def __init__(self, name: str, config: GPTConfig, batch_tokens: int, recompute: bool = False):
        """`batch_tokens`: of a step of GPT-3 at this size (Brown et al. 2020, arXiv:2005.14165, table 2.1).
        `recompute`: whether the backward runs each block's forward again (activation checkpointing)."""
        self.name, self.batch_tokens, self.recompute = name, batch_tokens, recompute
        self.layers, self.d_model, self.vocab_size = config.n_layers, config.d_model, config.vocab_size
        self.context = config.max_position_embeddings
        with torch.device("meta"):
            network = GPTModel(replace(config, n_heads=self.d_model // 64, d_ff=4 * self.d_model, bias=False))
        self.parameters, self.flops_per_token = network.num_parameters(), network.flops_per_token(self.context)
        self.layer_parameters = sum(parameter.numel() for parameter in network.blocks[0].parameters())
        self.root_parameters = self.parameters - self.layers * self.layer_parameters
        self.gathered_parameters = gathered_by_fsdp(network)

    def compute_seconds(self, tokens: int, constants: Constants) -> tuple[float, float]:
        """Forward and backward of a step on one GPU. The backward has two thirds of the operations, and a forward more
        if the blocks are recomputed."""
        third = tokens * self.flops_per_token / (constants.matrix_flops_per_second * constants.achieved_share) / 3
        return third, third * (3 if self.recompute else 2)


SHAPES = (
    Shape("124M", GPTConfig(50304, 1024, n_layers=12, d_model=768, tie_embeddings=True), 2**19),
    Shape("1.3B", GPTConfig(50304, 4096, n_layers=24, d_model=2048, tie_embeddings=True), 2**20),
    Shape("7B", GPTConfig(32000, 4096, n_layers=32, d_model=4096, tie_embeddings=False), 2**21, recompute=True),
)


@dataclass(frozen=True)
class Step:
    """The times of a step: its arithmetic, all its communication, and what of this the arithmetic does not hide."""

    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def efficiency(self) -> float:
        """Speed of n GPUs over n times that of one that does not communicate, at the same tokens of each."""
        return self.compute_seconds / (self.compute_seconds + self.exposed_seconds)

    @property
    def efficiency_without_overlap(self) -> float:
        return self.compute_seconds / (self.compute_seconds + self.communication_seconds)


def exposed_seconds(pieces: list[tuple[float, float]], backward_seconds: float) -> float:
    """How much later than the backward the communication ends, of `pieces` that go one after the other: when the
    gradients of each are ready, from the beginning of the backward, and how long it takes."""
    end = 0.0
    for ready_seconds, seconds in pieces:
        end = max(end, ready_seconds) + seconds
    return max(0.0, end - backward_seconds)


def ddp(shape: Shape, gpus: int, tokens: int, constants: Constants) -> Step:
    """Distributed data parallel (Li et al. 2020, arXiv:2006.15704): buckets are summed while the backward goes on.

    The gradient of the token embedding is complete last, whether or not it is the output projection too, and a
    parameter is in one bucket however large it is: that bucket, with what before it did not fill one, nothing hides.
    """
    forward, backward = shape.compute_seconds(tokens, constants)
    embedding_bytes = constants.gradient_bytes * shape.vocab_size * shape.d_model
    rest_bytes = constants.gradient_bytes * shape.parameters - embedding_bytes
    full_buckets, remainder_bytes = divmod(rest_bytes, constants.bucket_bytes)
    seconds, share = constants.all_reduce_seconds(constants.bucket_bytes, gpus), constants.bucket_bytes / rest_bytes
    pieces = [(backward * (index + 1) * share, seconds) for index in range(int(full_buckets))]
    pieces.append((backward, constants.all_reduce_seconds(remainder_bytes + embedding_bytes, gpus)))
    return Step(forward + backward, sum(seconds for _, seconds in pieces), exposed_seconds(pieces, backward))


def fsdp(shape: Shape, gpus: int, tokens: int, constants: Constants, shard_gpus: int | None = None) -> Step:
    """FSDP2 (Zhao et al. 2023, arXiv:2304.11277) over `shard_gpus`, default all, and replicas of these beyond.

    The next block is gathered while one computes, forward and backward; in the backward the gradients of the block
    before are summed as well. Nothing hides the first gather and the last sum, which are those outside the blocks:
    FSDP2 keeps these parameters gathered between forward and backward.
    """
    shard_gpus = shard_gpus or gpus
    forward, backward = (seconds / shape.layers for seconds in shape.compute_seconds(tokens, constants))

    def gather(parameters: int) -> float:
        return constants.gather_or_scatter_seconds(constants.gather_bytes * parameters, shard_gpus)

    def scatter(parameters: int) -> float:
        size_bytes = constants.scatter_bytes * parameters
        across = constants.across_machines_seconds(size_bytes / shard_gpus, gpus) if gpus > shard_gpus else 0.0
        return constants.gather_or_scatter_seconds(size_bytes, shard_gpus) + across

    in_forward = gather(shape.layer_parameters)
    in_backward = in_forward + scatter(shape.layer_parameters)
    ends = gather(shape.root_parameters) + scatter(shape.root_parameters)
    exposed = max(0.0, in_forward - forward) + max(0.0, in_backward - backward)
    communication = ends + shape.layers * (in_forward + in_backward)
    return Step(shape.layers * (forward + backward), communication, ends + shape.layers * exposed)


def hybrid(shape: Shape, gpus: int, tokens: int, constants: Constants) -> Step:
    """FSDP2 over the GPUs of each machine, whose sums are then added over the machines."""
    return fsdp(shape, gpus, tokens, constants, min(gpus, constants.gpus_per_machine))


STRATEGIES: dict[str, Callable[[Shape, int, int, Constants], Step]] = {"DDP": ddp, "FSDP": fsdp, "hybrid": hybrid}


def efficiency(strategy: str, shape: Shape, gpus: int, tokens: int, constants: Constants) -> float:
    return STRATEGIES[strategy](shape, gpus, tokens, constants).efficiency


def tokens_that_pay(strategy: str, shape: Shape, gpus: int, constants: Constants, wanted: float = 0.9) -> int | None:
    """The fewest tokens of a GPU and step, in whole sequences, that reach the `wanted` efficiency; None above 2**24."""
    counts = range(shape.context, 2**24 + 1, shape.context)
    index = bisect_left(counts, wanted, key=lambda tokens: efficiency(strategy, shape, gpus, tokens, constants))
    return counts[index] if index < len(counts) else None


def state_bytes(strategy: str, shape: Shape, gpus: int, constants: Constants) -> float:
    """Weights, gradients and two moments in float32 (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), and for FSDP
    what is gathered."""
    split = {"DDP": 1, "FSDP": gpus, "hybrid": min(gpus, constants.gpus_per_machine)}[strategy]
    gathered = 0 if strategy == "DDP" else constants.gather_bytes * shape.gathered_parameters
    return 16 * shape.parameters / split + gathered


def memory_bytes(strategy: str, shape: Shape, gpus: int, tokens: int, constants: Constants) -> float:
    """The peak of one GPU, at the end of the forward: the state, and what the backward needs.

    That is 36 bytes for each token, layer and unit of d_model (docs/scaling.md adds them up), or with recomputation the
    input of every block and all of one block; and for the loss in chunks of 512 MiB three float32 copies of the logits
    of one, and the output projection's gradient, which is made in the forward.
    """
    activations = tokens * shape.d_model * (4 * shape.layers + 36 if shape.recompute else 36 * shape.layers)
    logits = 3 * min(2**29, 4 * tokens * shape.vocab_size) + 4 * shape.vocab_size * shape.d_model
    return state_bytes(strategy, shape, gpus, constants) + activations + logits


def shapes_table(constants: Constants) -> Rows:
    header = "model, layers x width, context, parameters, GFLOP a token, recomputes, ms a step, in the last bucket"
    rows = [header.split(", ")]
    for shape in SHAPES:
        milliseconds = 1e3 * sum(shape.compute_seconds(constants.tokens, constants))
        last = shape.vocab_size * shape.d_model / shape.parameters
        rows.append([shape.name, f"{shape.layers} x {shape.d_model}", f"{shape.context:,}"])
        rows[-1] += [f"{shape.parameters / 1e6:,.0f}M", f"{shape.flops_per_token / 1e9:.3g}"]
        rows[-1] += ["yes" if shape.recompute else "no", f"{milliseconds:,.0f}", f"{last:.0%}"]
    return rows


def by_strategy(cell: Callable[[str, Shape, int], str]) -> Rows:
    """A row for each shape and strategy, a column for each number of GPUs."""
    rows = [["model", "strategy", *(f"{gpus:,}" for gpus in COUNTS)]]
    return rows + [[s.name, name, *(cell(name, s, gpus) for gpus in COUNTS)] for s in SHAPES for name in STRATEGIES]


def efficiency_table(constants: Constants) -> Rows:
    def gigabytes(strategy: str, shape: Shape, gpus: int) -> float:
        return memory_bytes(strategy, shape, gpus, constants.tokens, constants) / 1e9

    def cell(strategy: str, shape: Shape, gpus: int) -> str:
        step = STRATEGIES[strategy](shape, gpus, constants.tokens, constants)
        fits = gigabytes(strategy, shape, gpus) <= constants.memory_bytes / 1e9
        return f"{step.efficiency:.0%} ({step.efficiency_without_overlap:.0%})" if fits else "-"

    few, many = COUNTS[0], COUNTS[-1]
    sizes = [f"{gigabytes(name, s, few):,.0f} / {gigabytes(name, s, many):,.0f}" for s in SHAPES for name in STRATEGIES]
    return [[*row, size] for row, size in zip(by_strategy(cell), [f"GB at {few} / {many:,}", *sizes], strict=True)]


def batch_table(constants: Constants) -> Rows:
    def cell(strategy: str, shape: Shape, gpus: int) -> str:
        tokens = tokens_that_pay(strategy, shape, gpus, constants)
        if tokens is None or memory_bytes(strategy, shape, gpus, tokens, constants) > constants.memory_bytes:
            return "-"
        total = tokens * gpus
        return f"{tokens // shape.context} ({f'{total / 1e6:.1f}M' if total >= 1e6 else f'{total / 1e3:.0f}k'})"

    return by_strategy(cell)


def limit_table(constants: Constants, wanted: float = 0.9) -> Rows:
    """The largest power of two of GPUs that share a step of `batch_tokens`, in whole sequences, that efficiently."""
    rows = [["model", "tokens a step", "sequences a step", *STRATEGIES]]
    for shape in SHAPES:
        tokens = shape.batch_tokens
        counts = [2**power for power in range(21) if tokens >= 2**power * shape.context]
        rows.append([shape.name, f"{tokens / 2**20:g} x 2^20", f"{tokens // shape.context:,}"])
        for name in STRATEGIES:
            enough = (gpus for gpus in counts if efficiency(name, shape, gpus, tokens // gpus, constants) >= wanted)
            rows[-1].append(f"{max(enough):,}")
    return rows


def tables(constants: Constants) -> str:
    """All of it as markdown."""
    values = asdict(constants).items()
    shown = [[f"`{name}`", f"{value:,}" if isinstance(value, int) else f"{value:.4g}"] for name, value in values]
    tokens, slow = constants.tokens, replace(constants, network_bytes_per_second=100e9 / 8 / 8)
    captions = {
        "The constants:": [["constant", "value"], *shown],
        f"The models, and their step of {tokens:,} tokens on one GPU:": shapes_table(constants),
        f"Predicted efficiency on n GPUs at {tokens:,} tokens a GPU and step, in parentheses if nothing were hidden, "
        "and memory of a GPU (`-`: does not fit):": efficiency_table(constants),
        "Fewest sequences a GPU and step for a predicted efficiency of 90% on n GPUs, and in parentheses the tokens of "
        "all GPUs in such a step (`-`: no batch that fits):": batch_table(constants),
        "The same if the 8 GPUs of a machine share one card of 100 Gbit/s:": batch_table(slow),
        "Most GPUs that share a batch of GPT-3's size at a predicted efficiency of 90%:": limit_table(constants),
    }
    return "\n\n".join(f"{caption}\n\n{markdown(rows)}" for caption, rows in captions.items())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    for field in fields(Constants):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help=f"default: {field.default}")
    values = vars(parser.parse_args(arguments))
    write, constants = values.pop("write"), Constants(**values)
    if write and constants != Constants():
        parser.error("--write keeps the page at the default constants; without it the tables are printed")
    print(tables(constants))
    if write:
        PAGE.write_text(renewed(PAGE.read_text(), MARKER, f"\n{tables(constants)}\n"))


if __name__ == "__main__":
    main()
