"""The objects that a training step reads and changes."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import nn

from model.gpt import GPTModel
from model.seeds import derive_seed
from runtime.config.schema import TrainConfig
from trainer.block_stats import BlockStatistics
from trainer.cuda_graph import GraphedMicroBatch
from trainer.gradients import trainable_parameters
from trainer.results import Results


class GradientReducer(Protocol):
    """Sums gradients over micro-batches and processes in place of DDP."""

    def add_micro_batch(self, num_micro_batches: int) -> None:
        """Take the gradients of one of `num_micro_batches` micro-batches; after the last, `.grad` is the global sum."""


@dataclass
class TrainState:
    """What a training step reads and changes.

    A checkpoint has the weights and persistent buffers, the optimizer's state, the step and `results.skipped`. The rest
    is built at each start.
    """

    config: TrainConfig
    accelerator: Accelerator
    network: GPTModel
    """The bare model."""
    model: nn.Module
    """`network` as Accelerate prepared it: wrapped in DDP, sharded by FSDP2, or itself.

    In mixed precision it runs under autocast; FSDP2 instead casts the weights and activations."""
    optimizer: torch.optim.Optimizer
    results: Results
    block_statistics: BlockStatistics = field(default_factory=BlockStatistics)
    reducer: GradientReducer | None = None
    """None: DDP or FSDP2 averages the gradients over the processes, or there is one process."""
    graph: GraphedMicroBatch | None = None
    """Runs the forward and backward of a micro-batch; None: every kernel is launched by itself."""

    def __post_init__(self) -> None:
        self.parameters = trainable_parameters(self.network)

    def seed_micro_batch(self, step: int, index: int, num_micro_batches: int) -> None:
        """Seed dropout for the local micro-batch `index` of `step` (from 0).

        The seed depends on the index in the global batch, and so not on the number of processes.
        """
        global_index = self.results.rank * num_micro_batches + index
        seed = derive_seed(self.config.seed, "dropout", step, global_index)
        # torch.manual_seed would also record a stack trace for each kind of device that is not in use, which is slow.
        torch.default_generator.manual_seed(seed)
        if (device := self.accelerator.device).type != "cpu":
            torch.get_device_module(device).manual_seed(seed)
