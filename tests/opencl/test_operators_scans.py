"""cumsum, cumprod, logcumsumexp, cummax, cummin."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import agrees

SCANS = [torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin]


@pytest.mark.parametrize("scan", SCANS)
def test_dimensions_and_strides(scan) -> None:
    x = torch.randn(4, 5, 6)
    for dim in (0, 1, -1):
        agrees(lambda x: scan(x, dim), x)  # noqa: B023
        agrees(lambda x: scan(x, dim), x.transpose(0, 2)[1:, ::2])  # noqa: B023
    agrees(lambda x: scan(x, 0), torch.tensor(2.0))
    agrees(lambda x: scan(x, 1), torch.zeros(0, 3))
    agrees(lambda x: scan(x, 0), torch.zeros(0, 3))


@pytest.mark.parametrize("scan", SCANS)
def test_nan_and_infinity(scan) -> None:
    special = [1.0, math.inf, 2.0, -math.inf, 3.0, math.nan, 4.0]
    agrees(lambda x: scan(x, 0), torch.tensor(special))
    agrees(lambda x: scan(x, 0), torch.tensor(special[::-1]))
    agrees(lambda x: scan(x, 0), torch.tensor([-math.inf, -math.inf, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 1, 0, 2], [1, 1, 4, 1]]).to(dtype)
    for scan in (torch.cumsum, torch.cumprod, torch.cummax, torch.cummin):
        agrees(lambda x: scan(x, 1), x)  # noqa: B023
    agrees(lambda x: x.cumsum(1, dtype=torch.float32), x)


def test_in_place_out_and_gradients() -> None:
    agrees(lambda x: x.cumsum_(1), torch.randn(3, 4).t())
    agrees(lambda x, out: torch.cumprod(x, 0, out=out), torch.randn(3, 4), torch.empty(4, 3).t())

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x.cumsum(0) * x.cumsum(1)).sum(), x)[0]

    agrees(gradient, torch.randn(4, 5))


def test_a_long_sum_is_as_good_as_the_cpus() -> None:
    agrees(lambda x: x.cumsum(0)[-1], torch.rand(200_000), rtol=1e-6, atol=0)
