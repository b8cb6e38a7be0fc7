"""Give this process CUDA devices that compute on the CPU: `install()`; see README.md.

CUDA_VISIBLE_DEVICES says how many, as on a machine with eight GPUs.
"""

import collections
import importlib.util
import os
import subprocess
import sys
import sysconfig
import threading
import types
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NAME, MEMORY = "NVIDIA H100 80GB HBM3", 80 * 2**30

Event = tuple[str, str, str]
"""(kind, detail, place in the repository). Kinds: sync, copy, hazard, attention, collective, graph."""
events: collections.Counter[Event] = collections.Counter()
group_timeouts: list[timedelta] = []
"""Timeouts of the NCCL groups of this process, in order of creation."""


def build(*flags: str) -> Path:
    """Compile fake_cuda.cpp, once for each version of torch and of the source, and return the library.

    The flag `-DFAKE_MPS` makes it an Apple GPU.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails.
    """
    what = [SOURCE.read_bytes(), torch.__version__.encode(), sys.version.encode(), *map(str.encode, flags)]
    key = sha256(b"".join(what)).hexdigest()[:16]
    from torch.utils import cpp_extension  # imports setuptools

    library = Path(cpp_extension.get_default_build_root(), f"fake_cuda_{key}", "fake_cuda_ext.so")
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    (libraries,) = cpp_extension.library_paths()
    command = [cpp_extension.get_cxx_compiler(), "-shared", "-fPIC", "-std=c++20", "-O1", "-w", *flags]
    command += [str(SOURCE), "-o", str(unfinished)]
    command += ["-DTORCH_EXTENSION_NAME=fake_cuda_ext", *(f"-isystem{path}" for path in includes)]
    command += [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"no C++ compiler: {command[0]}") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} cannot compile {SOURCE.name}: {done.stderr.strip()[:500]}")
    unfinished.rename(library)
    return library


def load(*flags: str) -> types.ModuleType:
    """Compile fake_cuda.cpp and load it into this process, which then has its devices."""
    spec = importlib.util.spec_from_file_location("fake_cuda_ext", build(*flags))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(replace_inductor: bool = True) -> None:
    """Replace torch's CUDA in this process; a second call only counts the visible devices again."""
    if not hasattr(torch.cuda, "fake"):
        torch.cuda.fake = ext = load()
        ext.set_hook(note)
        patch_torch_cuda(ext)
        patch_nccl(ext)
        patch_attention()
        if replace_inductor:
            patch_compilation()
        from tests.fake_cuda import graph  # it imports this module

        graph.install()
        torch.empty(0).pin_memory()  # initialises CUDA, before which no memory counts as pinned; computes nothing
    torch.cuda.fake.set_count(visible_devices())


