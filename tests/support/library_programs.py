"""Functions of the programs in tests/cuda and tests/hip, which run on emulated devices in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_backplane import plans

HALVES = (torch.float16, torch.bfloat16)


def called(library: str, function: Callable[..., Any], *given: torch.Tensor) -> bool:
    """Whether the plan of a function calls a library, such as "cuBLAS matmul"."""
    return f"call {library} " in plans.explain(function, *(one.to("bp") for one in given))


def close(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    """Compares the result of a function with the CPU's, and its strides."""
    expected, found = function(*given), function(*(one.to("bp") for one in given))
    loose: dict[str, Any] = {"rtol": 2e-2, "atol": 5e-2} if expected.dtype in HALVES else {"rtol": 1e-5, "atol": 1e-4}
    assert found.device.type == "bp"
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected, **loose)


def error_of(function: Callable[..., Any], *given: Any) -> str:
    """The first line of the error that a call, or what the device does afterwards, raises."""
    try:
        function(*given)
        torch.bp.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def raised(function: Callable[..., Any], *given: Any) -> str:
    """The error that a call raises."""
    try:
        return f"no error: {function(*given)!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
