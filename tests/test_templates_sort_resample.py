"""Sorting and resampling in the text that GPUs get, run on a CPU; and all of it compiled as CUDA C++."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, run
from torch.nn.functional import interpolate

from torch_backplane.kernels.templates import random, resample, sort

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
HALF_PIXEL = {name: resample.Resampling(name, 0.5, 0.5, (0.5, 0.5)) for name in ("linear", "cubic")}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape).mul(9).to(dtype)


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
        run(random.dropout(dialect(processor), out, mask, x, 0.75, 1 / 0.75, 3, 8))
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
    if dtype.is_floating_point:
        check_cuda(random.dropout, x, indices.bool(), x, 0.5, 2.0, 1, 4)
        small, large = numbers(3, 5, 5, dtype=dtype), numbers(3, 10, 10, dtype=dtype)
        for how in (*HALF_PIXEL.values(), resample.Resampling("nearest", 0, 0, (0.5, 0.5))):
            check_cuda(resample.resample, large, small, how)
            check_cuda(resample.resample_backward, small, large, how)
