"""What a training step costs on one GPU, and what of it pays.

Two models of the GPT-2 kind in bf16, with nanoGPT beside them where --nanogpt says where its model.py is, then settings
one by one, on random tokens that lie on the device. Variants live at the same time and take turns, so that a card that
slows down slows all. Beside the data sheet's MFU, FLOP/s are set against a bf16 product of large matrices, which takes
its turn too. Peak memory is a variant's own: what the others hold is taken off. What a step consists of is told by its
kernels, in steps of their own. --quick runs it all on the CPU in miniature, to test it.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import release_memory
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.profiler import profile

from benchmarks.measure import Group
from benchmarks.nanogpt import build_peer
from config.schema import OptimizerConfig, ScheduleConfig, TrainConfig
from data.sampler import GlobalBatches
from model.config import GPTConfig
from model.gpt import GPTModel
from training.block_stats import BlockStatistics
from training.metrics import StepMetrics
from training.optimizer import build_optimizer
from training.prepare_model import no_compiler, prepare_network
from training.step import TrainState, train_step
from training.throughput import peak_bf16_flops

PEER, PRODUCT = "nanogpt", "a large product"
OPTIMIZER = OptimizerConfig(lr=1e-4)  # the other values are nanoGPT's too
COMPILED_REGION = "Torch-Compiled Region"
ANNOTATIONS = (COMPILED_REGION, "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
BACKENDS = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("flash", "cudnn", "efficient")}
RECOMPUTED, WHOLE_LOSS = "activation_checkpointing", "whole_loss"
SETTINGS = {"ours": {}, RECOMPUTED: {RECOMPUTED: True}, WHOLE_LOSS: {"chunked_loss": False}}  # of train.py
CASES = {  # shape, context, batch, variants, attention, in the order of what a reader wants to know first
    "124m_1024": ("124M", 1024, 32, ["ours", PEER, WHOLE_LOSS], None),
    "1.3b_4096": ("1.3B", 4096, 4, ["ours", PEER], None),
    # A backend holds for a whole group: compiled code does not notice that it was changed.
    **{f"124m_1024_{backend}": ("124M", 1024, 32, ["ours"], backend) for backend in BACKENDS},
    "124m_4096": ("124M", 4096, 8, ["ours", PEER], None),
    "1.3b_1024": ("1.3B", 1024, 16, ["ours", PEER], None),
    "1.3b_4096_settings": ("1.3B", 4096, 4, ["ours", RECOMPUTED], None),
}


class Scale(NamedTuple):
    """How much is measured, and on what."""

    device: str = "cuda"
    shapes: tuple[tuple[int, ...], ...] = ((12, 12, 768, 50304), (24, 16, 2048, 50304))
    backend: str = "inductor"
    product_size: int = 8192
    window_seconds: float = 2.0
    warm_up_steps: int = 5
    context: int | None = None  # in place of a case's, with a batch of one

    def config(self, shape: str, context: int) -> GPTConfig:
        """As nanoGPT has it: without biases and dropout, with tied embeddings."""
        n_layers, n_heads, d_model, vocab_size = self.shapes[["124M", "1.3B"].index(shape)]
        sizes = dict(n_layers=n_layers, n_heads=n_heads, d_model=d_model, d_ff=4 * d_model)
        return GPTConfig(vocab_size, self.context or context, **sizes, dropout=0.0, bias=False, tie_embeddings=True)


# Short sequences have another attention on a CPU, on which the backends would have no effect.
MINIATURE = Scale("cpu", ((1, 2, 32, 64), (2, 2, 32, 64)), "eager", 64, 0.0, 2, context=340)
Built = tuple[nn.Module, Optimizer, Callable[[], Tensor]]  # the last does a step and returns its loss


def ours(config: GPTConfig, tokens: Tensor, scale: Scale, **settings: bool) -> Built:
    """This repository's model and step: one turn of the loop in train.py."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=scale.device == "cpu")
    with torch.device(scale.device) as device:  # random numbers for a billion weights take a CPU many seconds
        network = GPTModel(config)
    run = TrainConfig(compile=scale.backend == "inductor", schedule=ScheduleConfig("constant"), **settings)
    prepare_network(network, run, device)
    for block in network.blocks if not run.compile else ():
        block.compile(backend=scale.backend)
    optimizer = build_optimizer(network, OPTIMIZER)
    model, sizes = accelerator.prepare_model(network), GlobalBatches(1, len(tokens), 0)
    metrics, statistics = StepMetrics(sizes, len(tokens), accelerator.device), BlockStatistics([], accelerator)
    state = TrainState(run, accelerator, network, model, optimizer, sizes, metrics, statistics)
    done = 0

    def step() -> Tensor:
        nonlocal done
        pending = train_step(state, done, [{"input_ids": tokens, "labels": tokens}])
        metrics.read()
        done += 1
        return pending.message[2] * pending.loss_denominator / pending.num_targets()

    return network, optimizer, step


