"""Factory functions, with and without `out=`, match the CPU without fallbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from agreement import DEVICE, had

from torch_backplane import _C

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def same(make: Callable[..., torch.Tensor], **options: Any) -> None:
    """Compares a new tensor, an empty `out=` and a strided `out=` with the CPU's result, without fallbacks."""
    gives(make(**options), make, **options)


def gives(want: torch.Tensor, make: Callable[..., torch.Tensor], **options: Any) -> None:
    """Like `same`, with the expected result."""
    before = sum(_C.fallback_counts().values())
    spaced = torch.zeros(*want.shape, 2, dtype=want.dtype, device=DEVICE)
    found = [
        make(device=DEVICE, **options),
        make(out=torch.empty(0, dtype=want.dtype, device=DEVICE), **options),
        make(out=spaced[..., 0], **options),
    ]
    assert sum(_C.fallback_counts().values()) == before
    for one in found:
        assert one.device.type == "bp"
        torch.testing.assert_close(one.cpu(), want)
    assert not spaced[..., 1].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 1000])
def test_linspace_and_logspace(steps: int, dtype: torch.dtype) -> None:
    same(lambda **options: torch.linspace(-1.5, 7, steps, **options), dtype=dtype)

    def powers(**options: Any) -> torch.Tensor:
        return torch.logspace(-1.5, 2, steps, base=2, **options)

    # For 16-bit dtypes, the reference is float64: the CPU computes the steps between exponents in 16 bits.
    gives(powers(dtype=torch.float64).to(dtype) if dtype.itemsize == 2 else powers(dtype=dtype), powers, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 7), (7, 3), (0, 4)], ids=str)
def test_eye(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    same(lambda **options: torch.eye(*shape, **options), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_arange_and_range(dtype: torch.dtype) -> None:
    same(lambda **options: torch.arange(2, 19, 3, **options), dtype=dtype)
    with pytest.warns(UserWarning, match="torch.range is deprecated"):
        same(lambda **options: torch.range(2, 20, 3, **options), dtype=dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
def test_zeros_ones_and_full(dtype: torch.dtype) -> None:
    same(lambda **options: torch.zeros(3, 5, **options), dtype=dtype)
    same(lambda **options: torch.ones(3, 5, **options), dtype=dtype)
    same(lambda **options: torch.full((3, 5), 1, **options), dtype=dtype)


INTEGERS = [0, 1, -1, 3, -7, 2**31 - 1, -(2**31), 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1]
NUMBERS = [0.0, -0.0, 0.5, 1.0, -1.5, 7.1, 1e-30, 1e30, 3.4e38, 1e300, 1e-300, math.inf, -math.inf, math.nan, 9.3e18]
DTYPES = [None, torch.int64, torch.int32, torch.uint8, *FLOATS]


def drawn(random: Random) -> Callable[..., torch.Tensor]:
    """A range with extreme ends, steps and dtypes, with few elements or too many for memory."""
    numbers = random.choice([INTEGERS, NUMBERS, [*INTEGERS, *NUMBERS]])
    name = random.choice(["arange", "arange", "range", "linspace", "logspace"])
    options: dict[str, Any] = {"dtype": random.choice(had(DTYPES))}
    if name in ("linspace", "logspace"):
        given = [random.choice(numbers), random.choice(numbers), random.choice([0, 1, 2, 3, -1])]
        if name == "logspace":
            options["base"] = random.choice([2, 10.0, 0.5, 0, -2.0])
    else:
        start, step = random.choice(numbers), random.choice(numbers)
        end = start + random.choice([-1, 1]) * random.choice([0, 1, 2, 3]) * random.choice([step, 1])
        given = [start, max(min(end, 2**63 - 1), -(2**63)) if isinstance(end, int) else end, step]
        if name == "range" and -1 < step < 1:
            given[2] = 2  # in integer dtypes, it crashes the CPU's process
    return lambda **where: getattr(torch, name)(*given, **options, **where)


@pytest.mark.filterwarnings("ignore")
def test_random_ranges_with_extreme_numbers() -> None:
    """Sizes, values and errors are the CPU's, with numbers that overflow, are rounded, or are NaN."""
    random, made = Random(torch.initial_seed()), 0
    for _ in range(300):
        make = drawn(random)
        try:
            expected = make(device="cpu")
        except (RuntimeError, ValueError, TypeError) as error:
            if "memory" not in str(error):
                with pytest.raises(type(error)):
                    make(device=DEVICE)
            continue
        found = make(device=DEVICE)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if expected.numel() < 100:
            made += 1
            rounding = {"rtol": 2e-2, "atol": 0} if found.dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 0}
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **rounding)
    assert made > 100


RANGES: dict[str, Callable[..., torch.Tensor]] = {
    "a distance beyond int64": lambda **where: torch.arange(0, 2**63 - 1, 2**63 - 1, **where),
    "a distance that float64 rounds": lambda **where: torch.arange(2**62, 2**62 - 1, -1, dtype=torch.float32, **where),
    "a distance that becomes a power of two": lambda **where: torch.arange(-1, 2**53, 2**53, dtype=torch.half, **where),
    "a step beyond float32": lambda **where: torch.arange(1.0, 3.0, 1e300, **where),
    "one of infinity": lambda **where: torch.linspace(torch.inf, 5, 1, **where),
    "one of infinity in float16": lambda **where: torch.linspace(-torch.inf, 5, 1, dtype=torch.half, **where),
    "a power of infinity": lambda **where: torch.logspace(torch.inf, 5, 1, 0.5, **where),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_whose_length_or_step_is_not_exact(name: str) -> None:
    torch.testing.assert_close(RANGES[name](device=DEVICE).cpu(), RANGES[name](device="cpu"))


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_integer_range_with_fractional_step_is_an_error() -> None:
    """It is a division by zero, which crashes the process on the CPU."""
    for dtype in (torch.uint8, torch.int64):
        with pytest.raises(RuntimeError, match="step must be nonzero"):
            torch.range(1.0, 2.0, 0.5, dtype=dtype, device=DEVICE)


# randperm


@pytest.mark.parametrize("n", [0, 1, 2, 7, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_permutations_contain_each_number_once(n: int, dtype: torch.dtype) -> None:
    for _ in range(3):
        found = torch.randperm(n, dtype=dtype, device=DEVICE)
        assert found.dtype == dtype
        assert torch.equal(found.cpu().sort()[0], torch.arange(n).to(dtype))


def test_permutations_follow_the_seed() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [torch.randperm(1000, device=DEVICE).cpu() for _ in range(3)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    generator = torch.Generator(DEVICE).manual_seed(4)
    a = torch.randperm(50, generator=generator, device=DEVICE)
    assert torch.equal(a, torch.randperm(50, generator=generator.manual_seed(4), device=DEVICE))


def test_permutations_are_equally_likely() -> None:
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(1200):
        found = tuple(torch.randperm(3, device=DEVICE).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 6
    # 200 of each are expected, with a standard deviation of 13.
    assert all(130 < count < 270 for count in counts.values()), counts


def test_randperm_rejects_invalid_sizes() -> None:
    with pytest.raises(RuntimeError, match="negative"):
        torch.randperm(-1, device=DEVICE)
    with pytest.raises(RuntimeError, match="n cannot be greater than 2049"):
        torch.randperm(40000, dtype=torch.float16, device=DEVICE)
