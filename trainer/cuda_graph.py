"""The forward and backward of a micro-batch as one CUDA graph.

A GPU runs the kernels of a small model faster than the host launches them one by one. A captured graph contains the
same kernels with the same arguments, and one call launches all of them. The optimizer, the metrics and the loading of
data stay outside.

Dropout: a replay reads the seed of the device's generator, so the seed that is set before each micro-batch
(`TrainState.seed_micro_batch`) gives the same masks as without a graph.
"""

import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import Batch
from model.loss import MetricSums
from runtime.config.errors import RunError
from runtime.private_torch import foreach_add_, foreach_copy_


class GraphChoice(NamedTuple):
    """Whether the steps of a run use a CUDA graph."""

    use: bool
    report: str = ""
    """What a trial found; "" without a trial."""


class GraphedMicroBatch:
    """Replays `forward_backward(batch, num_targets, grad_scale)` of train.py; called like it, after `warm_up`.

    The graph is captured at the first call, and again when the shapes of the batch, `grad_scale` or a number that is an
    attribute of a module of `network`, such as a dropout rate, change. Any other Python value that the forward reads
    keeps the value that it had in the capture.

    If it is optional and the memory for a capture does not suffice, it prints one line and launches the kernels one by
    one from then on.

    Attributes:
        is_paused: whether to launch the kernels one by one, because a graph runs no hooks of modules.
    """

    def __init__(
        self, forward_backward: Callable[..., tuple[Tensor, MetricSums]], network: nn.Module, is_optional: bool = False
    ):
        self.forward_backward, self.is_optional, self.is_paused = forward_backward, is_optional, False
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.attributes = [vars(module) for module in network.modules()]
        self.is_given_up = False
        self.captured_for: tuple | None = None
        self.graph = torch.cuda.CUDAGraph()
        # The memory that the graph reads and writes.
        self.inputs: list[Tensor] = []
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.outputs: tuple[Tensor, MetricSums]

    def __call__(
        self, batch: Batch, num_targets: Tensor, grad_scale: float, all_reduce: dist.Work | None = None
    ) -> tuple[Tensor, MetricSums]:
        """Add the gradients of a micro-batch to `.grad`; return its loss divided by `num_targets`, and its metrics.

        Raises:
            RunError: the forward or the backward cannot be captured, for example because it reads a value on the host.
                An optional graph raises it too, unless the memory does not suffice.
        """
        if self.is_paused:
            return self.forward_backward(batch, num_targets, grad_scale, all_reduce)
        if all_reduce:
            all_reduce.wait()
        numbers = [value for names in self.attributes for value in names.values() if isinstance(value, int | float)]
        captured_for = grad_scale, numbers, [(name, tensor.shape) for name, tensor in batch.items()]
        if captured_for != self.captured_for and not self.is_given_up:
            self.capture(batch, num_targets, grad_scale)
            self.captured_for = captured_for
        if self.is_given_up:
            return self.forward_backward(batch, num_targets, grad_scale)
        for static, tensor in zip(self.inputs, [*batch.values(), num_targets], strict=True):
            static.copy_(tensor)
        self.graph.replay()
        # The next replay overwrites the gradients, the loss and the metrics, so all of them are copied.
        parameters, gradients = zip(*self.gradients, strict=True)
        if parameters[0].grad is None:
            for parameter, gradient in self.gradients:
                parameter.grad = torch.empty_like(gradient)
            foreach_copy_([parameter.grad for parameter in parameters], gradients)
        else:
            foreach_add_([parameter.grad for parameter in parameters], gradients)
        loss, metrics = self.outputs
        return loss.clone(), {name: (copy_of(total), copy_of(count)) for name, (total, count) in metrics.items()}

    def capture(self, batch: Batch, num_targets: Tensor, grad_scale: float) -> None:
        """Record the kernels without running them."""
        self.graph, self.gradients = torch.cuda.CUDAGraph(), []  # frees the memory of the previous graph
        static_batch, num_targets = {name: tensor.clone() for name, tensor in batch.items()}, num_targets.clone()
        self.inputs = [*static_batch.values(), num_targets]
        accumulated = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            # thread_local: a thread that saves a checkpoint may use the device at the same time.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outputs = self.forward_backward(static_batch, num_targets, grad_scale)
            self.gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]
        except RuntimeError as error:
            cause = error.__context__ or error  # ending a failed capture raises a second error
            frames = reversed(traceback.extract_tb(cause.__traceback__))
            place = next(frame for frame in frames if "site-packages" not in frame.filename)
            reason = (
                f"the forward or the backward cannot be captured, {place.filename}:{place.lineno}: "
                f"{str(cause).splitlines()[0]}"
            )
            # When an allocation fails, torch ends the capture without a second error, and can compute as before (its
            # test test_graph_capture_oom). After a CUDA error it does not restore its memory allocator and its random
            # generator, so a later allocation or dropout might raise, in the middle of a run.
            if not (self.is_optional and isinstance(error, torch.OutOfMemoryError)):
                message = f"cuda_graph: true: {reason}; set it to false, or read no value on the host"
                raise RunError(message) from cause
            print(f"CUDA graph: off from here on, memory does not suffice: {reason}", flush=True)
            self.is_given_up = True
            # Free the memory of the capture. The frames of the traceback refer to activations.
            self.graph, self.inputs, cause.__traceback__ = torch.cuda.CUDAGraph(), [], None
        finally:
            for parameter, gradient in zip(self.parameters, accumulated, strict=True):
                parameter.grad = gradient


def copy_of(value: Tensor | float) -> Tensor | float:
    """Return a copy of a tensor, or the number itself."""
    return value.clone() if isinstance(value, Tensor) else value