def visible_devices() -> int:
    """Return the number of devices of eight that CUDA_VISIBLE_DEVICES shows."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")
    return next((i for i, name in enumerate(names) if not name.isdecimal()), len(names))


def note(kind: str, detail: str) -> None:
    """Count an event at the innermost line of the repository that is being executed."""
    if kind == "sync" and torch.cuda.fake.error_on_sync:
        raise RuntimeError(f"called a synchronizing CUDA operation: {detail}")
    frame = sys._getframe().f_back  # None in a thread of the autograd engine
    while frame and not (frame.f_code.co_filename.startswith(f"{ROOT}/") and in_repository(frame.f_code.co_filename)):
        frame = frame.f_back
    place = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}" if frame else "autograd or torch"
    events[kind, detail, place] += 1


def in_repository(file: str) -> bool:
    """Return whether `file` under ROOT is neither an installed package nor the emulator itself."""
    return "/.venv/" not in file and "/fake_cuda/" not in file


class FakeEvent:
    """Replaces torch.cuda.Event: waiting for it finishes the copies that were started before it."""

    def __init__(self, *_, **__):
        self.copies = 0

    def record(self, stream=None) -> None:
        self.copies = torch.cuda.fake.copies_so_far()

    def synchronize(self) -> None:
        note_if_recording("sync", "event")
        torch.cuda.fake.finish_copies(self.copies)

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 1.0


class FakeStream:
    """Replaces torch.cuda.Stream: there is one, and what it is given is done at once."""

    cuda_stream = stream_id = 0
    device_type = 1

    def __init__(self, device=None, priority=0, **_):
        self.device_index = device_index(device)
        self.device = torch.device("cuda", self.device_index)

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        torch.cuda.fake.synchronize("stream")

    def wait_event(self, event) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def __eq__(self, other) -> bool:
        return isinstance(other, FakeStream)

    def __hash__(self) -> int:
        return 0


class FakeDevice:
    """Replaces torch.cuda.device."""

    def __init__(self, device):
        self.index = -1 if device is None else device_index(device)

    def __enter__(self) -> None:
        self.previous = torch.cuda.fake.exchange_device(self.index)

    def __exit__(self, *_) -> None:
        torch.cuda.fake.exchange_device(self.previous)


FakeProperties = types.SimpleNamespace(
    name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, uuid="0", is_integrated=0,
    gcnArchName="", L2_cache_size=50 * 2**20, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
)  # fmt: skip


def device_index(device) -> int:
    if device is None or isinstance(device, int):
        return torch.cuda.fake.get_device() if device is None else device
    index = torch.device(device).index
    return torch.cuda.fake.get_device() if index is None else index


def note_if_recording(kind: str, detail: str) -> None:
    if torch.cuda.fake.recording:
        note(kind, detail)


def set_sync_debug_mode(mode: str) -> None:
    """Replace torch.cuda.set_sync_debug_mode, which does not cover events."""
    torch.cuda.fake.error_on_sync = mode == "error"
    torch.cuda.fake.record(mode == "error")


def start_recording() -> None:
    """Forget the events so far and count the next ones."""
    events.clear()
    torch.cuda.fake.recording = True
    torch.cuda.fake.record(True)


def stop_recording() -> None:
    torch.cuda.fake.recording = False
    torch.cuda.fake.record(False)


def patch_torch_cuda(ext) -> None:
    """Replace the Python functions of torch.cuda that need a driver."""
    ext.recording = ext.error_on_sync = False

    def seed_all(seed: int) -> None:
        for index in range(8):
            ext.generator(index).manual_seed(int(seed))

    live, peak, synchronize = ext.live_bytes, ext.peak_bytes, lambda *_: ext.synchronize("device")
    public = dict(
        is_available=lambda: visible_devices() > 0,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=visible_devices,
        device=FakeDevice,
        current_device=lambda: ext.get_device(),
        set_device=lambda device: ext.exchange_device(device_index(device)),
        _exchange_device=lambda index: ext.exchange_device(index),
        _maybe_exchange_device=lambda index: ext.exchange_device(index),
        get_device_name=lambda device=None: NAME,
        get_device_capability=lambda device=None: (9, 0),
        get_device_properties=lambda device=None: FakeProperties,
        get_arch_list=lambda: ["sm_90"],
        is_bf16_supported=lambda including_emulation=True: True,
        synchronize=synchronize,
        set_sync_debug_mode=set_sync_debug_mode,
        Stream=FakeStream,
        Event=FakeEvent,
        stream=lambda stream: stream or FakeStream(),
        current_stream=lambda device=None: FakeStream(device),
        default_stream=lambda device=None: FakeStream(device),
        set_stream=lambda stream: None,
        is_current_stream_capturing=lambda: False,
        memory_allocated=lambda device=None: live(),
        memory_reserved=lambda device=None: live(),
        max_memory_allocated=lambda device=None: peak(),
        max_memory_reserved=lambda device=None: peak(),
        reset_peak_memory_stats=lambda device=None: ext.reset_peak(),
        memory_stats=lambda device=None: {"allocated_bytes.all.current": live(), "allocated_bytes.all.peak": peak()},
        mem_get_info=lambda device=None: (MEMORY - live(), MEMORY),
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        default_generators=tuple(ext.generator(index) for index in range(8)),
        manual_seed=lambda seed: ext.generator(-1).manual_seed(int(seed)),
        manual_seed_all=seed_all,
        initial_seed=lambda: ext.generator(-1).initial_seed(),
        get_rng_state=lambda device=None: ext.generator(device_index(device)).get_state(),
        set_rng_state=lambda state, device=None: ext.generator(device_index(device)).set_state(state),
        _is_in_bad_fork=lambda: False,
    )
    for name, value in public.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.manual_seed, torch.cuda.random.manual_seed_all = public["manual_seed"], seed_all
    torch.cuda.memory.mem_get_info = public["mem_get_info"]
    torch.cuda.streams.Event, torch.cuda.streams.Stream = FakeEvent, FakeStream
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda._initialized, torch.version.cuda = True, "13.0"
    private = dict(
        _cuda_init=lambda: None,
        _cuda_getDeviceCount=visible_devices,
        _cuda_getDevice=lambda: ext.get_device(),
        _cuda_setDevice=lambda index: ext.exchange_device(index),
        _cuda_exchangeDevice=lambda index: ext.exchange_device(index),
        _cuda_maybeExchangeDevice=lambda index: ext.exchange_device(index),
        _cuda_getCurrentStream=lambda index: (0, index, 1),
        _cuda_getCurrentRawStream=lambda index: 0,
        _cuda_isCurrentStreamCapturing=lambda: False,
        _cuda_synchronize=synchronize,
        _cuda_emptyCache=lambda: None,
        _cuda_memoryStats=lambda index: {},
        _cuda_resetPeakMemoryStats=lambda index: ext.reset_peak(),
        _cuda_hasPrimaryContext=lambda index: True,
        _cuda_getCompiledVersion=lambda: 13000,
        _cuda_isInBadFork=lambda: False,
        _cuda_clearCublasWorkspaces=lambda: None,
    )
    for name, value in private.items():
        setattr(torch._C, name, value)
    torch.cuda.cudart = lambda: types.SimpleNamespace(  # for memory that a checkpoint's copy pins
        cudaHostRegister=lambda data, size, flags: ext.pin(data, size) or 0,
        cudaHostUnregister=lambda data: ext.unpin(data) or 0,
        cudaGetErrorString=str,
        cudaError=types.SimpleNamespace(success=0),
    )
    resize_cpu_storage = torch.UntypedStorage.resize_

    def resize_(storage, size: int):
        if storage.device.type != "cuda":
            return resize_cpu_storage(storage, size)
        ext.reallocate(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), int(size))
        return storage

    torch.UntypedStorage.resize_ = resize_


def patch_nccl(ext) -> None:
    """Replace ProcessGroupNCCL by gloo on the same memory."""
    gloo = c10d.ProcessGroupGloo

    class IsFakeNCCL(type):
        def __instancecheck__(cls, group) -> bool:
            return isinstance(group, ext.FakeNCCL)

    class ProcessGroupNCCL(metaclass=IsFakeNCCL):
        class Options:
            def __init__(self, *_, **__):
                self._timeout = self.split_from = self.split_color = None
                self.is_high_priority_stream, self.group_name, self.global_ranks_in_group = False, "", []
                self.config = types.SimpleNamespace(blocking=0)

        def __new__(cls, store, rank: int, size: int, options):
            gloo_options = gloo._Options()
            gloo_options._devices, gloo_options._threads = [gloo.create_default_device()], 2
            gloo_options._timeout = options._timeout
            group_timeouts.append(options._timeout)
            return ext.FakeNCCL(gloo(store, rank, size, gloo_options), rank, size)

    def split_group(parent_pg=None, split_ranks=(), timeout=None, pg_options=None, group_desc=None, **_):
        note_if_recording("collective", f"split_group with timeout {timeout}")
        groups = [c10d.new_group(list(ranks), timeout=timeout, group_desc=group_desc) for ranks in split_ranks]
        return next(group for group, ranks in zip(groups, split_ranks, strict=True) if c10d.get_rank() in ranks)

    import torch.distributed.device_mesh

    c10d.split_group = torch.distributed.device_mesh.split_group = split_group

    def noted(collective):
        def call(tensor, *arguments, **more):
            # A checkpoint is written in a thread, which may wait.
            if tensor.device.type == "cpu" and threading.current_thread() is threading.main_thread():
                note_if_recording("sync", f"{collective.__name__} of a CPU tensor")
            return collective(tensor, *arguments, **more)

        return call

    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):  # gloo accepts a CPU tensor, and blocks the host
        setattr(c10d, name, noted(getattr(c10d, name)))
        setattr(dist, name, getattr(c10d, name))
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE, c10d.default_pg_nccl_timeout = True, timedelta(minutes=10)
    c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 28, 3)


def patch_attention() -> None:
    """Note which of its kernels a GPU would take; compute with plain products."""
    attend_on_cpu = F.scaled_dot_product_attention

    def choose(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        half = query.dtype in (torch.float16, torch.bfloat16)
        if half and attn_mask is None and query.shape[-1] <= 256:
            return SDPBackend.FLASH_ATTENTION.value
        return (SDPBackend.MATH if more.get("enable_gqa") else SDPBackend.EFFICIENT_ATTENTION).value

    def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        if query.device.type != "cuda":
            return attend_on_cpu(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if not torch.compiler.is_compiling():
            chosen = choose(query, key, value, attn_mask, dropout_p, is_causal, **more)
            kernel = SDPBackend(chosen).name.lower().removesuffix("_attention")
            note_if_recording("attention", kernel if attn_mask is None else f"{kernel}, dense mask")
        with sdpa_kernel(SDPBackend.MATH):  # the only one of the CPU's that accepts what each of a GPU's accepts
            return attend_on_cpu(query, key, value, attn_mask, dropout_p, is_causal, **more)

    torch.library.impl("aten::_fused_sdp_choice", "CUDA", choose)
    F.scaled_dot_product_attention = scaled_dot_product_attention


def patch_compilation() -> None:
    """Compile to the same graphs without generating a GPU's code for them."""
    from model import attention

    compile_function = torch.compile

    def compile_eagerly(model=None, *, backend="inductor", options=None, mode=None, **more):
        return compile_function(model, backend="aot_eager" if backend == "inductor" else backend, **more)

    def compile_module(module, *arguments, **more) -> None:
        module._compiled_call_impl = torch.compile(module._call_impl, *arguments, **more)

    # Clones of a generator stay on the device in CUDA's implementation only.
    torch._functorch.config.graphsafe_rng_functionalization = False
    torch.compile, torch.nn.Module.compile = compile_eagerly, compile_module
    attention.HAS_TRITON = True
    if summary := sys.modules.get("trainer.run.summary"):
        summary.HAS_TRITON = True
