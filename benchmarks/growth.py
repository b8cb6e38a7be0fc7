"""What a token of training costs as things grow, beside what theory says it costs:

    python -m benchmarks.growth [--quick]

Context, width, depth, vocabulary: a training step of one process, on as many threads as there are cores. Theory is
GPTModel.flops_per_token, at the speed of one of the points (`predicted_from`).
Corpus: the order of the data and the windows it asks for, of corpora of holes instead of tokens. Theory is a constant.
Processes: train.py under a launcher, one thread a process. Theory is that the work is shared among the cores.
About five minutes on two cores; the sizes of one axis are measured by turns.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import torch
from torch.profiler import profile

from benchmarks import record
from benchmarks.measure import ROOT, alternate, arguments, launch, pictures, started, wait_for_line
from config import OptimizerConfig
from data.order import GlobalBatches
from data.text import TextCorpus, TextDataset
from data.tokenizer import load_tokenizer, save_tokenizer
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import available_cores, prepare_cpu
from training.optimizer import build_optimizer

BASE = GPTConfig(
    vocab_size=512, max_position_embeddings=4096, n_layers=2, n_heads=4, d_model=256, d_ff=688, dropout=0.0,
    position="rope", norm="rmsnorm", mlp="swiglu", qk_norm=True, bias=False,
)  # fmt: skip
SEQ_LEN = 256
CORES = available_cores()
CORPUS_BATCH, CORPUS_SEQ_LEN = 64, 1025
PART = 10**8  # tokens of a file: 10,000 files at most, because a process may map no more than 65,530 on Linux
Figures = dict[str, list | float | int]


@dataclass
class Axis:
    """Something of a model that grows."""

    label: str
    points: list[int]
    tokens: int  # of a step
    case: Callable[[int], tuple[GPTConfig, int]]  # the model and its seq_len
    predicted_from: int  # index of the point whose speed theory takes over


def with_width(width: int) -> GPTConfig:
    """Heads stay 64 wide."""
    return replace(BASE, d_model=width, n_heads=width // 64, d_ff=8 * -(-width // 3))


# Where few FLOPs are done slowly, in small models, theory takes the speed of the largest; where FLOPs are of two kinds,
# with context, that of the shortest, so that it shows how the other kind adds to it.
AXES = {
    "context": Axis("context, tokens", [2**n for n in range(7, 13)], 4096, lambda n: (BASE, n), 0),
    "width": Axis("d_model", [2**n for n in range(6, 11)], 2048, lambda n: (with_width(n), SEQ_LEN), -1),
    "depth": Axis("layers", [1, 2, 4, 8, 16], 2048, lambda n: (replace(BASE, n_layers=n), SEQ_LEN), -1),
    "vocabulary": Axis(
        "tokens of the vocabulary", [2**n for n in (8, 10, 12, 14, 15, 16, 17)], 1024,
        lambda n: (replace(with_width(128), vocab_size=n), SEQ_LEN), -1,
    ),
}  # fmt: skip


class Training:
    """A model that is trained on the same random tokens again and again."""

    def __init__(self, config: GPTConfig, seq_len: int, tokens: int):
        torch.manual_seed(0)
        self.network = GPTModel(config)
        self.optimizer = build_optimizer(self.network, OptimizerConfig())
        self.input_ids = torch.randint(config.vocab_size, (tokens // seq_len, seq_len))
        self.step()

    def step(self) -> None:
        self.network(self.input_ids, labels=self.input_ids)[1].backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds_per_token(self) -> float:
        start = time.perf_counter()
        self.step()
        return (time.perf_counter() - start) / self.input_ids.numel()

    def peak_bytes(self) -> int:
        """Of tensors: weights and moments, and what a step allocates besides."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = sum(tensor.nbytes for tensor in (*self.network.parameters(), *moments))
        with profile(profile_memory=True) as profiled:
            self.step()
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        allocated = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
        return kept + int(allocated.max())


