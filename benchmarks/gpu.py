"""What a training step costs on one GPU, and what of it pays: python -m benchmarks.gpu [--nanogpt PATH]

Two models in bf16, with nanoGPT (https://github.com/karpathy/nanoGPT, a folder with its model.py) beside them if it is
given, then settings one by one. The step is that of train.py's loop without the data loader, nanoGPT's that of its
train.py; both read random tokens that lie on the device. Variants of a case live at the same time and take turns, so
that a card that slows down slows all of them; a ratio is the median over the rounds.

MFU is counted twice: against a bf16 product of 8192 x 8192 matrices, measured in the same case, and against the data
sheet. Peak memory is a variant's own: what the others hold is taken off. The pieces of a step come from CUDA events in
steps of their own, in which hooks tell the loss from the blocks.

No case starts after --budget_seconds; the file is written after each. --miniature runs it all on the CPU in a few
seconds, to test the script: its figures mean nothing.
"""

import argparse
import dataclasses
import gc
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch._functorch.config
from accelerate import Accelerator
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import record
from benchmarks.nanogpt import load_model_file
from config import OptimizerConfig, TrainConfig
from data.order import derive_seed
from model.config import GPTConfig
from model.gpt import GPTModel
from training.compute import no_compiler, prepare_network
from training.optimizer import build_optimizer, set_lr
from training.step_totals import StepTotals
from training.throughput import peak_bf16_flops

