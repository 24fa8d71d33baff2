"""Comparing what an OpenCL device computes with what the CPU does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import torch_backplane
from torch_backplane import plans

DEVICE = "bp:0"


def on_device(value: Any) -> Any:
    """Tensors in `value` moved to the device, with the same strides."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        return moved.copy_(tensor)

    return tree_map_only(torch.Tensor, move, value)


def to_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)


@contextmanager
def plans_from_the_start() -> Iterator[None]:
    """For tests that count plans: there are none, and they are used, whatever TORCH_BACKPLANE_PLANS says."""
    mode = plans.mode()
    plans.clear()
    plans.set_mode("1")
    try:
        yield
    finally:
        plans.set_mode(mode)


def agrees(function: Callable[..., Any], *arguments: Any, fallbacks: int | None = 0, **tolerances: float) -> None:
    """Calls `function` three times on the device (which plans, and replays) and once on the CPU: equal results, and
    equal arguments afterwards. `fallbacks`: how many operators may run on the CPU; None: any number."""
    reference = tree_map_only(torch.Tensor, torch.clone, arguments)
    expected = function(*reference)
    for _ in range(3):
        given = on_device(arguments)
        torch_backplane._C.reset_fallback_counts()
        found = function(*given)
        fell_back = torch_backplane._C.fallback_counts()
        torch.testing.assert_close(to_cpu(found), expected, equal_nan=True, **tolerances)
        torch.testing.assert_close(to_cpu(given), reference, equal_nan=True, **tolerances)
        if fallbacks is not None:
            assert sum(fell_back.values()) == fallbacks, fell_back


def refused_alike(function: Callable[..., Any], *arguments: Any) -> None:
    """The CPU refuses the call, and the device twice (planned, and once it is known) with the same error in the same
    words; no tensor is changed."""
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(*arguments)
    given = on_device(arguments)
    for _ in range(2):
        with pytest.raises(expected.type) as found:
            function(*given)
        assert str(found.value) == str(expected.value)
    torch.testing.assert_close(to_cpu(given), arguments, rtol=0, atol=0, equal_nan=True)
