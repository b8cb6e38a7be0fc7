"""Speed and memory of a training step on one GPU, and what `cuda_graph` gains with small models and small batches.

GPT-2 shapes in bfloat16 on random tokens in device memory, beside nanoGPT if --nanogpt names a checkout, and
without the chunked loss. All variants of a group exist at the same time and are interleaved, so that a GPU that slows
down slows all of them. FLOP/s are compared with those of a bfloat16 product of large matrices and with the data sheet
(MFU). Peak memory excludes the other variants. A profile lists the kernels. --quick runs everything in miniature,
as a test, on the CPU if there is no GPU.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.profiler import profile

from config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from model.config import GPTConfig
from model.gpt import GPTModel, build_on_meta_device
from tools.benchmark.bare_loop import build_peer
from tools.benchmark.cpu import Group
from train import forward_backward, train_step, warm_up
from training.cuda_graph import GraphedMicroBatch
from training.optimizer import build_optimizer
from training.prepare_model import missing_compiler, prepare_network
from training.results import Results
from training.state import TrainState
from training.throughput import peak_bf16_flops

PEER, PRODUCT = "nanogpt", "a large product"
OPTIMIZER, GRAD_CLIP = OptimizerConfig(lr=1e-4), 1.0  # other values are the defaults, which are nanoGPT's too
COMPILED_REGION = "Torch-Compiled Region"
ANNOTATIONS = (COMPILED_REGION, "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
BACKENDS = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("flash", "cudnn", "efficient")}
GRAPH, EAGER = {"cuda_graph": True}, {"compile": False}
MUON = {"optimizer": OPTIMIZER.replace(name="muon")}
SETTINGS: dict[str, dict[str, Any]] = {  # settings of train.py
    **{"ours": {}, "whole_loss": {"chunked_loss": False}, "graph": GRAPH, "uncompiled": EAGER},
    **{"uncompiled, graph": EAGER | GRAPH, "muon": MUON, "muon, graph": MUON | GRAPH},
}
SHAPES = {
    "124M": (12, 12, 768, 50304),
    "1.3B": (24, 16, 2048, 50304),
    "11M": (6, 6, 384, 256),
    "stories": (2, 4, 128, 266),
}


class Case(NamedTuple):
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


CASES = {  # the most interesting first
    "124m_1024": Case("124M", 1024, 32, ["ours", PEER, "whole_loss"]),
    "1.3b_4096": Case("1.3B", 4096, 4, ["ours", PEER]),
    **{f"124m_1024_{backend}": Case("124M", 1024, 32, ["ours"], backend) for backend in BACKENDS},
    "124m_4096": Case("124M", 4096, 8, ["ours", PEER]),
    "1.3b_1024": Case("1.3B", 1024, 16, ["ours", PEER]),
}
SMALL_MODELS = {
    "11m_256": Case("11M", 256, 64, [*(name for name in SETTINGS if name != "whole_loss"), PEER], dropout=0.2),
    "11m_256_4_parts": Case("11M", 256, 64, ["ours", "graph"], micro_batches=4, dropout=0.2),
    "stories_128": Case("stories", 128, 32, ["ours", "graph"]),
}
SMALL_BATCHES = {f"124m_1024_{batch}": Case("124M", 1024, batch, ["ours", "graph", PEER]) for batch in (8, 16, 32)}
# The last trains a step; with `wait` it waits for the device and returns the loss of the step.
Built = tuple[nn.Module, Optimizer, Callable[[bool], float | None]]


class Scale(NamedTuple):
    """Device, model shapes and duration of the measurements."""

    device: str = "cuda"
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(SHAPES)
    backend: str = "inductor"
    product_size: int = 8192
    window_seconds: float = 2.0
    warm_up_steps: int = 5
    context: int | None = None  # replaces the context of every case, with a batch of 1

    def model_config(self, shape: str, context: int, dropout: float = 0.0) -> GPTConfig:
        """Return a shape as nanoGPT has it: without biases, with tied embeddings."""
        n_layers, n_heads, d_model, vocab_size = self.shapes[shape]
        return GPTConfig(
            vocab_size=vocab_size,
            max_position_embeddings=self.context or context,
            n_layers=n_layers,
            n_heads=n_heads,
            d_model=d_model,
            d_ff=4 * d_model,
            dropout=dropout,
            bias=False,
            tie_embeddings=True,
        )


# The context exceeds 256, up to which eager attention replaces the backends on a CPU (model/attention.py).
TINY = dict.fromkeys(SHAPES, (1, 2, 32, 64)) | {"1.3B": (2, 2, 32, 64)}
MINIATURE = Scale("cpu", TINY, "eager", 64, 0.0, 2, context=340)


def build_ours(config: GPTConfig, micro_batches: Sequence[Tensor], scale: Scale, **settings: Any) -> Built:
    """Build this repository's model and a step of the loop in train.py, as its `build_state` does."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=scale.device == "cpu")
    with torch.device(scale.device) as device:  # initialising a billion weights takes a CPU many seconds
        network = GPTModel(config)
    values: dict[str, Any] = {"schedule": ScheduleConfig(name="constant"), "optimizer": OPTIMIZER, "tf32": True}
    values |= {"compile": True} | settings
    uses_backend = values["compile"] and scale.backend != "inductor"
    if uses_backend:
        values["compile"] = False
    run = TrainConfig(**values)
    prepare_network(network, run, device)
    for block in network.blocks if uses_backend else ():
        block.compile(backend=scale.backend)
    optimizer = build_optimizer(network, run.optimizer)
    model, results = accelerator.prepare_model(network), Results(0, 1, accelerator.device)
    state = TrainState(run, accelerator, network, model, optimizer, results)
    batches = [{"input_ids": tokens, "labels": tokens} for tokens in micro_batches]
    if run.cuda_graph:
        state.graph = GraphedMicroBatch(partial(forward_backward, state), state.parameters)
        warm_up(state, batches[0])
    completed_steps = 0

    def step(wait: bool = False) -> float | None:
        nonlocal completed_steps
        train_step(state, completed_steps, batches)
        result = results.read(wait)
        completed_steps += 1
        return result.means["loss"] if wait and result else None

    return network, optimizer, step


