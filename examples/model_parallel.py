"""Model parallelism: the layers of one mini-GPT are split over several devices.

First in one process: forward copies the activations to the next device, and autograd copies their gradients back. All
devices but one are always idle. Then as a pipeline with one process per stage: the batch is split into m micro-batches,
so that p stages work at the same time and idle only at the start and the end, (p - 1) / (m + p - 1) of the time (the
bubble). GPipe (Huang et al. 2019) runs all forwards, then all backwards; 1F1B alternates them, so a stage stores fewer
activations. The script records the order in which each stage ran its forwards (F) and backwards (B), and prints it with
the slots in which a stage waits for another one (.), if a forward and a backward take one slot each.
"""

import argparse
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from examples import common
from model.config import GPTConfig
from model.gpt import GPTModel

CONFIG = GPTConfig(vocab_size=256, n_layers=8, dropout=0.0)
BATCH_SIZE, SEQ_LEN = 32, 32


class Stage(nn.Module):
    """Some layers of a model: maps tokens [B, T] to hidden states [B, T, C], at the end to logits [B, T, V]."""

    def __init__(self, model: GPTModel, index: int, num_stages: int, device: torch.device):
        super().__init__()
        model, depth, self.device = copy.deepcopy(model), len(model.blocks) // num_stages, device
        self.embeddings = nn.ModuleList([model.token_embedding, model.position_embedding] if index == 0 else [])
        self.blocks = model.blocks[index * depth : (index + 1) * depth]
        self.output = nn.Sequential(*[model.final_norm, model.lm_head] if index == num_stages - 1 else [])
        self.order = ""
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.device)  # backward copies the gradient to the device of the stage before
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, None, None)
        x = self.output(x)
        self.order += "F"
        x.register_hook(self.record_backward)
        return x

    def record_backward(self, _: Tensor) -> None:
        self.order += "B"


def timetable(orders: list[str]) -> list[str]:
    """Return a row for each stage: what it does in each slot, if it runs in this order and as early as possible."""
    rows, done = [""] * len(orders), set()
    while any(order != row.replace(".", "") for order, row in zip(orders, rows, strict=True)):
        before = frozenset(done)
        for stage, order in enumerate(orders):
            ran = rows[stage].replace(".", "")
            kind = order[len(ran) : len(ran) + 1]
            needed = stage - 1 if kind == "F" else stage + 1  # the stage from which its input comes
            is_ready = needed in (-1, len(orders)) or (kind, needed, ran.count(kind)) in before
            rows[stage] += kind if kind and is_ready else "."
            done.add((rows[stage][-1], stage, ran.count(kind)))
    return rows


def report(name: str, loss: float, orders: list[str], reference: float) -> None:
    """Print the loss of the last step, and its timetable."""
    rows = timetable(orders)
    stored = max(rows[0][:end].count("F") - rows[0][:end].count("B") for end in range(len(rows[0]) + 1))
    idle = rows[0].count(".") / len(rows[0])
    print(f"{name}: last loss {loss:.6f} (difference from one device {abs(loss - reference):.0e})")
    print(
        f"  each stage is idle in {idle:.0%} of the slots; the first one stores activations of {stored} micro-batch(es)"
    )
    print(*(f"  stage {stage}: {row}" for stage, row in enumerate(rows)), sep="\n", flush=True)


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


def train(module: nn.Module, forward_backward: Callable[[Tensor], float], steps: int) -> float:
    """Train on random tokens [B, T]; return the last loss."""
    optimizer, loss = torch.optim.AdamW(module.parameters(), lr=3e-4), 0.0
    for step in range(steps):
        torch.manual_seed(step)
        loss = forward_backward(torch.randint(CONFIG.vocab_size, (BATCH_SIZE, SEQ_LEN)))
        optimizer.step()
        optimizer.zero_grad()
    return loss


def train_in_one_process(model: GPTModel, devices: list[torch.device], steps: int) -> tuple[float, list[str]]:
    """Return the loss of the last step, and the order of each stage in it."""
    split = nn.Sequential(*(Stage(model, index, len(devices), device) for index, device in enumerate(devices)))

    def forward_backward(tokens: Tensor) -> float:
        loss = cross_entropy(split(tokens), tokens.to(devices[-1]))
        loss.backward()
        return loss.item()

    return train(split, forward_backward, steps), [stage.order[-2:] for stage in split]


def train_pipelines(rank: int, init_method: str, args: argparse.Namespace, model: GPTModel, reference: float) -> None:
    dist.init_process_group(args.backend, init_method, rank=rank, world_size=args.ranks)
    device = common.select_device(rank, args.backend)
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage(Stage(model, rank, args.ranks, device), rank, args.ranks, device)
        schedule = schedule_class(stage, args.micro_batches, loss_fn=cross_entropy)

        def forward_backward(tokens: Tensor, stage=stage, schedule=schedule) -> float:
            tokens, losses = tokens.to(stage.device), []
            schedule.step(*[tokens] * stage.is_first, target=tokens if stage.is_last else None, losses=losses)
            return torch.stack(losses).mean().item() if stage.is_last else 0.0

        loss = train(stage.submod, forward_backward, args.steps)
        of_last_step = stage.submod.order[-2 * args.micro_batches :]
        dist.all_gather_object(orders := [""] * args.ranks, of_last_step)
        if stage.is_last:
            report(schedule_class.__name__, loss, orders, reference)
    common.leave()


def main() -> None:
    parser = common.Parser(__spec__.name, __doc__)
    parser.add_argument("--steps", type=common.positive_int, default=10, help="training steps (default 10)")
    parser.add_argument("--micro-batches", type=int, default=4, choices=(2, 4, 8, 16, 32), help="default 4")
    args = parser.parse()
    if args.ranks not in (2, 4, 8) or args.micro_batches < args.ranks:
        parser.error(f"--ranks {args.ranks} must be 2, 4 or 8, and at most --micro-batches {args.micro_batches}")
    devices = [torch.device("cuda", i) if args.backend == "nccl" else torch.device("cpu") for i in range(args.ranks)]
    torch.manual_seed(0)
    model = GPTModel(CONFIG)
    reference, _ = train_in_one_process(model, devices[:1], args.steps)
    print(f"One device: last loss {reference:.6f}", flush=True)
    report("Split in one process", *train_in_one_process(model, devices, args.steps), reference)
    common.spawn(train_pipelines, args, model, reference)


if __name__ == "__main__":
    main()
