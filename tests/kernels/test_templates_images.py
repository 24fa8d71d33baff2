"""Tests the patch templates, and compiles patch and pooling templates as CUDA C++. tests/opencl tests the operators."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, run

from torch_backplane.kernels.templates import pooling
from torch_backplane.kernels.templates.unfold import Windows, fold, unfold

WINDOWS = Windows((8, 9), (3, 4), (3, 2), (2, 2), (1, 0), (1, 2))


@processors
def test_patches_match_pytorch(processor):
    image = torch.randn(2, 3, 8, 9)
    settings = {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 0), "dilation": (1, 2)}
    expected = torch.nn.functional.unfold(image, **settings)
    windows = Windows((8, 9), (4, 4), (3, 2), (2, 2), (1, 0), (1, 2))
    columns = torch.empty_like(expected)
    run(unfold(dialect(processor), columns, image, windows))
    torch.testing.assert_close(columns, expected)
    run(fold(dialect(processor), image, columns, windows, torch.tensor([1.0, 2.0, 3.0])))
    folded = torch.nn.functional.fold(expected, (8, 9), **settings)
    torch.testing.assert_close(image, folded + torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_cuda_compiles(dtype):
    image, out = torch.zeros(6, 8, 9, dtype=dtype), torch.zeros(6, 3, 4, dtype=dtype)
    indices = torch.zeros(6, 3, 4, dtype=torch.int64)
    check_cuda(unfold, torch.zeros(1, 36, 12, dtype=dtype), image.unsqueeze(0), WINDOWS)
    check_cuda(fold, image.unsqueeze(0), torch.zeros(1, 36, 12, dtype=dtype), WINDOWS, out[0, 0])
    check_cuda(pooling.max_pool, out, indices, image, WINDOWS)
    check_cuda(pooling.max_pool_backward, image, out, indices, WINDOWS)
    for padding, divisor in ((True, None), (False, None), (True, 3)):
        check_cuda(pooling.avg_pool, out, image, WINDOWS, padding, divisor)
        check_cuda(pooling.avg_pool_backward, image, out, WINDOWS, padding, divisor)
    check_cuda(pooling.adaptive_avg_pool, out, image)
    check_cuda(pooling.adaptive_avg_pool_backward, image, out)
