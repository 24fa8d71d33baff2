"""Every distribution in every dtype: support, moments, correlation of neighbours, and the Kolmogorov-Smirnov distance.

By default a quick check with few draws, in every second dtype. `make test-random` makes 10 million draws in each dtype,
which shows deviations of 0.001.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from agreement import DEVICE, had
from torch import Tensor

DRAWS = int(os.environ.get("DRAWS", "20000"))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# A correct distribution exceeds a distance of 2.5 / √n in one of 130,000 tests, and six standard errors less often.
DISTANCE, ERRORS = 2.5, 6


class Distribution(NamedTuple):
    fill: Callable[[Tensor], Tensor]  # fills an uninitialized tensor
    below: Callable[[Tensor], Tensor]  # cumulative distribution function, in float64
    least: float
    greatest: float
    mean: float | None = None
    variance: float | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    least_is_in: bool = True
    greatest_is_in: bool = True
    whole: bool = False  # integers only


def integers(low: int, high: int, fill: Callable[[Tensor], Tensor], *dtypes: torch.dtype) -> Distribution:
    """All integers from low to high - 1, with equal probability."""
    count = high - low
    return Distribution(
        fill,
        lambda x: ((x - low + 1) / count).clamp(0, 1),
        low,
        high - 1,
        low + (count - 1) / 2,
        (count**2 - 1) / 12,
        dtypes,
        whole=True,
    )


def uniform(low: float, high: float, *dtypes: torch.dtype) -> Distribution:
    return Distribution(
        lambda x: x.uniform_(low, high),
        lambda x: ((x - low) / (high - low)).clamp(0, 1),
        low,
        high,
        (low + high) / 2,
        (high - low) ** 2 / 12,
        dtypes,
        greatest_is_in=False,
    )


def normal_below(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def exponential(rate: float, *dtypes: torch.dtype) -> Distribution:
    return Distribution(
        lambda x: x.exponential_(rate),
        lambda x: -torch.expm1(-rate * x.clamp(min=0)),
        0,
        math.inf,
        1 / rate,
        1 / rate**2,
        dtypes,
        least_is_in=False,
        greatest_is_in=False,
    )


def chances(chance: float, fill: Callable[[Tensor], Tensor], *dtypes: torch.dtype) -> Distribution:
    def below(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, torch.where(x < 1, 1 - chance, 1.0)).double()

    return Distribution(fill, below, 0, 1, chance, chance * (1 - chance), dtypes, whole=True)


def geometric(chance: float, *dtypes: torch.dtype) -> Distribution:
    return Distribution(
        lambda x: x.geometric_(chance),
        lambda x: 1 - (1 - chance) ** x.floor().clamp(min=0),
        1,
        math.inf,
        1 / chance,
        (1 - chance) / chance**2,
        dtypes,
        greatest_is_in=False,
        whole=True,
    )


def multinomial(x: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0], dtype=x.dtype, device=x.device)
    return torch.multinomial(weights.expand(x.numel(), 4), 1).view(-1)


def chosen(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, torch.where(x < 2, 0.1, torch.where(x < 3, 0.4, 1.0))).double()


def rrelu_noise(x: Tensor) -> Tensor:
    noise = torch.empty_like(x)
    torch.ops.aten.rrelu_with_noise(torch.full_like(x, -1.0), noise, 0.25, 0.75, True)
    return noise


def dropped(x: Tensor) -> Tensor:
    """Returns 1 where dropout keeps the element and 0 elsewhere."""
    kept = torch.nn.functional.dropout(torch.ones_like(x), 0.25)
    assert set(kept.unique().tolist()) <= {0.0, (torch.ones((), dtype=x.dtype) * (1 / 0.75)).item()}
    return (kept != 0).to(x.dtype)


LN = math.exp(0.5**2 / 2)  # the mean of a log-normal variable whose logarithm has standard deviation 0.5
DISTRIBUTIONS: dict[str, Distribution] = {
    "rand": uniform(0, 1, *FLOATS),
    "uniform_ of another range": uniform(-0.1, 0.3, *FLOATS),
    "uniform_ far from zero": uniform(1000, 1001, torch.float32, torch.float64),
    "randn": Distribution(lambda x: x.normal_(), normal_below, -math.inf, math.inf, 0, 1),
    "normal_": Distribution(lambda x: x.normal_(2, 3), lambda x: normal_below((x - 2) / 3), -math.inf, math.inf, 2, 9),
    "normal of tensors": Distribution(
        lambda x: torch.normal(torch.full_like(x, 2), torch.full_like(x, 3)),
        lambda x: normal_below((x - 2) / 3),
        -math.inf,
        math.inf,
        2,
        9,
    ),
    "log_normal_": Distribution(
        lambda x: x.log_normal_(0, 0.5),
        lambda x: normal_below(x.clamp(min=0).log() / 0.5),
        0,
        math.inf,
        LN,
        LN**2 * math.expm1(0.25),
        least_is_in=False,
    ),
    "exponential_": exponential(1, *FLOATS),
    "exponential_ of a large rate": exponential(5000, *FLOATS),
    "cauchy_": Distribution(
        lambda x: x.cauchy_(1, 2), lambda x: ((x - 1) / 2).atan() / math.pi + 0.5, -math.inf, math.inf
    ),
    "geometric_": geometric(0.25, *FLOATS, *INTEGERS),
    "geometric_, rare": geometric(1e-3, torch.float32, torch.float64, torch.int64, torch.int32),
    "bernoulli_": chances(0.3, lambda x: x.bernoulli_(0.3), *FLOATS, *INTEGERS, torch.bool),
    "bernoulli": chances(0.25, lambda x: torch.bernoulli(torch.full_like(x, 0.25)), *FLOATS),
    "bernoulli out=": chances(
        0.25, lambda x: torch.bernoulli(torch.full(x.shape, 0.25, device=x.device), out=x), *INTEGERS, torch.bool
    ),
    # Too rare for the moments of so few draws to be meaningful.
    "bernoulli_, rare": chances(1e-6, lambda x: x.bernoulli_(1e-6), torch.float32, torch.float64)._replace(mean=None),
    "dropout": chances(0.75, dropped, *FLOATS),
    "random_ of a small range": integers(-3, 5, lambda x: x.random_(-3, 5), *FLOATS, *INTEGERS[:-1]),
    "random_ of a byte": integers(0, 200, lambda x: x.random_(200), torch.uint8, torch.int64, torch.float16),
    "random_ of bools": integers(0, 2, lambda x: x.random_(), torch.bool),
    "random_ of int8": integers(0, 128, lambda x: x.random_(), torch.int8),
    "random_ of float16": integers(0, 2**11 + 1, lambda x: x.random_(), torch.float16),
    "random_ of bfloat16": integers(0, 2**8 + 1, lambda x: x.random_(), torch.bfloat16),
    "random_ of float32": integers(0, 2**24 + 1, lambda x: x.random_(), torch.float32),
    "random_ of int32": integers(0, 2**31, lambda x: x.random_(), torch.int32),
    "random_ of int64": integers(0, 2**63, lambda x: x.random_(), torch.int64),
    "randint beyond 32 bits": integers(-(2**40), 3 * 2**40, lambda x: x.random_(-(2**40), 3 * 2**40), torch.int64),
    # Ranges for which the remainder of 32 random bits would be clearly biased.
    "random_ of three quarters": integers(0, 3 * 2**30, lambda x: x.random_(3 * 2**30), torch.int64),
    "random_ of a large range": integers(0, 5 * 2**27, lambda x: x.random_(5 * 2**27), torch.int32),
    "multinomial": Distribution(multinomial, chosen, 0, 3, 2.4, 0.84, whole=True),
    "rrelu": Distribution(rrelu_noise, lambda x: (x - 0.25) / 0.5, 0.25, 0.75, 0.5, 1 / 48, greatest_is_in=False),
    "poisson": Distribution(
        lambda x: torch.poisson(torch.full_like(x, 4)),
        lambda x: torch.special.gammaincc(x.floor() + 1, torch.full_like(x, 4)),
        0,
        math.inf,
        4,
        4,
        FLOATS,
        whole=True,
    ),
}


def rounded_up_to(values: Tensor) -> Tensor:
    """Returns, for each value, the upper end of the interval that is rounded to it, in float64."""
    if not values.is_floating_point():
        return values.double()
    following = torch.nextafter(values, torch.full_like(values, math.inf))
    return torch.where(following.isinf(), values.double(), (values.double() + following.double()) / 2)


def distance(drawn: Tensor, case: Distribution) -> float:
    """Returns the Kolmogorov-Smirnov distance: the largest difference between the draws' cumulative shares and those of
    the distribution."""
    values, counts = drawn.unique(return_counts=True)
    found = counts.double().cumsum(0) / drawn.numel()
    bounds = values.double() if case.whole else rounded_up_to(values)
    expected = case.below(bounds)
    if not case.greatest_is_in and math.isfinite(case.greatest):
        # Numbers that would be rounded to the upper end become the lower end instead, as on GPUs.
        top = torch.tensor(case.greatest, dtype=drawn.dtype)
        before = torch.nextafter(top, torch.tensor(-math.inf, dtype=drawn.dtype))
        share = 1 - case.below((top.double() + before.double()) / 2)
        expected = (expected + share).clamp(max=1)
    before = torch.cat([torch.zeros(1, dtype=torch.float64), expected[:-1]])
    gaps = torch.cat([torch.zeros(1, dtype=torch.float64), found[:-1]]) - before
    return max((found - expected).abs().max().item(), gaps.abs().max().item())


@pytest.mark.filterwarnings("ignore:.* has no kernel for")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution(name: str) -> None:
    case = DISTRIBUTIONS[name]
    for dtype in case.dtypes if DRAWS >= 10**6 else case.dtypes[::2]:
        result = case.fill(torch.empty(DRAWS, dtype=dtype, device=DEVICE)).cpu()
        about = f"{name}, {dtype}, {DRAWS} draws"
        least, greatest = (torch.tensor(bound, dtype=torch.float64) for bound in (case.least, case.greatest))
        if dtype.is_floating_point:
            least, greatest = least.to(dtype).double(), greatest.to(dtype).double()
        drawn = result.double()
        assert not drawn.isnan().any(), about
        assert (drawn >= least if case.least_is_in else drawn > least).all(), f"{about}: {drawn.min()}"
        # 16-bit dtypes can overflow to infinity.
        below = drawn <= greatest if case.greatest_is_in or dtype.itemsize == 2 else drawn < greatest
        assert (below if math.isinf(greatest) else below & (drawn <= greatest)).all(), f"{about}: {drawn.max()}"
        if not case.greatest_is_in and math.isfinite(greatest):
            assert (drawn < greatest).all(), f"{about}: the upper end was drawn"
        if case.whole:
            assert (drawn == drawn.round()).all(), about
        assert distance(result, case) < DISTANCE / math.sqrt(DRAWS), f"{about}: {distance(result, case)}"
        if case.mean is not None and case.variance is not None:
            check_moments(drawn, case.mean, case.variance, dtype, about)


def check_moments(drawn: Tensor, mean: float, variance: float, dtype: torch.dtype, about: str) -> None:
    """Checks the mean, the variance, and that draws at several distances are uncorrelated."""
    deviation, count = math.sqrt(variance), drawn.numel()
    step = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    centred = (drawn - mean) / deviation
    error = ERRORS / math.sqrt(count)
    assert abs(centred.mean()) < error + step * (1 + abs(mean) / deviation), f"{about}: mean {drawn.mean()}"
    spread = (centred**2 - 1).std().item()
    slack = 2 * step * (1 + abs(mean) / deviation)
    assert abs((centred**2).mean() - 1) < error * spread + slack + 1e-9, f"{about}: variance {drawn.var()}"
    for lag in (1, 2, 3, 4, 16):
        together = (centred[lag:] * centred[:-lag]).mean().item()
        assert abs(together) < error + slack, f"{about}: neighbours {lag} apart"


def test_randperm() -> None:
    for dtype in (torch.int64, torch.int32):
        count = min(DRAWS, 10**6)
        drawn = torch.randperm(count, dtype=dtype, device=DEVICE).cpu()
        assert torch.equal(drawn.sort().values.long(), torch.arange(count))
        half = drawn[: count // 2]
        assert distance(half, integers(0, count, lambda x: x)) < DISTANCE / math.sqrt(count // 2)


def test_exponential_is_never_zero_for_any_rate() -> None:
    """Large rates force small draws: with the largest, all draws would be below the dtype's smallest number."""
    for dtype in had(FLOATS):
        for rate in (1.0, 1e5, torch.finfo(dtype).max):
            drawn = torch.empty(1000, dtype=dtype, device=DEVICE).exponential_(rate)
            assert (drawn.cpu() > 0).all(), (dtype, rate)


def test_bernoulli_out_of_another_dtype_and_shape() -> None:
    chances = torch.tensor([[0.0, 1.0], [1.0, 0.0]], device=DEVICE)
    for dtype in (*INTEGERS, *had(FLOATS), torch.bool):
        for out in (torch.empty(0, dtype=dtype, device=DEVICE), torch.empty(2, 4, dtype=dtype, device=DEVICE)[:, ::2]):
            for _ in range(2):
                assert torch.bernoulli(chances, out=out) is out
                assert torch.equal(out.cpu(), chances.cpu().to(dtype))


@pytest.mark.parametrize("std", FLOATS)
@pytest.mark.parametrize("mean", FLOATS)
def test_normal_has_the_dtype_of_the_mean(mean: torch.dtype, std: torch.dtype) -> None:
    given = torch.zeros(2, 3, dtype=mean), torch.ones(3, dtype=std)
    assert torch.normal(*given).dtype == mean
    assert torch.normal(*(one.to(DEVICE) for one in given)).dtype == mean
