"""Binary operators and operators on rows, with zeros and with numbers at the limits of dtypes and functions.

A floating-point result must be near the CPU's result in float64 or in the same dtype. The latter is not always the
better reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from agreement import DEVICE, why_not
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import BinaryUfuncInfo, op_db

OPERATORS = {op.full_name: op for op in op_db if isinstance(op, BinaryUfuncInfo) and "jiterator" not in op.name}
FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 2.0**-149, 1.1754944e-38, 1e-7, 35.0, 88.7, -103.9, 170.6, 65504.0, -7e4),
    *(2.0**31, -(2.0**31), 2.0**63, 1e19, 1e30, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan),
]
INTEGERS = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 1000, 2000, 32767, 2**31 - 1]
# They convert the degree to int64, which is undefined in C for numbers out of its range.
POLYNOMIALS = [name for name in OPERATORS if "polynomial" in name]


def floats() -> list[float]:
    """Returns FLOATS, without the smallest ones if the device, or only its fma, flushes subnormal numbers to zero."""
    few = torch.tensor([2.0**-140, 2.0**100], device=DEVICE)
    has_smaller = bool((few[:1] * few[1:]).cpu()) and bool(few.prod().cpu())
    return [one for one in FLOATS if has_smaller or one == 0 or not abs(one) < 1.2e-38]


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.tensor(floats(), dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    expected = {limits.min, limits.min + 1, limits.max - 1, limits.max, 2**33 + 1, -(2**32) - 1, *INTEGERS}
    expected |= {-one for one in INTEGERS}
    return torch.tensor(sorted(one for one in expected if limits.min <= one <= limits.max), dtype=dtype)


def is_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compares within the rounding errors of the CPU's functions. Subnormal numbers may be flushed to zero."""
    least = 64 * torch.finfo(dtype).tiny
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-4, torch.float64: 1e-7}[dtype]
    return torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=least, equal_nan=True)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.int16, torch.int16),
        (torch.int64, torch.int64),
        (torch.float16, torch.int64),
    ],
    ids=lambda pair: " ".join(str(dtype).removeprefix("torch.") for dtype in pair),
)
def test_pairs_of_extremes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    if reason := why_not(dtypes):
        pytest.skip(reason)
    a, b = extremes(dtypes[0])[:, None].contiguous(), extremes(dtypes[1])
    if not dtypes[0].is_floating_point:
        # PyTorch's CPU kernels sometimes crash for the smallest integer together with -1, in either order.
        a = a[(a[:, 0] != a.min()) & (a[:, 0] != -1)]
    wrong = []
    for name, op in OPERATORS.items():
        if name in POLYNOMIALS:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = op.op(a, b)
            except RuntimeError:
                continue  # other tests check which dtypes are refused
            if why_not([expected.dtype]):
                continue
            found = op.op(a.to(DEVICE), b.to(DEVICE)).cpu()
            wide = op.op(*(one.double() if one.is_floating_point() else one for one in (a, b)))
        assert found.dtype == expected.dtype, name
        if found.is_complex():
            continue
        if not found.dtype.is_floating_point:
            right = found == expected
        else:
            right = is_near(found, expected, found.dtype) | is_near(found, wide.to(found.dtype), found.dtype)
        right |= meant(name, a, b)
        if not right.all():
            row, column = (~right).nonzero()[0].tolist()
            given = a[row, 0].item(), b[column].item()
            message = f"{found[row, column]}, expected {expected[row, column]}"
            wrong.append(f"{name}{given}: {message}; {(~right).sum()} differ")
    assert not wrong, "\n".join(wrong)


def meant(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns where an operator's result is meant to differ from the CPU's."""
    none = torch.zeros_like(a + b, dtype=torch.bool)
    if name == "gcd":  # the CPU's is negative for the smallest integer, whose absolute value overflows
        least = torch.iinfo(a.dtype).min
        return (a == least) | (b == least)
    if name == "special.zeta":  # the CPU's sum of b to the power of -a is NaN for huge a, not 0
        return (a > 1e3) | none
    if name == "igammac":  # computed as 1 - igamma here, even where it is close to 0
        return (a.abs() < 1e-6) & (b.abs() <= 1)
    return none


# Functions of rows, for which PyTorch's results do not depend on rounding.
OF_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: partial(getattr(torch, name), dim=1)
        for name in ("sum", "prod", "mean", "nansum", "logsumexp", "amax", "amin", "argmax", "argmin", "all", "any")
    },
    **{
        f"running {name}": partial(getattr(torch, name), dim=1)
        for name in ("cumsum", "cumprod", "logcumsumexp")
    },
    **{f"var of {kind}": partial(torch.var, dim=1, correction=kind) for kind in (0, 1)},
    **{f"std of {kind}": partial(torch.std, dim=1, correction=kind) for kind in (0, 1)},
    **{f"softmax in {name}": partial(getattr(torch, name), dim=1) for name in ("softmax", "log_softmax")},
    **{f"norm of {p}": partial(torch.linalg.vector_norm, ord=p, dim=1) for p in (0, 1, 2, torch.inf, -torch.inf)},
    "logits": lambda x: functional.binary_cross_entropy_with_logits(x, x.flip(1), reduction="none"),
    "pooled": lambda x: functional.max_pool1d(x[:, None], 2, 1),
    "entropy": lambda x: functional.cross_entropy(x, torch.arange(len(x), device=x.device) % 3, reduction="none"),
    "between": lambda x: torch.lerp(x[:, :1], x[:, 1:2], x[:, 2:]),
    "clamped": lambda x: torch.clamp(x, x[:, :1], x[:, 1:2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_extremes(dtype: torch.dtype) -> None:
    few = torch.tensor([one for one in floats() if one != -3.4e38], dtype=torch.float64)  # differences overflow
    rows = torch.stack([*torch.meshgrid(few, few, indexing="ij"), torch.full((len(few), len(few)), 0.5)]).flatten(1).mT
    rows = rows.to(dtype).contiguous()
    wrong = []
    for name, function in OF_ROWS.items():
        expected, found = function(rows), function(rows.to(DEVICE)).cpu()
        wide = function(rows.double()).to(expected.dtype)
        # Intermediate results such as sums of squares can overflow in float32; the CPU accumulates in float64.
        if not found.dtype.is_floating_point:
            right = found == expected
        else:
            right = is_near(found, expected, found.dtype) | is_near(found, wide, found.dtype)
            right |= found.isinf() & (expected.abs() > 1e18)
            if name == "prod":  # work items that share a row multiply in any order; the least two can underflow
                underflows = rows.abs().sort(-1).values[:, :2].prod(-1) == 0
                right |= underflows & ((found == 0) | found.isnan())  # 0 * inf
        if not right.all():
            (place, *_) = (~right).nonzero().tolist()
            message = f"{found[tuple(place)]}, expected {expected[tuple(place)]}"
            wrong.append(f"{name} of {rows[place[0]].tolist()}: {message}; {(~right).sum()} differ")
    assert not wrong, "\n".join(wrong)
