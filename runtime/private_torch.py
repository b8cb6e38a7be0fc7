"""Private functions of torch that this repository uses. Check them when torch is upgraded.

These are multi-tensor operations: each applies an operation to all tensors of a list with one kernel launch. For
example, foreach_mul_ multiplies each tensor in place, and foreach_norm returns the norm of each. torch's own optimizers
are built on them. Import the public functions instead once torch has them (check: `torch.foreach_mul_` exists).

Other private parts are used where they are imported: torch._inductor's cache_dir (trainer/prepare_model.py), the state
dict stager (trainer/checkpoint/tensor_files.py), buffers of modules (trainer/checks/verification.py), the file of
torch._C (runtime/machine/cpu.py), oneDNN products and the softmax backward
(trainer/cpu_kernels.py).
"""

from typing import Any

import torch

_torch: Any = torch  # its stubs declare these functions for list[Tensor], not for list[Parameter]
foreach_add_, foreach_lerp_, foreach_mul_ = _torch._foreach_add_, _torch._foreach_lerp_, _torch._foreach_mul_
foreach_copy_, foreach_norm, foreach_sub = _torch._foreach_copy_, _torch._foreach_norm, _torch._foreach_sub
