"""A model of training on many GPUs: python -m benchmarks.scaling_model [--write] [--matrix_flops_per_second 4e14]

Predictions, none of them measured: how long a step takes when the gradients of N parameters must be summed over n GPUs,
by DDP, by FSDP2 that shards over all of them, or over the GPUs of a machine only (hybrid). docs/scaling.md explains it,
and --write puts the tables there. Every constant is an option.

A step is the matrix products, and whatever communication they do not hide. Left out: the optimizer, loading data,
slow machines, other traffic on the network, and the part of a GPU that communication itself takes.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- python -m benchmarks.scaling_model -->", "<!-- end -->"


@dataclass(frozen=True)
class Constants:
    """Machines of 8 H200 with a network card of 400 Gbit/s for each GPU. Bandwidths are those of one direction."""

    matrix_flops_per_second: float = 790e12
    """A large bf16 product, measured on one H200 (its data sheet says 989e12)."""

    achieved_share: float = 0.5
    """What a training step reaches of it without communication, in operations that it executes: assumed. With
    recomputation more operations are executed than flops_per_token counts."""

    memory_bytes: float = 141e9
    """Of one GPU, by its data sheet."""

    gpus_per_machine: int = 8

    nvlink_bytes_per_second: float = 450e9
    """From a GPU to the others of its machine, by the data sheet."""

    network_bytes_per_second: float = 50e9
    """From a GPU's network card: 400 Gbit/s."""

    nvlink_hop_seconds: float = 3.4e-6
    """A step of a ring within a machine; this, the next two and tree_share are from NCCL's tuning table."""

    network_hop_seconds: float = 14e-6
    """A step between machines, of a ring or a tree."""

    launch_seconds: float = 8.4e-6
    """A collective operation of nothing at all."""

    tree_share: float = 0.92
    """What a tree reaches of a ring's bandwidth."""

    bucket_bytes: float = 25 * 2**20
    """DDP sums gradients in buckets of this size, PyTorch's default."""

    gradient_bytes: int = 4
    """A number of a gradient that DDP sums: parameters are float32 under autocast, and so are their gradients."""

    gather_bytes: int = 2
    """A parameter that FSDP gathers: bf16."""

    scatter_bytes: int = 2
    """A number of a gradient that FSDP sums: bf16, which is Accelerate's choice with mixed_precision bf16; or 4."""

    tokens: int = 16384
    """Of one GPU in one step."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer with 12 d_model^2 weights a layer."""

    name: str
    layers: int
    d_model: int
    vocab_size: int
    context: int
    tied: bool
    batch_tokens: float
    """Of a step of GPT-3 at this size (Brown et al. 2020, arXiv:2005.14165, table 2.1)."""
    recompute: bool = False
    """Whether the backward runs each block's forward again (activation checkpointing)."""

    @property
    def layer_parameters(self) -> int:
        return 12 * self.d_model**2

    @property
    def matrix_parameters(self) -> int:
        """Those that are multiplied, the output projection among them."""
        return self.layers * self.layer_parameters + self.vocab_size * self.d_model

    @property
    def root_parameters(self) -> int:
        """Those outside the blocks."""
        return self.vocab_size * self.d_model * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def flops_per_token(self) -> int:
        """PaLM, appendix B (arXiv:2204.02311), as GPTModel.flops_per_token; what is recomputed does not count."""
        return 6 * self.matrix_parameters + 12 * self.layers * self.d_model * self.context


SHAPES = (
    Shape("124M", 12, 768, 50304, 1024, tied=True, batch_tokens=2**19),
    Shape("1.3B", 24, 2048, 50304, 4096, tied=True, batch_tokens=2**20),
    Shape("7B", 32, 4096, 32000, 4096, tied=False, batch_tokens=2**21, recompute=True),
)


# Communication


def machines(gpus: int, constants: Constants) -> int:
    return math.ceil(gpus / constants.gpus_per_machine)


def ring_bytes_per_second(gpus: int, constants: Constants) -> float:
    """What each GPU sends on, in a ring that passes through all GPUs of a machine before it leaves it.

    NCCL lays one ring for each network card, so that all cards of a machine carry what leaves it, an equal part each.
    """
    if gpus <= constants.gpus_per_machine:
        return constants.nvlink_bytes_per_second
    return min(constants.nvlink_bytes_per_second, constants.gpus_per_machine * constants.network_bytes_per_second)


def all_reduce_bytes(size_bytes: float, gpus: int) -> float:
    """What each GPU sends in a ring all-reduce (Patarasuk and Yuan 2009): no algorithm needs less."""
    return 2 * (gpus - 1) / gpus * size_bytes


