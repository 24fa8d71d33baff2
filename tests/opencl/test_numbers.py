"""Numbers become the tensor's dtype as in PyTorch: a sample of `conformance --numbers`, and what it has found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees
from torch import Tensor

from torch_backplane.conformance.numbers import compare, compare_conversions, overloads

FRACTIONS = [0.5, 1e-50, -0.0, 0.0, math.nan, 1e39, -2, 256, 2**63 - 1, True, 3.5]

# Of a tensor of bools, an index and a number.
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
def test_fractions_are_true(name: str) -> None:
    given, index = torch.tensor([False, True, False, True, False]), torch.tensor([0, 3])
    for number in FRACTIONS:
        expected = WRITES[name](given.clone(), index, number)
        found = WRITES[name](given.to(DEVICE), index.to(DEVICE), number)
        assert torch.equal(found.cpu(), expected), number


def test_a_factor_of_bools_is_one() -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for alpha in (1, -1, 2, 0, True, False):
        agrees(lambda a, b, alpha=alpha: torch.add(a, b, alpha=alpha), a, b)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_index_add_makes_its_factor_an_integer(dtype: torch.dtype) -> None:
    for alpha in (2.7, -2.7, 0.5, 3, True):
        x, index = torch.tensor([1, 2, 3], dtype=dtype), torch.tensor([2, 0])
        agrees(lambda x, i, alpha=alpha: x.index_add(0, i, x[:2], alpha=alpha), x, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linspace_rounds_each_step(dtype: torch.dtype) -> None:
    for start, end, steps in [(0.1, 3.3, 50), (-5, 1000, 777), (3, 3, 4), (2, 9, 1), (2, 9, 2), (2, 9, 0)]:
        expected = torch.linspace(start, end, steps, dtype=dtype)
        for _ in range(2):
            assert torch.equal(torch.linspace(start, end, steps, dtype=dtype, device=DEVICE).cpu(), expected)
        out = torch.empty(2 * steps, dtype=dtype, device=DEVICE)[::2]
        assert torch.equal(torch.linspace(start, end, steps, out=out).cpu(), expected)


def test_add_relu_refuses_a_factor_beyond_the_dtype() -> None:
    x = torch.ones(3, dtype=torch.int16, device=DEVICE)
    for _ in range(2):
        torch.ops.aten._add_relu.Scalar(x, 1, 2)
        with pytest.raises(RuntimeError, match="value cannot be converted to type int16_t without overflow"):
            torch.ops.aten._add_relu.Scalar(x, 1, 40_000)


def test_conversions_of_tensors() -> None:
    outcome = compare_conversions(DEVICE, (torch.float32, torch.bool, torch.uint8, torch.int16, torch.float16))
    assert outcome.calls > 500
    assert not outcome.findings


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fill.Scalar", "index_fill.int_Scalar", "scatter.value"])
def test_a_sample_of_the_sweep(name: str) -> None:
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
def test_numbers_beyond_the_dtype_and_between_its_values(name: str) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    numbers = (2.7, 40_000, 1e39, 1e300, math.nan, 1 + 0j, 0.5j)
    outcome = compare(overload, DEVICE, (torch.float16, torch.float32), numbers)
    assert outcome.has_sample
    assert not [one for one in outcome.findings if one.kind != "words"]


# Of no elements, where PyTorch's CPU kernels are no judges: one returns memory that nothing was written to, and one
# makes infinities of what torch.cuda refuses.
NOT_AS_THE_CPU = ("multi_margin_loss", "multi_margin_loss.out", "scalar_tensor", "scalar_tensor.out")


@pytest.mark.filterwarnings("ignore")
def test_every_number_of_no_elements() -> None:
    numbers = (1, 40_000, 1e39, 1e300, 2**40, math.inf, math.nan, 0.5j)
    differences, calls = [], 0
    for overload in overloads():
        if overload.name().removeprefix("aten::") not in NOT_AS_THE_CPU:
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
def test_numbers_beyond_the_dtype_are_refused_without_elements_too(name: str) -> None:
    """When planning and when replaying, after numbers that fit and before others."""
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
