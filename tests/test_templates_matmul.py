"""Matrix products: every form, layout and dtype against PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates.matmul import matmul

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def laid_out(shape, layout, dtype):
    if layout == "row":
        return random(shape, dtype)
    if layout == "column":
        return random((*shape[:-2], shape[-1], shape[-2]), dtype).mT
    return random((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")], ids=str)
def test_products(processor, dtype, layouts):
    for batch, rows, depth, columns in ((1, 70, 67, 65), (3, 9, 33, 20), (2, 1, 5, 1), (1, 3, 0, 4)):
        a, b = laid_out((batch, rows, depth), layouts[0], dtype), laid_out((batch, depth, columns), layouts[1], dtype)
        out = torch.full((batch, rows, columns), 9).to(dtype)
        run(matmul(dialect(processor), out, a, b))
        torch.testing.assert_close(out, torch.bmm(a, b), rtol=None, atol=None)


@processors
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_in_place_with_factors_and_transposed_results(processor, dtype):
    a, b = random((30, 40), dtype), random((40, 50), dtype)
    out = random((50, 30), dtype).t()
    expected = torch.addmm(out, a, b, alpha=2, beta=3)
    run(matmul(dialect(processor), out, a, b, out, 2, 3))
    torch.testing.assert_close(out, expected)
    bias = random((50,), dtype).expand(30, 50)
    run(matmul(dialect(processor), out, a, b, bias, -1, 1))
    torch.testing.assert_close(out, torch.addmm(bias, a, b, alpha=-1))
    run(matmul(dialect(processor), out, a, b))
    torch.testing.assert_close(out, a @ b)


@processors
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")], ids=str)
def test_long_sums_are_accurate(processor, layouts):
    """With one chain of additions the error would be some 1.2e-6, and 0.6e-6 by vectors along the chain."""
    torch.manual_seed(0)
    a, b = laid_out((20, 5000), layouts[0], torch.float32), laid_out((5000, 20), layouts[1], torch.float32)
    out, exact = torch.empty(20, 20), a.double() @ b.double()
    run(matmul(dialect(processor), out, a, b))
    assert (out - exact).norm() / exact.norm() < 2.5e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_compiles(dtype):
    a, b = random((70, 67), dtype), random((67, 65), dtype)
    check_cuda(matmul, a @ b, a, b, a @ b)