def gather_or_scatter_bytes(size_bytes: float, gpus: int) -> float:
    """What each GPU sends in a ring all-gather or reduce-scatter of `size_bytes` in all: half an all-reduce."""
    return (gpus - 1) / gpus * size_bytes


def ring_hops_seconds(rounds: int, gpus: int, constants: Constants) -> float:
    """The latency of going round the ring once or twice."""
    between = machines(gpus, constants) - 1
    within = gpus - 1 - between
    return rounds * (within * constants.nvlink_hop_seconds + between * constants.network_hop_seconds)


def all_reduce_seconds(size_bytes: float, gpus: int, constants: Constants) -> float:
    """The faster of a ring and a tree, as NCCL chooses: a tree's latency grows with the logarithm of the machines."""
    if gpus == 1:
        return 0.0
    bytes_per_second = ring_bytes_per_second(gpus, constants)
    ring = ring_hops_seconds(2, gpus, constants) + all_reduce_bytes(size_bytes, gpus) / bytes_per_second
    within = min(gpus, constants.gpus_per_machine) - 1
    levels = math.ceil(math.log2(machines(gpus, constants)))
    tree = 2 * (within * constants.nvlink_hop_seconds + levels * constants.network_hop_seconds)
    tree += 2 * size_bytes / (constants.tree_share * bytes_per_second)
    return constants.launch_seconds + min(ring, tree)


def gather_or_scatter_seconds(size_bytes: float, gpus: int, constants: Constants) -> float:
    """An all-gather or a reduce-scatter by a ring: NCCL's logarithmic one is for a single GPU a machine."""
    if gpus == 1:
        return 0.0
    sent = gather_or_scatter_bytes(size_bytes, gpus)
    seconds = ring_hops_seconds(1, gpus, constants) + sent / ring_bytes_per_second(gpus, constants)
    return constants.launch_seconds + seconds


def across_machines_seconds(size_bytes: float, gpus: int, constants: Constants) -> float:
    """An all-reduce of `size_bytes` by the GPUs that have the same place in each machine, each with its own card."""
    if machines(gpus, constants) == 1:
        return 0.0
    one_a_machine = replace(constants, gpus_per_machine=1)
    return all_reduce_seconds(size_bytes, machines(gpus, constants), one_a_machine)


# Time


def compute_seconds(shape: Shape, tokens: int, constants: Constants) -> tuple[float, float]:
    """Forward and backward of a step on one GPU. The backward has two thirds of the operations, and a forward more
    if the blocks are recomputed."""
    third = tokens * shape.flops_per_token / (constants.matrix_flops_per_second * constants.achieved_share) / 3
    return third, third * (3 if shape.recompute else 2)


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
    """How much later than the backward the communication ends.

    Args:
        pieces: for each in order, when its gradients are ready, from the beginning of the backward, and how long it
            takes. One runs at a time.
        backward_seconds: how long the backward takes.
    """
    end = 0.0
    for ready_seconds, seconds in pieces:
        end = max(end, ready_seconds) + seconds
    return max(0.0, end - backward_seconds)


def ddp(shape: Shape, gpus: int, tokens: int, constants: Constants) -> Step:
    """Distributed data parallel (Li et al. 2020, arXiv:2006.15704): buckets are summed while the backward goes on.

    The gradient of the token embedding is complete last, whether or not it is the output projection too, and a
    parameter is in one bucket however large it is: that bucket, with what before it did not fill one, nothing hides.
    """
    forward, backward = compute_seconds(shape, tokens, constants)
    embedding_bytes = constants.gradient_bytes * shape.vocab_size * shape.d_model
    rest_bytes = constants.gradient_bytes * shape.parameters - embedding_bytes
    full_buckets, remainder_bytes = divmod(rest_bytes, constants.bucket_bytes)
    seconds = all_reduce_seconds(constants.bucket_bytes, gpus, constants)
    bucket_share = constants.bucket_bytes / rest_bytes
    pieces = [(backward * (index + 1) * bucket_share, seconds) for index in range(int(full_buckets))]
    pieces.append((backward, all_reduce_seconds(remainder_bytes + embedding_bytes, gpus, constants)))
    return Step(forward + backward, sum(seconds for _, seconds in pieces), exposed_seconds(pieces, backward))


