"""What a training step costs on one GPU, and what of it pays.

Two models of the GPT-2 kind in bf16, with nanoGPT beside them where --nanogpt says where its model.py is, then
settings one by one. The step is that of train.py's loop without the data loader, nanoGPT's that of its train.py; both
read random tokens that lie on the device. Variants live at the same time and take turns, so that a card that slows down
slows all.

Beside the data sheet's MFU, FLOP/s are set against a bf16 product of large matrices that takes its turn too. Peak
memory is a variant's own: what the others hold is taken off. What a step consists of is told by its kernels, in steps
of their own. --quick runs it all on the CPU in miniature, to test it.
"""

import gc
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch._functorch.config
from accelerate import Accelerator
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import jsonargparse  # noqa: F401
except ImportError:  # a lent machine may lack it; config.py names its types and its parser, neither is used here
    sys.modules["jsonargparse"] = sys.modules["jsonargparse.typing"] = MagicMock()

from benchmarks.measure import Group
from benchmarks.nanogpt import build_peer
from config import OptimizerConfig, TrainConfig
from data.order import derive_seed
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import no_compiler, prepare_network
from training.optimizer import build_optimizer, set_lr
from training.step_totals import StepTotals
from training.throughput import peak_bf16_flops

BUDGET_SECONDS = 420  # no group starts later
PEER, PRODUCT = "nanogpt", "a large product"
OPTIMIZER = OptimizerConfig(lr=1e-4)  # the other values are nanoGPT's too
COMPILED_REGION = "Torch-Compiled Region"
ANNOTATIONS = (COMPILED_REGION, "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
BACKENDS = {name: getattr(SDPBackend, f"{name.upper()}_ATTENTION") for name in ("flash", "cudnn", "efficient")}
SETTINGS = {  # what a variant does differently from a plain run
    **{"ours": {}, "chunked_loss": {"chunked_loss": True}, "whole_loss": {"chunked_loss": False}},
    **{"foreach_adamw": {"foreach": True}, "activation_checkpointing": {"activation_checkpointing": True}},
}
CASES = {  # shape, context, batch, variants, attention, in the order of what a reader wants to know first
    "124m_1024": ("124M", 1024, 32, ["ours", PEER], None),
    "1.3b_4096": ("1.3B", 4096, 4, ["ours", PEER], None),
    "124m_1024_settings": ("124M", 1024, 32, ["ours", "chunked_loss", "whole_loss", "foreach_adamw"], None),
    # A backend holds for a whole group: compiled code does not notice that it was changed.
    **{f"124m_1024_{backend}": ("124M", 1024, 32, ["ours"], backend) for backend in BACKENDS},
    "124m_4096": ("124M", 4096, 8, ["ours", PEER], None),
    "1.3b_1024": ("1.3B", 1024, 16, ["ours", PEER], None),
    "1.3b_4096_settings": ("1.3B", 4096, 4, ["ours", "activation_checkpointing"], None),
}


@dataclass(frozen=True)
class Scale:
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
        sizes = dict(n_layers=n_layers, n_heads=n_heads, d_model=d_model, d_ff=4 * d_model, vocab_size=vocab_size)
        sizes["max_position_embeddings"] = self.context or context
        return GPTConfig(**sizes, dropout=0.0, bias=False, tie_embeddings=True)


# Short sequences have another attention on a CPU, on which the backends would have no effect.
MINIATURE = Scale("cpu", ((1, 2, 32, 64), (2, 2, 32, 64)), "eager", 64, 0.0, 2, context=340)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object], times: int) -> float:
    """Of one time that it is done, without a wait in between."""
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - start) / times


