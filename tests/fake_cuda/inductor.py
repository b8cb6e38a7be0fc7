"""Generate Inductor's code for a block and the loss of configs/gpt2_124m.yaml on an H100, without a GPU.

Needs Triton, which a CPU build of torch does not install. Nothing is computed: a kernel that is launched leaves its
outputs as they were allocated. Prints one JSON object: the number of Triton kernels by part, the other functions that
the generated code calls, and the kernels that Triton cannot compile to sm_90 code.
"""

import json
import os
import re
from collections import Counter
from types import SimpleNamespace

os.environ |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import torch

from tests.fake_cuda import device

device.install(replace_inductor=False)  # before Inductor is imported, which looks for the functions of torch.cuda

import triton  # noqa: E402
from torch._inductor import async_compile  # noqa: E402
from torch._inductor.codecache import PyCodeCache  # noqa: E402
from torch._inductor.graph import GraphLowering  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from model.gpt import Block  # noqa: E402
from model.loss import Targets, differentiate_loss  # noqa: E402
from runtime.config.parser import parse_config  # noqa: E402

H100 = GPUTarget("cuda", 90, 32)
ROWS = 4096  # of a chunk of logits

kernels: list[tuple[str, str]] = []  # name and source of each
code: list[str] = []  # each generated module


class FakeDriver:
    """Replaces Triton's driver of a GPU."""

    def get_current_target(self) -> GPUTarget:
        return H100

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


def record_kernel(self, name: str, source: str, device_str: str = "cuda") -> SimpleNamespace:
    """Replace the compilation of a kernel."""
    kernels.append((name, source))
    return SimpleNamespace(run=lambda *_, **__: None)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    def empty(*shape, dtype=torch.int64):
        return torch.empty(*shape, dtype=dtype, device=q.device)

    sums, state = empty(*q.shape[:3], dtype=torch.float32), empty(2, dtype=torch.uint64)
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    return out, sums, None, None, q.shape[2], k.shape[2], state, empty((), dtype=torch.uint64), empty(0, dtype=q.dtype)


def flash_backward(grad, q, k, v, *_, **__):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def install() -> None:
    """Replace what Inductor and Triton would ask a GPU for."""
    torch.nn.functional.scaled_dot_product_attention = attend
    global library  # its implementations end with it
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CUDA")
    torch._C._dynamo.guards._empty_strided_cuda = lambda shape, stride, dtype: torch.empty_strided(
        shape, stride, dtype=dtype, device="cuda"
    )
    triton.runtime.driver.set_active(FakeDriver())
    triton_helpers.set_driver_to_gpu = lambda: None
    async_compile.AsyncCompile.triton = record_kernel
    GraphLowering.save_output_code = code.append


def compiles(name: str, source: str) -> bool:
    """Return whether Triton compiles a kernel, with the first of its configurations, to sm_90 code."""
    kernel = getattr(PyCodeCache.load(source), name)
    config, constants = kernel.configs[0], dict(kernel.triton_meta["constants"]) | kernel.configs[0].kwargs
    signature = dict(kernel.triton_meta["signature"]) | dict.fromkeys(constants, "constexpr")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel_source = ASTSource(kernel.fn, signature, constants, kernel.triton_meta["configs"][0])
    return "cubin" in triton.compile(kernel_source, target=H100, options=options).asm


def main() -> None:
    """Generate the code, compile the kernels and print the result."""
    install()
    run = parse_config(["--config", "configs/gpt2_124m.yaml", "--data.path", "."])
    config = run.replace(**{"model.n_layers": 1}).model
    with torch.device("cuda"):
        block = Block(config)
        hidden = torch.randn(1, run.seq_len, config.d_model, requires_grad=True)
        logits = torch.empty(ROWS, config.vocab_size, dtype=torch.bfloat16)
        targets = torch.zeros(ROWS, dtype=torch.int64)
    block.compile(options={"fallback_random": True})
    counts: dict[str, int] = {}
    with torch.autocast("cuda", torch.bfloat16):
        out = block(hidden, None, None)
    counts["forward"] = len(kernels)
    out.sum().backward()
    counts["backward"] = len(kernels) - sum(counts.values())
    torch.compile(differentiate_loss)(logits, Targets(targets), config, needs_gradient=True)
    counts["loss"] = len(kernels) - sum(counts.values())
    called = Counter(re.findall(r"(?:extern_kernels|torch\.ops)\.[\w.]+(?=\()", "\n".join(code)))
    failed = [name for name, source in kernels if not compiles(name, source)]
    print(json.dumps({"kernels": counts, "called": dict(called), "failed": failed}))


if __name__ == "__main__":
    main()
