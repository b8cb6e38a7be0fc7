"""Benchmark cases on one GPU: training steps in this process, and whole trainings by train.py and nanoGPT.

A step of `gpu`, `small_models` and `small_batches` is that of a GPT-2 shape in bfloat16 on random tokens in device
memory. All variants of a group exist at the same time and are interleaved, so that a GPU that slows down slows all of
them. FLOP/s are compared with those of a bfloat16 product of large matrices and with the data sheet (MFU). Peak memory
excludes the other variants.

--quick runs everything in miniature, without a GPU uncompiled and without CUDA graphs.
"""

import importlib.util
import math
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from model.config import GPTConfig
from model.gpt import build_on_meta_device
from run.directory import Run
from run.metrics_log import read_rows
from run.resolve import GivenModels
from tools.benchmark import programs
from tools.benchmark.programs import BF16, PEER, WITHOUT_WANDB, Case, Group, nanogpt, ours
from tools.benchmark.tables import PAGE, ROOT
from train import build_state, train_step, warm_up
from training.throughput import peak_bf16_flops

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

# Steps

PRODUCT = "a large product"
OPTIMIZER, GRAD_CLIP = OptimizerConfig(lr=1e-4), 1.0  # other values are the defaults, which are nanoGPT's too
ANNOTATIONS = ("Torch-Compiled Region", "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
BACKENDS = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("flash", "cudnn", "efficient")}
GRAPH, EAGER, MUON = {"cuda_graph": True}, {"compile": False}, {"optimizer": OPTIMIZER.replace(name="muon")}
SETTINGS: dict[str, dict[str, Any]] = {  # settings of train.py
    **{"ours": {}, "whole_loss": {"chunked_loss": False}, "graph": GRAPH, "uncompiled": EAGER},
    **{"uncompiled, graph": EAGER | GRAPH, "muon": MUON, "muon, graph": MUON | GRAPH},
}
SHAPES = {  # layers, heads, width, vocabulary
    **{"124M": (12, 12, 768, 50304), "1.3B": (24, 16, 2048, 50304), "11M": (6, 6, 384, 256)},
    **{"stories": (2, 4, 128, 266), "miniature": (2, 2, 32, 64)},
}
Step = Callable[[bool], float | None]  # trains a step; with True it waits for the device and returns the loss


class Steps(NamedTuple):
    """A group: a shape, and its variants, which are compared."""

    shape: str
    context: int
    batch: int
    variants: list[str]
    backend: str | None = None
    """Of attention; one for a whole group, because compiled code does not notice a change of it."""
    micro_batches: int = 1
    """Parts of the batch."""
    dropout: float = 0.0

    def model_config(self) -> GPTConfig:
        """Return the config of the model, as nanoGPT has it: without biases, with tied embeddings."""
        names = "n_layers", "n_heads", "d_model", "vocab_size"
        sizes: dict[str, Any] = dict(zip(names, SHAPES[self.shape], strict=True))
        sizes |= {"d_ff": 4 * sizes["d_model"], "max_position_embeddings": self.context}
        return GPTConfig(**sizes, dropout=self.dropout, bias=False, tie_embeddings=True)


LARGE_MODELS = {  # the most interesting first
    "124m_1024": Steps("124M", 1024, 32, ["ours", PEER, "whole_loss"]),
    "1.3b_4096": Steps("1.3B", 4096, 4, ["ours", PEER]),
    **{f"124m_1024_{backend}": Steps("124M", 1024, 32, ["ours"], backend) for backend in BACKENDS},
    "124m_4096": Steps("124M", 4096, 8, ["ours", PEER]),
    "1.3b_1024": Steps("1.3B", 1024, 16, ["ours", PEER]),
}
SMALL_MODELS = {
    "11m_256": Steps("11M", 256, 64, [*(name for name in SETTINGS if name != "whole_loss"), PEER], dropout=0.2),
    "11m_256_4_parts": Steps("11M", 256, 64, ["ours", "graph"], micro_batches=4, dropout=0.2),
    "stories_128": Steps("stories", 128, 32, ["ours", "graph"]),
}
SMALL_BATCHES = {f"124m_1024_{batch}": Steps("124M", 1024, batch, ["ours", "graph", PEER]) for batch in (8, 16, 32)}


def our_step(config: GPTConfig, tokens: Tensor, micro_batches: int = 1, **settings: Any) -> Step:
    """Build this repository's model and a step of the loop in train.py."""
    settings = {"optimizer": OPTIMIZER, "compile": ON_GPU} | settings
    run = TrainConfig(model=config, schedule=ScheduleConfig(name="constant"), tf32=True, **settings)
    accelerator = Accelerator(mixed_precision="bf16", cpu=not ON_GPU)
    with DEVICE:  # initialising a billion weights takes a CPU many seconds
        state = build_state(run, Run(Path()), accelerator, GivenModels(None, None))
    batches = [{"input_ids": part, "labels": part} for part in tokens.chunk(micro_batches)]
    warm_up(state, batches[0])
    completed_steps = count()

    def step(wait: bool = False) -> float | None:
        train_step(state, next(completed_steps), batches)
        result = state.results.read(wait)
        return result.means["loss"] if wait and result else None

    return step