def measure_axis(axis: Axis, rounds: int) -> Figures:
    """Cost of a token and peak memory at each point, and the cost that FLOPs alone would make."""
    cases, flops, attention, peaks = {}, [], [], []
    for point in axis.points:
        config, seq_len = axis.case(point)
        training = Training(config, seq_len, axis.tokens)
        cases[str(point)] = training.seconds_per_token
        flops.append(training.network.flops_per_token(seq_len))
        attention.append(flops[-1] - training.network.flops_per_token(0))
        peaks.append(round(training.peak_bytes() / 2**20, 1))
    measured = [1e6 * seconds for seconds in alternate(cases, rounds).values()]
    microseconds_a_flop = measured[axis.predicted_from] / flops[axis.predicted_from]
    return {
        "points": axis.points,
        "tokens_a_step": axis.tokens,
        "microseconds_per_token": rounded(measured),
        "predicted": rounded([microseconds_a_flop * n for n in flops]),
        "predicted_for_attention": rounded([microseconds_a_flop * n for n in attention]),
        "predicted_from": axis.points[axis.predicted_from],
        "gigaflops_per_second": rounded([n / cost / 1000 for n, cost in zip(flops, measured, strict=True)]),
        "peak_mib": peaks,
    }


def rounded(values: list[float]) -> list[float]:
    """To four digits: more are noise."""
    return [float(f"{value:.4g}") for value in values]


class SparseFile:
    """A file in which what is long is a hole: it must have been zeros."""

    def __init__(self, path: Path):
        self.file, self.closed = open(path, "wb"), False

    def write(self, content: bytes) -> int:
        if len(content) > 2**20:
            self.file.seek(len(content), 1)
        else:
            self.file.write(content)
        return len(content)

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()
        self.closed = True