def fsdp(shape: Shape, gpus: int, tokens: int, constants: Constants, shard_gpus: int | None = None) -> Step:
    """FSDP2 (Zhao et al. 2023, arXiv:2304.11277) over `shard_gpus`, default all, and replicas of these beyond.

    The next block is gathered while one computes, forward and backward; in the backward the gradients of the block
    before are summed as well. Nothing hides the first gather and the last sum, which are those outside the blocks:
    FSDP2 keeps these parameters gathered between forward and backward.
    """
    shard_gpus = shard_gpus or gpus
    forward, backward = (seconds / shape.layers for seconds in compute_seconds(shape, tokens, constants))

    def gather(parameters: int) -> float:
        return gather_or_scatter_seconds(constants.gather_bytes * parameters, shard_gpus, constants)

    def scatter(parameters: int) -> float:
        size_bytes = constants.scatter_bytes * parameters
        seconds = gather_or_scatter_seconds(size_bytes, shard_gpus, constants)
        if gpus > shard_gpus:
            seconds += across_machines_seconds(size_bytes / shard_gpus, gpus, constants)
        return seconds

    in_forward = gather(shape.layer_parameters)
    in_backward = in_forward + scatter(shape.layer_parameters)
    at_the_ends = gather(shape.root_parameters) + scatter(shape.root_parameters)
    exposed = max(0.0, in_forward - forward) + max(0.0, in_backward - backward)
    return Step(
        shape.layers * (forward + backward),
        at_the_ends + shape.layers * (in_forward + in_backward),
        at_the_ends + shape.layers * exposed,
    )


def hybrid(shape: Shape, gpus: int, tokens: int, constants: Constants) -> Step:
    """FSDP2 over the GPUs of each machine, whose sums are then added over the machines."""
    return fsdp(shape, gpus, tokens, constants, min(gpus, constants.gpus_per_machine))


STRATEGIES: dict[str, Callable[[Shape, int, int, Constants], Step]] = {"DDP": ddp, "FSDP": fsdp, "hybrid": hybrid}


def efficiency(strategy: str, shape: Shape, gpus: int, tokens: int, constants: Constants) -> float:
    return STRATEGIES[strategy](shape, gpus, tokens, constants).efficiency


def tokens_that_pay(strategy: str, shape: Shape, gpus: int, constants: Constants, wanted: float = 0.9) -> int | None:
    """The fewest tokens of a GPU and step, in whole sequences, that reach the `wanted` efficiency; None above 2**24."""
    if efficiency(strategy, shape, gpus, 2**24, constants) < wanted:
        return None
    too_few, enough = 0, 2**24 // shape.context
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if efficiency(strategy, shape, gpus, middle * shape.context, constants) >= wanted:
            enough = middle
        else:
            too_few = middle
    return enough * shape.context


# Memory


def sharding(strategy: str, gpus: int, constants: Constants) -> int:
    """Over how many GPUs a parameter is split."""
    return {"DDP": 1, "FSDP": gpus, "hybrid": min(gpus, constants.gpus_per_machine)}[strategy]


def state_bytes(strategy: str, shape: Shape, gpus: int, constants: Constants) -> float:
    """Weights, gradients and two moments in float32 (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), and for FSDP
    what is gathered: two blocks, and what is outside the blocks."""
    split = sharding(strategy, gpus, constants)
    gathered = 0 if strategy == "DDP" else constants.gather_bytes * (2 * shape.layer_parameters + shape.root_parameters)
    return 16 * shape.parameters / split + gathered


def activation_bytes(shape: Shape, tokens: int) -> float:
    """What the backward needs of the forward: 36 bytes for each token, layer and unit of d_model, or with recomputation
    the input of every block and all of one block. docs/scaling.md adds the 36 up."""
    unit = tokens * shape.d_model
    return unit * (4 * shape.layers + 36) if shape.recompute else unit * 36 * shape.layers


def logit_bytes(shape: Shape, tokens: int, chunk_bytes: float = 2**29) -> float:
    """The loss in chunks: three float32 copies of one chunk of logits at a time, and the output projection's gradient,
    which is made in the forward."""
    return 3 * min(chunk_bytes, 4 * tokens * shape.vocab_size) + 4 * shape.vocab_size * shape.d_model


def memory_bytes(strategy: str, shape: Shape, gpus: int, tokens: int, constants: Constants) -> float:
    """The peak of one GPU, at the end of the forward."""
    state = state_bytes(strategy, shape, gpus, constants)
    return state + activation_bytes(shape, tokens) + logit_bytes(shape, tokens)


# Tables

COUNTS = (8, 16, 64, 1024)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)


def constants_table(constants: Constants) -> str:
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    rows = [[f"`{name}`", f"{value:,}" if isinstance(value, int) else f"{value:.4g}"] for name, value in values.items()]
    return markdown(["constant", "value"], rows)


def shapes_table(constants: Constants) -> str:
    rows = []
    for shape in SHAPES:
        forward, backward = compute_seconds(shape, constants.tokens, constants)
        rows.append([
            shape.name, f"{shape.layers} x {shape.d_model}", f"{shape.context:,}", f"{shape.parameters / 1e6:,.0f}M",
            f"{shape.flops_per_token / 1e9:.3g}", "yes" if shape.recompute else "no",
            f"{(forward + backward) * 1e3:,.0f}",
            f"{shape.vocab_size * shape.d_model / shape.parameters:.0%}",
        ])  # fmt: skip
    header = ["model", "layers x width", "context", "parameters", "GFLOP a token", "recomputes"]
    return markdown([*header, "ms a step", "in the last bucket"], rows)


