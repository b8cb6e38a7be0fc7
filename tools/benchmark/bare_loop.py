"""A hand-written training loop on one batch of random tokens: python -m tools.benchmark.bare_loop SETTINGS_OF_TRAIN.

It trains the model and optimizer of train.py without Accelerate, on a CPU, and prints log lines like those of train.py.
Several processes under `accelerate launch` train by DistributedDataParallel.
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data.corpus import load_corpus
from model.gpt import GPTModel
from runtime.config.parser import parse_config
from runtime.distributed.world import is_main_process, num_processes
from runtime.machine.cpu import prepare_cpu
from trainer.optimizer import build_optimizer
from trainer.prepare_model import prepare_network


def main() -> None:
    """Train `steps` steps of one micro-batch in each process."""
    config = parse_config(num_processes=num_processes())
    config = load_corpus(config).fill_in(config)
    torch.manual_seed(config.seed)
    prepare_cpu()
    network = GPTModel(config.model)
    prepare_network(network, config, torch.device("cpu"))
    optimizer, model = build_optimizer(network, config.optimizer), network
    if num_processes() > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    tokens = torch.randint(config.model.vocab_size or 0, (config.micro_batch_size, config.seq_len))
    if is_main_process():
        print(f"tokens: {tokens.numel() * num_processes()} a step", flush=True)
    for step in range(1, config.steps + 1):
        loss = model(tokens, None, tokens)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if is_main_process() and step % config.tracking.log_every == 0:
            print(f"[step {step} / {config.steps}] loss = {loss.item():.4f}", flush=True)
    if num_processes() > 1:
        dist.barrier()
    os._exit(0)  # skips the interpreter's exit, where threads of gloo may abort


if __name__ == "__main__":
    main()
