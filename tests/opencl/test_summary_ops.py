"""bincount and histc."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE, agrees, need

from torch_backplane import _C


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float64, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("minlength", [0, 3, 200])
def test_bincount(dtype: torch.dtype, weights: torch.dtype | None, minlength: int) -> None:
    torch.manual_seed(1)
    if weights not in (None, torch.float32):
        need(torch.float64)  # the dtype of the result
    x = torch.randint(100, (500,)).to(dtype)
    given = [] if weights is None else [numbers((500,)).round().to(weights)]
    agrees(lambda x, *w: torch.bincount(x, *w, minlength=minlength), x, *given)
    agrees(lambda x, *w: torch.bincount(x[:0], *(one[:0] for one in w), minlength=minlength), x, *given)
    agrees(lambda x, *w: torch.bincount(x[::2], *(one[::2] for one in w), minlength=minlength), x, *given)


def test_bincount_rejects_invalid_input() -> None:
    for x in (torch.tensor([1, -1]), torch.ones(2, 2, dtype=torch.int64), torch.ones(2)):
        with pytest.raises(RuntimeError) as expected:
            torch.bincount(x)
        with pytest.raises(RuntimeError) as found:
            torch.bincount(x.to(DEVICE))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bins", [1, 7, 100])
def test_histc(dtype: torch.dtype, bins: int) -> None:
    x = numbers((40, 50)).to(dtype)
    agrees(lambda x: torch.histc(x, bins), x)
    agrees(lambda x: torch.histc(x.t()[::3], bins, -2, 2.5), x)
    agrees(lambda x: torch.histc(x, bins, 1, 1), x)
    agrees(lambda x: torch.histc(x[0, 0], bins), x)
    agrees(lambda x: torch.histc(x[:0], bins), x)
    agrees(lambda x: torch.histc(x[:0], bins, 1, 2), x)
    agrees(lambda x: torch.histc(torch.ones_like(x), bins), x)
    agrees(lambda x, out: torch.histc(x, bins, -1, 1, out=out), x, torch.zeros(bins, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_histc_of_integers_is_computed_in_integers(dtype: torch.dtype) -> None:
    """As on CUDA; the CPU has no such kernel. Bins are exact, where float64 would give another bin at some borders."""
    experts = torch.tensor([0, 3, 3, 1, 7, 2, 0, 0, 9, 100]).to(dtype)
    x = experts.to("bp")
    _C.reset_fallback_counts()
    for bins, least, most in ((8, 0, 7), (5, 0, 0), (3, 1, 1), (10, 0, 6), (7, 1.9, 3.9)):
        low, high = int(least), int(most)
        low, high = (int(experts.min()), int(experts.max())) if low == high else (low, high)
        low, high = (low - 1, high + 1) if low == high else (low, high)
        expected = [0] * bins
        for value in experts.tolist():
            if low <= value <= high:
                expected[min((value - low) * bins // (high - low), bins - 1)] += 1
        for device in (x, x.repeat_interleave(2)[::2]):
            found = torch.histc(device, bins, least, most)
            assert (found.dtype, found.tolist()) == (dtype, expected), (bins, least, most)
        out = torch.zeros(bins, dtype=dtype, device="bp")
        assert torch.histc(x, bins, least, most, out=out).tolist() == expected
    assert not _C.fallback_counts()


def test_histc_ignores_nan_and_values_out_of_range() -> None:
    x = torch.tensor([math.nan, -math.inf, math.inf, 0.0, 1.0, 2.0, -1e-30, 2.0000002, 1.9999999])
    agrees(lambda x: torch.histc(x, 4, 0, 2), x)


def test_histc_rejects_invalid_arguments() -> None:
    cases = [([1.0, math.nan], {}), ([1.0, math.inf], {}), ([1.0], {"min": 3, "max": 1}), ([1.0], {"bins": 0})]
    for values, options in cases:
        x = torch.tensor(values)
        with pytest.raises(RuntimeError) as expected:
            torch.histc(x, **options)
        with pytest.raises(RuntimeError) as found:
            torch.histc(x.to(DEVICE), **options)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
