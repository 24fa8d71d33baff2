"""Numbers are converted to the tensor's dtype as in PyTorch: a sample of `conformance --numbers`, and past findings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, plans_from_the_start, refused_alike
from torch import Tensor
from torch.nn import functional as F

from torch_backplane import plans
from torch_backplane.conformance.numbers import (
    answer,
    compare,
    compare_conversions,
    difference,
    in_float32,
    overloads,
)
from torch_backplane.planning import pointwise

LIBRARY = torch.library.Library("backplane_numbers", "FRAGMENT")  # never released: planners stay declared

FRACTIONS = [0.5, 1e-50, -0.0, 0.0, math.nan, 1e39, -2, 256, 2**63 - 1, True, 3.5]

# Functions of a bool tensor, an index and a number.
WRITES: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "fill_": lambda x, i, number: x.fill_(number),
    "full_like": lambda x, i, number: torch.full_like(x, number),
    "masked_fill": lambda x, i, number: x.masked_fill(~x, number),
    "index_fill": lambda x, i, number: x.index_fill(0, i, number),
    "index_fill_": lambda x, i, number: x.index_fill_(0, i, number),
    "scatter": lambda x, i, number: x.scatter(0, i, number),
    "scatter_": lambda x, i, number: x.scatter_(0, i, number),
    "index": lambda x, i, number: x.index_put_((i,), torch.tensor(number != 0)),
    "a number in a CPU tensor": lambda x, i, number: x.index_fill_(0, i, torch.tensor(number != 0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_fractions_become_true(name: str) -> None:
    given, index = torch.tensor([False, True, False, True, False]), torch.tensor([0, 3])
    for number in FRACTIONS:
        expected = WRITES[name](given.clone(), index, number)
        found = WRITES[name](given.to(DEVICE), index.to(DEVICE), number)
        assert torch.equal(found.cpu(), expected), number


def test_add_of_bools_with_alpha() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for alpha in (1, -1, 2, 0, True, False):
        agrees(lambda a, b, alpha=alpha: torch.add(a, b, alpha=alpha), a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_index_add_of_integers_truncates_alpha(dtype: torch.dtype) -> None:
    for alpha in (2.7, -2.7, 0.5, 3, True):
        x, index = torch.tensor([1, 2, 3], dtype=dtype), torch.tensor([2, 0])
        agrees(lambda x, i, alpha=alpha: x.index_add(0, i, x[:2], alpha=alpha), x, index)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.bool], ids=str)
def test_index_add_of_empty_tensors_checks_alpha(dtype: torch.dtype) -> None:
    index = torch.tensor([], dtype=torch.int64)
    for x in (torch.ones(3, dtype=dtype), torch.ones(3, 2, dtype=dtype)):
        for alpha in (2, 300, 1, 1e30, math.inf, 2.5, -1e30, 1):  # valid and invalid, in turns

            def added(x: Tensor, i: Tensor, alpha: float = alpha) -> Tensor:
                return x.index_add(0, i, x[:0], alpha=alpha)

            try:
                added(x, index)
            except RuntimeError:
                refused_alike(added, x, index)
            else:
                agrees(added, x, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linspace_rounds_each_step(dtype: torch.dtype) -> None:
    for start, end, steps in [(0.1, 3.3, 50), (-5, 1000, 777), (3, 3, 4), (2, 9, 1), (2, 9, 2), (2, 9, 0)]:
        expected = torch.linspace(start, end, steps, dtype=dtype)
        for _ in range(2):
            assert torch.equal(torch.linspace(start, end, steps, dtype=dtype, device=DEVICE).cpu(), expected)
        out = torch.empty(2 * steps, dtype=dtype, device=DEVICE)[::2]
        assert torch.equal(torch.linspace(start, end, steps, out=out).cpu(), expected)


def test_add_relu_rejects_alpha_out_of_range() -> None:
    x = torch.ones(3, dtype=torch.int16, device=DEVICE)
    for _ in range(2):
        torch.ops.aten._add_relu.Scalar(x, 1, 2)
        with pytest.raises(RuntimeError, match="value cannot be converted to type int16_t without overflow"):
            torch.ops.aten._add_relu.Scalar(x, 1, 40_000)


def test_conversions_of_tensors() -> None:
    outcome = compare_conversions(DEVICE, (torch.float32, torch.bool, torch.uint8, torch.int16, torch.float16))
    assert outcome.calls > 500
    assert not outcome.findings


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_out_of_range_floats_convert_to_integers_as_on_the_cpu(source: torch.dtype) -> None:
    numbers = [0.0, -1.5, 255.5, 256.0, -129.0, 70_000.0, 3e9, -3e9, 3_000_001_024, 1e19, math.inf, -math.inf, math.nan]
    x = torch.tensor(numbers, dtype=torch.float64).to(source).repeat(3)
    for target in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64):
        assert torch.equal(x.to(DEVICE).to(target).cpu(), x.to(target)), target


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fill.Scalar", "index_fill.int_Scalar", "scatter.value"])
def test_sample_of_the_conformance_sweep(name: str) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    outcome = compare(overload, DEVICE, (torch.bool, torch.int16))
    assert outcome.has_sample
    assert outcome.calls >= 70
    assert not [one for one in outcome.findings if one.kind != "words"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["pow.Tensor_Scalar", "pow.Scalar", "remainder.Scalar_Tensor", "remainder.Scalar", "fmod.Scalar", "var.correction",
     "norm.ScalarOpt_dim_dtype", "linspace", "histc"],
)  # fmt: skip
def test_numbers_that_the_dtype_cannot_represent(name: str) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    numbers = (2.7, 40_000, 1e39, 1e300, math.nan, 1 + 0j, 0.5j)
    outcome = compare(overload, DEVICE, (torch.float16, torch.float32), numbers)
    assert outcome.has_sample
    assert not [one for one in outcome.findings if one.kind != "words"]


def test_half_precision_uses_float32_numbers() -> None:
    """The comparison accepts float32's results and the CPU's, and no others."""
    overload, x = torch.ops.aten.add.Tensor, torch.arange(1, 7, dtype=torch.float16).view(2, 3)
    given = {"self": x, "other": x, "alpha": -2.7}
    wide = in_float32(overload, given, torch.float16)
    assert difference(wide, answer(overload, given, "cpu")) == "values"
    assert difference(wide, answer(overload, given, DEVICE)) is None
    wrong = answer(lambda **given: overload(**given) * 1.01, given, DEVICE)
    assert difference(wide, wrong) == "values"


# With empty tensors, PyTorch's CPU kernels of these are no reference: multi_margin_loss returns uninitialized memory,
# and scalar_tensor returns infinities for numbers that torch.cuda rejects.
NOT_AS_THE_CPU = ("multi_margin_loss", "multi_margin_loss.out", "scalar_tensor", "scalar_tensor.out")


@pytest.mark.filterwarnings("ignore")
def test_all_operators_with_empty_tensors() -> None:
    numbers = (1, 40_000, 1e39, 1e300, 2**40, math.inf, math.nan, 0.5j)
    differences, calls = [], 0
    beyond = () if had([torch.float64]) else ("float_power.Scalar", "float_power.Tensor_Scalar")  # always in float64
    for overload in overloads():
        if overload.name().removeprefix("aten::") not in (*NOT_AS_THE_CPU, *beyond):
            outcome = compare(overload, DEVICE, (torch.int16, torch.float16, torch.float32), numbers, empty=True)
            differences += [one for one in outcome.findings if one.kind != "words"]
            calls += outcome.calls
    assert not differences
    assert calls > 8_000


NUMBERS_OF_NOTHING: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda x, number: torch.add(x, x, alpha=number),
    "masked_fill_": lambda x, number: x.masked_fill_(x > 0, number),
    "threshold": lambda x, number: torch.nn.functional.threshold(x, number, 0),
    "clamp": lambda x, number: x.clamp(number),
    "fill_": lambda x, number: x.fill_(number),
    "softplus": lambda x, number: torch.nn.functional.softplus(x, number),
    "index_fill": lambda x, number: x.index_fill(0, torch.empty(0, dtype=torch.int64, device=x.device), number),
}


@pytest.mark.parametrize("name", NUMBERS_OF_NOTHING)
def test_numbers_out_of_range_raise_with_empty_tensors(name: str) -> None:
    """Both when planning and when replaying, in turns with valid numbers."""
    for dtype in (torch.int16, torch.float16, torch.float32):
        for number in (1, 40_000, 1, 1e39, 2, math.inf, 1e300, 1):
            answers = []
            for device in ("cpu", DEVICE):
                try:
                    NUMBERS_OF_NOTHING[name](torch.empty(0, dtype=dtype, device=device), number)
                    answers.append("")
                except RuntimeError as error:
                    answers.append(str(error))
            if "not implemented for" not in answers[0]:
                assert answers[1] == answers[0], (dtype, number)


# Numbers that formulas receive as kernel arguments, including extreme ones.
_X = torch.linspace(-3, 3, 60).view(5, 12)
NUMBERS_OF: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "tril": (lambda x, k: (x.tril(k), x.triu(k)), [0, 1, -4, 11, -(2**63), 2**63 - 1]),
    "huber_loss": (
        lambda x, delta: [F.huber_loss(x, x.square(), delta=delta, reduction=how) for how in REDUCTIONS],
        [0.3, 1.0, 1e-30, 1e30],
    ),
    "smooth_l1_loss": (
        lambda x, beta: [F.smooth_l1_loss(x, x.square(), beta=beta, reduction=how) for how in REDUCTIONS],
        [0.0, 0.3, 1.0, 1e30],
    ),
    "var": (lambda x, n: (x.var(1, correction=n), torch.std_mean(x, correction=n)), [0, 1, 2.5, 12, 1000]),
    "var of nothing": (lambda x, n: x[:0].var(0, correction=n), [0, 2.5]),
    "norm": (
        lambda x, p: (torch.linalg.vector_norm(x, p, 1), x.renorm(abs(p) or 1, 0, 1.5)),
        [0, 1, 2, 2.7, 0.5, 3, -1.3, math.inf],
    ),
    "logit": (lambda x, eps: (x / 6 + 0.5).logit(eps), [None, 0.0, 1e-6, 0.3]),
    "round": (lambda x, n: x.round(decimals=n), [0, 2, -1, 39, -39]),
    "polygamma": (lambda x, n: torch.polygamma(n, x.abs() + 0.5), [0, 1, 2, 5, 10]),
    "mvlgamma": (lambda x, p: torch.mvlgamma(x + 8, p), [1, 2, 7]),
    "histc": (lambda x, bins: x.histc(bins, -2, 2), [1, 2, 100]),
}
REDUCTIONS = ("none", "mean", "sum")


@pytest.mark.parametrize("name", NUMBERS_OF)
def test_scalar_arguments_of_formulas(name: str) -> None:
    function, numbers = NUMBERS_OF[name]
    for dtype in had((torch.float32, torch.float64)):
        for number in numbers:
            agrees(lambda x, number=number: function(x, number), _X.to(dtype), rtol=2e-6, atol=1e-5)


def test_invalid_numbers_and_dtypes_raise() -> None:
    refused_alike(lambda x: torch.polygamma(-1, x), _X.clone())
    whole = torch.arange(6).view(2, 3)
    for loss in (F.huber_loss, F.smooth_l1_loss):
        for reduction in REDUCTIONS:
            refused_alike(lambda x, loss=loss, how=reduction: loss(x, x + 1, reduction=how), whole.clone())
    refused_alike(lambda x: torch.ops.aten.huber_loss_backward(x, x, x + 1, 0, 0.3), whole.clone())


def test_one_plan_serves_all_diagonals_and_intervals() -> None:
    x = torch.ones(4, 6, device=DEVICE)
    scale, found = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    with plans_from_the_start():
        for number in (0, 1, -2, 2**40):
            assert torch.equal(x.tril(number).cpu(), torch.ones(4, 6).tril(number))
            tracker = torch.ones((), dtype=torch.int32, device=DEVICE)
            torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, number)
            assert tracker.item() == 2  # counts on: it is past an interval of 1, and 2**40 exceeds 32 bits
        counts = plans.stats()
    assert counts["aten::tril"]["planner_calls"] == 1
    assert counts["aten::_amp_update_scale_"]["planner_calls"] == 1


def test_static_numbers_reach_formulas_as_python_numbers() -> None:
    seen: list[Any] = []

    def formula(a: Any, n: Any, by: Any) -> Any:
        seen.append(n)
        return a if isinstance(n, int) else a * by + n

    LIBRARY.define("scaled(Tensor a, int n, float by) -> Tensor")
    LIBRARY.impl("scaled", lambda a, n, by: a.clone() if n == 0 else a * by + n, "CPU")
    LIBRARY.impl("scaled", lambda a, n, by: torch.empty_like(a), "Meta")
    with pytest.raises(ValueError, match="has no argument m"):
        pointwise("backplane_numbers::scaled", formula, static={"m": (0,)})
    pointwise("backplane_numbers::scaled", formula, static={"n": (0,)})
    x = torch.arange(6.0, device=DEVICE)
    for n in (0, 3, 4, 0, 5):
        found = torch.ops.backplane_numbers.scaled(x, n, 0.5)
        assert torch.equal(found.cpu(), torch.ops.backplane_numbers.scaled(x.cpu(), n, 0.5))
    assert [one if isinstance(one, int) else "traced" for one in seen] == [0, "traced"]
    with pytest.raises(OverflowError):
        torch.ops.backplane_numbers.scaled(x.to(torch.int8), 300, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("renorm", torch.float16), ("norm.ScalarOpt_dim_dtype", torch.complex64),
     ("multi_margin_loss", torch.float32), ("multi_margin_loss_backward", torch.float32),
     ("searchsorted.Scalar", torch.bool), ("bucketize.Scalar", torch.bool), ("addr", torch.float32),
     ("div.Scalar_mode", torch.float64), ("index_add", torch.bool),
     ("special_zeta.self_scalar", torch.float32)],
)  # fmt: skip
def test_all_numbers_for_selected_operators(name: str, dtype: torch.dtype) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    outcome = compare(overload, DEVICE, [dtype])
    assert outcome.has_sample or name.startswith("norm")  # every call of norm is rejected
    assert not [one for one in outcome.findings if one.kind != "words"]
