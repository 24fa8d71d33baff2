"""Softmax and norms of few long rows and channels, which GPU targets split among work groups, are accurate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import DEVICE, plans_from_the_start
from targets import target

from torch_backplane import _C, plans

F = torch.nn.functional

Tensors = list[torch.Tensor]
Function = Callable[..., Any]


def numbers(*shape: int, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + offset


def gradients(function: Function, grad: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
    """The result and the gradients of all tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(result.dtype))]


def of_softmax(dim: int, log: bool) -> Function:
    return lambda x: (torch.log_softmax if log else torch.softmax)(x, dim)


DTYPES = [torch.float32, torch.float64, torch.bfloat16]

# Few and long rows, for which kernels of a single launch would have few work groups.
SOFTMAX = {
    "one row": ((20_011,), -1),
    "few rows": ((3, 9_000), -1),
    "columns": ((2, 700, 37), 1),
    "one column": ((1, 9_001, 1), 1),
}
NORMS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "layer norm of a row": (lambda x, w, b: F.layer_norm(x, (20_011,), w, b), [(1, 20_011), (20_011,), (20_011,)]),
    "layer norm of rows": (lambda x, w, b: F.layer_norm(x, (100,), w, b), [(5, 300, 100), (100,), (100,)]),
    "layer norm of few columns": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(2_000, 5), (5,), (5,)]),
    "layer norm with a weight": (lambda x, w: F.layer_norm(x, (9_000,), w), [(2, 9_000), (9_000,)]),
    "layer norm alone": (lambda x: F.layer_norm(x, (9_000,)), [(2, 9_000)]),
    "RMS norm of a row": (lambda x, w: F.rms_norm(x, (20_011,), w), [(1, 20_011), (20_011,)]),
    "RMS norm of rows": (lambda x, w: F.rms_norm(x, (100,), w), [(1_500, 100), (100,)]),
    "RMS norm alone": (lambda x: F.rms_norm(x, (20_011,)), [(1, 20_011)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 6, 71, 50), (6,), (6,)]),
    "group norm of channels": (lambda x, w, b: F.group_norm(x, 4, w, b), [(200, 8, 40), (8,), (8,)]),
    "group norm of points": (lambda x, w, b: F.group_norm(x, 1, w, b), [(2, 9_000), (9_000,), (9_000,)]),
    "group norm alone": (lambda x: F.group_norm(x, 3), [(2, 3, 9_000)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 3, 51, 50), (3,), (3,)]),
    "batch norm of columns": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(3_000, 5), (5,), (5,)]),
    "batch norm alone": (lambda x: F.batch_norm(x, None, None, training=True), [(2, 3, 9_000)]),
}
MANY_SETS = {  # only their gradients of weights are long sums
    "layer norm of rows", "layer norm of few columns", "RMS norm of rows", "group norm of channels",
}  # fmt: skip


@contextmanager
def gpu(**figures: Any) -> Iterator[None]:
    with target("gpu", compute_units=64, **figures):
        yield


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the error, relative to the exact result's norm. NaN and infinities must be equal."""
    assert found.shape == exact.shape
    assert torch.equal(found.cpu().isnan(), exact.isnan())
    known = exact.isfinite()
    infinite = exact.isinf()
    assert torch.equal(found.cpu().double()[infinite], exact[infinite])
    size = exact[known].norm().item()
    return (found.cpu().double() - exact)[known].norm().item() / (size or 1.0)


