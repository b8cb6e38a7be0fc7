"""A hand-written training loop without Accelerate, data loader, logging and checkpoints.

Take the arguments of train.py, and train the same model with the same optimizer on one batch of random tokens. Print
the tokens of a step, a line each log_every steps, and at the end the median time of a step and the increase of peak
memory since the imports. Under `accelerate launch` with several processes the model is wrapped in
DistributedDataParallel. The environment variable PEER may name a checkout of nanoGPT, whose model is then trained.
"""

import json
import math
import os
import statistics
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from config.parser import parse_config
from data.corpus import load_corpus
from distributed.cpu import prepare_cpu
from distributed.world import is_main_process, num_processes
from model.gpt import GPTModel
from tools.benchmark.programs import nanogpt_model
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network
from training.throughput import peak_memory_bytes


def main() -> None:
    """Train, and print the figures as one line of JSON."""
    processes = num_processes()
    config = parse_config(num_processes=processes)
    config = load_corpus(config).fill_in(config)
    after_imports, every = psutil.Process().memory_info().rss, config.tracking.log_every
    tokens = torch.randint(config.model.vocab_size or 0, (config.micro_batch_size, config.seq_len))
    torch.manual_seed(config.seed)
    if peer := os.environ.get("PEER"):
        network, optimizer = nanogpt_model(Path(peer), config.model, config.optimizer)
        inputs = tokens, tokens
    else:
        prepare_cpu()
        network, inputs = GPTModel(config.model), (tokens, None, tokens)
        prepare_network(network, config, torch.device("cpu"))
        optimizer = build_optimizer(network, config.optimizer)
    model = network
    if processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    if is_main_process():
        print(f"tokens: {tokens.numel() * processes} a step", flush=True)
    times = [time.perf_counter()]
    for step in range(1, config.steps + 1):
        model(*inputs)[1].backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        if is_main_process() and step % every == 0:
            print(f"[step {step}", flush=True)
    seconds = [end - start for start, end in zip(times[1:], times[2:], strict=False)]  # the first step allocates
    figures = {"seconds_a_step": statistics.median(seconds), "peak_mib": (peak_memory_bytes() - after_imports) / 2**20}
    if is_main_process():
        print(json.dumps(figures), flush=True)
    if processes > 1:
        dist.barrier()
    os._exit(0)  # skips the interpreter's exit, where threads of gloo may abort


if __name__ == "__main__":
    main()
