"""Functions with scans and their arguments, for tests of the kernels that torch.compile generates."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_map

from torch_backplane import drivers


class Case(NamedTuple):
    """A function of tensors.

    Args:
        make: returns the arguments, on the CPU.
        kernels: the number of kernels that it compiles to.
        tolerance: relative and absolute.
    """

    function: Callable[..., Any]
    make: Callable[[], list[torch.Tensor]]
    kernels: int = 1
    tolerance: float = 1e-5


def on_bp(values: Any) -> Any:
    return tree_map(lambda one: one.to("bp") if isinstance(one, torch.Tensor) else one, values)


def eager_calls(code: str) -> list[str]:
    """The operators of eager PyTorch that a wrapper calls, in order."""
    return re.findall(r"= torch\.ops\.(?:aten|higher_order)\.(\w+)\.\w+\(", code)


def kernels(code: str) -> list[str]:
    """The names of the kernels of a wrapper."""
    return re.findall(r"^(\w+) = bp_compile\.define_kernel\(", code, re.MULTILINE)


def check(case: Case, **options: Any) -> None:
    """Compares the compiled function on bp with the eager one on the CPU and on bp, and counts the kernels."""
    torch._dynamo.reset()
    given = case.make()
    expected = case.function(*copy.deepcopy(given))
    found, codes = run_and_get_code(torch.compile(case.function, **options), *on_bp(given))
    eager = case.function(*on_bp(given))
    for other in (expected, eager):
        torch.testing.assert_close(
            found, other, rtol=case.tolerance, atol=case.tolerance, check_device=False, equal_nan=True
        )
    if drivers.device(0).properties.dialect:
        (code,) = codes
        assert not eager_calls(code)
        assert len(kernels(code)) == case.kernels, kernels(code)


def _special() -> list[torch.Tensor]:
    """NaN and infinities at the beginning, in the middle and at the end of rows of 200 elements."""
    x = torch.randn(8, 200)
    for row, column in enumerate((0, 77, 199)):
        x[row, column] = torch.nan
    x[3, 0] = x[5, 140] = torch.inf
    x[4, 70] = x[5, 20] = -torch.inf
    x[6], x[7, 3:9] = -torch.inf, torch.inf
    return [x]


def _in_place(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.cumsum_(-1)
    y.copy_((y * 2).cumprod(1))
    return x + 1, y


def _tied(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


CASES: dict[str, Case] = {
    "softmax before": Case(lambda x: x.softmax(-1).cumsum(-1) * 2, lambda: [torch.randn(20, 1000)]),
    "columns": Case(lambda x: (x * 2).cumsum(0) + 1, lambda: [torch.randn(300, 70)], tolerance=1e-4),
    "many columns": Case(lambda x: (x * 2).cumsum(0) + 1, lambda: [torch.randn(70, 1100)], tolerance=1e-4),
    "middle": Case(lambda x: (x + 1).cumprod(1).sin(), lambda: [torch.rand(5, 33, 7) / 9]),
    "few elements": Case(lambda x: x.cumsum(-1) - x, lambda: [torch.randn(300, 5)]),
    "two elements": Case(lambda x: x.cumsum(-1) - x, lambda: [torch.randn(30, 2)]),
    "one tile": Case(lambda x: (x * 3).cumsum(-1), lambda: [torch.randn(9, 64)]),
    "whole tiles": Case(lambda x: (x * 3).cumsum(-1), lambda: [torch.randn(9, 2048)], tolerance=1e-3),
    "one element more": Case(lambda x: (x * 3).cumsum(-1), lambda: [torch.randn(9, 2049)], tolerance=1e-3),
    "long": Case(lambda x: (x / 9).cumsum(-1).relu(), lambda: [torch.randn(3, 30_001)], tolerance=1e-3),
    "long columns": Case(lambda x: (x / 9).cumsum(0).relu(), lambda: [torch.randn(20_001, 3)], tolerance=1e-3),
    "one row": Case(lambda x: (x / 9).cumsum(0) + 1, lambda: [torch.randn(10_000)], tolerance=1e-3),
    "one element": Case(lambda x: x.cumsum(0) + x.cumprod(0) + x.cummax(0)[0], lambda: [torch.randn(1, 5)]),
    "no element": Case(lambda x: x.cumsum(0) + x.cumprod(1), lambda: [torch.randn(0, 5)], kernels=0),
    "scalar": Case(lambda x: x.cumsum(0) + 1, lambda: [torch.randn(())]),
    "products": Case(lambda x: x.cumprod(1) * 2, lambda: [torch.rand(30, 70) * 2]),
    "zeros in products": Case(lambda x: x.cumprod(1), lambda: [_tied(30, 70)]),
    "exponentials": Case(lambda x: (x * 9).logcumsumexp(-1).tanh(), lambda: [torch.randn(30, 300)]),
    "exponentials of columns": Case(lambda x: (x * 9).logcumsumexp(0), lambda: [torch.randn(300, 40)]),
    "maxima": Case(lambda x: (x * 2).cummax(-1), lambda: [_tied(40, 300)]),
    "minima of columns": Case(lambda x: (x * 2).cummin(0), lambda: [_tied(300, 40)]),
    "maxima only": Case(lambda x: x.cummax(1)[0] + 1, lambda: [torch.randn(40, 300)]),
    "positions only": Case(lambda x: x.cummin(1)[1] * 2, lambda: [torch.randn(40, 300)]),
    "extrema of booleans": Case(lambda x: (x.cummax(0), x.cummin(0)), lambda: [torch.randn(30, 20) > 1]),
    "extrema of integers": Case(lambda x: (x.cummax(1), x.cummin(1)), lambda: [torch.randint(-9, 9, (30, 90))]),
    "sums of special": Case(lambda x: (x.cumsum(-1), x.cumsum(-1) * 2), _special, tolerance=1e-4),
    "products of special": Case(lambda x: x.cumprod(-1), _special),
    "exponentials of special": Case(lambda x: x.logcumsumexp(-1), _special),
    "extrema of special": Case(lambda x: (x.cummax(-1), x.cummin(-1)), _special),
    "extrema of special columns": Case(lambda x: (x.t().cummax(0), x.t().cummin(0)), _special),
    "half": Case(lambda x: (x / 8).cumsum(-1), lambda: [torch.randn(20, 300).half()], tolerance=2e-3),
    "half extrema": Case(lambda x: x.cummax(-1), lambda: [torch.randn(20, 300).half()]),
    "bfloat16": Case(lambda x: x.cumsum(0) + 1, lambda: [torch.randn(300, 20).bfloat16()], tolerance=2e-2),
    "bfloat16 products": Case(lambda x: x.cumprod(1), lambda: [torch.rand(30, 40).bfloat16() * 2], tolerance=2e-2),
    "float64": Case(
        lambda x: (x.cumsum(-1), x.logcumsumexp(-1)), lambda: [torch.randn(20, 300).double()], tolerance=1e-13
    ),
    "integers": Case(lambda x: (x.cumsum(0), x.cumprod(1) // 3), lambda: [torch.randint(-9, 9, (90, 90)).int()], 2),
    "int8 that wraps": Case(lambda x: x.cumsum(-1, dtype=torch.int8), lambda: [torch.randint(0, 99, (9, 90))]),
    "booleans": Case(lambda x: (x > 1).cumsum(-1), lambda: [torch.randn(9, 90)]),
    "other dtype": Case(lambda x: x.cumsum(-1, dtype=torch.float64), lambda: [torch.randn(9, 90)]),
    "reverse": Case(lambda x: (x.flip(-1) * 2).cumsum(-1), lambda: [torch.randn(20, 130)]),
    "reverse result": Case(lambda x: x.flip(0).cumsum(0).flip(0) + 1, lambda: [torch.randn(130, 20)], 2),
    "transposed": Case(lambda x: x.t().cumsum(1) + 1, lambda: [torch.randn(300, 50)], tolerance=1e-4),
    "broadcast": Case(lambda x, y: (x * y).cumsum(1), lambda: [torch.randn(30, 1), torch.randn(90)], tolerance=1e-4),
    "padded": Case(lambda x: torch.nn.functional.pad(x, (3, 2)).cumsum(-1), lambda: [torch.randn(20, 130)]),
    "indices": Case(
        lambda x, i: x[:, i].cumsum(-1) * 2, lambda: [torch.randn(20, 50), torch.randint(0, 50, (130,))]
    ),
    "negative indices": Case(
        lambda x, i: x[:, i - 60].cumsum(-1), lambda: [torch.randn(20, 50), torch.randint(10, 110, (130,))]
    ),
    "reduced": Case(lambda x: (x.cumsum(1) * 2).sum(1), lambda: [torch.randn(30, 130)], tolerance=1e-4),
    "reduced columns": Case(lambda x: (x.cumsum(0).amax(0), x.mean(0)), lambda: [torch.randn(30, 300)]),
    "reduced positions": Case(lambda x: x.cumsum(1).argmax(1), lambda: [torch.randint(-5, 5, (30, 700)).float()]),
    "normalized": Case(lambda x: torch.softmax(x.cumsum(-1), -1), lambda: [torch.randn(30, 130)]),
    "several": Case(lambda x: (x.cumsum(-1), x.cummax(-1), x.cumprod(-1)), lambda: [torch.rand(30, 130)]),
    "chain": Case(lambda x: (x.cumsum(-1) / 9).cumprod(-1).cummin(-1), lambda: [torch.rand(30, 80)]),
    "in place": Case(_in_place, lambda: [torch.randn(30, 130), torch.rand(9, 700)], 2),
    "columns in place": Case(lambda x: x.cumsum_(0), lambda: [torch.randn(130, 9)], 2),
}
