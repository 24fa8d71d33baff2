"""Costs of candidates, which decide which one runs a call that was not tuned.

A cost is relative to that of the generated kernels for the same call, which is GENERATED. There are two classes of
targets: those whose work items run in lockstep (`Target.simt`), and processors, which run each work group in a thread.
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.target import Target

GENERATED = 100
_LESS, _MORE = GENERATED // 2, GENERATED * 2

# The number of multiplications from which PyTorch's CPU kernels are used on processors. For smaller calls generated
# kernels are faster: the host's threads have to be woken, and compete with the device's threads for the cores.
HOST_FROM = {
    "products": 1 << 30,
    "products of few rows": 1 << 18,
    "convolutions": 1 << 23,
    "attention": 0,
    "recurrent layers": 0,
    "transforms": 0,
}


def unstated(target: Target) -> int:
    """The cost of a driver's library that states none.

    On GPUs, a library for the hardware is expected to be faster than generated kernels. On processors PyTorch's own
    libraries are known to be fast, so a driver's library must state a cost to be chosen.
    """
    return _LESS if target.simt else GENERATED + 1


def on_host(kind: str, dtype: torch.dtype, multiplications: int | None = None) -> int:
    """The cost of PyTorch's CPU kernels.

    Args:
        kind: a key of HOST_FROM.
        multiplications: how many the call has; None means enough for the host.
    """
    enough = multiplications is None or multiplications >= HOST_FROM[kind]
    return _LESS if enough and not host_is_slow(dtype) else _MORE


def host_is_slow(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes products and convolutions of this dtype with plain loops on this host.

    That is so if the processor lacks the instructions that oneDNN needs. Convolutions in bfloat16 are then also
    inexact: they round intermediate sums.
    """
    has_instructions = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return dtype in has_instructions and not has_instructions[dtype]()