def fits(strategy: str, shape: Shape, gpus: int, tokens: int, constants: Constants) -> bool:
    return memory_bytes(strategy, shape, gpus, tokens, constants) <= constants.memory_bytes


def efficiency_table(constants: Constants) -> str:
    rows, tokens = [], constants.tokens
    for shape in SHAPES:
        for strategy in STRATEGIES:
            cells = []
            for gpus in COUNTS:
                step = STRATEGIES[strategy](shape, gpus, tokens, constants)
                cell = f"{step.efficiency:.0%} ({step.efficiency_without_overlap:.0%})"
                cells.append(cell if fits(strategy, shape, gpus, tokens, constants) else "-")
            need = [memory_bytes(strategy, shape, gpus, tokens, constants) / 1e9 for gpus in (COUNTS[0], COUNTS[-1])]
            rows.append([shape.name, strategy, *cells, f"{need[0]:,.0f} / {need[1]:,.0f}"])
    header = ["model", "strategy", *(f"{gpus:,}" for gpus in COUNTS)]
    return markdown([*header, f"GB at {COUNTS[0]} / {COUNTS[-1]:,}"], rows)


def batch_table(constants: Constants) -> str:
    rows = []
    for shape in SHAPES:
        for strategy in STRATEGIES:
            cells = []
            for gpus in COUNTS:
                tokens = tokens_that_pay(strategy, shape, gpus, constants)
                if tokens is None or not fits(strategy, shape, gpus, tokens, constants):
                    cells.append("-")
                else:
                    total = tokens * gpus
                    short = f"{total / 1e6:.1f}M" if total >= 1e6 else f"{total / 1e3:.0f}k"
                    cells.append(f"{tokens // shape.context} ({short})")
            rows.append([shape.name, strategy, *cells])
    return markdown(["model", "strategy", *(f"{gpus:,}" for gpus in COUNTS)], rows)


def most_gpus(strategy: str, shape: Shape, constants: Constants, wanted: float = 0.9) -> int:
    """The largest power of two of GPUs that share a step of `batch_tokens`, in whole sequences, that efficiently."""
    counts = [2**power for power in range(21) if shape.batch_tokens >= 2**power * shape.context]
    return max(
        gpus
        for gpus in counts
        if efficiency(strategy, shape, gpus, int(shape.batch_tokens) // gpus, constants) >= wanted
    )


def limit_table(constants: Constants) -> str:
    rows = [
        [
            shape.name,
            f"{shape.batch_tokens / 2**20:g} x 2^20",
            f"{shape.batch_tokens // shape.context:,.0f}",
            *(f"{most_gpus(strategy, shape, constants):,}" for strategy in STRATEGIES),
        ]
        for shape in SHAPES
    ]
    return markdown(["model", "tokens a step", "sequences a step", *STRATEGIES], rows)


def tables(constants: Constants) -> str:
    """All of it as markdown."""
    return "\n\n".join(
        [
            "The constants:",
            constants_table(constants),
            f"The models, and their step of {constants.tokens:,} tokens on one GPU:",
            shapes_table(constants),
            f"Predicted efficiency on n GPUs at {constants.tokens:,} tokens a GPU and step, in parentheses if nothing "
            "were hidden, and memory of a GPU (`-`: does not fit):",
            efficiency_table(constants),
            "Fewest sequences a GPU and step for a predicted efficiency of 90% on n GPUs, and in parentheses the "
            "tokens of all GPUs in such a step (`-`: no batch that fits):",
            batch_table(constants),
            "The same if the 8 GPUs of a machine share one card of 100 Gbit/s:",
            batch_table(replace(constants, network_bytes_per_second=100e9 / 8 / 8)),
            "Most GPUs that share a batch of GPT-3's size at a predicted efficiency of 90%:",
            limit_table(constants),
        ]
    )


def page_with(text: str, page: str) -> str:
    """`page` with what stands between the markers replaced by `text`."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    for field in fields(Constants):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help=f"default: {field.default}")
    arguments = vars(parser.parse_args())
    write = arguments.pop("write")
    constants = Constants(**arguments)
    if write and constants != Constants():
        parser.error("--write keeps the page at the default constants; without it the tables are printed")
    print(tables(constants))
    if write:
        PAGE.write_text(page_with(tables(constants), PAGE.read_text()))


if __name__ == "__main__":
    main()
