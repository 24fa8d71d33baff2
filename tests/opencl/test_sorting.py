"""Sorting and selection: order, ties, NaN, dimensions and strides as on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE, agrees

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """With ties, and for floats with infinities, NaN and both zeros."""
    torch.manual_seed(1)
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, shape).to(dtype)
    x = torch.randn(shape).mul(4).round() / 2
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, -math.nan])
    where = torch.rand(shape) < 0.2
    return torch.where(where, special[torch.randint(6, shape)], x).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(dtype: torch.dtype, descending: bool) -> None:
    for size in (1, 2, 16, 17, 100, 1000):
        agrees(lambda x: x.sort(dim=-1, descending=descending, stable=True), values((3, size), dtype))


def test_extreme_integers() -> None:
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    x = torch.tensor([most, least, 0, -1, most, 1, least] * 5)
    agrees(lambda x: [y.sort(stable=True, descending=d) for y in (x, x.int()) for d in (False, True)], x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (40,), (5, 30), (30, 5), (4, 20, 3)])
def test_dimensions(shape: tuple[int, ...]) -> None:
    x = values(shape)
    for dim in range(max(1, x.dim())):
        agrees(lambda x, dim=dim: (x.sort(dim=dim, stable=True), x.argsort(dim=dim, stable=True)), x)
    agrees(lambda x: x.msort(), x)


def test_long_rows() -> None:
    torch.manual_seed(2)
    agrees(lambda x: x.sort(stable=True), torch.randint(1000, (300_001,)))
    agrees(lambda x: x.sort(stable=True), torch.rand(300_001))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_length(dtype: torch.dtype) -> None:
    """Sizes on both sides of the switches between merge sort, radix sort and heaps, in turns."""
    for rows, size in ((2, 255), (2, 256), (1, 4095), (3, 8200), (1, 12), (2, 9000), (1, 300), (9, 1023), (3, 1024)):
        x = values((rows, size), dtype)
        agrees(lambda x: x.sort(dim=-1, stable=True), x)
        agrees(lambda x: x.sort(dim=0, descending=True, stable=True), x.T)
        if dtype == torch.bool:
            continue  # the CPU has no topk and kthvalue of bool
        for k in {1, min(size, 40), size // 32, size // 20, size // 3, size} - {0}:
            largest = k % 2 == 0
            found = x.to(DEVICE).topk(k, largest=largest)
            expected = x.sort(dim=-1, descending=largest, stable=True)
            torch.testing.assert_close(found.values.cpu(), expected.values[:, :k], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.indices.cpu(), expected.indices[:, :k]), (size, k)
            kth = x.to(DEVICE).kthvalue(k)
            assert torch.equal(kth.indices.cpu(), x.sort(dim=-1, stable=True).indices[:, k - 1]), (size, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.float64, torch.uint8], ids=str)
def test_topk_of_sorted_reversed_and_constant_rows(dtype: torch.dtype) -> None:
    """Each element replaces a kept one, none does, or all are equal."""
    row = torch.arange(20_000).div(100, rounding_mode="floor").to(dtype)
    for x in (torch.stack([row, row.flip(0), torch.zeros_like(row)]), row[None, :4100], row.flip(0)[None]):
        for k, largest in ((1, True), (50, True), (50, False), (256, True), (257, True), (2, False)):
            order = x.sort(dim=1, descending=largest, stable=True)
            found = x.to(DEVICE).topk(k, largest=largest)
            assert torch.equal(found.values.cpu(), order.values[:, :k]), (k, largest)
            assert torch.equal(found.indices.cpu(), order.indices[:, :k]), (k, largest)


def test_strides_and_out_variants() -> None:
    x = values((20, 30))
    agrees(lambda x: x.t().sort(dim=0, stable=True), x)
    agrees(lambda x: x[:, ::3].sort(dim=1, stable=True), x)
    indices = torch.zeros(20, 30, dtype=torch.int64)
    agrees(lambda x, v, i: torch.sort(x, dim=1, stable=True, out=(v.t(), i)), x, torch.zeros(30, 20), indices)
    agrees(lambda x, i: torch.sort(x, dim=1, stable=True, out=(x, i)), x, indices)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_topk(dtype: torch.dtype, largest: bool) -> None:
    x = values((4, 777), dtype)
    expected = x.sort(dim=-1, descending=largest, stable=True)
    for k in (1, 3, 16, 20, 500, 777, 0):
        agrees(lambda x, k=k: x.topk(k, largest=largest)[0], x)
        found = x.to(DEVICE).topk(k, largest=largest)
        assert torch.equal(found.indices.cpu(), expected.indices[:, :k])
    agrees(lambda x: x.topk(2, 0, largest=largest)[0], x)
    agrees(lambda x: x[0, 0].topk(1), x)


def test_topk_rejects_k_out_of_range() -> None:
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        torch.ones(3, device=DEVICE).topk(4)


def distinct(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randperm(math.prod(shape)).view(shape).float()


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_kthvalue_and_medians(keepdim: bool, dim: int) -> None:
    x = distinct(7, 20, 4)
    agrees(lambda x: x.kthvalue(3, dim, keepdim), x)
    agrees(lambda x: x.median(dim, keepdim), x)
    agrees(lambda x: x.int().median(dim, keepdim), x)
    agrees(lambda x: x.nanmedian(dim, keepdim), x)
    agrees(lambda x: (x.median(), x.nanmedian(), x[0, 0, 0].median(), x[0, 0, 0].kthvalue(1)), x)


@pytest.mark.parametrize("dim", [0, 1])
def test_medians_of_nan(dim: int) -> None:
    x = distinct(9, 20)
    x[3:6, 2] = math.nan
    x[:, 4] = math.nan
    x[7] = math.nan
    agrees(lambda x: x.median(dim), x)
    agrees(lambda x: x.nanmedian(dim)[0], x)
    agrees(lambda x: (x.median(), x.nanmedian()), x)


GRADIENTS = {"sort": lambda x: x.sort(1)[0], "topk": lambda x: x.topk(3)[0], "median": lambda x: x.median(1)[0]}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = GRADIENTS[name](x)
        weights = torch.arange(result.numel(), device=x.device).view_as(result)
        return torch.autograd.grad((result * weights).sum(), x)[0]

    agrees(gradient, distinct(4, 30))


def test_kthvalue_rejects_out_that_overlaps_the_input() -> None:
    x = distinct(10).to(DEVICE)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch.kthvalue(x, 5, out=(x, torch.empty(0, dtype=torch.int64, device=DEVICE)))
