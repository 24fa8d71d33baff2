"""Matrix products with an activation, and with numbers that may be none of their dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, refused_alike

from torch_backplane.conformance.numbers import compare, overloads


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_with_an_activation(dtype: torch.dtype, use_gelu: bool) -> None:
    def run(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch._addmm_activation(*tensors, use_gelu=use_gelu, **given)

    a, b = numbers(4, 3, dtype=dtype), numbers(3, 5, dtype=dtype)
    agrees(run, numbers(5, dtype=dtype), a, b)
    turned = numbers(3, 4, dtype=dtype)
    agrees(lambda c, x, y: run(c, x.t(), y, beta=0.5, alpha=2), numbers(4, 5, dtype=dtype), turned, b)
    agrees(lambda c, x, y, out: run(c, x, y, out=out), numbers(5, dtype=dtype), a, b, torch.zeros(4, 5, dtype=dtype))
    agrees(run, numbers(5, dtype=dtype), a[:0], b)
    refused_alike(run, numbers(5, dtype=dtype), a, a)


NUMBERS = (2, -0.5, 2.7, 300, 40_000, 2**31, 1e10, 1e39, math.nan, math.inf, 1 + 0j, 0.5j, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["addmm", "addmm.out", "addmv_", "baddbmm", "addbmm_"])
def test_factors_that_are_no_numbers_of_the_dtype(name: str, dtype: torch.dtype) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    outcome = compare(overload, DEVICE, [dtype], NUMBERS)
    assert outcome.calls == 2 * len(NUMBERS)
    assert not [one for one in outcome.findings if one.kind != "words"]
