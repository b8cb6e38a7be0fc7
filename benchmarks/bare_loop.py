"""A training loop as one writes it by hand: no Accelerate, no data loader, no logging, no checkpoints.

Takes train.py's arguments, trains the same model with the same optimizer on one batch of random tokens, and prints
tokens per second: the median over every log_every steps. Under `torchrun --nproc-per-node 2 -m` the model is wrapped in
DistributedDataParallel.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from config import parse_config
from data.corpus import load_corpus
from model.gpt import GPTModel
from training import cli
from training.compute import prepare_cpu, prepare_network
from training.optimizer import build_optimizer


def main() -> None:
    processes = cli.num_processes()
    config = parse_config(num_processes=processes)
    prepare_cpu()
    config.model.vocab_size = load_corpus(config).vocab_size
    torch.manual_seed(config.seed)
    model = network = GPTModel(config.model)
    prepare_network(network, config, torch.device("cpu"))
    if processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = build_optimizer(network, config.optimizer)
    in_bfloat16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    autocast = torch.autocast("cpu", torch.bfloat16) if in_bfloat16 else nullcontext()
    tokens = torch.randint(config.model.vocab_size, (config.micro_batch_size, config.seq_len))
    speeds, start = [], time.perf_counter()
    for step in range(1, config.steps + 1):
        with autocast:
            loss = model(tokens, labels=tokens)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % config.tracking.log_every == 0:
            loss.item()
            now = time.perf_counter()
            speeds.append(config.tracking.log_every * tokens.numel() * processes / (now - start))
            start = now
    if cli.is_main_process():
        print(f"tokens/s = {statistics.median(speeds[1:])}", flush=True)
    if processes > 1:
        dist.barrier()
    cli.leave(0)


if __name__ == "__main__":
    main()
