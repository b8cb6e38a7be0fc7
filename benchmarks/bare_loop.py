"""A training loop by hand: no Accelerate, data loader, logging or checkpoints.

Takes the arguments of train.py, trains the same model with the same optimizer on one batch of random tokens and prints
the median time of a step over intervals of log_every steps, and the peak of resident memory above that after the
imports. With several processes, as under `accelerate launch`, the model is wrapped in DistributedDataParallel. The
environment variable PEER may name a checkout of nanoGPT, whose model is then trained instead.
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

from benchmarks.nanogpt import build_peer
from config.parser import parse_config
from data.corpus import load_corpus
from distributed.cpu import prepare_cpu
from model.gpt import GPTModel
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network
from training.throughput import peak_memory_bytes


def main() -> None:
    """Train, and print the figures as one line of JSON."""
    processes, peer = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("PEER")
    is_main = os.environ.get("RANK", "0") == "0"
    config = parse_config(num_processes=processes)
    config = load_corpus(config).complete(config)
    after_imports, every = psutil.Process().memory_info().rss, config.tracking.log_every
    tokens = torch.randint(config.model.vocab_size or 0, (config.micro_batch_size, config.seq_len))
    torch.manual_seed(config.seed)
    if peer:
        network, optimizer = build_peer(Path(peer), config.model, config.optimizer)
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

    def step() -> None:
        model(*inputs)[1].backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(config.steps // every):
        start = time.perf_counter()
        for _ in range(every):
            step()
        seconds.append((time.perf_counter() - start) / every)
        if is_main:
            print(f"[step {every} more]", flush=True)
    peak_bytes = peak_memory_bytes() - after_imports
    if is_main:
        figures = {"seconds_a_step": statistics.median(seconds[1:]), "peak_mib": peak_bytes / 2**20}
        print(json.dumps(figures), flush=True)
    if processes > 1:
        dist.barrier()
    os._exit(0)  # skips the interpreter's exit, where threads of gloo may abort


if __name__ == "__main__":
    main()
