"""isin."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, refused_alike

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("invert", [False, True])
def test_isin(dtype: torch.dtype, invert: bool) -> None:
    x, few, many = numbers((7, 9), dtype), numbers((5,), dtype), numbers((20, 30), dtype)
    for tests in (few, many, few[:0], few[0]):
        agrees(lambda x, t: torch.isin(x, t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(x.t()[::2], t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(x[0, 0], t, invert=invert), x, tests)
        agrees(lambda x, t: torch.isin(3, t, invert=invert), x, tests)
    agrees(lambda x: torch.isin(x, 3, invert=invert), x)
    unique = torch.arange(700).to(dtype).unique()
    agrees(lambda x, t: torch.isin(x, t, assume_unique=True, invert=invert), unique[::2].clone(), unique[:300])


def test_isin_of_nan() -> None:
    nan = float("nan")
    x = torch.tensor([nan, 1.0, 2.0, -0.0])
    for tests in (torch.tensor([nan, 2.0, 0.0]), torch.tensor([nan, 2.0, 0.0] * 100)):
        agrees(lambda x, t: torch.isin(x, t), x, tests)


def test_isin_of_two_dtypes() -> None:
    agrees(lambda x, t: torch.isin(x, t), torch.arange(9), torch.tensor([1.0, 2.5, 3.0]))
    agrees(lambda x, t: torch.isin(x, t), torch.arange(9.0), torch.tensor([1, 300]).repeat(300))


def test_isin_rejects_bools() -> None:
    for size in (0, 3):
        bools = torch.zeros(size, dtype=torch.bool)
        for elements in (2, True, 0.5, torch.ones(2), torch.ones(2, dtype=torch.int64), bools):
            refused_alike(torch.isin, elements, bools)
        refused_alike(torch.isin, bools, torch.ones(2, dtype=torch.int64))


def test_isin_checks_arguments_in_pytorchs_order() -> None:
    """It reports an unsupported dtype first, then `out`, and then dtypes without a common dtype."""
    some = {dtype: torch.ones(2).to(dtype) for dtype in (torch.bool, torch.uint16, torch.uint32, torch.int32)}
    for a in some.values():
        for b in some.values():
            if a.dtype != b.dtype:
                refused_alike(lambda a, b: torch.isin(a, b, out=torch.zeros(2, device=a.device)), a, b)
                if not {torch.bool, torch.int32} >= {a.dtype, b.dtype}:
                    refused_alike(torch.isin, a, b)