def nanogpt_step(config: GPTConfig, tokens: Tensor, path: Path) -> Step:
    """Build nanoGPT's model and a step of the loop in its train.py; its gradient scaler does nothing in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = True
    network, optimizer = programs.nanogpt_model(path, config, OPTIMIZER, DEVICE.type)
    model, targets = torch.compile(network) if ON_GPU else network, tokens.roll(-1, dims=1)

    def step(wait: bool = False) -> float | None:
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        with torch.autocast(DEVICE.type, torch.bfloat16):
            _logits, loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() if wait else None

    return step


def mean_seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean time of a call, without a synchronisation between calls."""
    synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - start) / times


def measure_product(size: int) -> dict[str, float]:
    """Return the rate of a product of two large bfloat16 matrices, the most that a step can reach on this GPU."""
    one, other = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    mean_seconds(lambda: one @ other, 5)
    return {"flops_per_second": 2 * size**3 / mean_seconds(lambda: one @ other, 20)}


def profile_kernels(step: Step, steps: int = 3, top: int = 15) -> dict[str, Any]:
    """Return the time and number of the kernels of a step, and those that take the most; on a CPU, of operators."""
    with profile() as profiled:
        mean_seconds(partial(step, False), steps)
    # Operators are charged with the time of their kernels, and annotations span them: both would count twice.
    kernels = [
        (row.self_device_time_total if ON_GPU else row.self_cpu_time_total, row.count, row.key)
        for row in profiled.key_averages()
        if row.device_type.name == DEVICE.type.upper()
        and not (row.is_user_annotation or row.key.startswith(ANNOTATIONS))
    ]
    total, largest = sum(time for time, *_ in kernels), sorted(kernels, reverse=True)[:top]
    figures = {"kernel_milliseconds": total / 1000 / steps, "kernels": sum(count for _, count, _ in kernels) / steps}
    return figures | {"top": {key[:160]: [round(time / total, 4), count / steps] for time, count, key in largest}}


def measure_windows(build: Callable[[], Step], tokens: int, flops: float, window_seconds: float) -> Iterator[dict]:
    """Build a model and train until it is compiled; then yield the figures of one window of steps after another.

    `tokens` are those of a step, and `flops` those of a token.
    """
    release_memory()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    step = build()
    step(True)
    seconds = [mean_seconds(partial(step, False), 1) for _ in range(5)][-1]
    kernels = profile_kernels(step)
    release_memory()
    resting_bytes = torch.cuda.memory_allocated() - before
    while True:
        others_bytes = torch.cuda.memory_allocated() - resting_bytes
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        speed = tokens / mean_seconds(partial(step, False), max(1, round(window_seconds / seconds)))
        figures = {"tokens_per_second": speed, "flops_per_second": speed * flops}
        if ON_GPU:
            figures["peak_gib"] = (torch.cuda.max_memory_allocated() - others_bytes) / 2**30
            if data_sheet := peak_bf16_flops(DEVICE):
                figures["mfu"] = speed * flops / data_sheet
        yield figures | {"loss": step(True)} | kernels


def build_cases(group: Steps, options: Namespace) -> dict[str, Case]:
    """Return the large product and the variants of a group."""
    if options.quick:  # above 256 tokens no eager attention replaces the backends on a CPU (model/attention.py)
        group = group._replace(shape="miniature", context=340, batch=group.micro_batches)
    config, window_seconds = group.model_config(), 0.0 if options.quick else 2.0
    tokens = torch.randint(config.vocab_size or 0, (group.batch, group.context), device=DEVICE)
    flops = build_on_meta_device(config).flops_per_token(group.context)
    builders: dict[str, Callable[[], Step]] = {
        name: partial(our_step, config, tokens, group.micro_batches, **SETTINGS[name])
        for name in group.variants
        if name != PEER and (ON_GPU or not SETTINGS[name].get("cuda_graph"))
    }
    if PEER in group.variants and options.nanogpt:
        builders[PEER] = partial(nanogpt_step, config, tokens, options.nanogpt)
    cases: dict[str, Case] = {PRODUCT: partial(measure_product, 64 if options.quick else 8192)}
    for name, build in builders.items():
        cases[name] = partial(next, measure_windows(build, tokens.numel(), flops, window_seconds))
    return cases