class Variant:
    """A case: a model and its step, built at the first call; every call times a window of steps on end."""

    def __init__(self, config: GPTConfig, tokens: Tensor, scale: Scale, **settings):
        self.config, self.tokens, self.scale, self.on_cuda = config, tokens, scale, scale.device == "cuda"
        self.facts, self.settings, self.window = {}, settings, 0

    def prepare(self) -> None:
        """Until it is compiled and its optimizer has its moments."""
        free_memory()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        self.build(**self.settings)
        self.facts["parameters"] = sum(parameter.numel() for parameter in self.network.parameters())
        self.facts["first_loss"] = str(self.step().item())
        for _ in range(self.scale.warm_up_steps):
            seconds = seconds_of(self.step, 1)
        self.window, self.facts["kernels"] = max(1, round(self.scale.window_seconds / seconds)), self.kernels()
        with torch.device("meta"):
            self.flops_per_token = GPTModel(self.config).flops_per_token(self.tokens.shape[1])
        free_memory()
        self.resting = torch.cuda.memory_allocated() - before

    def __call__(self) -> dict:
        if not self.window:
            self.prepare()
        others = torch.cuda.memory_allocated() - self.resting
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        speed = self.tokens.numel() / seconds_of(self.step, self.window)
        measured = {"tokens_per_second": speed, "flops_per_second": speed * self.flops_per_token}
        if self.on_cuda:
            measured["peak_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30
            if data_sheet := peak_bf16_flops(torch.device("cuda")):
                measured["mfu"] = speed * self.flops_per_token / data_sheet
        return measured | {"loss": self.step().item()} | self.facts

    def kernels(self, steps: int = 3, top: int = 15) -> dict:
        """The kernels that take the most time on the device; on a CPU, operators."""
        activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * self.on_cuda]
        with torch.profiler.profile(activities=activities) as profile:
            seconds_of(self.step, steps)
        where, time_of = DeviceType.CPU, "self_cpu_time_total"
        if self.on_cuda:
            where, time_of = DeviceType.CUDA, "self_device_time_total"
        averages = profile.key_averages()
        regions = [row for row in averages if row.device_type == DeviceType.CPU and row.key.startswith(COMPILED_REGION)]
        # An operator is charged with its kernels' time too, and an annotation spans them: either would count twice.
        rows = [row for row in averages if row.device_type == where]
        rows = [row for row in rows if not (row.is_user_annotation or row.key.startswith(ANNOTATIONS))]
        rows.sort(key=lambda row: getattr(row, time_of), reverse=True)
        total = sum(getattr(row, time_of) for row in rows)
        attention = [row for row in rows if re.search("flash|fmha|sdpa|attention", row.key, re.IGNORECASE)]
        return {  # torch.compile passes over what it cannot take without a word: then no region is counted
            "compiled_regions_a_step": sum(row.count for row in regions) / steps,
            "milliseconds_a_step": round(total / 1000 / steps, 3),
            "top": {row.key[:160]: [round(getattr(row, time_of) / total, 4), row.count / steps] for row in rows[:top]},
            "attention_calls_a_step": {row.key: row.count / steps for row in attention},
        }


class Ours(Variant):
    """This repository's model and step."""

    def build(self, foreach: bool = False, **compute: bool) -> None:
        self.accelerator = Accelerator(mixed_precision="bf16", cpu=self.scale.device == "cpu")
        with torch.device(self.scale.device):  # random numbers for a billion weights take a CPU many seconds
            self.network = GPTModel(self.config)
        run = TrainConfig(compile=self.scale.backend == "inductor", **compute)
        prepare_network(self.network, run, torch.device(self.scale.device))
        for block in self.network.blocks if not run.compile else ():
            block.compile(backend=self.scale.backend)
        optimizer = build_optimizer(self.network, OPTIMIZER)
        for group in optimizer.param_groups if foreach else ():
            group["fused"], group["foreach"] = False, True
        self.model, self.optimizer = self.accelerator.prepare(self.network, optimizer)
        self.totals = StepTotals(None, 1, 0, self.accelerator)  # the order only words an error
        self.batch, self.done = {"input_ids": self.tokens, "labels": self.tokens}, 0
        self.target_tokens = self.count_targets()

    def count_targets(self) -> Tensor:
        return (self.batch["labels"][:, 1:] != -100).sum()

    def step(self) -> Tensor:
        """One turn of the loop in train.py; returns the loss."""
        set_lr(self.optimizer, OPTIMIZER.lr)
        torch.manual_seed(derive_seed(0, "dropout", self.done, 0))
        loss = self.model(**self.batch, num_items_in_batch=self.target_tokens)[1]
        self.accelerator.backward(loss)
        self.totals.add(loss)
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self.done += 1
        self.target_tokens = self.totals.exchange(self.done, grad_norm, self.count_targets(), stop=False)
        self.totals.read(at_once=False)
        if self.totals.finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Peer(Variant):
    """nanoGPT's model and step, from its own files."""

    def build(self, path: Path) -> None:
        self.network, self.optimizer = build_peer(path, self.config, OPTIMIZER, self.scale.device)
        self.model = torch.compile(self.network, backend=self.scale.backend)
        self.autocast = torch.autocast(self.scale.device, torch.bfloat16)
        self.targets = self.tokens.roll(-1, dims=1)

    def step(self) -> Tensor:
        """One turn of the loop in nanoGPT's train.py, whose gradient scaler does nothing in bf16; returns the loss."""
        set_lr(self.optimizer, OPTIMIZER.lr)
        with self.autocast:
            _logits, loss = self.model(self.tokens, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def product(scale: Scale) -> dict[str, float]:
    """The rate of a product of two random bf16 matrices: the most that a step can hope for on this card."""
    size = scale.product_size
    one, other = (torch.randn(size, size, device=scale.device, dtype=torch.bfloat16) for _ in range(2))
    seconds_of(lambda: one @ other, 5)
    return {"flops_per_second": 2 * size**3 / seconds_of(lambda: one @ other, 20)}


def group(name: str, scale: Scale, peer: Path | None) -> Group:
    shape, context, batch, names, _ = CASES[name]
    config, batch = scale.config(shape, context), 1 if scale.context else batch
    tokens = torch.randint(config.vocab_size, (batch, config.max_position_embeddings), device=scale.device)
    names = [variant for variant in names if variant != PEER or peer]
    cases = {variant: Ours(config, tokens, scale, **SETTINGS[variant]) for variant in names if variant != PEER}
    if PEER in names:
        cases[PEER] = Peer(config, tokens, scale, path=peer)
    against = {variant: [PRODUCT, PEER, "ours"] if variant != PEER else [PRODUCT] for variant in names}
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
        free_memory()
