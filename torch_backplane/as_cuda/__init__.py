"""Runs programs that were written for CUDA on bp: in this process, "cuda" and `torch.cuda` mean bp.

Active only on request: `python -m torch_backplane run --as-cuda`, or TORCH_BACKPLANE_AS_CUDA=1 in the environment,
which the launcher sets for the program's child processes.

| code | what it sees |
|---|---|
| the program and its libraries | devices of type "cuda", `torch.cuda` with the functions of `torch.bp` |
| PyTorch's and Backplane's Python code | devices of type "bp", and PyTorch's `torch.cuda`, without devices |

So PyTorch takes the same paths as for `bp`. Its Python code decides by names (`device.type == "cuda"`) and then calls
functions that only CUDA builds have.

| file | what means bp |
|---|---|
| `csrc/python/cuda_names.cpp` | `torch.device("cuda")`, `device.type`; generators, streams and events |
| `arguments.py` | "cuda" as an argument of functions that are implemented in C++, or that compare names |
| `modules.py` | `torch.cuda`, `torch.backends.cuda` and `torch.backends.cudnn` |
| `names.py` | what has another name, and why the rest has no counterpart |

Only the wrapped functions, such as `torch.zeros` and `Tensor.to`, take longer: no operator is intercepted.
"""

from __future__ import annotations

import functools

from torch_backplane import _C
from torch_backplane.as_cuda import arguments, modules


@functools.cache
def enable() -> None:
    """Makes "cuda" mean bp, for the rest of this process."""
    arguments.install()
    modules.install()
    _C.name_bp_cuda()
