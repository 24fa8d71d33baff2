"""Which implementation of a heavy operator computes a call that was not tuned: costs by class of target and family.

A cost is relative to that of the generated kernels for the same call, which is GENERATED. There are two classes of
targets: those whose work items run in lockstep (`Target.simt`), and those whose groups are threads of a processor.
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.target import Target

GENERATED = 100
_LESS, _MORE = GENERATED // 2, GENERATED * 2

# Multiplications from which on PyTorch's own kernels are used on processors. Fewer are left to generated kernels: the
# host's threads have to be woken, and then take the cores from the device's.
HOST_FROM = {
    "products": 1 << 30,
    "products of few rows": 1 << 18,
    "convolutions": 1 << 23,
    "attention of few queries": 1 << 21,
    "gradients of attention": 1 << 26,
    "recurrent layers": 0,
    "transforms": 0,
}


def unstated(target: Target) -> int:
    """Of a driver's library that states no cost. A library for the hardware is expected to be faster than generated
    kernels. On a processor PyTorch's own libraries are known to be: there a library has to state that it is faster.
    """
    return _LESS if target.simt else GENERATED + 1


def on_host(kind: str, dtype: torch.dtype, multiplications: int | None = None) -> int:
    """Of PyTorch's own kernels.

    Args:
        kind: a key of HOST_FROM.
        multiplications: of the call; without it, enough.
    """
    enough = multiplications is None or multiplications >= HOST_FROM[kind]
    return _LESS if enough and not host_is_slow(dtype) else _MORE


def host_is_slow(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products and convolutions of this dtype are loops on this host, which has no
    instructions for it that oneDNN uses. Convolutions in bfloat16 are inexact then, too: they round while they add up.
    """
    has_instructions = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return dtype in has_instructions and not has_instructions[dtype]()
