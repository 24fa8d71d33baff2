"""histc, and the elements or slices that are not the same as others: unique and unique_consecutive."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from agreement import DEVICE, agrees

from torch_backplane import _C

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
ASKED = list(itertools.product([False, True], repeat=2))


def few_values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, most: int = 7) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randint(most, shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = few_values((6, 50), dtype)
    agrees(lambda x: x.unique(return_inverse=True, return_counts=True), x)
    agrees(lambda x: x.unique_consecutive(return_inverse=True, return_counts=True), x)
    for dim in (0, 1):
        agrees(lambda x, dim=dim: x.unique(dim=dim, return_inverse=True, return_counts=True), x % 2 if dim else x)
        agrees(lambda x, dim=dim: x.unique_consecutive(dim=dim, return_inverse=True, return_counts=True), x)


@pytest.mark.parametrize(("inverse", "counts"), ASKED)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (40,), (5, 6), (2, 3, 4), (3000,), (0, 3)], ids=str)
def test_what_is_asked_for(shape: tuple[int, ...], inverse: bool, counts: bool) -> None:
    x = few_values(shape)
    agrees(lambda x: torch.ops.aten._unique2(x, True, inverse, counts), x)
    agrees(lambda x: torch.ops.aten._unique2(x, False, inverse, counts), x)
    agrees(lambda x: torch.ops.aten.unique_consecutive(x, inverse, counts), x)
    agrees(lambda x: torch._unique(x, True, inverse), x)
    if 0 not in shape:
        for dim in range(-x.dim(), x.dim()):
            agrees(lambda x, dim=dim: torch.ops.aten.unique_dim(x, dim, True, inverse, counts), x)
            agrees(lambda x, dim=dim: torch.ops.aten.unique_consecutive(x, inverse, counts, dim), x)
            agrees(lambda x, dim=dim: torch.ops.aten.unique_dim_consecutive(x, dim, inverse, counts), x)


@pytest.mark.parametrize(("shape", "dim"), [((0, 3), 0), ((3, 0), 1), ((0,), 0), ((0,), -1), ((2, 0, 3), -2)])
def test_no_slices(shape: tuple[int, ...], dim: int) -> None:
    agrees(lambda x: torch.ops.aten.unique_dim(x, dim, True, True, True), torch.zeros(shape))
    agrees(lambda x: torch.ops.aten.unique_dim_consecutive(x, dim, True, True), torch.zeros(shape))
    agrees(lambda x: torch.ops.aten.unique_consecutive(x, True, True, dim), torch.zeros(shape))


@pytest.mark.parametrize(("shape", "dim"), [((0, 0), 0), ((3, 0), 0), ((), 0), ((3,), 1)])
def test_slices_are_refused(shape: tuple[int, ...], dim: int) -> None:
    x = torch.zeros(shape)
    for function in (torch.ops.aten.unique_dim, torch.ops.aten.unique_dim_consecutive):
        with pytest.raises((RuntimeError, IndexError)) as expected:
            function(x, dim)
        with pytest.raises(expected.type) as found:
            function(x.to(DEVICE), dim)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_strides() -> None:
    x = few_values((9, 8))
    agrees(lambda x: (x.t().unique(return_inverse=True), x[::2, 1].unique_consecutive(return_inverse=True)), x)
    agrees(lambda x: x.t()[::2].unique(dim=0, return_inverse=True), x % 2)


def test_nan() -> None:
    x = torch.tensor([1.0, math.nan, math.nan, -0.0, 0.0, math.inf, 1.0, -math.inf, math.nan])
    agrees(lambda x: x.unique(return_inverse=True, return_counts=True), x)
    agrees(lambda x: x.unique_consecutive(return_inverse=True, return_counts=True), x)


def test_slices_in_the_order_of_their_elements() -> None:
    for shape, dim in (((200, 5), 0), ((5, 200), 1), ((4, 30, 3), 1), ((300, 1), 0), ((40, 33), 0)):
        x = few_values(shape, most=2) - 1
        agrees(lambda x, dim=dim: x.unique(dim=dim, return_inverse=True, return_counts=True), x)
        agrees(lambda x, dim=dim: x.unique_consecutive(dim=dim, return_inverse=True, return_counts=True), x)


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bins", [1, 7, 100])
def test_histc(dtype: torch.dtype, bins: int) -> None:
    x = numbers(40, 50).to(dtype)
    agrees(lambda x: torch.histc(x, bins), x)
    agrees(lambda x: torch.histc(x.t()[::3], bins, -2, 2.5), x)
    agrees(lambda x: torch.histc(x, bins, 1, 1), x)
    agrees(lambda x: torch.histc(x[0, 0], bins), x)
    agrees(lambda x: torch.histc(x[:0], bins), x)
    agrees(lambda x: torch.histc(x[:0], bins, 1, 2), x)
    agrees(lambda x: torch.histc(torch.ones_like(x), bins), x)
    agrees(lambda x, out: torch.histc(x, bins, -1, 1, out=out), x, torch.zeros(bins, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_histc_of_integers_is_computed_in_integers(dtype: torch.dtype) -> None:
    """As on CUDA; the CPU has none. The places are exact, where float64 would find another bin at some borders."""
    experts = torch.tensor([0, 3, 3, 1, 7, 2, 0, 0, 9, 100]).to(dtype)
    x = experts.to("bp")
    _C.reset_fallback_counts()
    for bins, least, most in ((8, 0, 7), (5, 0, 0), (3, 1, 1), (10, 0, 6), (7, 1.9, 3.9)):
        low, high = int(least), int(most)
        low, high = (int(experts.min()), int(experts.max())) if low == high else (low, high)
        low, high = (low - 1, high + 1) if low == high else (low, high)
        expected = [0] * bins
        for value in experts.tolist():
            if low <= value <= high:
                expected[min((value - low) * bins // (high - low), bins - 1)] += 1
        for device in (x, x.repeat_interleave(2)[::2]):
            found = torch.histc(device, bins, least, most)
            assert (found.dtype, found.tolist()) == (dtype, expected), (bins, least, most)
        out = torch.zeros(bins, dtype=dtype, device="bp")
        assert torch.histc(x, bins, least, most, out=out).tolist() == expected
    assert not _C.fallback_counts()


def test_histc_leaves_out_what_is_beyond_and_nan() -> None:
    x = torch.tensor([math.nan, -math.inf, math.inf, 0.0, 1.0, 2.0, -1e-30, 2.0000002, 1.9999999])
    agrees(lambda x: torch.histc(x, 4, 0, 2), x)


def test_histc_refuses() -> None:
    cases = [([1.0, math.nan], {}), ([1.0, math.inf], {}), ([1.0], {"min": 3, "max": 1}), ([1.0], {"bins": 0})]
    for values, options in cases:
        x = torch.tensor(values)
        with pytest.raises(RuntimeError) as expected:
            torch.histc(x, **options)
        with pytest.raises(RuntimeError) as found:
            torch.histc(x.to(DEVICE), **options)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
