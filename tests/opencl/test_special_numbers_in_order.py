"""NaN, signed zeros and infinities in operators that depend on order or equality give the CPU's results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE

NAN, INF = math.nan, math.inf
ROWS = [
    [NAN, 0.0, -0.0, INF, -INF, NAN],
    [1.0, NAN, 0.0, 1.0, -0.0, NAN],
    [-0.0, 0.0, 2.0, -INF, INF, INF],
    [NAN, NAN, NAN, NAN, NAN, NAN],
    [0.0, -0.0, 0.0, -0.0, 0.0, -0.0],
]

# Functions of a tensor and a dimension. Unspecified results, such as which of several NaN is returned, are left out.
ALONG: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sort": lambda x, dim: torch.sort(x, dim=dim, stable=True),
    "sort descending": lambda x, dim: torch.sort(x, dim=dim, descending=True, stable=True),
    "argsort": lambda x, dim: torch.argsort(x, dim=dim, stable=True),
    "topk": lambda x, dim: torch.topk(x, 3, dim).values.abs(),
    "least": lambda x, dim: torch.topk(x, 3, dim, largest=False).values.abs(),
    "kthvalue": lambda x, dim: [torch.kthvalue(x, k, dim).values.abs() for k in (1, 3, 5)],
    "median": lambda x, dim: torch.median(x, dim).values.abs(),
    "nanmedian": lambda x, dim: torch.nanmedian(x, dim).values.abs(),
    "mode": lambda x, dim: torch.mode(x, dim).values.abs(),
    "max": lambda x, dim: torch.max(x, dim),
    "min": lambda x, dim: torch.min(x, dim),
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "amax": lambda x, dim: torch.amax(x, dim).abs(),
    "amin": lambda x, dim: torch.amin(x, dim).abs(),
    "aminmax": lambda x, dim: [one.abs() for one in torch.aminmax(x, dim=dim)],
    "cummax": torch.cummax,
    "cummin": torch.cummin,
    "nanquantile": lambda x, dim: torch.nanquantile(x.float(), 0.25, dim),
    "unique": lambda x, dim: torch.unique(x, dim=dim, return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x, dim: torch.unique_consecutive(
        x, dim=dim, return_inverse=True, return_counts=True
    ),
}
WHOLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "unique": lambda x: [one.abs() for one in torch.unique(x, return_inverse=True, return_counts=True)],
    "unique_consecutive": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    "median": lambda x: torch.median(x).abs(),
    "nanmedian": lambda x: torch.nanmedian(x).abs(),
    "max": lambda x: torch.max(x).abs(),
    "min": lambda x: torch.min(x).abs(),
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "msort": torch.msort,
    "isin": lambda x: torch.isin(x, x.new_tensor([NAN, 0.0, -INF])),
    "isin of many": lambda x: torch.isin(x, x.new_tensor([NAN, -0.0, 7.0, INF] * 9)),
    "isin inverted": lambda x: torch.isin(x, x.new_tensor([NAN, -0.0]), invert=True),
    "searchsorted": lambda x: torch.searchsorted(x.new_tensor([-INF, -0.0, 0.0, 1.0, INF, NAN]), x),
    "searchsorted right": lambda x: torch.searchsorted(x.new_tensor([-INF, -0.0, 0.0, 1.0, INF, NAN]), x, right=True),
    "bucketize": lambda x: torch.bucketize(x, x.new_tensor([-INF, 0.0, 2.0])),
    "histc": lambda x: torch.histc(x.nan_to_num(0.0, 3.0, -3.0).float(), 4),
    "equal": lambda x: [torch.tensor(torch.equal(x, x.clone())), x == x, x.isnan(), x.signbit()],
}


def agree(function: Callable[..., Any], x: torch.Tensor, *arguments: Any) -> None:
    """Compares the values and the signs of zeros."""
    expected = function(x, *arguments)
    for _ in range(2):
        found = function(x.to(DEVICE), *arguments)
        wanted = expected if isinstance(expected, (tuple, list)) else [expected]
        for one, other in zip(found if isinstance(found, (tuple, list)) else [found], wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
            if other.is_floating_point():
                assert torch.equal(one.cpu().nan_to_num().signbit(), other.nan_to_num().signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALONG)
def test_along_a_dimension(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor(ROWS, dtype=dtype)
    for dim in (0, 1):
        agree(ALONG[name], x, dim)
    agree(ALONG[name], x[:2, None].expand(2, 3, 6).clone(), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_over_all_elements(name: str, dtype: torch.dtype) -> None:
    for row in ROWS:
        agree(WHOLE[name], torch.tensor(row, dtype=dtype))


def test_nan_values_are_distinct_in_unique_along_a_dimension() -> None:
    """As in PyTorch's own test."""
    x = torch.tensor([NAN, 0, 0, NAN, NAN, 1], device=DEVICE)
    values, inverse, counts = torch.unique(x, dim=0, return_inverse=True, return_counts=True)
    torch.testing.assert_close(values.cpu(), torch.tensor([NAN, 0, NAN, NAN, 1]), equal_nan=True)
    assert inverse.tolist() == [0, 1, 1, 2, 3, 4]
    assert counts.tolist() == [1, 2, 1, 1, 1]
