"""Compares the softmax and log_softmax templates with PyTorch on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates.softmax import softmax, softmax_backward

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


@processors
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(processor, log, dtype):
    for shape, dim in (((5, 70), 1), ((3, 7, 35), 1), ((100, 3), 0), ((2, 3), 1), ((), 0), ((1, 1000), -1)):
        x = (random(shape, dtype).float() * 5).to(dtype)
        out, grad = torch.empty_like(x), random(shape, dtype)
        run(softmax(dialect(processor), out, x, dim, log))
        # float64, because PyTorch rounds intermediate results in 16-bit dtypes.
        expected = (torch.log_softmax if log else torch.softmax)(x.double(), dim).to(dtype)
        torch.testing.assert_close(out, expected)
        run(softmax_backward(dialect(processor), out, grad, expected, dim, log))
        aten = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
        torch.testing.assert_close(out, aten(grad, expected, dim, dtype))


@processors
@both
def test_infinities_and_nan(processor, log):
    x = torch.randn(4, 20)
    x[0, 3], x[1, 2], x[2], x[3, 5] = -math.inf, math.nan, -math.inf, math.inf
    for dim, values in ((1, x), (0, x.t().contiguous())):
        out = torch.empty_like(values)
        run(softmax(dialect(processor), out, values, dim, log))
        torch.testing.assert_close(out, (torch.log_softmax if log else torch.softmax)(values, dim), equal_nan=True)


@processors
def test_half_to_float(processor):
    x, out = torch.randn(3, 40).half(), torch.empty(3, 40)
    run(softmax(dialect(processor), out, x, 1, False))
    torch.testing.assert_close(out, torch.softmax(x.float(), 1))


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_cuda_compiles(log, dtype, dim):
    x = random((9, 8), dtype)
    check_cuda(softmax, x, x, dim, log)
    check_cuda(softmax_backward, x, x, x, dim, log)
