"""A training loop as one writes it by hand: no Accelerate, no data loader, no logging, no checkpoints.

Takes train.py's arguments, trains the same model with the same optimizer on one batch of random tokens, and prints what
it measured: the median over every log_every steps, and the peak of resident memory over that after the imports. Under
`torchrun --nproc-per-node 2 -m` the model is wrapped in DistributedDataParallel, or what WAY in the environment names
of examples/overlap.py is done; then the last step is profiled too. PEER is a checkout of nanoGPT, to train its model.
"""

import json
import os
import statistics
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from benchmarks.nanogpt import build_peer
from config.parser import parse_config
from data.corpus import load_corpus
from distributed.cpu import prepare_cpu
from examples.overlap import WAYS, average_gradients, hidden, lanes
from model.gpt import GPTModel
from training.optimizer import build_optimizer
from training.prepare_model import prepare_network
from training.throughput import peak_memory_bytes


def main() -> None:
    processes, peer, way = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("PEER"), os.environ.get("WAY")
    say = print if os.environ.get("RANK", "0") == "0" else lambda *_, **__: None
    config = parse_config(num_processes=processes)
    config = load_corpus(config).complete(config)
    after_imports, every = psutil.Process().memory_info().rss, config.tracking.log_every
    tokens = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.seq_len))
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
        if way is None or WAYS[way]:
            model = DistributedDataParallel(network, bucket_cap_mb=WAYS.get(way), gradient_as_bucket_view=True)

    def step() -> None:
        model(*inputs)[1].backward()
        if processes > 1 and model is network:
            average_gradients(network)
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(config.steps // every):
        start = time.perf_counter()
        for _ in range(every):
            step()
        seconds.append((time.perf_counter() - start) / every)
        say(f"[step {every} more]", flush=True)
    median, peak_bytes = statistics.median(seconds[1:]), peak_memory_bytes() - after_imports
    figures = {"seconds_a_step": median, "peak_mib": peak_bytes / 2**20}
    if not way:
        figures["tokens_per_second"] = tokens.numel() * processes / median
    if not peer:
        figures["flops_per_token"] = network.flops_per_token(config.seq_len)
        figures["attention_flops_per_token"] = figures["flops_per_token"] - network.flops_per_token(0)
    if way:
        dist.barrier()
        with profile() as profiled:
            step()
        figures["share_hidden"] = float(hidden(*lanes(profiled.events())))
    say(json.dumps(figures), flush=True)
    if processes > 1:
        dist.barrier()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort


if __name__ == "__main__":
    main()
