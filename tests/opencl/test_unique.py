"""unique and unique_consecutive, of elements and of slices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from agreement import DEVICE, agrees

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
def test_optional_results(shape: tuple[int, ...], inverse: bool, counts: bool) -> None:
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
def test_unique_of_no_slices(shape: tuple[int, ...], dim: int) -> None:
    agrees(lambda x: torch.ops.aten.unique_dim(x, dim, True, True, True), torch.zeros(shape))
    agrees(lambda x: torch.ops.aten.unique_dim_consecutive(x, dim, True, True), torch.zeros(shape))
    agrees(lambda x: torch.ops.aten.unique_consecutive(x, True, True, dim), torch.zeros(shape))


@pytest.mark.parametrize(("shape", "dim"), [((0, 0), 0), ((3, 0), 0), ((), 0), ((3,), 1)])
def test_invalid_slices_raise_the_cpus_errors(shape: tuple[int, ...], dim: int) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_slices_that_share_nan_are_ordered_by_other_elements(dtype: torch.dtype) -> None:
    x = few_values((6, 9), dtype)
    for rows in ([0], [0, 3], [2], [5]):
        x[rows] = math.nan
        for function in (torch.unique, torch.unique_consecutive):
            found = function(x.to(DEVICE), dim=1, return_inverse=True, return_counts=True)
            expected = function(x, dim=1, return_inverse=True, return_counts=True)
            torch.testing.assert_close([one.cpu() for one in found], [*expected], equal_nan=True)


def test_slices_are_sorted_lexicographically() -> None:
    for shape, dim in (((200, 5), 0), ((5, 200), 1), ((4, 30, 3), 1), ((300, 1), 0), ((40, 33), 0)):
        x = few_values(shape, most=2) - 1
        agrees(lambda x, dim=dim: x.unique(dim=dim, return_inverse=True, return_counts=True), x)
        agrees(lambda x, dim=dim: x.unique_consecutive(dim=dim, return_inverse=True, return_counts=True), x)