def is_exact(function: Function, *tensors: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Checks that the result and the gradients are as close to float64's as the CPU's, within one eps (float64: 32)."""
    tensors = tuple(tensor.to(dtype) for tensor in tensors)
    grad = numbers(*tensors[0].shape, seed=9).to(dtype)
    exact = gradients(function, grad.double(), *(tensor.double() for tensor in tensors))
    cpu = gradients(function, grad, *tensors)
    fallbacks = _C.fallback_counts()
    found = gradients(function, grad.to(DEVICE), *(tensor.to(DEVICE) for tensor in tensors))
    assert _C.fallback_counts() == fallbacks
    for number, (one, own, wanted) in enumerate(zip(found, cpu, exact, strict=True)):
        assert one.dtype == dtype
        most = error(own, wanted) + (32 if dtype == torch.float64 else 1) * torch.finfo(dtype).eps
        assert error(one, wanted) <= most, (number, error(one, wanted), error(own, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("case", SOFTMAX)
def test_softmax(case: str, log: bool, dtype: torch.dtype) -> None:
    shape, dim = SOFTMAX[case]
    with gpu():
        is_exact(of_softmax(dim, log), numbers(*shape) * 3, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NORMS)
def test_norms(case: str, dtype: torch.dtype) -> None:
    function, shapes = NORMS[case]
    with gpu():
        is_exact(function, *(numbers(*shape, seed=i) for i, shape in enumerate(shapes)), dtype=dtype)


@pytest.mark.parametrize("case", [*SOFTMAX, *NORMS])
def test_rows_are_split_among_work_groups(case: str) -> None:
    """Otherwise the other tests here would not test split rows, as the device's own target uses a single launch."""
    function, shapes = NORMS[case] if case in NORMS else (of_softmax(SOFTMAX[case][1], False), [SOFTMAX[case][0]])
    tensors = [numbers(*shape).to(DEVICE) for shape in shapes]
    with gpu(), torch.autograd.set_multithreading_enabled(False):
        explained = plans.explain(gradients, function, torch.ones_like(tensors[0]), *tensors)
    forward, *backward = [one for one in explained.split("\n\n") if "norm" in one or "softmax" in one]
    assert backward, explained
    for one in backward if case in MANY_SETS else (forward, *backward):
        assert "_team_" in one, one  # a reduction by teams of work items


def test_cpu_targets_with_many_units_split_rows() -> None:
    with target("cpu", compute_units=1024):
        is_exact(of_softmax(-1, False), numbers(2, 70_001) * 3)
        is_exact(of_softmax(0, True), numbers(70_001, 9) * 3)
        is_exact(lambda x, w, b: F.layer_norm(x, (37,), w, b), numbers(40_000, 37), numbers(37), numbers(37))
        is_exact(lambda x, w, b: F.group_norm(x, 2, w, b), numbers(1, 4, 40_001), numbers(4), numbers(4))
        explained = plans.explain(torch.softmax, numbers(70_001).to(DEVICE), -1)
    assert "bp_softmax_rows_chunks on" in explained


# NaN, infinities and values far from the others, by position.
SPECIAL = {
    "NaN": {0: math.nan},
    "NaN at the end": {-1: math.nan},
    "infinity": {777: math.inf},
    "minus infinity": {5: -math.inf, 8_000: -math.inf},
    "both": {5: -math.inf, 8_000: math.inf},
    "NaN and infinity": {5: math.nan, 8_000: math.inf},
    "one that is far above": {8_000: 3e38, 0: -3e38},
    "steps up": {at: float(at) for at in range(0, 9_000, 100)},
}


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("case", SPECIAL)
def test_softmax_of_special_values(case: str, log: bool) -> None:
    x = numbers(3, 9_000)
    for at, value in SPECIAL[case].items():
        x[1, at] = value
    with gpu():
        for rows in (x, x.t().contiguous()):
            is_exact(of_softmax(-1 if rows is x else 0, log), rows)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1e38, 88.0])
def test_softmax_of_constant_rows(value: float, log: bool) -> None:
    with gpu():
        is_exact(of_softmax(-1, log), torch.full((2, 9_000), value))


@pytest.mark.parametrize("log", [False, True])
def test_softmax_of_increasing_rows(log: bool) -> None:
    """Each element is a new maximum, so the running sum is rescaled again and again, or never."""
    for step in (1e-4, 0.01, 1.0, 17.0):
        with gpu():
            is_exact(of_softmax(-1, log), torch.arange(9_000.0).mul(step).expand(2, -1).contiguous())


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("norm", ["layer norm alone", "RMS norm of a row", "batch norm alone", "group norm alone"])
def test_norms_of_special_values(norm: str, case: str) -> None:
    if case == "one that is far above":
        pytest.skip("its square overflows float32")
    function, shapes = NORMS[norm]
    x, *rest = (numbers(*shape, seed=i) for i, shape in enumerate(shapes))
    for at, value in SPECIAL[case].items():
        x.view(-1)[at] = value
    grad = torch.ones_like(x)
    with gpu():
        found = gradients(function, grad.to(DEVICE), *(tensor.to(DEVICE) for tensor in (x, *rest)))
    for one, wanted in zip(found, gradients(function, grad, x, *rest), strict=True):
        torch.testing.assert_close(one.cpu(), wanted, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["layer norm alone", "batch norm alone", "group norm alone", "layer norm of rows"])
def test_norms_of_values_far_from_zero(norm: str) -> None:
    function, shapes = NORMS[norm]
    x, *rest = (numbers(*shape, seed=i) for i, shape in enumerate(shapes))
    with gpu():
        is_exact(function, x + 10_000.0, *rest)