def sparse_corpus(folder: Path, tokens: int, part: int, tokenizer: Path) -> TextCorpus:
    """A corpus of `tokens` zeros in files of `part` tokens, all of which are one file full of holes."""
    zeros = np.zeros(part, np.uint16)  # which takes no memory until it is read
    column = pa.ListArray.from_arrays(np.array([0, part], np.int32), pa.array(zeros))
    batch = pa.record_batch({"input_ids": column})
    (folder / "train").mkdir(parents=True)
    names = [f"train/{index:06d}.arrow" for index in range(tokens // part)]
    sparse = SparseFile(folder / names[0])
    with pa.ipc.new_stream(pa.PythonFile(sparse, mode="w"), batch.schema) as writer:
        writer.write_batch(batch)
    sparse.close()
    for name in names[1:]:
        (folder / name).hardlink_to(folder / names[0])
    (folder / "tokenizer").symlink_to(tokenizer)
    size, facts = (folder / names[0]).stat().st_size, load_tokenizer(tokenizer)[1]
    counts = {"train": {"tokens": len(names) * part, "bytes": 0}, "validation": {"tokens": 0, "bytes": 0}}
    metadata = {"tokenizer": facts, **counts, "hash": "", "files": dict.fromkeys(names, size)}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return TextCorpus(str(folder))


def read_once(file: Path) -> None:
    """So that it lies in the system's memory: a corpus is measured here, not a disk."""
    with open(file, "rb") as content:
        while content.read(2**24):
            pass


def traced_bytes(work: Callable[[], object]) -> int:
    """The highest that Python's, numpy's and Arrow's memory rises while `work` is done."""
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + pa.total_allocated_bytes() - arrow


def page_faults() -> int:
    """How often so far the system had to find the memory behind an address that this process had not used before."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def corpus_cases(
    dataset: TextDataset, batches: int, faults: list[float]
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds per token of the order, and of the windows that it asks for; later calls ask for later batches.

    Each call of the second adds to `faults` how many page faults a window took.
    """
    order, ordered, looked_up = GlobalBatches(len(dataset), CORPUS_BATCH, seed=0), count(), count()
    tokens = batches * CORPUS_BATCH * CORPUS_SEQ_LEN

    def order_case() -> float:
        start = time.perf_counter()
        for _ in range(batches):
            order.indices(next(ordered))
        return (time.perf_counter() - start) / tokens

    def window_case() -> float:
        wanted = [order.indices(next(looked_up)) for _ in range(batches)]
        before, start = page_faults(), time.perf_counter()
        for indices in wanted:
            dataset.batch(indices)
        seconds = time.perf_counter() - start
        faults.append((page_faults() - before) / (batches * CORPUS_BATCH))
        return seconds / tokens

    return order_case, window_case


def measure_corpus(sizes: list[int], rounds: int, batches: int, part: int) -> Figures:
    """Cost of a token in the order and in the windows, and the memory of both, for corpora of `sizes` tokens."""
    cases, memory, faults = {}, {"order": [], "open_corpus": []}, {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        save_tokenizer("byte", folder / "tokenizer", ())
        for size in sizes:
            corpus = sparse_corpus(folder / str(size), size, min(size, part), folder / "tokenizer")
            read_once(folder / str(size) / "train" / "000000.arrow")
            dataset = TextDataset(corpus, "train", CORPUS_SEQ_LEN, "concat")
            order_of = GlobalBatches(len(dataset), CORPUS_BATCH, seed=0)
            memory["order"].append(traced_bytes(lambda order=order_of: order.indices(0)))
            memory["open_corpus"].append(
                traced_bytes(lambda corpus=corpus: TextDataset(corpus, "train", CORPUS_SEQ_LEN, "concat")[0])
            )
            cases[f"order {size}"], cases[f"windows {size}"] = corpus_cases(dataset, batches, faults[size])
        medians = alternate(cases, rounds)
    nanoseconds = {what: [1e9 * medians[f"{what} {size}"] for size in sizes] for what in ("order", "windows")}
    return {
        "points": sizes,
        "tokens_a_file": part,
        **{f"{what}_nanoseconds_per_token": rounded(values) for what, values in nanoseconds.items()},
        **{f"{what}_predicted": rounded(values[:1] * len(sizes)) for what, values in nanoseconds.items()},
        "predicted_from": sizes[0],
        "page_faults_per_window": rounded([statistics.median(values) for values in faults.values()]),
        **{f"{what}_peak_kib": rounded([n / 1024 for n in values]) for what, values in memory.items()},
    }


def clocks(process: psutil.Popen) -> np.ndarray:
    """Seconds that have passed, and that processors have worked for a process and all below it."""
    used = [child.cpu_times() for child in (process, *process.children(recursive=True))]
    return np.array([time.perf_counter(), sum(times.user + times.system for times in used)])


def train_command(processes: int, directory: str, every: int) -> list[str]:
    """A run that goes on until it is stopped, of the base model on random tokens, with a log line `every` steps."""
    shape = {name: getattr(BASE, name) for name in ("vocab_size", "n_layers", "n_heads", "d_model", "d_ff", "dropout")}
    settings = {
        "config": "configs/random_tokens.yaml", "out_dir": directory, "steps": 10**6, "seq_len": 128,
        "global_batch_size": 16, "micro_batch_size": 2, "tracking.log_every": every, "tracking.wandb": "disabled",
        **{f"model.{name}": value for name, value in shape.items()},
    }  # fmt: skip
    return [*launch(processes, "train.py"), *(word for name in settings for word in (f"--{name}", str(settings[name])))]


def process_seconds(processes: int, every: int, intervals: int) -> np.ndarray:
    """Seconds per token of a run, [by the clock, of processors]: medians over the intervals between log lines."""
    readings = []
    with tempfile.TemporaryDirectory() as directory:
        with started(train_command(processes, directory, every), OMP_NUM_THREADS="1") as process:
            for line in range(1, intervals + 2):
                wait_for_line(process, f"[step {line * every} /")
                readings.append(clocks(process))
    return np.median(np.diff(readings, axis=0), axis=0) / (every * 16 * 128)


def measure_processes(counts: list[int], rounds: int, every: int, intervals: int) -> Figures:
    """Cost of a token by the clock and in processor time, with the same global batch on every number of processes."""
    of_processors = {processes: [] for processes in counts}

    def case(processes: int) -> float:
        by_the_clock, worked = process_seconds(processes, every, intervals)
        of_processors[processes].append(worked)
        return by_the_clock

    medians = alternate({str(n): lambda n=n: case(n) for n in counts}, rounds)
    clock = [1e6 * seconds for seconds in medians.values()]
    work = [1e6 * statistics.median(values) for values in of_processors.values()]
    return {
        "points": counts,
        "cores": CORES,
        "threads_a_process": 1,
        "microseconds_per_token": rounded(clock),
        "predicted": rounded([clock[0] * counts[0] / min(n, CORES) for n in counts]),
        "cpu_microseconds_per_token": rounded(work),
        "cpu_predicted": rounded(work[:1] * len(work)),
        "predicted_from": counts[0],
    }


def draw(
    file: Path, labels: tuple[str, str], figures: Figures, lines: dict[str, tuple[str, str]], scale: str = "linear"
) -> None:
    """Lines of `figures`, as {key: (name, matplotlib's format)}, over its points; `scale` is of the cost."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure, points = Figure(figsize=(6, 3.75), layout="constrained"), figures["points"]
    axes = figure.add_subplot(xscale="log", yscale=scale, xlabel=labels[0], ylabel=f"{labels[1]} per token")
    for key, (name, style) in lines.items():
        axes.plot(points, figures[key], style, label=name)
    if scale == "linear":
        axes.set_ylim(0, 1.4 * max(max(figures[key]) for key in lines))  # with room for the legend
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(points, [f"{point:,}" if point < 10**6 else f"{point:.0e}" for point in points], fontsize=7)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(file, dpi=100)


def draw_axis(folder: Path, name: str, figures: Figures) -> None:
    lines = {
        "microseconds_per_token": ("measured", "o-C0"),
        "predicted": (f"by FLOPs, at the speed of {figures['predicted_from']:,}", "--C1"),
        "predicted_for_attention": ("of that for attention's scores", ":C1"),
    }
    draw(folder / f"{name}.png", (AXES[name].label, "microseconds"), figures, lines, "log")


def draw_corpus(folder: Path, figures: Figures) -> None:
    lines = {
        "order_nanoseconds_per_token": ("order, measured", "o-C0"),
        "order_predicted": ("order, constant", "--C0"),
        "windows_nanoseconds_per_token": ("windows, measured", "o-C1"),
        "windows_predicted": ("windows, constant", "--C1"),
    }
    draw(folder / "corpus.png", ("tokens of the corpus", "nanoseconds"), figures, lines)


def draw_processes(folder: Path, figures: Figures) -> None:
    lines = {
        "microseconds_per_token": ("by the clock, measured", "o-C0"),
        "predicted": (f"by the clock, shared by {figures['cores']} cores", "--C0"),
        "cpu_microseconds_per_token": ("processor time, measured", "o-C1"),
        "cpu_predicted": ("processor time, constant", "--C1"),
    }
    draw(folder / "processes.png", ("processes", "microseconds"), figures, lines)


def main() -> None:
    quick = arguments(__doc__).quick
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler has nothing to say to a reader
    prepare_cpu()
    axes = {name: replace(axis, points=axis.points[:2], tokens=256) if quick else axis for name, axis in AXES.items()}
    figures = {"threads": torch.get_num_threads()}
    with pictures(ROOT / "docs" / "growth", quick) as folder:
        for name, axis in axes.items():
            print(f"{name}:", file=sys.stderr)
            figures[name] = measure_axis(axis, rounds=1 if quick else 5)
            draw_axis(folder, name, figures[name])
        sizes = [10**6, 10**7] if quick else [10**n for n in range(6, 13)]
        figures["corpus"] = measure_corpus(sizes, 1 if quick else 9, 1 if quick else 5, 10**6 if quick else PART)
        draw_corpus(folder, figures["corpus"])
        counts, work = ([1, 2], (1, 1, 1)) if quick else ([1, 2, 4, 8], (3, 4, 4))
        figures["processes"] = measure_processes(counts, *work)
        draw_processes(folder, figures["processes"])
    record.save("growth", figures, quick)


if __name__ == "__main__":
    main()
