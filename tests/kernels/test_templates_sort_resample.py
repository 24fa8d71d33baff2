"""Tests the sorting, selection, resampling and dropout templates: runs them on a CPU and compiles them as CUDA C++."""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import check_cuda, dialect, processors, run
from torch.nn.functional import interpolate

from torch_backplane.kernels.templates import radix, random, resample, sort

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
HALF_PIXEL = {name: resample.Resampling(name, 0.5, 0.5, (0.5, 0.5)) for name in ("linear", "cubic")}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).mul(9).to(dtype)


def special_numbers(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers that include duplicates, both zeros, infinities and NaN."""
    if dtype == torch.bool:
        return numbers(rows, size) > 0
    x = numbers(rows, size, dtype=dtype)
    if dtype.is_floating_point:
        for first, step, value in ((5, 77, math.nan), (7, 91, -0.0), (9, 93, 0.0), (11, 95, -math.inf)):
            x.view(-1)[first::step] = value
    return x


@pytest.mark.parametrize("k", [1000, 37, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sort(k: int, dtype: torch.dtype) -> None:
    target, x = dialect("gpu"), numbers(3, 1000, dtype=dtype)
    runs = sort.first_runs(x, k)
    run(sort.sort_runs(target, runs, x, False))
    while runs.count > 1:
        merged = sort.merged_runs(x, runs, k)
        run(sort.merge_runs(target, merged, runs))
        runs = merged
    values, indices = torch.empty(3, k, dtype=dtype), torch.empty(3, k, dtype=torch.int64)
    run(sort.take_sorted(target, values, indices, x, runs, 0))
    expected = x.sort(dim=-1, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    assert torch.equal(indices, expected.indices[:, :k])


@processors
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_radix_sort(dtype: torch.dtype, descending: bool, processor: str) -> None:
    for rows, size, first, count in ((1, 20_000, 0, 20_000), (3, 1025, 1000, 20), (70, 1, 0, 1), (2, 300, 7, 293)):
        x = special_numbers(rows, size, dtype)
        values, indices = torch.empty(rows, count, dtype=dtype), torch.empty(rows, count, dtype=torch.int64)
        run(radix.radix_sort(dialect(processor, compute_units=3), values, indices, x, first, descending))
        expected = x.sort(dim=-1, stable=True, descending=descending)
        assert torch.equal(indices, expected.indices[:, first : first + count])
        torch.testing.assert_close(values, expected.values[:, first : first + count], rtol=0, atol=0, equal_nan=True)


@processors
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_selection(dtype: torch.dtype, descending: bool, processor: str) -> None:
    for rows, size, k in ((1, 20_000, 50), (3, 1025, 1025), (70, 1, 1), (2, 9000, 300)):
        x = special_numbers(rows, size, dtype)
        values, indices = torch.empty(rows, k, dtype=dtype), torch.empty(rows, k, dtype=torch.int64)
        run(radix.select(dialect(processor, compute_units=3), values, indices, x, descending))
        expected = x.sort(dim=-1, stable=True, descending=descending)
        found = values.sort(dim=-1, stable=True, descending=descending)
        torch.testing.assert_close(found.values, expected.values[:, :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(indices.gather(1, found.indices), expected.indices[:, :k])


@pytest.mark.parametrize(("name", "mode"), [("linear", "bilinear"), ("cubic", "bicubic")])
def test_resample(name: str, mode: str) -> None:
    x = torch.rand(2, 7, 9, requires_grad=True)
    expected = interpolate(x[None], scale_factor=2, mode=mode)[0]
    out, grad = torch.empty(2, 14, 18), torch.empty(2, 7, 9)
    run(resample.resample(dialect("gpu"), out, x.detach(), HALF_PIXEL[name]))
    torch.testing.assert_close(out, expected.detach())
    weights = torch.rand(2, 14, 18)
    run(resample.resample_backward(dialect("gpu"), grad, weights, HALF_PIXEL[name]))
    torch.testing.assert_close(grad, torch.autograd.grad(expected, x, weights)[0])


def test_dropout() -> None:
    x, out, mask = torch.rand(10_001), torch.empty(10_001), torch.empty(10_001, dtype=torch.bool)
    results = []
    for processor in ("cpu", "gpu"):
        run(random.dropout(dialect(processor), out, mask, x, 0.25, 1 / 0.75, (3, 8)))
        assert torch.equal(out, x * mask * torch.tensor(1 / 0.75))
        results.append(mask.clone())
    assert torch.equal(*results)
    assert abs(mask.float().mean() - 0.75) < 0.03


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool], ids=str)
def test_cuda_compiles(dtype: torch.dtype) -> None:
    x, indices = numbers(3, 40, dtype=dtype), torch.empty(3, 40, dtype=torch.int64)
    runs = sort.first_runs(x, 40)
    merged = sort.merged_runs(x, runs, 40)
    check_cuda(sort.sort_runs, runs, x, True)
    check_cuda(sort.merge_runs, merged, runs)
    check_cuda(sort.take_sorted, x, indices, x, merged, 0)
    check_cuda(radix.radix_sort, x, indices, torch.empty_like(x), 0, False)
    check_cuda(radix.select, x[:, :9].contiguous(), indices[:, :9].contiguous(), x, True)
    if dtype.is_floating_point:
        check_cuda(random.dropout, x, indices.bool(), x, 0.5, 2.0, (1, 4))
        small, large = numbers(3, 5, 5, dtype=dtype), numbers(3, 10, 10, dtype=dtype)
        for how in (*HALF_PIXEL.values(), resample.Resampling("nearest", 0, 0, (0.5, 0.5))):
            check_cuda(resample.resample, large, small, how)
            check_cuda(resample.resample_backward, small, large, how)