def measure_steps(groups: dict[str, Steps], options: Namespace) -> Iterator[Group]:
    """Yield every group; clear it, and the compiler's cache, after it was measured."""
    # The cache's key does not include the attention backend, so that a group would get the code of another.
    torch._functorch.config.enable_autograd_cache = False
    for name, group in groups.items():
        cases = build_cases(group, options)
        with sdpa_kernel(BACKENDS[group.backend]) if group.backend else nullcontext():
            yield name, cases, {variant: [PEER, "ours"] for variant in group.variants if variant != PEER}
        cases.clear()
        torch.compiler.reset()  # torch.compile caches at most eight shapes of a function
        release_memory()


gpu, small_models, small_batches = (
    partial(measure_steps, groups) for groups in (LARGE_MODELS, SMALL_MODELS, SMALL_BATCHES)
)

# Whole trainings

CONFIG = {"config": "configs/shakespeare_char.yaml", "evaluation.num_logged_generations": 0} | WITHOUT_WANDB
RANDOM_BYTES = {"data.source": "random", "data.num_samples": 10_000, "evaluation.num_samples": 1}
RANDOM_BYTES |= {"model.vocab_size": 256}
MODERN = {
    **{"model.position": "rope", "model.norm": "rmsnorm", "model.mlp": "relu2", "model.qk_norm": True},
    **{"model.zero_init": True, "optimizer.name": "muon", "schedule.name": "wsd", "schedule.min_lr_ratio": 0.0},
}
MODERN_11M = MODERN | {
    **{"model.rope_theta": 1000.0, "optimizer.lr": 4e-3, "optimizer.betas": [0.9, 0.95], "steps": 1000},
    **{"schedule.warmup_steps": 20, "schedule.decay_steps": 750, "evaluation.every": 50},
}
# Candidates for the fewest seconds to 1.47 nats/character, where nanoGPT's recipe ends.
RECIPES = {
    "Muon, 1,000 steps": {},
    "Muon, 600 steps": {"steps": 600, "schedule.decay_steps": 450},
    "Muon, 8 x 256": {
        **{"model.n_layers": 8, "model.n_heads": 4, "model.d_model": 256, "model.d_ff": 1024},
        **{"steps": 1200, "schedule.decay_steps": 900},
    },
    "Muon, 1,500 steps, more regularised": {
        **{"model.dropout": 0.3, "optimizer.weight_decay": 0.3, "steps": 1500, "schedule.decay_steps": 1125},
    },
}
RECIPES = {name: MODERN_11M | own for name, own in RECIPES.items()} | {CONFIG["config"]: {"steps": 5000}}
SHORT = {"steps": 11, "schedule.warmup_steps": 0, "schedule.decay_steps": 5, "evaluation.every": 5}  # for --quick
SHORT |= {"tracking.log_every": 1, "micro_batch_size": 4, "global_batch_size": 4}
WAYS = {  # to launch kernels
    ("compiled" if compiled else "uncompiled") + ", graph" * graph: {"compile": compiled, "cuda_graph": graph}
    for compiled in (True, False)
    for graph in ((False, True) if ON_GPU else (False,))
}


def bits(options: Namespace) -> Iterator[Group]:
    """Digests of exact trainings without and with a graph: they must be equal, also after a resume without it."""
    settings = CONFIG | RANDOM_BYTES | {"exact": True, "schedule.name": "constant", "schedule.min_lr_ratio": 0.0}
    settings |= {"schedule.warmup_steps": 2, "evaluation.every": 0}
    variants = {
        "11M": {},
        "11M, several micro-batches": {"micro_batch_size": 16},
        "11M, Muon": {"optimizer.name": "muon"},
    }
    expected: dict[str, str] = {}

    def train(group: str, own: dict, *graphs: bool) -> dict:
        """Train ten steps for each of `graphs`, resuming."""
        with tempfile.TemporaryDirectory() as folder:
            for number, graph in enumerate(graphs, start=1):
                phase = own | {"cuda_graph": graph, "out_dir": folder, "name": "run", "steps": 10 * number}
                ours(options, settings | phase, env=BF16).run()
            *_, last = read_rows(Path(folder, "run", "metrics.jsonl"))
        if (digest := last["state/digest"]) != expected.setdefault(group, digest):
            raise RuntimeError(f"digest {digest}, expected {expected[group]}")
        return {"digest": digest}

    for variant, own in variants.items():
        for compiled in (True, False):
            group = f"{variant}, {'compiled' if compiled else 'uncompiled'}"
            start = partial(train, group, own | {"compile": compiled})
            cases = {"no graph": partial(start, False, False)}
            if ON_GPU:
                cases |= {"graph": partial(start, True, True), "graph, then none": partial(start, True, False)}
            yield group, cases, {}


