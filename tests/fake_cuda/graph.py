"""CUDA graphs of the fake device: a capture records operations, and a replay runs them.

As on a GPU, a capture computes nothing: what it wrote is put back, its results are garbage until the first replay, and
the random generator does not move. A replay runs every operation again with the same scalars on the same memory.
Reading a value on the host, copies between host and device, and seeding are errors during a capture. Ending the capture
after an error raises a second one, as after a CUDA error on a GPU, unless an allocation failed.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fake_cuda import device

ATEN = torch.ops.aten
READ_ON_HOST = (ATEN._local_scalar_dense.default, ATEN.nonzero.default)
WITHOUT_RESULT = ("aten::empty", "aten::new_empty", "aten::detach", "prim::")


def tensors_of(values) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Recorder(TorchDispatchMode):
    """Runs and records the operations of a capture."""

    def __init__(self):
        super().__init__()
        self.calls, self.results = [], []
        self.created: set[int] = set()  # addresses of memory that the capture allocated
        self.overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # other memory, with its content before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        copies_between = func in (ATEN.copy_.default, ATEN._to_copy.default) and any(t.dim() for t in inputs)
        devices = {tensor.device.type for tensor in inputs} | {torch.device(kwargs.get("device") or "cuda").type}
        if func in READ_ON_HOST or (copies_between and len(devices) > 1):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing\n{func}")
        if func._schema.is_mutable:
            for tensor in inputs:  # includes those that are only read, which is harmless
                if tensor.is_cuda and address(tensor) not in self.created | self.overwritten.keys():
                    self.overwritten[address(tensor)] = tensor.detach(), bytes_of(tensor).clone()
        result = func(*args, **kwargs)
        known = {address(tensor) for tensor in inputs}
        fresh = [tensor for tensor in tensors_of(result) if address(tensor) not in known]
        self.created |= {address(tensor) for tensor in fresh}
        self.results += fresh
        if (fresh or func._schema.is_mutable) and not func.name().startswith(WITHOUT_RESULT):
            self.calls.append((func, args, kwargs, result))
        return result


class FakeCUDAGraph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls = []

    def replay(self) -> None:
        device.note_if_recording("graph", "replay")
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, recorded in self.calls:
                result = func(*args, **kwargs)
                for new, old in zip(tensors_of(result), tensors_of(recorded), strict=True):
                    if address(new) != address(old):
                        bytes_of(old)[:] = bytes_of(new)


class FakeCapture:
    """Replaces torch.cuda.graph."""

    active = False

    def __init__(self, graph: FakeCUDAGraph, pool=None, stream=None, capture_error_mode: str = "global"):
        self.graph = graph

    def __enter__(self) -> None:
        FakeCapture.active, self.generator_state, self.recorder = True, torch.cuda.get_rng_state(), Recorder()
        self.recorder.__enter__()

    def __exit__(self, error_type, error, frames) -> None:
        self.recorder.__exit__(error_type, error, frames)
        FakeCapture.active = False
        torch.cuda.set_rng_state(self.generator_state)
        for tensor, content in self.recorder.overwritten.values():
            bytes_of(tensor).copy_(content)
        for tensor in self.recorder.results:
            if tensor.is_floating_point():
                bytes_of(tensor).fill_(0xFF)  # NaN
        if error_type and not issubclass(error_type, torch.OutOfMemoryError):
            while frames.tb_next and frames.tb_next.tb_frame.f_code.co_filename != __file__:
                frames = frames.tb_next
            frames.tb_next = None  # on a GPU the innermost frame is the caller's
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if not error_type:
            self.graph.calls = self.recorder.calls
        del self.recorder  # its results are memory of the capture


def install() -> None:
    """Replace CUDA graphs in this process."""
    torch.cuda.CUDAGraph, torch.cuda.graph = FakeCUDAGraph, FakeCapture
    torch.cuda.is_current_stream_capturing = lambda: FakeCapture.active
    seed_device = torch.cuda.manual_seed

    def manual_seed(seed: int) -> None:
        if FakeCapture.active:
            raise RuntimeError("the generator cannot be seeded during a capture")
        seed_device(seed)

    torch.cuda.manual_seed = torch.cuda.random.manual_seed = manual_seed
