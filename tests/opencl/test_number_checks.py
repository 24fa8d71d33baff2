"""Scalar arguments are checked at each call, also in calls that replay the plan of a valid number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, on_device, to_cpu
from plain_arguments import by_position, fresh, outcome, plain_arguments

from torch_backplane import _C, plans

LIBRARY = torch.library.Library("backplane_checks", "FRAGMENT")  # never released: planners stay declared

# Numbers that most dtypes can hold. The range check of others (`Number.fitting`) would raise first.
FLOATS = (-1.5, -0.0, 0.0, 0.25, 1.0, 70.0, math.nan, math.inf, -math.inf)
INTEGERS = (-1, 0, 1, 3, 100)
# Kernels detect an integer division by zero, so the error is raised at the next synchronization.
ASYNCHRONOUS = ("div", "fmod", "remainder", "floor_divide")


def plain_calls() -> Iterator[tuple[str, Callable[..., Any], list[Any], int]]:
    """(description, function of positional arguments, arguments, position of a passed-through number) of operators."""
    from torch_backplane.planning import declare, registry

    torch.bp.init()
    for name, numbers in sorted(registry.passed.items()):
        overload = declare.find(name.removeprefix("aten::"))
        call = by_position(overload)
        for dtype in (torch.float32, torch.int64, torch.uint8):
            arguments = plain_arguments(overload, dtype)
            for chosen in numbers:
                if not outcome(call, fresh(arguments))[0]:
                    names = [one.name for one in overload._schema.arguments]
                    yield f"{name} {dtype} {chosen}", call, arguments, names.index(chosen)


def changed(arguments: list[Any], position: int, number: float) -> list[Any]:
    old = arguments[position]
    values = fresh(arguments)
    values[position] = [number, *old[1:]] if isinstance(old, list) else number
    return values


def test_replays_reject_the_same_numbers_as_the_cpu() -> None:
    differences = []
    covered, refused = set(), set()
    plans.clear()
    for described, call, arguments, position in plain_calls():
        name = described.split()[0]
        covered.add(name)
        old = arguments[position]
        whole = isinstance(old[0] if isinstance(old, list) else old, int)
        for number in INTEGERS if whole else FLOATS:
            bad = changed(arguments, position, number)
            expected = outcome(call, fresh(bad))
            if not expected[0] or (whole and number == 0 and any(one in name for one in ASYNCHRONOUS)):
                continue
            refused.add(name)
            call(*on_device(fresh(arguments)))
            found = outcome(call, on_device(fresh(bad)))
            if found != expected:
                differences.append(f"{described} = {number}: {expected} on the CPU, {found} on the device")
    assert not differences, "\n".join(differences)
    assert len(covered) > 100, sorted(covered)
    assert {"aten::softshrink", "aten::renorm", "aten::hardtanh"} <= refused


def sgd(x: torch.Tensor, buffers: list[torch.Tensor], momentum: float) -> list[torch.Tensor]:
    fixed = {"weight_decay": 0.1, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([x], [x.clone()], buffers, momentum=momentum, is_first_step=False, **fixed)
    return [x, *buffers]


CALLS: dict[str, tuple[Callable[..., Any], float, float]] = {
    "softshrink": (torch.nn.functional.softshrink, 0.5, -0.5),
    "softshrink by NaN": (torch.nn.functional.softshrink, 0.5, math.nan),
    "softshrink by inf": (torch.nn.functional.softshrink, 0.5, math.inf),
    "softshrink by a whole number": (torch.nn.functional.softshrink, 1, -1),
    "softshrink out=": (lambda x, by: torch._C._nn.softshrink(x, by, out=torch.empty_like(x)), 0.5, -0.5),
    "renorm": (lambda x, most: torch.renorm(x, 2, 0, most), 1.5, -1.5),
    "renorm_": (lambda x, most: x.renorm_(2, 0, most), 1.5, math.nan),
    "renorm out=": (lambda x, most: torch.renorm(x, 2, 0, most, out=torch.empty_like(x)), 1.5, -1.5),
    "elu_backward": (lambda x, alpha: torch.ops.aten.elu_backward(x, alpha, 1, 1, False, x), 1.0, -1.0),
    "elu_backward in place": (lambda x, alpha: torch.ops.aten.elu_backward(x, alpha, 1, 1, True, x), 1.0, -1.0),
    "leaky_relu_backward": (lambda x, slope: torch.ops.aten.leaky_relu_backward(x, x, slope, False), 0.5, -0.5),
    "leaky_relu_backward in place": (lambda x, slope: torch.ops.aten.leaky_relu_backward(x, x, slope, True), 0.5, -0.5),
    "sgd": (lambda x, momentum: sgd(x, [], momentum), 0.0, 0.9),
    "sgd with momentum": (lambda x, momentum: sgd(x, [x + 1], momentum), 0.9, 0.0),
    "hardtanh of bytes": (lambda x, least: torch.nn.functional.hardtanh((x * 9).abs().byte(), least, 3), 1, -1),
    "hardtanh": (lambda x, least: torch.nn.functional.hardtanh(x, least, 3), 1, -1),
}


@pytest.mark.parametrize("name", CALLS)
def test_alternating_valid_and_invalid_numbers(name: str) -> None:
    function, good, bad = CALLS[name]
    x = torch.randn(3, 4)
    counted = sum(_C.fallback_counts().values())
    for number in (good, bad, good, bad, good):
        here, there = x.clone(), x.to(DEVICE)
        expected, found = outcome(function, [here, number]), outcome(function, [there, number])
        assert found == expected
        if not found[0]:
            torch.testing.assert_close(there.cpu(), here)
            torch.testing.assert_close(to_cpu(function(there, number)), function(here, number))
        else:
            assert torch.equal(there.cpu(), here)
    assert sum(_C.fallback_counts().values()) == counted  # errors do not count as fallbacks


def test_checks_must_be_comparisons_of_arguments() -> None:
    from torch_backplane.planning import operator

    LIBRARY.define("checked(Tensor self, Scalar lambd) -> Tensor")
    for check, error in {
        "lambd": "a check must be a comparison such as 'lambd >= 0', but got 'lambd'",
        "beta >= 0": "backplane_checks::checked has no argument beta",
        "lambd >= 0 if beta": "backplane_checks::checked has no argument beta",
    }.items():
        with pytest.raises(ValueError, match=error):
            operator("backplane_checks::checked", checks=[check], variants=False)(lambda call, self, lambd: self)
