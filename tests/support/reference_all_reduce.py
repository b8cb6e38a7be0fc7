"""A hand-written training step, the reference for train.py: torchrun reference_all_reduce.py OUT_FILE STEPS.

Every process takes its slice of the global batch, back-propagates the sum of its losses, adds up gradients and target
counts with all_reduce, divides, clips and updates. Nothing of trainer/ is used, nor DDP, nor Accelerate.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data.sampler import BatchSizes, GlobalBatches
from data.synthetic.stories import STORIES, StoriesDataset
from model.config import GPTConfig
from model.gpt import GPTModel

BATCH, LR, WEIGHT_DECAY, CLIP = 6, 0.01, 0.1, 0.5


def main(out_file: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=STORIES.build_tokenizer().get_vocab_size(),
        n_layers=2,
        d_model=16,
        n_heads=2,
        d_ff=32,
        dropout=0.0,
    )
    model = GPTModel(config)
    dataset, order = StoriesDataset("train", 20, 0, 128), GlobalBatches(20, BatchSizes(BATCH), 0)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    history = []
    for step in range(steps):
        mine = order.indices(step)[rank * BATCH // world : (rank + 1) * BATCH // world]
        rows = [dataset[i] for i in mine]
        input_ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
        logits = model(input_ids).logits
        loss_sum = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        optimizer.zero_grad()
        loss_sum.backward()
        sums = torch.stack((loss_sum.detach(), (labels[:, 1:] != -100).sum()))
        dist.all_reduce(sums)
        gradients = [p.grad for p in model.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= sums[1]
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
        for gradient in gradients:
            gradient *= min(1.0, CLIP / norm.item())
        optimizer.step()
        history.append({"train/loss": (sums[0] / sums[1]).item(), "train/grad_norm": norm.item()})
    if rank == 0:
        torch.save(model.state_dict(), out_file)
        print(json.dumps(history))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # not through the interpreter's exit, where threads of gloo may abort
