"""Functions that sort and their arguments, for tests of the kernels that torch.compile generates.

`Case.kernels` counts the kernels on GPUs.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from scan_cases import Case, eager_calls, kernels, on_bp
from torch._inductor.utils import run_and_get_code

from torch_backplane import drivers
from torch_backplane.planning import dialect_of

HAS_KERNELS = bool(drivers.device(0).properties.dialect)
IS_GPU = HAS_KERNELS and dialect_of(0).target.simt


def check(name: str) -> None:
    """Compares the compiled function of a case on bp with the eager one on the CPU and on bp.

    On GPUs, counts the kernels, and compares the operators of eager PyTorch that are called with CALLS.
    """
    case = CASES[name]
    torch._dynamo.reset()
    given = case.make()
    expected = case.function(*copy.deepcopy(given))
    found, (code,) = run_and_get_code(torch.compile(case.function), *on_bp(given))
    eager = case.function(*on_bp(given))
    for other in (expected, eager):
        torch.testing.assert_close(
            found, other, rtol=case.tolerance, atol=case.tolerance, check_device=False, equal_nan=True
        )
    if IS_GPU:
        assert eager_calls(code) == CALLS.get(name, [])
        assert len(kernels(code)) == case.kernels, kernels(code)


def _tied(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).float()


def _special(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 40 elements, with several NaN, infinities and zeros of both signs."""
    some = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, -torch.nan], dtype=dtype)
    return torch.stack([some[torch.randint(0, 8, (40,))], torch.randn(40, dtype=dtype), some.repeat(5)])


