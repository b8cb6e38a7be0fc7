"""Repeat a training step on one batch of random tokens: python -m tools.benchmark.steps KIND [settings of train.py].

KIND is `train`, the step of train.py; `bare`, a hand-written step without Accelerate; or a checkout of nanoGPT, whose
model and optimizer the hand-written step then trains. `product SIZE` multiplies square matrices instead.

Print the tokens of a step, a line each log_every steps, and at the end one line of JSON with the figures: times are
those of the second half of the steps, and peak memory is what is used beyond the imports. Several processes under
`accelerate launch` train `bare` by DistributedDataParallel. ACCELERATE_MIXED_PRECISION is the precision, and ATTENTION
may name the kernel of attention.
"""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from itertools import count
from pathlib import Path

import psutil
import torch
import torch._functorch.config
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile

from config.parser import parse_config
from config.schema import TrainConfig
from data.corpus import load_corpus
from distributed.cpu import prepare_cpu
from distributed.world import is_main_process, num_processes
from model.gpt import GPTModel, build_on_meta_device
from run.directory import Run
from run.resolve import GivenModels
from train import build_state, train_step, warm_up
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network
from training.throughput import peak_bf16_flops, peak_memory_bytes

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
ANNOTATIONS = ("Torch-Compiled Region", "CompiledFunction", "TorchDynamo", "ProfilerStep", "Optimizer.", "##")
Step = Callable[[bool], float | None]  # trains a step; with True it waits for the device and returns the loss


def step_of_train(config: TrainConfig, tokens: Tensor) -> Step:
    """Build the model and return the step of train.py, with accumulation over micro-batches."""
    with DEVICE:  # initialising a billion weights takes a CPU many seconds
        state = build_state(config, Run(Path()), Accelerator(cpu=not ON_GPU), GivenModels(None, None))
    batches = [{"input_ids": part, "labels": part} for part in tokens.split(config.micro_batch_size)]
    warm_up(state, batches[0])
    completed_steps = count()

    def step(wait: bool = False) -> float | None:
        train_step(state, next(completed_steps), batches)
        result = state.results.read(wait)
        return result.means["loss"] if wait and result else None

    return step


def bare_step(config: TrainConfig, tokens: Tensor, peer: Path | None) -> Step:
    """Build this repository's model, or nanoGPT's, and return a hand-written step."""
    if peer:
        torch.backends.cuda.matmul.allow_tf32 = True
        network, optimizer = nanogpt_model(peer, config)
        model, inputs = torch.compile(network) if config.compile else network, (tokens, tokens.roll(-1, dims=1))
    else:
        prepare_cpu()
        model = network = GPTModel(config.model)
        prepare_network(network, config, DEVICE)
        optimizer, inputs = build_optimizer(network, config.optimizer), (tokens, None, tokens)
    if num_processes() > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    in_bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"

    def step(wait: bool = False) -> float | None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=in_bf16):
            loss = model(*inputs)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() if wait else None

    return step


def nanogpt_model(path: Path, config: TrainConfig) -> tuple[nn.Module, Optimizer]:
    """Return nanoGPT's model in the shape of ours, without biases, and its optimizer."""
    # Imported under another name, because our package is called `model` too.
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    assert spec, path
    assert spec.loader, path
    theirs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    model, optimizer = config.model, config.optimizer
    sizes = dict(n_layer=model.n_layers, n_head=model.n_heads, n_embd=model.d_model, vocab_size=model.vocab_size)
    shape = theirs.GPTConfig(block_size=model.max_position_embeddings, dropout=model.dropout, bias=False, **sizes)
    with DEVICE, redirect_stdout(sys.stderr):  # nanoGPT prints
        network = theirs.GPT(shape)
        groups = optimizer.weight_decay, optimizer.lr, optimizer.betas
        return network, network.configure_optimizers(*groups, DEVICE.type)


def clock() -> float:
    """Return the time in seconds when the device has done all that was asked for."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_steps(step: Step, config: TrainConfig) -> dict[str, float]:
    """Train; return the time of a step, on a GPU also the peak of the memory, in the second half of the steps."""
    start = clock()
    for number in range(1, config.steps + 1):
        step(False)
        if is_main_process() and number % config.tracking.log_every == 0:
            print(f"[step {number}", flush=True)
        if number == config.steps // 2:
            start = clock()
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
    return {"seconds_a_step": (clock() - start) / math.ceil(config.steps / 2), "peak_mib": peak_memory_bytes() / 2**20}


def profile_kernels(step: Step, steps: int = 3) -> dict[str, float]:
    """Return the time and number of the GPU's kernels in a step."""
    with profile() as profiled:
        for _ in range(steps):
            step(False)
        clock()
    # Operators are charged with the time of their kernels, and annotations span them: both would count twice.
    kernels = [
        row
        for row in profiled.key_averages()
        if row.device_type.name == "CUDA" and not (row.is_user_annotation or row.key.startswith(ANNOTATIONS))
    ]
    milliseconds, number = sum(row.self_device_time_total for row in kernels) / 1000, sum(row.count for row in kernels)
    return {"kernel_milliseconds": milliseconds / steps, "kernels": number / steps}


def measure_product(size: int, times: int = 20) -> dict[str, float]:
    """Return the rate of a product of two large bfloat16 matrices, the most that a step can reach on this GPU."""
    one, other = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16)
    start = clock()
    for number in range(2 * times):
        start = clock() if number == times else start
        torch.mm(one, other)
    return {"flops_per_second": 2 * size**3 * times / (clock() - start)}


def main() -> None:
    """Print the figures."""
    kind, *words = sys.argv[1:]
    if kind == "product":
        print(json.dumps(measure_product(int(words[0]))))
        return
    config = parse_config(words, num_processes())
    config = load_corpus(config).fill_in(config)
    imports_mib = 0.0 if ON_GPU else psutil.Process().memory_info().rss / 2**20
    torch.manual_seed(config.seed)
    batch = config.global_batch_size or config.micro_batch_size
    tokens = torch.randint(config.model.vocab_size or 0, (batch, config.seq_len), device=DEVICE)
    tokens_a_step = tokens.numel() * num_processes()
    if is_main_process():
        print(f"tokens: {tokens_a_step} a step", flush=True)
    attention = os.environ.get("ATTENTION")
    # The key of the compiler's cache does not include the kernel of attention.
    torch._functorch.config.enable_autograd_cache = not attention
    with sdpa_kernel(SDPBackend[f"{attention}_ATTENTION"]) if attention else nullcontext():
        if kind == "train":
            step = step_of_train(config, tokens)
        else:
            step = bare_step(config, tokens, None if kind == "bare" else Path(kind))
        figures = measure_steps(step, config)
        figures["loss"] = step(True) or math.nan
        figures |= profile_kernels(step) if ON_GPU else {}
    figures["peak_mib"] -= imports_mib
    figures["peak_gib"] = figures["peak_mib"] / 1024
    figures["tokens_per_second"] = tokens_a_step / figures["seconds_a_step"]
    flops_per_token = build_on_meta_device(config.model).flops_per_token(config.seq_len)
    figures["flops_per_second"] = figures["tokens_per_second"] * flops_per_token
    if ON_GPU and (data_sheet := peak_bf16_flops(DEVICE)):
        figures["mfu"] = figures["flops_per_second"] / data_sheet
    if is_main_process():
        print(json.dumps(figures), flush=True)
    if num_processes() > 1:
        dist.barrier()
    os._exit(0)  # skips the interpreter's exit, where threads of gloo may abort


if __name__ == "__main__":
    main()
