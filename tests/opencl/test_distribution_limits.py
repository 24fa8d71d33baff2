"""Distributions with parameters at and beyond their limits: errors and kinds of numbers are those of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE

INF, NAN = math.inf, math.nan
DRAWS = 2000
GREATEST, LEAST = 3.4e38, 1e-45  # of float32; the next two are out of its range
BEYOND, BELOW = 1e300, 1e-300
Fill = Callable[[torch.Tensor], torch.Tensor]

FILLS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[float, ...]]]] = {
    "exponential_": (
        torch.Tensor.exponential_,
        [(1.0,), (INF,), (BEYOND,), (GREATEST,), (1e30,), (LEAST,), (BELOW,), (0.0,), (-1.0,), (NAN,)],
    ),
    "cauchy_": (
        torch.Tensor.cauchy_,
        [(0.0, 1.0), (INF, 1.0), (NAN, 1.0), (0.0, INF), (0.0, BELOW), (-INF, 1.0), (0.0, 0.0), (0.0, -1.0),
         (0.0, NAN)],
    ),
    "geometric_": (torch.Tensor.geometric_, [(0.5,), (0.0,), (1.0,), (1 - 1e-12,), (1e-6,), (NAN,), (2.0,)]),
    "log_normal_": (
        torch.Tensor.log_normal_,
        [(0.0, 1.0), (INF, 1.0), (-INF, 1.0), (NAN, 1.0), (0.0, BELOW), (0.0, 0.0), (0.0, -1.0), (0.0, NAN),
         (200.0, 1.0), (-200.0, 1.0)],
    ),
    "normal_": (
        torch.Tensor.normal_,
        [(0.0, 1.0), (INF, 1.0), (-INF, 1.0), (NAN, 1.0), (0.0, 0.0), (0.0, BELOW), (0.0, -1.0), (0.0, NAN),
         (1e30, 1.0)],
    ),
    "uniform_": (
        torch.Tensor.uniform_,
        [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, INF), (-INF, 0.0), (NAN, 1.0), (0.0, NAN), (-3e38, 3e38),
         (0.0, BEYOND), (0.0, BELOW), (-0.0, 0.0)],
    ),
    "bernoulli_": (torch.Tensor.bernoulli_, [(0.0,), (1.0,), (0.5,), (NAN,), (-0.1,), (1.1,), (BELOW,)]),
    "random_": (
        torch.Tensor.random_,
        [(), (1,), (0,), (-1,), (2, 1), (5, 6), (-5, 5), (0, 2**24), (0, 2**53), (-(2**63), 2**63 - 1)],
    ),
}  # fmt: skip
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def described(x: torch.Tensor) -> torch.Tensor:
    """Returns the shares of NaN, positive and negative infinity, zero, and other positive and negative numbers."""
    x = x.detach().cpu().double()
    kinds = [x.isnan(), x == INF, x == -INF, x == 0, (x > 0) & (x < INF), (x < 0) & (x > -INF)]
    return torch.stack([kind.double().mean() for kind in kinds])


def outcome(function: Callable[[], torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    torch.manual_seed(0)
    try:
        return "", function().cpu()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", None


def alike(function: Callable[[str], torch.Tensor]) -> None:
    """Asserts that `function`, called with a device's name, behaves the same on the device and the CPU: error messages,
    kinds of numbers, quartiles."""
    wrong, expected = outcome(lambda: function("cpu"))
    for _ in range(2):
        error, found = outcome(lambda: function(DEVICE))
        assert error == wrong, f"{error}; on the CPU {wrong}"
        if expected is None or found is None:
            continue
        assert found.dtype == expected.dtype
        torch.testing.assert_close(described(found), described(expected), rtol=0, atol=0.06)
        finite = [one[one.isfinite()].double() for one in (found, expected)]
        if min(map(len, finite)) > DRAWS // 2:
            quarter = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
            one, other = (numbers.quantile(quarter) for numbers in finite)
            spread = 0.2 * (other[2] - other[0]).item()
            discrete = 1.0 if torch.equal(finite[1], finite[1].round()) else 0.0
            torch.testing.assert_close(one, other, rtol=2e-2, atol=max(spread, discrete))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str, dtype: torch.dtype) -> None:
    function, parameters = FILLS[name]
    for given in parameters:
        if name == "exponential_" and dtype == torch.float16 and 1e5 < given[0] <= GREATEST:
            continue  # PyTorch rounds all draws to 0; ours are never 0 (test_distributions.py)
        alike(lambda device: function(torch.empty(DRAWS, dtype=dtype, device=device), *given))  # noqa: B023


OF_TENSORS: dict[str, tuple[Callable[..., torch.Tensor], list[float]]] = {
    "poisson": (torch.poisson, [0.0, 1e-30, 1.0, 1e4, -1.0, NAN]),
    "standard_gamma": (torch._standard_gamma, [1e-30, 0.5, 1.0, 1e4]),
    "bernoulli": (torch.bernoulli, [0.0, 1.0, 1e-30, NAN, -0.5, 1.5]),
    "normal of means": (lambda x: torch.normal(x, 1.0), [0.0, INF, -INF, NAN]),
    "normal of deviations": (lambda x: torch.normal(0.0, x.abs()), [0.0, 1.0, NAN]),
    "binomial of one": (lambda x: torch.binomial(torch.ones_like(x), x), [0.0, 1.0, 0.5]),
    "binomial of many": (lambda x: torch.binomial(torch.full_like(x, 1000), x), [0.0, 1.0, 0.5, 1e-6]),
    "binomial of counts": (lambda x: torch.binomial(x, torch.full_like(x, 0.5)), [0.0, 1.0, 100.0]),
    "dirichlet": (lambda x: torch._sample_dirichlet(x.view(-1, 2)), [1e-6, 1.0, 1e4]),
    "multinomial": (lambda x: torch.multinomial(x.view(2, -1), 1000, True).to(x.dtype), [0.0, 1e-30, 1.0, INF, NAN]),
}


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("name", OF_TENSORS)
def test_parameters_in_tensors(name: str, dtype: torch.dtype) -> None:
    function, numbers = OF_TENSORS[name]
    for number in numbers:
        alike(lambda device: function(torch.full((DRAWS,), number, dtype=dtype, device=device)))  # noqa: B023