@pytest.mark.parametrize("kept", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_running_statistics_are_updated(kept: torch.dtype) -> None:
    x = numbers(4, 3, 60, 50, offset=2.0)
    mean, var = numbers(3), numbers(3).abs()
    x = x.to(torch.float64 if kept == torch.float64 else x.dtype if kept == torch.float32 else kept)

    def found(device: str) -> Tensors:
        running = [one.to(device, kept, copy=True) for one in (mean, var)]
        results = torch.ops.aten.native_batch_norm(x.to(device), None, None, *running, True, 0.3, 1e-3)
        # The same tensor for mean and variance, and a strided one.
        same, apart = running[0].clone(), torch.ones(6, device=device, dtype=kept)[::2]
        torch.ops.aten.native_batch_norm(x.to(device), None, None, same, same, True, 0.3, 1e-3)
        torch.ops.aten.native_batch_norm(x.to(device), None, None, apart, apart.clone(), True, 0.3, 1e-3)
        evaluated = torch.ops.aten.native_batch_norm(x.to(device), None, None, *running, False, 0.3, 1e-3)
        return [one.cpu() for one in (*results, *running, apart, evaluated[0])]

    with gpu():
        own = found(DEVICE)
    for one, wanted in zip(own, found("cpu"), strict=True):
        # PyTorch saves the statistics of bfloat16 in bfloat16 if the running ones are bfloat16.
        wide = {"rtol": 2e-2, "atol": 2e-2, "check_dtype": False} if kept == torch.bfloat16 else {}
        torch.testing.assert_close(one, wanted, **wide)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False], [False, True, False]], ids=str)
def test_batch_norm_backward(training: bool, mask: list[bool]) -> None:
    x, grad = numbers(4, 3, 60, 50), numbers(4, 3, 60, 50, seed=1)
    weight, mean, var, *saved = (numbers(3, seed=i).abs() + 0.5 for i in range(5))

    def found(device: str, dtype: torch.dtype) -> Tensors:
        given = [one.to(device, dtype) for one in (grad, x, weight, mean, var, *saved)]
        results = torch.ops.aten.native_batch_norm_backward(*given, training, 1e-3, mask)
        return [one.cpu() for one, wanted in zip(results, mask, strict=True) if wanted]

    with gpu():
        own = found(DEVICE, torch.float32)
    for one, wanted in zip(own, found("cpu", torch.float64), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=2e-6, atol=2e-4)


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True], [True, False, True]], ids=str)
@pytest.mark.parametrize("norm", ["layer", "group"])
def test_subsets_of_gradients(norm: str, mask: list[bool]) -> None:
    x, grad = numbers(200, 6, 70), numbers(200, 6, 70, seed=1)
    sets, weights = ([200, 6, 1], (70,)) if norm == "layer" else ([200, 2], (6,))
    mean, rstd = numbers(*sets, seed=2), numbers(*sets, seed=3).abs()

    def found(device: str, dtype: torch.dtype) -> Tensors:
        grad_, x_, mean_, rstd_, w = (one.to(device, dtype) for one in (grad, x, mean, rstd, numbers(*weights)))
        if norm == "layer":
            results = torch.ops.aten.native_layer_norm_backward(grad_, x_, [70], mean_, rstd_, w, w, mask)
        else:
            results = torch.ops.aten.native_group_norm_backward(grad_, x_, mean_, rstd_, w, 200, 6, 70, 2, mask)
        return [one.cpu() for one, wanted in zip(results, mask, strict=True) if wanted]

    with gpu():
        own = found(DEVICE, torch.float32)
    for one, wanted in zip(own, found("cpu", torch.float64), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=2e-5, atol=2e-4)


ANY: dict[str, Callable[[int], Any]] = {
    "softmax of rows": lambda n: gradients(of_softmax(-1, False), *given(3, 9_000 + n)),
    "log_softmax of columns": lambda n: gradients(of_softmax(1, True), *given(2, 700 + n, 37)),
    "layer norm": lambda n: gradients(lambda x: F.layer_norm(x, x.shape[1:]), *given(2, 9_000 + n)),
    "weights of a layer norm": lambda n: gradients(
        NORMS["layer norm of rows"][0], *given(5, 300 + n, 100), *weights(100)
    ),
    "group norm": lambda n: gradients(NORMS["group norm"][0], *given(3, 6, 3_000 + n), *weights(6)),
    "batch norm": lambda n: gradients(NORMS["batch norm"][0], *given(2, 3, 9_000 + n), *weights(3)),
}


def given(*shape: int) -> Tensors:
    return [numbers(*shape).to(DEVICE), numbers(*shape, seed=1).to(DEVICE)]


def weights(count: int) -> Tensors:
    return [numbers(count, seed=2).to(DEVICE), numbers(count, seed=3).to(DEVICE)]


@pytest.mark.parametrize("case", ANY)
def test_one_plan_serves_any_size(case: str) -> None:
    with gpu(), plans_from_the_start():
        for n in (0, 10, 21, 33):
            ANY[case](n)
        found = {name: one for name, one in plans.stats().items() if "norm" in name or "softmax" in name}
        assert len(found) == 2
        for one in found.values():
            assert (one["planner_calls"], one["dynamic_shape_replays"]) == (2, 2), found
