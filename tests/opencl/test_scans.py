"""Cumulative operators match the CPU's results along any dimension and for any strides."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE, agrees, had

OPERATORS = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
}
SHAPES = [
    ((7,), 0),
    ((3, 100), 1),
    ((20, 37), 0),
    ((2, 9, 5), -2),
    ((4, 3, 2, 16), 0),
    ((), 0),
    ((0, 3), 0),
    ((3, 0), 0),
]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    if dtype.is_floating_point:
        return (torch.rand(shape) * 2 - 0.5).to(dtype)
    return torch.randint(-3, 4, shape).to(dtype)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_shapes(name: str, shape: tuple[int, ...], dim: int) -> None:
    agrees(lambda x: OPERATORS[name](x, dim), values(shape, torch.float32))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_floats(name: str, dtype: torch.dtype) -> None:
    agrees(lambda x: OPERATORS[name](x, 1), values((3, 40), dtype))


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_integers(name: str, dtype: torch.dtype, dim: int) -> None:
    agrees(lambda x: OPERATORS[name](x, dim), values((20, 40), dtype))


def test_overflow_wraps() -> None:
    agrees(lambda x: (x.cumprod(0), x.cumsum(0), x.cumsum(0, dtype=torch.int8)), torch.full((70,), 2**40 + 77))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dim", [0, 1])
def test_infinities_and_nan(name: str, dim: int) -> None:
    x = values((20, 24), torch.float32)
    for place, special in enumerate([math.inf, -math.inf, math.nan, math.inf, math.nan]):
        x[(place * 7 + torch.arange(20)) % 20, (torch.arange(20) * 5 + place) % 24] = special
    x[:, 3] = -math.inf
    x[2] = -math.inf
    agrees(lambda x: OPERATORS[name](x, dim), x)


def test_cummax_returns_the_last_of_equal_elements() -> None:
    agrees(lambda x: (x.cummax(0), x.cummin(1)), torch.tensor([[1.0, 1, 2], [1, 1, 1], [0, 2, 2]]))


def test_strides_dtypes_and_out_variants() -> None:
    x = values((6, 20, 4), torch.float32)
    agrees(lambda x: x.transpose(0, 2).cumsum(1), x)
    agrees(lambda x: x[:, ::3].cummax(1), x)
    for dtype in had((torch.float16, torch.float64)):
        agrees(lambda x, dtype=dtype: x.cumsum(1, dtype=dtype), x)
    agrees(lambda x: x.cumsum_(1), x)
    for cumulate in (torch.cumprod, torch.logcumsumexp):
        agrees(lambda x, out, to=cumulate: to(x, 1, out=out.transpose(0, 1)), x, torch.zeros(20, 6, 4))


@pytest.mark.parametrize("name", ["cummax", "logcumsumexp"])
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = OPERATORS[name](x, 1)
        result = result if isinstance(result, torch.Tensor) else result[0]
        return torch.autograd.grad((result * result.detach()).sum(), x)[0]

    agrees(gradient, values((5, 9), torch.float32), fallbacks=None)  # flip can fall back


def test_long_sums_are_accurate() -> None:
    x = torch.full((3, 1_000_003), 0.1)
    assert (x.to(DEVICE).cumsum(1).cpu().double()[:, -1] - x.double().sum(1)).abs().max() < 0.005