STARTED = time.monotonic()
PEER = "nanogpt"
OPTIMIZER = OptimizerConfig(lr=1e-4)  # the other values are nanoGPT's too
COMPILED_REGION = "Torch-Compiled Region"
ANNOTATIONS = (COMPILED_REGION, "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    """A model of the GPT-2 kind without biases and dropout, with tied embeddings, as nanoGPT has them."""

    n_layers: int
    n_heads: int
    d_model: int
    vocab_size: int = 50304


@dataclass(frozen=True)
class Setting:
    """What a variant does differently from a plain run."""

    chunked_loss: bool | None = None
    activation_checkpointing: bool = False
    foreach: bool = False


SETTINGS = {
    "ours": Setting(),
    "chunked_loss": Setting(chunked_loss=True),
    "whole_loss": Setting(chunked_loss=False),
    "foreach_adamw": Setting(foreach=True),
    "activation_checkpointing": Setting(activation_checkpointing=True),
}


@dataclass(frozen=True)
class Case:
    """Variants of one shape that take turns. The first is measured against the peer, or the others against the first.

    A backend of attention holds for a whole case: compiled code does not notice that it was changed.
    """

    shape: str
    context: int
    batch: int
    variants: tuple[str, ...]
    attention: str | None = None

    @property
    def reference(self) -> str:
        return PEER if PEER in self.variants else self.variants[0]


# In the order of what a reader wants to know first, because the budget may end the list.
CASES = {
    "124m_1024": Case("124M", 1024, 32, ("ours", PEER)),
    "1.3b_4096": Case("1.3B", 4096, 4, ("ours", PEER)),
    "124m_1024_settings": Case("124M", 1024, 32, ("ours", "chunked_loss", "whole_loss", "foreach_adamw")),
    "124m_1024_flash": Case("124M", 1024, 32, ("ours",), "flash"),
    "124m_1024_cudnn": Case("124M", 1024, 32, ("ours",), "cudnn"),
    "124m_1024_efficient": Case("124M", 1024, 32, ("ours",), "efficient"),
    "124m_4096": Case("124M", 4096, 8, ("ours", PEER)),
    "1.3b_1024": Case("1.3B", 1024, 16, ("ours", PEER)),
    "1.3b_4096_settings": Case("1.3B", 4096, 4, ("ours", "activation_checkpointing")),
}


@dataclass(frozen=True)
class Scale:
    """How much is measured, and on what."""

    device: torch.device
    shapes: dict[str, Shape]
    nanogpt: Path | None
    backend: str = "inductor"
    product_size: int = 8192
    rounds: int = 6
    window_seconds: float = 1.0
    warm_up_steps: int = 5

    def shrink(self, case: Case) -> Case:
        return case


@dataclass(frozen=True)
class Miniature(Scale):
    """The same cases, so small that a CPU needs a second for each."""

    backend: str = "eager"
    product_size: int = 64
    rounds: int = 2
    window_seconds: float = 0.0
    warm_up_steps: int = 2

    def shrink(self, case: Case) -> Case:
        # Short sequences have another attention on a CPU, on which the backends would have no effect.
        return dataclasses.replace(case, context=case.context // 3, batch=1)


SHAPES = {"124M": Shape(12, 12, 768), "1.3B": Shape(24, 16, 2048)}
MINIATURE_SHAPES = {"124M": Shape(1, 2, 32, 64), "1.3B": Shape(2, 2, 32, 64)}


class Marks:
    """A stopwatch on the device: each mark ends the piece that it names and begins the next."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def __call__(self, name: str) -> None:
        if self.on_cuda:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = time.perf_counter()
        self._marks.append((name, stamp))

    def seconds(self) -> dict[str, float]:
        """The median time of each piece; the one named "begin" is what lay between the others."""
        if self.on_cuda:
            torch.cuda.synchronize()
        durations: dict[str, list[float]] = {}
        for (_, before), (name, after) in pairwise(self._marks):
            elapsed = before.elapsed_time(after) / 1000 if self.on_cuda else after - before
            durations.setdefault(name, []).append(elapsed)
        return {name: statistics.median(values) for name, values in durations.items() if name != "begin"}


def unmarked(name: str) -> None:
    """In place of Marks where nothing is timed."""


class Ours:
    """This repository's model and step."""

    def __init__(self, case: Case, shape: Shape, setting: Setting, scale: Scale):
        torch.manual_seed(0)
        self.accelerator = Accelerator(mixed_precision="bf16", cpu=scale.device.type == "cpu")
        with scale.device:  # random numbers for a billion weights take a CPU many seconds
            self.network = GPTModel(gpt_config(case, shape))
        compiled = scale.backend == "inductor"
        config = TrainConfig(
            chunked_loss=setting.chunked_loss,
            activation_checkpointing=setting.activation_checkpointing,
            compile=compiled,
        )
        prepare_network(self.network, config, scale.device)
        for block in [] if compiled else self.network.blocks:
            block.compile(backend=scale.backend)
        optimizer = build_optimizer(self.network, OPTIMIZER)
        if setting.foreach:
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = False, True
        self.model, self.optimizer = self.accelerator.prepare(self.network, optimizer)
        self.totals = StepTotals(config, None, self.accelerator)  # the order only words an error
        tokens = random_tokens(case, shape, scale)
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.target_tokens = self.count_targets()
        self.done = 0

    def count_targets(self) -> torch.Tensor:
        return (self.batch["labels"][:, 1:] != -100).sum()

    def step(self, mark: Callable[[str], None] = unmarked) -> torch.Tensor:
        """One turn of the loop in train.py; returns the loss."""
        mark("begin")
        set_lr(self.optimizer, OPTIMIZER.lr)
        losses = torch.zeros(1, device=self.accelerator.device)
        torch.manual_seed(derive_seed(0, "dropout", self.done, 0))
        _, loss = self.model(**self.batch, num_items_in_batch=self.target_tokens)
        mark("loss_forward")
        self.accelerator.backward(loss)
        mark("backward")
        losses[0] = loss.detach()
        grad_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self.done += 1
        self.target_tokens = self.totals.exchange(self.done, losses, grad_norm, self.count_targets(), stop=False)
        self.totals.read(at_once=False)
        mark("clip_and_totals")
        if self.totals.finite:
            self.optimizer.step()
        mark("optimizer")
        self.optimizer.zero_grad()
        return loss.detach()

    @contextmanager
    def splitting(self, mark: Callable[[str], None]) -> Iterator[None]:
        """Mark where the blocks end and the loss begins, in the forward and in the backward pass."""

        def at_hidden_states(module, inputs, hidden):
            mark("forward")
            hidden.register_hook(lambda gradient: mark("loss_backward"))

        handle = self.network.final_norm.register_forward_hook(at_hidden_states)
        yield
        handle.remove()


class Peer:
    """nanoGPT's model and step, from its own files."""

    def __init__(self, case: Case, shape: Shape, setting: Setting, scale: Scale):
        module = load_model_file(scale.nanogpt)
        config = module.GPTConfig(
            block_size=case.context,
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layers,
            n_head=shape.n_heads,
            n_embd=shape.d_model,
            dropout=0.0,
            bias=False,
        )
        torch.manual_seed(0)
        with scale.device:
            self.network = module.GPT(config)
        self.optimizer = self.network.configure_optimizers(
            OPTIMIZER.weight_decay, OPTIMIZER.lr, OPTIMIZER.betas, scale.device.type
        )
        self.model = torch.compile(self.network, backend=scale.backend)
        self.autocast = torch.autocast(scale.device.type, torch.bfloat16)
        self.tokens = random_tokens(case, shape, scale)
        self.targets = self.tokens.roll(-1, dims=1)

    def step(self, mark: Callable[[str], None] = unmarked) -> torch.Tensor:
        """One turn of the loop in nanoGPT's train.py, whose gradient scaler does nothing in bf16; returns the loss."""
        mark("begin")
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr
        with self.autocast:
            _logits, loss = self.model(self.tokens, self.targets)
        mark("forward")
        loss.backward()
        mark("backward")
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        mark("clip")
        self.optimizer.step()
        mark("optimizer")
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def splitting(self, mark: Callable[[str], None]) -> nullcontext:
        """The model is compiled as one: its loss cannot be told from its forward pass."""
        return nullcontext()


@dataclass
class Runner:
    """A variant that is ready to be timed."""

    trainer: Ours | Peer
    resting_bytes: int
    window_steps: int
    seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0


def gpt_config(case: Case, shape: Shape) -> GPTConfig:
    return GPTConfig(
        **dataclasses.asdict(shape),
        d_ff=4 * shape.d_model,
        max_position_embeddings=case.context,
        dropout=0.0,
        bias=False,
        tie_embeddings=True,
    )


def random_tokens(case: Case, shape: Shape, scale: Scale) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (case.batch, case.context), device=scale.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def survive(figures: dict) -> Iterator[None]:
    """Record what goes wrong inside in `figures["error"]`, and go on.

    The tensors of a failed variant are free only after it: inside, the traceback still holds them.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        figures["error"] = f"out of memory: {str(error).splitlines()[0]}"
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        figures["error"] = f"{type(error).__name__}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"


def matrix_flops_per_second(scale: Scale) -> float:
    """The rate of a product of two random bf16 matrices: the most that a step can hope for on this card."""
    size, marks = scale.product_size, Marks(scale.device)
    one, other = (torch.randn(size, size, device=scale.device, dtype=torch.bfloat16) for _ in range(2))
    for index in range(25):
        if index >= 5:
            marks("begin")
        one @ other
        if index >= 5:
            marks("product")
    return 2 * size**3 / marks.seconds()["product"]


def data_sheet_flops_per_second(device: torch.device) -> float | None:
    return (peak_bf16_flops(device) or None) if device.type == "cuda" else None


def prepare(name: str, case: Case, scale: Scale, figures: dict) -> Runner:
    """Build a variant and run it until it is compiled and its optimizer has its moments."""
    before = allocated_bytes(scale.device)
    start = time.perf_counter()
    trainer = (Peer if name == PEER else Ours)(case, scale.shapes[case.shape], SETTINGS.get(name, Setting()), scale)
    figures["parameters"] = sum(parameter.numel() for parameter in trainer.network.parameters())
    figures["first_loss"] = trainer.step().item()
    synchronize(scale.device)
    figures["first_step_seconds"] = time.perf_counter() - start
    for _ in range(scale.warm_up_steps):
        synchronize(scale.device)
        start = time.perf_counter()
        trainer.step()
        synchronize(scale.device)
    window_steps = max(1, round(scale.window_seconds / (time.perf_counter() - start)))
    free_memory(scale.device)
    return Runner(trainer, allocated_bytes(scale.device) - before, window_steps)


def time_window(runner: Runner, device: torch.device) -> None:
    """Some steps on end, without a wait in between."""
    others = allocated_bytes(device) - runner.resting_bytes
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(runner.window_steps):
        runner.trainer.step()
    synchronize(device)
    runner.seconds.append((time.perf_counter() - start) / runner.window_steps)
    if device.type == "cuda":
        runner.peak_bytes = max(runner.peak_bytes, torch.cuda.max_memory_allocated() - others)


def time_pieces(trainer: Ours | Peer, device: torch.device, steps: int = 5) -> dict:
    """Where the time of a step goes, in seconds and as shares of the step."""
    marks = Marks(device)
    with trainer.splitting(marks):
        for _ in range(steps):
            trainer.step(marks)
    pieces = marks.seconds()
    total = sum(pieces.values())
    figures = {"seconds": pieces, "optimizer_share": pieces["optimizer"] / total}
    if "loss_backward" in pieces:
        figures["loss_share"] = (pieces["loss_forward"] + pieces["loss_backward"]) / total
    return figures


def profile_kernels(trainer: Ours | Peer, device: torch.device, steps: int = 3, top: int = 15) -> dict:
    """The kernels that take the most time on the device; on a CPU, operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            trainer.step()
        synchronize(device)
    where, attribute = DeviceType.CPU, "self_cpu_time_total"
    if device.type == "cuda":
        where, attribute = DeviceType.CUDA, "self_device_time_total"
    averages = profile.key_averages()
    regions = [row for row in averages if row.device_type == DeviceType.CPU and row.key.startswith(COMPILED_REGION)]
    # An operator is charged with its kernels' time too, and an annotation spans them: either would count them twice.
    rows = [
        row
        for row in averages
        if row.device_type == where and not (row.is_user_annotation or row.key.startswith(ANNOTATIONS))
    ]
    microseconds = {row.key: getattr(row, attribute) for row in rows}
    counts = {row.key: row.count for row in rows}
    total = sum(microseconds.values())
    kernels = [
        {
            "name": name[:160],
            "share": microseconds[name] / total,
            "milliseconds_a_step": microseconds[name] / 1000 / steps,
            "calls_a_step": counts[name] / steps,
        }
        for name in sorted(microseconds, key=microseconds.get, reverse=True)[:top]
    ]
    attention = {
        name: count / steps
        for name, count in counts.items()
        if re.search("flash|fmha|sdpa|attention", name, re.IGNORECASE)
    }
    return {
        "device_seconds_a_step": total / 1e6 / steps,
        "compiled_regions_a_step": sum(row.count for row in regions) / steps,
        "top": kernels,
        "attention_calls_a_step": attention,
    }


def summarise(runner: Runner, case: Case, flops_per_token: int, product: float, data_sheet: float | None) -> dict:
    """Speed and memory of a variant from its windows."""
    tokens = case.batch * case.context
    rates = [tokens / seconds for seconds in runner.seconds]
    tokens_per_second = statistics.median(rates)
    return {
        "tokens_per_second": tokens_per_second,
        "slowest_and_fastest_window": [min(rates), max(rates)],
        "step_seconds": tokens / tokens_per_second,
        "steps_a_window": runner.window_steps,
        "mfu_of_measured_product": tokens_per_second * flops_per_token / product,
        "mfu_of_data_sheet": tokens_per_second * flops_per_token / data_sheet if data_sheet else None,
        "peak_memory_gib": runner.peak_bytes / 2**30 if runner.peak_bytes else None,
    }


def compare(runners: dict[str, Runner], reference: str) -> dict:
    """Each variant over the reference: speed round by round, and peak memory."""
    if reference not in runners:
        return {}
    base = runners[reference]
    return {
        f"{name} / {reference}": {
            "tokens_per_second": statistics.median(
                theirs / own for own, theirs in zip(runner.seconds, base.seconds, strict=True)
            ),
            "peak_memory": runner.peak_bytes / base.peak_bytes if base.peak_bytes else None,
        }
        for name, runner in runners.items()
        if name != reference
    }


def measure(case: Case, scale: Scale) -> dict:
    """All figures of a case. A variant that fails is recorded and drops out; the others go on."""
    case, device = scale.shrink(case), scale.device
    shape = scale.shapes[case.shape]
    with torch.device("meta"):
        flops_per_token = GPTModel(gpt_config(case, shape)).flops_per_token(case.context)
    product, data_sheet = matrix_flops_per_second(scale), data_sheet_flops_per_second(device)
    figures = {
        **dataclasses.asdict(case),
        "shape": {"name": case.shape, **dataclasses.asdict(shape)},
        "variants": {name: {} for name in case.variants},
        "flops_per_token": flops_per_token,
        "measured_product_flops_per_second": product,
        "data_sheet_flops_per_second": data_sheet,
    }
    variants, runners = figures["variants"], {}
    with sdpa_kernel(ATTENTION[case.attention]) if case.attention else nullcontext():
        for name in case.variants:
            if name == PEER and scale.nanogpt is None:
                variants[name]["left_out"] = "--nanogpt was not given"
                continue
            with survive(variants[name]):
                runners[name] = prepare(name, case, scale, variants[name])
            if "error" in variants[name]:
                free_memory(device)
        for _ in range(scale.rounds):
            for name in list(runners):
                with survive(variants[name]):
                    time_window(runners[name], device)
                if "error" in variants[name]:
                    del runners[name]
                    free_memory(device)
        for name, runner in runners.items():
            variants[name] |= summarise(runner, case, flops_per_token, product, data_sheet)
            with survive(variants[name]):
                variants[name]["pieces"] = time_pieces(runner.trainer, device)
                variants[name]["kernels"] = profile_kernels(runner.trainer, device)
                variants[name]["last_loss"] = runner.trainer.step().item()
    figures["ratios"] = compare(runners, case.reference)
    return figures


def run_case(case: Case, scale: Scale) -> dict:
    """Measure a case and leave nothing of it behind."""
    figures: dict = {}
    start = time.monotonic()
    with survive(figures):
        figures |= measure(case, scale)
    torch.compiler.reset()  # compiled code is found by function, and after eight shapes torch.compile gives up on one
    free_memory(scale.device)
    figures["seconds"] = time.monotonic() - start
    return rounded(figures)


def rounded(figures):
    """The same with four significant digits: no timing has more."""
    if isinstance(figures, dict):
        return {name: rounded(value) for name, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def describe(name: str, figures: dict) -> str:
    """A few lines for the screen."""
    lines = [f"{name}: {figures['seconds']:.0f} s"]
    if "error" in figures:
        lines.append(f"  {figures['error']}")
    for variant, row in figures.get("variants", {}).items():
        line = f"  {variant:<25}"
        if row.get("kernels", {}).get("compiled_regions_a_step") == 0:
            line += " NOT COMPILED"  # torch.compile passes over what it cannot take without a word
        if "tokens_per_second" in row:
            line += f"{row['tokens_per_second']:>11,.0f} tokens/s  MFU {row['mfu_of_measured_product']:6.1%}"
            line += f"  {row['peak_memory_gib']:6.1f} GiB" if row["peak_memory_gib"] else ""
        lines.append(f"{line} {row.get('error', row.get('left_out', ''))}".rstrip())
    for pair, ratio in figures.get("ratios", {}).items():
        line = f"  {pair}: {ratio['tokens_per_second']:.3f} in tokens/s"
        lines.append(line + (f", {ratio['peak_memory']:.3f} in memory" if ratio["peak_memory"] else ""))
    return "\n".join(lines)


def versions(device: torch.device) -> dict:
    """What the record of a CPU benchmark does not name."""
    if device.type != "cuda":
        return {}
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "gpu_memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="folder with nanoGPT's model.py; default: no peer")
    parser.add_argument("--miniature", action="store_true", help="tiny, on the CPU; written only to --out")
    parser.add_argument("--out", type=Path, help="the file to write; default: benchmarks/results/gpu.json")
    parser.add_argument("--budget_seconds", type=float, default=420, help="no case starts later than this")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default: all")
    arguments = parser.parse_args()
    if not (arguments.miniature or torch.cuda.is_available()):
        parser.error("no GPU is here; --miniature tests the script on a CPU")
    if not arguments.miniature and (missing := no_compiler(torch.device("cuda"))):
        parser.error(f"the blocks would not be compiled: {missing}")
    if arguments.miniature:
        scale = Miniature(torch.device("cpu"), MINIATURE_SHAPES, arguments.nanogpt)
    else:
        scale = Scale(torch.device("cuda"), SHAPES, arguments.nanogpt)
    out = arguments.out or (None if arguments.miniature else record.RESULTS / "gpu.json")

    torch.set_float32_matmul_precision("high")
    # Its key does not name the backend of attention, so that one case would be given the code of another.
    torch._functorch.config.enable_autograd_cache = False
    figures = {"miniature": arguments.miniature, **versions(scale.device), "cases": {}, "left_out": []}
    for name in arguments.cases:
        if time.monotonic() - STARTED > arguments.budget_seconds:
            figures["left_out"].append(name)
            print(f"{name}: left out, the budget of {arguments.budget_seconds:.0f} s is spent", flush=True)
        else:
            figures["cases"][name] = run_case(CASES[name], scale)
            print(describe(name, figures["cases"][name]), flush=True)
        if out:
            record.write(out, figures)


if __name__ == "__main__":
    main()