def _extremes(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 70 integers, with the least and the greatest ones."""
    limits = torch.iinfo(dtype)
    some = torch.tensor([limits.min, limits.max, 0, 1, limits.min + 1, limits.max - 1, limits.max // 2], dtype=dtype)
    return some[torch.randint(0, 7, (5, 70))]


def _sorted(x: torch.Tensor, dim: int = -1, **order: Any) -> Any:
    """In a stable order, which bp has always: without `stable`, the CPU places equal elements in any order."""
    return x.sort(dim=dim, stable=True, **order)


def _all(x: torch.Tensor) -> Any:
    """The sorted elements in both orders, the signs of zeros, and the positions."""
    ascending, descending = _sorted(x), _sorted(x, descending=True)
    if not x.is_floating_point():
        return tuple(ascending), tuple(descending)
    return tuple(ascending), tuple(descending), ascending[0].signbit(), descending[0].signbit()


def _neighbours(x: torch.Tensor, y: torch.Tensor) -> Any:
    values, positions = (x * 2 + y).sort(-1)
    return values.sigmoid() - y, positions * 3


def _routed(x: torch.Tensor) -> Any:
    """The weights and numbers of the 8 experts of each token."""
    weights, experts = x.softmax(-1).topk(8)
    return weights / weights.sum(-1, keepdim=True), experts


def _short(x: torch.Tensor, y: torch.Tensor) -> Any:
    values, positions = _sorted(x.softmax(-1) - 0.2)
    return values.cumsum(-1), values.square().sum(-1) * y, (x + y[:, None]).gather(1, positions), values.amax(-1)


def _in_place(*xs: torch.Tensor) -> Any:
    return [x.copy_(_sorted(x)[0] + 1) for x in xs]


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LENGTHS = (2, 4, 5, 64, 65, 255, 256)

CASES: dict[str, Case] = {
    "rows": Case(lambda x: _sorted(x * 2), lambda: [torch.randn(20, 200)]),
    "lengths": Case(
        lambda *xs: [_sorted(x + 1) for x in xs], lambda: [_tied(9, one) for one in _LENGTHS], kernels=len(_LENGTHS)
    ),
    "floats": Case(
        lambda *xs: [_all(x) for x in xs], lambda: [_special(one) for one in _FLOATS], kernels=len(_FLOATS)
    ),
    "integers": Case(
        lambda *xs: [_all(x) for x in xs], lambda: [_extremes(one) for one in _INTEGERS], kernels=len(_INTEGERS)
    ),
    "booleans": Case(_all, lambda: [torch.randn(20, 90) > 0]),
    "one row": Case(lambda x: _sorted(x + 1, 0), lambda: [torch.randn(100)]),
    "one element": Case(lambda x: _sorted(x + 1, 0), lambda: [torch.randn(1, 5)], kernels=2),
    "no element": Case(lambda x, y: (_sorted(x, 1), _sorted(y, 1)), lambda: [torch.ones(5, 0), torch.ones(0, 5)], 0),
    "scalar": Case(lambda x: _sorted(x + 1, 0), lambda: [torch.randn(())], kernels=2),
    "columns": Case(lambda x: _sorted(x * 2, 0), lambda: [_tied(130, 70)]),
    "many columns": Case(lambda x: _sorted(x * 2, 0), lambda: [torch.randn(30, 1100)]),
    "middle": Case(lambda x: _sorted(x + 1, 1, descending=True), lambda: [_tied(5, 33, 7)]),
    "transposed": Case(lambda x: _sorted(x.t(), 1), lambda: [torch.randn(130, 50)]),
    "neighbours": Case(_neighbours, lambda: [torch.randn(20, 90), torch.randn(20, 1)]),
    "values only": Case(lambda x: _sorted(x)[0] + 1, lambda: [torch.randn(20, 90)]),
    "positions only": Case(lambda x: x.argsort(dim=-1, stable=True) * 2, lambda: [_tied(20, 90)]),
    "msort": Case(lambda x: x.msort() * 2, lambda: [torch.randn(20, 90)]),
    "softmax before": Case(lambda x: _sorted(x.softmax(-1), descending=True)[0], lambda: [torch.randn(20, 100)]),
    "reduced": Case(lambda x, y: (_sorted(x)[0] * y).sum(1), lambda: [torch.rand(30, 130), torch.rand(130)]),
    "scanned": Case(
        lambda x: _sorted(x.softmax(-1), descending=True)[0].cumsum(-1), lambda: [torch.randn(30, 130)]
    ),
    "several": Case(
        lambda x, y: (_sorted(x), _sorted(y, descending=True), _sorted(x + y)),
        lambda: [torch.randn(30, 70), torch.randint(-9, 9, (30, 70))],
    ),
    "chain": Case(lambda x: x.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True), lambda: [_tied(30, 70)]),
    "short rows": Case(_short, lambda: [torch.randn(33, 12), torch.randn(33)]),
    "short columns": Case(
        lambda x, i: (_sorted(x[i] * 2, 0)[0], x[i].sum(0)), lambda: [_tied(20, 100), torch.randint(-20, 20, (7,))]
    ),
    "in place": Case(_in_place, lambda: [torch.randn(30, 70), torch.randn(33, 5)], kernels=2),
    "indices": Case(lambda x, i: _sorted(x[:, i - 60]), lambda: [torch.randn(20, 50), torch.randint(10, 110, (130,))]),
    "gathered": Case(lambda x, y: y.gather(1, _sorted(x)[1]), lambda: [_tied(20, 50), torch.randn(20, 50)]),
    "padded": Case(lambda x: _sorted(torch.nn.functional.pad(x, (3, 2))), lambda: [torch.randn(20, 130)]),
    "topk": Case(_routed, lambda: [torch.randn(40, 64)], kernels=2),
    "topk of columns": Case(
        lambda x: (x * 2).topk(3, 0, largest=False), lambda: [torch.randperm(350).view(50, 7).float()], kernels=1
    ),
    "topk, all results": Case(lambda x: (x * 2).topk(5), lambda: [torch.randperm(45).view(9, 5)], kernels=1),
    "257 elements": Case(
        lambda x, y: (_sorted(x + 1)[0] * 2, _sorted(y, 0)), lambda: [_tied(9, 257), _tied(257, 9)], kernels=2
    ),
}
# The operators of eager PyTorch that a case calls.
CALLS = {"257 elements": ["sort", "sort"]}
