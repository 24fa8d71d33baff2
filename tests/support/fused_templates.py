"""For tests of kernels of products and convolutions that compute elementwise operators, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_backplane
from torch_backplane.compile import template_kernel
from torch_backplane.tuning.choosing import forcing

CANDIDATES = (template_kernel.FUSED, template_kernel.SEPARATE)
CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # tolerance of results
Function = Callable[..., Any]


def kernels(function: Function, *arguments: Any) -> list[str]:
    """The names of the kernels that a call of a compiled function launches."""
    text = torch_backplane.plans.explain(function, *arguments)
    return [line.split()[2] for line in text.splitlines() if line.strip().startswith("→ launch")]


def check(function: Function, given: Sequence[torch.Tensor], candidate: str, dtype: torch.dtype) -> list[str]:
    """Compares a compiled function with the CPU in float64, for the given candidate and results of `dtype`.

    Returns:
        The names of the kernels.
    """
    compiled = torch.compile(function, options={"max_autotune_gemm": True})
    on_bp = [one.to("bp") for one in given]
    with forcing(template_kernel.FAMILY, candidate):
        found = [compiled(*on_bp) for _ in range(3)][-1]
        launched = kernels(compiled, *on_bp)
    expected = function(*(one.double() if one.is_floating_point() else one for one in given))
    close = CLOSE[dtype]
    results = (each if isinstance(each, tuple) else (each,) for each in (found, expected, function(*given)))
    for one, other, like in zip(*results, strict=True):
        assert (one.dtype, one.stride()) == (like.dtype, like.stride())
        if other.dtype == torch.bool:
            assert (one.cpu() != other).sum() <= other.numel() * close
        else:
            torch.testing.assert_close(one.cpu().double(), other, rtol=close, atol=close, equal_nan=True)
    return launched