def build_nanogpt(config: GPTConfig, tokens: Tensor, scale: Scale, path: Path) -> Built:
    """Build nanoGPT's model and a step of the loop in its train.py; its gradient scaler does nothing in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = True
    network, optimizer = build_peer(path, config, OPTIMIZER, scale.device)
    model, targets = torch.compile(network, backend=scale.backend), tokens.roll(-1, dims=1)

    def step(wait: bool = False) -> float | None:
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        with torch.autocast(scale.device, torch.bfloat16):
            _logits, loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() if wait else None

    return network, optimizer, step


def mean_seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean time of a call, without a synchronisation between calls."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - start) / times


@dataclass
class Variant:
    """A case: a model and its step, built at the first call; each call times a window of consecutive steps."""

    build: Callable[[], Built]
    step_tokens: int
    flops_per_token: float
    scale: Scale
    window_steps: int = 0

    def prepare(self) -> None:
        """Build the model and train until its blocks are compiled and its optimizer has moments."""
        release_memory()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        network, _, self.step = self.build()
        parameters, first_loss = sum(weight.numel() for weight in network.parameters()), str(self.step(True))
        seconds = 1.0
        for _ in range(self.scale.warm_up_steps):
            seconds = mean_seconds(partial(self.step, False), 1)
        self.window_steps = max(1, round(self.scale.window_seconds / seconds))
        self.constants = {"parameters": parameters, "first_loss": first_loss, "kernels": self.profile_kernels()}
        for quantity in ("milliseconds_a_step", "launches_a_step"):  # of the table
            self.constants[quantity] = str(self.constants["kernels"].get(quantity, ""))
        release_memory()
        self.resting_bytes = torch.cuda.memory_allocated() - before

    def __call__(self) -> dict:
        """Time a window of steps; return its speed, its peak memory and the loss of the step after it."""
        if not self.window_steps:
            self.prepare()
        on_cuda, others_bytes = self.scale.device == "cuda", torch.cuda.memory_allocated() - self.resting_bytes
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        speed = self.step_tokens / mean_seconds(partial(self.step, False), self.window_steps)
        measured = {"tokens_per_second": speed, "flops_per_second": speed * self.flops_per_token}
        if on_cuda:
            measured["peak_gib"] = (torch.cuda.max_memory_allocated() - others_bytes) / 2**30
            if data_sheet := peak_bf16_flops(torch.device("cuda")):
                measured["mfu"] = speed * self.flops_per_token / data_sheet
        return measured | {"loss": self.step(True)} | self.constants

    def profile_kernels(self, steps: int = 3, top: int = 15) -> dict:
        """Return the kernels that take the most time on the device; on a CPU, operators."""
        device_type, time_attribute = "CPU", "self_cpu_time_total"
        if self.scale.device == "cuda":
            device_type, time_attribute = "CUDA", "self_device_time_total"
        with profile() as profiled:
            mean_seconds(partial(self.step, False), steps)
        rows = profiled.key_averages()
        regions = [row for row in rows if row.device_type.name == "CPU" and row.key.startswith(COMPILED_REGION)]
        # Operators are charged with the time of their kernels, and annotations span them: both would count twice.
        rows = [row for row in rows if row.device_type.name == device_type and not row.is_user_annotation]
        rows = [row for row in rows if not row.key.startswith(ANNOTATIONS)]
        rows.sort(key=lambda row: getattr(row, time_attribute), reverse=True)
        total = sum(getattr(row, time_attribute) for row in rows)
        return {  # torch.compile falls back to eager code silently; then no region is counted
            "compiled_regions_a_step": sum(row.count for row in regions) / steps,
            "milliseconds_a_step": round(total / 1000 / steps, 3),
            "launches_a_step": round(sum(row.count for row in rows) / steps),
            "top": {
                row.key[:160]: [round(getattr(row, time_attribute) / total, 4), row.count / steps] for row in rows[:top]
            },
        }


def measure_product(scale: Scale) -> dict[str, float]:
    """Return the rate of a product of two large bfloat16 matrices, the most that a step can reach on this GPU."""
    size = scale.product_size
    one, other = torch.randn(2, size, size, device=scale.device, dtype=torch.bfloat16)
    mean_seconds(lambda: one @ other, 5)
    return {"flops_per_second": 2 * size**3 / mean_seconds(lambda: one @ other, 20)}


def build_cases(case: Case, scale: Scale, peer: Path | None) -> tuple[dict[str, Callable], dict[str, list[str]]]:
    """Return the large product and the variants of a case, and their baselines."""
    config = scale.model_config(case.shape, case.context, case.dropout)
    size = case.micro_batches if scale.context else case.batch, config.max_position_embeddings
    tokens = torch.randint(config.vocab_size or 0, size, device=scale.device)
    flops_per_token = build_on_meta_device(config).flops_per_token(tokens.shape[1])
    micro_batches, builders = tokens.chunk(case.micro_batches), {}
    for name in case.variants:
        if name == PEER and peer:
            builders[PEER] = partial(build_nanogpt, config, tokens, scale, peer)
        elif name != PEER and (scale.device == "cuda" or not SETTINGS[name].get("cuda_graph")):
            builders[name] = partial(build_ours, config, micro_batches, scale, **SETTINGS[name])
    cases = {name: Variant(build, tokens.numel(), flops_per_token, scale) for name, build in builders.items()}
    baselines = {name: [PRODUCT, PEER, "ours"] if name != PEER else [PRODUCT] for name in cases}
    return {PRODUCT: partial(measure_product, scale), **cases}, baselines


def measure_groups(groups: dict[str, Case], options: Namespace) -> Iterator[Group]:
    """Yield every group; clear it, and the compiler's cache, after it was measured."""
    scale = Scale()
    if options.quick:
        scale = MINIATURE._replace(device="cuda" if torch.cuda.is_available() else "cpu")
    if not options.quick and not torch.cuda.is_available():
        sys.exit("no GPU was found; --quick tests this case on a CPU")
    if not options.quick and (missing := missing_compiler(torch.device("cuda"))):
        sys.exit(f"the blocks would not be compiled: {missing}")
    # The cache's key does not include the attention backend, so that a group would get the code of another.
    torch._functorch.config.enable_autograd_cache = False
    for name, case in groups.items():
        cases, baselines = build_cases(case, scale, options.nanogpt)
        with sdpa_kernel(BACKENDS[case.backend]) if case.backend else nullcontext():
            yield name, cases, baselines
        cases.clear()
        torch.compiler.reset()  # torch.compile caches at most eight shapes of a function
        release_memory()


gpu, small_models, small_batches = (partial(measure_groups, groups) for groups in (CASES, SMALL_MODELS, SMALL_BATCHES))
