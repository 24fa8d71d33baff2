"""Operands of different dtypes are first converted to the common dtype, which rounds wider values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE

HALVES = [torch.float16, torch.bfloat16]
BINARY: list[Callable[..., Any]] = [torch.add, torch.div, torch.atan2, torch.lt]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_two_tensors_are_rounded_to_their_common_dtype(dtype: torch.dtype) -> None:
    narrow = (torch.rand(600) * 3 + 0.5).to(dtype)
    for other in (torch.randint(1, 4000, (600,)), torch.tensor(1.00123)):
        for function in BINARY:
            found, expected = (function(narrow.to(DEVICE), one.to(DEVICE)) for one in (other, other.to(dtype)))
            assert torch.equal(found, expected), f"{function} of {dtype} and {other.dtype}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_three_tensors_are_rounded_to_their_common_dtype(dtype: torch.dtype) -> None:
    narrow, whole, one = torch.randn(500).to(dtype), torch.randint(1, 4000, (500,)), torch.tensor(1.00123)
    for function, *given in (
        (torch.addcmul, narrow, whole, one), (torch.addcmul, one, narrow, whole), (torch.addcdiv, narrow, one, whole),
        (torch.clamp, narrow, one - 2, one),
    ):  # fmt: skip
        expected = function(*(value.to(dtype) for value in given))
        for _ in range(2):
            assert torch.equal(function(*(value.to(DEVICE) for value in given)).cpu(), expected)


def test_in_place_and_out_results() -> None:
    for dtype in HALVES:
        narrow, whole = torch.randn(500).to(dtype), torch.randint(1, 4000, (500,))
        assert torch.equal(narrow.to(DEVICE).mul_(whole.to(DEVICE)).cpu(), narrow.clone().mul_(whole))
        out = torch.empty(500, device=DEVICE)
        torch.add(narrow.to(DEVICE), whole.to(DEVICE), out=out)
        assert torch.equal(out.cpu(), torch.add(narrow, whole, out=torch.empty(500)))
