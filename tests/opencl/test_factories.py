"""Tensors made from numbers, new ones and into `out=`, on the device and without the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE

from torch_backplane import _C

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def same(make: Callable[..., torch.Tensor], **options: Any) -> None:
    """New, into an empty `out=`, and into one with strides: what the CPU gives, without asking it."""
    gives(make(**options), make, **options)


def gives(want: torch.Tensor, make: Callable[..., torch.Tensor], **options: Any) -> None:
    """The same with what is wanted."""
    before = sum(_C.fallback_counts().values())
    spaced = torch.zeros(*want.shape, 2, dtype=want.dtype, device=DEVICE)
    found = [
        make(device=DEVICE, **options),
        make(out=torch.empty(0, dtype=want.dtype, device=DEVICE), **options),
        make(out=spaced[..., 0], **options),
    ]
    assert sum(_C.fallback_counts().values()) == before
    for one in found:
        assert one.device.type == "bp"
        torch.testing.assert_close(one.cpu(), want)
    assert not spaced[..., 1].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 1000])
def test_spaced_numbers(steps: int, dtype: torch.dtype) -> None:
    same(lambda **options: torch.linspace(-1.5, 7, steps, **options), dtype=dtype)

    def powers(**options: Any) -> torch.Tensor:
        return torch.logspace(-1.5, 2, steps, base=2, **options)

    # Of small floats what the CPU gives in float64: it makes the steps between exponents in their own dtype.
    gives(powers(dtype=torch.float64).to(dtype) if dtype.itemsize == 2 else powers(dtype=dtype), powers, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 7), (7, 3), (0, 4)], ids=str)
def test_identities(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    same(lambda **options: torch.eye(*shape, **options), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_ranges(dtype: torch.dtype) -> None:
    same(lambda **options: torch.arange(2, 19, 3, **options), dtype=dtype)
    with pytest.warns(UserWarning, match="torch.range is deprecated"):
        same(lambda **options: torch.range(2, 20, 3, **options), dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
def test_one_value_everywhere(dtype: torch.dtype) -> None:
    same(lambda **options: torch.zeros(3, 5, **options), dtype=dtype)
    same(lambda **options: torch.ones(3, 5, **options), dtype=dtype)
    same(lambda **options: torch.full((3, 5), 1, **options), dtype=dtype)