def small_programs(options: Namespace) -> Iterator[Group]:
    """Tokens/s of the whole train.py on random bytes, and the seconds to its first log line."""
    with tempfile.TemporaryDirectory() as folder:
        log_every = 1 if options.quick else 50
        settings = CONFIG | RANDOM_BYTES | programs.speed_settings(log_every, folder)
        settings |= {"schedule.warmup_steps": log_every}
        cases = {f"ours, {name}": ours(options, settings | own, env=BF16).train for name, own in WAYS.items()}
        if options.nanogpt:
            recipe = dict(max_iters=settings["steps"], log_interval=log_every, eval_interval=10**6, eval_iters=1)
            cases[PEER] = nanogpt(options, folder, recipe | {"dtype": "bfloat16"}, vocab_size=256).train
        yield "11M, 64 x 256", cases, dict.fromkeys(cases, [PEER])


def small_to_loss(options: Namespace) -> Iterator[Group]:
    """Seconds from launch to 1.47 nats/character on --corpus, another seed in each round of ours."""
    target = math.inf if options.quick else 1.47
    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or programs.prepare_characters(PAGE, folder)

        settings = CONFIG | {"data.path": corpus, "out_dir": folder, "resume": "never"}

        def train(own: dict, seeds: Iterator[int]) -> dict:
            own = own | {"seed": next(seeds)} | (SHORT if options.quick else {})
            return ours(options, settings | own, env=BF16).train(target)

        for recipe, own in RECIPES.items():
            ways = {name: way for name, way in WAYS.items() if way["cuda_graph"] == ON_GPU}
            yield recipe, {name: partial(train, own | way, count()) for name, way in ways.items()}, {}
        if options.nanogpt:
            peer = nanogpt(options, folder, {"dtype": "bfloat16"}, corpus=corpus)
            yield PEER, {PEER: partial(peer.train, target)}, {}


def curve(options: Namespace) -> Iterator[Group]:
    """Curves of GPT-2 124M on --corpus, validation loss against seconds: a group for each program.

    All programs train on the same tokens in batches of the same size: nanoGPT, ours with its recipe, with Muon and the
    other settings of configs/shakespeare_cpu.yaml, and with these for half the steps. Each takes eight minutes or less
    on an H100. nanoGPT evaluates random windows of the validation text, ours evenly spaced ones. The seconds of the
    curve are those of the steps alone: the number of steps times their median time, without the start, compilation,
    evaluations and checkpoints. `seconds` is the time from the launch to the last evaluation.
    """
    from data.text import TextCorpus  # needs pyarrow, which a machine with a GPU may lack

    with tempfile.TemporaryDirectory() as folder:
        corpus = options.corpus or programs.prepare_characters(PAGE, folder)
        vocab_size = -(-TextCorpus(str(corpus)).vocab_size // 128) * 128  # GPUs multiply such matrices faster
        if options.nanogpt:
            recipe = dict(config="train_gpt2.py", dtype="bfloat16", wandb_log=False, max_iters=400, lr_decay_iters=400)
            recipe |= dict(warmup_iters=40, batch_size=32, gradient_accumulation_steps=15, log_interval=10)
            recipe |= dict(eval_interval=40, eval_iters=20, always_save_checkpoint=False)
            yield PEER, {"124M": nanogpt(options, folder, recipe, corpus=corpus, vocab_size=vocab_size).train}, {}
        settings = {"config": "configs/gpt2_124m.yaml", "data.path": corpus, "model.vocab_size": vocab_size}
        settings |= {"model.bias": False, "model.mlp": "gelu_erf", "steps": 400, "schedule.warmup_steps": 40}
        settings |= {"global_batch_size": 480, "micro_batch_size": 32, "evaluation.every": 40}
        settings |= {"evaluation.num_samples": 640, "evaluation.micro_batch_size": 32} | WITHOUT_WANDB
        settings |= {"evaluation.num_logged_generations": 0, "out_dir": folder, "resume": "never"}
        muon = settings | MODERN | {"optimizer.lr": 3.6e-3, "schedule.decay_steps": 300}
        half = muon | {"steps": 200, "schedule.warmup_steps": 20, "schedule.decay_steps": 150}
        for name, own in {"ours, its recipe": settings, "ours, Muon": muon, "ours, Muon, half the steps": half}.items():
            own |= SHORT if options.quick else {}
            yield name, {"124M": ours(options, own, env=BF16).train}, {}


def tests(options: Namespace) -> Iterator[Group]:
    """Run the tests that need a GPU; the figure is their summary."""
    marked = sorted(str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in file.read_text())
    workers = ["--numprocesses", "8"] if importlib.util.find_spec("xdist") else []  # these share the GPU
    files = ["--co", "-q", *marked] if options.quick else [*workers, *marked]
    program = programs.Program([sys.executable, "-m", "pytest", "-m", "cuda", "-rfE", *files])
    yield "marked cuda", {"pytest": lambda: {"summary": program.run()[-1][1].strip("= ")}}, {}
