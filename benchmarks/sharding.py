"""What sharding saves and costs, on CPUs joined by gloo, beside what docs/scaling.md predicts for a GPU's memory."""

from argparse import Namespace
from collections.abc import Iterator

from benchmarks.measure import Case, Group, train
from benchmarks.programs import QUIET, RANDOM, TINY, against, model
from model.config import GPTConfig

LAUNCH_FILES = {"DDP": "cpu.yaml", "FSDP2": "fsdp2.yaml"}


def sharding(options: Namespace) -> Iterator[Group]:
    """Memory of a process against the number of processes, and FSDP2's step against DDP's, for 26 million weights.

    The memory of the largest process, over that of one that trains next to nothing. Predicted: the weights, gradients
    and two moments of float32 alone, 16 bytes a weight, shared by all processes or not.
    """
    sizes = TINY | {"vocab_size": 64} if options.quick else dict(n_layers=8, n_heads=8, d_model=512, vocab_size=512)
    settings = RANDOM | QUIET | model(**sizes) | {"seq_len": 64, "micro_batch_size": 1}
    settings |= {"checkpoint.asynchronous": False}  # which would hold a copy
    settings |= {"steps": 2, "tracking.log_every": 1} if options.quick else {"steps": 12, "tracking.log_every": 3}
    config = GPTConfig(**{name.removeprefix("model."): value for name, value in model(**sizes).items()})
    of_nothing: dict[str, float] = {}

    def case(kind: str, processes: int) -> Case:
        def measured() -> dict:
            how = {"processes": processes, "launch_file": LAUNCH_FILES[kind], "OMP_NUM_THREADS": "1"}
            if kind not in of_nothing:
                small = settings | model(**TINY, vocab_size=64) | {"steps": 2, "tracking.log_every": 1}
                of_nothing[kind] = train(small, **how)["peak_mib"]
            took = train(settings, **how)
            shards = processes if kind == "FSDP2" else 1
            return {
                "peak_mib": took["peak_mib"] - of_nothing[kind],
                "predicted_mib": str(round(16 * config.num_weights / shards / 2**20)),
                "seconds_a_step": processes * settings["seq_len"] / took["tokens_per_second"],
            }

        return measured if kind == "DDP" else against(f"DDP, {processes}", measured)

    counts = (2,) if options.quick else (1, 2, 4)
    yield Group("processes", {f"{kind}, {count}": case(kind, count) for count in counts for kind in LAUNCH_FILES})