def nanogpt(config: GPTConfig, tokens: Tensor, scale: Scale, path: Path) -> Built:
    """nanoGPT's model and step: one turn of the loop in its train.py, whose gradient scaler does nothing in bf16."""
    network, optimizer = build_peer(path, config, OPTIMIZER, scale.device)
    model, targets = torch.compile(network, backend=scale.backend), tokens.roll(-1, dims=1)

    def step() -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        with torch.autocast(scale.device, torch.bfloat16):
            _logits, loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return network, optimizer, step


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Of one time that it is done, without a wait in between."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - start) / times


@dataclass
class Variant:
    """A case: a model and its step, built at the first call; every call times a window of steps on end."""

    build: Callable[[], Built]
    tokens: int  # of a step
    flops_per_token: float
    scale: Scale
    window: int = 0  # steps

    def prepare(self) -> None:
        """Until it is compiled and its optimizer has its moments."""
        release_memory()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        network, _, self.step = self.build()
        parameters, first_loss = sum(weight.numel() for weight in network.parameters()), str(self.step().item())
        for _ in range(self.scale.warm_up_steps):
            seconds = seconds_of(self.step, 1)
        self.window = max(1, round(self.scale.window_seconds / seconds))
        self.facts = {"parameters": parameters, "first_loss": first_loss, "kernels": self.kernels()}
        release_memory()
        self.resting = torch.cuda.memory_allocated() - before

    def __call__(self) -> dict:
        if not self.window:
            self.prepare()
        on_cuda, others = self.scale.device == "cuda", torch.cuda.memory_allocated() - self.resting
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        speed = self.tokens / seconds_of(self.step, self.window)
        measured = {"tokens_per_second": speed, "flops_per_second": speed * self.flops_per_token}
        if on_cuda:
            measured["peak_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30
        if on_cuda and (data_sheet := peak_bf16_flops(torch.device("cuda"))):
            measured["mfu"] = speed * self.flops_per_token / data_sheet
        return measured | {"loss": self.step().item()} | self.facts

    def kernels(self, steps: int = 3, top: int = 15) -> dict:
        """The kernels that take the most time on the device; on a CPU, operators."""
        where, time_of = DeviceType.CPU, "self_cpu_time_total"
        if self.scale.device == "cuda":
            where, time_of = DeviceType.CUDA, "self_device_time_total"
        with profile() as profiled:
            seconds_of(self.step, steps)
        averages = profiled.key_averages()
        regions = [row for row in averages if row.device_type == DeviceType.CPU and row.key.startswith(COMPILED_REGION)]
        # An operator is charged with its kernels' time too, and an annotation spans them: either would count twice.
        rows = [row for row in averages if row.device_type == where]
        rows = [row for row in rows if not (row.is_user_annotation or row.key.startswith(ANNOTATIONS))]
        rows.sort(key=lambda row: getattr(row, time_of), reverse=True)
        total = sum(getattr(row, time_of) for row in rows)
        return {  # torch.compile passes over what it cannot take without a word: then no region is counted
            "compiled_regions_a_step": sum(row.count for row in regions) / steps,
            "milliseconds_a_step": round(total / 1000 / steps, 3),
            "top": {row.key[:160]: [round(getattr(row, time_of) / total, 4), row.count / steps] for row in rows[:top]},
        }


def product(scale: Scale) -> dict[str, float]:
    """The rate of a product of two random bf16 matrices: the most that a step can hope for on this card."""
    size = scale.product_size
    one, other = torch.randn(2, size, size, device=scale.device, dtype=torch.bfloat16)
    seconds_of(lambda: one @ other, 5)
    return {"flops_per_second": 2 * size**3 / seconds_of(lambda: one @ other, 20)}


def group(name: str, scale: Scale, peer: Path | None) -> Group:
    shape, context, batch, names, _ = CASES[name]
    config = scale.config(shape, context)
    size = 1 if scale.context else batch, config.max_position_embeddings
    tokens = torch.randint(config.vocab_size, size, device=scale.device)
    with torch.device("meta"):
        flops_per_token = GPTModel(config).flops_per_token(tokens.shape[1])
    builders = {name: partial(ours, config, tokens, scale, **SETTINGS[name]) for name in names if name != PEER}
    if PEER in names and peer:
        builders[PEER] = partial(nanogpt, config, tokens, scale, peer)
    cases = {name: Variant(build, tokens.numel(), flops_per_token, scale) for name, build in builders.items()}
    against = {name: [PRODUCT, PEER, "ours"] if name != PEER else [PRODUCT] for name in cases}
    return Group(name, {PRODUCT: partial(product, scale), **cases}, against)


def gpu(options: Namespace) -> Iterator[Group]:
    scale = MINIATURE if options.quick else Scale()
    if not options.quick and not torch.cuda.is_available():
        sys.exit("no GPU is here; --quick tests the script on a CPU")
    if not options.quick and (missing := no_compiler(torch.device("cuda"))):
        sys.exit(f"the blocks would not be compiled: {missing}")
    torch.set_float32_matmul_precision("high")
    # Its key does not name the backend of attention, so that one group would be given the code of another.
    torch._functorch.config.enable_autograd_cache = False
    for name, (*_, backend) in CASES.items():
        members = group(name, scale, options.nanogpt)
        with sdpa_kernel(BACKENDS[backend]) if backend else nullcontext():
            yield members
        members.cases.clear()
        torch.compiler.reset()  # which finds compiled code by function, and gives up on one after eight shapes
        release_memory()
