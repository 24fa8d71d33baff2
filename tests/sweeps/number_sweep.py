"""Finds planned operators that request other kernels when a number changes. Runs on devices that build nothing.

Prints the findings as JSON: lists of lines by kind; test_numbers_in_kernels.py describes the kinds.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from planned_calls import CALLS, CHOICES, DEVICES, Calls
from torch._ops import OpOverload

import torch_backplane.operators  # noqa: F401 - declares the planners
from torch_backplane import _C, plans
from torch_backplane.planning.declare import declared, find, static_numbers

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name
asked: set[str] = set()  # the texts of the requested kernels
findings: dict[str, list[str]] = {
    "without a call": [],
    "not varied": [],
    "not planned": [],
    "built": [],
    "needless": [],
}


def note_kernels() -> None:
    compiled = launch.compiled

    def noted(index: int, kernel: Any, name: str) -> Any:
        asked.add(kernel.text)
        return compiled(index, kernel, name)

    launch.compiled = noted


def kernels_of(overload: OpOverload, arguments: Mapping[str, Any]) -> set[str]:
    """Returns the texts of the kernels that a call requests. Raises ValueError if the CPU computes it."""
    asked.clear()
    _C.reset_fallback_counts()
    schema = [one for one in overload._schema.arguments if one.name in arguments]
    named = {one.name: arguments[one.name] for one in schema if one.kwarg_only}
    overload(*(arguments[one.name] for one in schema if not one.kwarg_only), **named)
    torch.accelerator.synchronize()
    if fell_back := _C.fallback_counts():
        raise ValueError(f"the CPU computed {', '.join(fell_back)}")
    return set(asked)


def numbers_of(overload: OpOverload) -> list[str]:
    """The arguments that are numbers, or lists of numbers, which formulas can compute with."""
    kinds = {one.name: str(one.type) for one in overload._schema.arguments}
    return [
        name
        for name, kind in kinds.items()
        if name not in CHOICES and "Tensor" not in kind and any(one in kind for one in ("number", "int", "float"))
    ]


def others(value: Any) -> Iterator[Any]:
    """Yields other numbers; for a list, lists with another number at one position."""
    if isinstance(value, list):
        for place, number in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in others(number))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value + 1
    elif isinstance(value, float):
        yield value * 1.5 + 0.125


def variations(overload: OpOverload, calls: Calls, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (argument, another value)."""
    for name in numbers_of(overload):
        if name in calls.together:
            continue
        chosen = [calls.others[name]] if name in calls.others else list(others(given.get(name)))
        if not chosen:
            findings["not varied"].append(f"{overload}: {name}")
        yield from ((name, value) for value in chosen if value is not None)


def try_operator(name: str, calls: Calls, device: str) -> None:
    overload = find(name)
    names = [one.name for one in overload._schema.arguments]

    def made(make: Any) -> dict[str, Any]:
        return dict(zip(names, make(device), strict=False))

    given = made(calls.make)
    first = kernels_of(overload, given)
    if not first and not calls.launches_nothing:
        raise ValueError("no kernel was requested")
    for make in calls.also:
        if kernels_of(overload, made(make)) - first:
            findings["built"].append(f"{name} on {device}: {', '.join(calls.together)}")
    static = static_numbers[overload.name()]
    for argument, value in variations(overload, calls, given):
        if value in static.get(argument, ()) or given[argument] in static.get(argument, ()):
            continue
        if kernels_of(overload, {**made(calls.make), argument: value}) - first:
            findings["built"].append(f"{name} on {device}: {argument}={value}")
    for argument, values in static.items():
        tried = [{**made(calls.make), argument: value} for value in values if value != given[argument]]
        if not any(kernels_of(overload, arguments) - first for arguments in tried):
            findings["needless"].append(f"{name} on {device}: {argument}")


def wanted() -> Iterator[str]:
    """Yields the declared operators with numbers, except other forms of operators in CALLS."""
    planners = [declared[find(name).name()] for name in CALLS]
    for full, planner in declared.items():
        namespace, _, name = full.rpartition("::")
        name = name if namespace == "aten" else full
        packet, _, which = name.partition(".")
        functional = f"{packet.removesuffix('_')}{'.' if which else ''}{which}"
        overload = find(name)
        if any(one.is_out for one in overload._schema.arguments):
            is_other_form = planner in planners
        else:
            is_other_form = name != functional and functional in CALLS
        if numbers_of(overload) and not is_other_form:
            yield name


if __name__ == "__main__":
    _C.set_fallback_policy(_C.FallbackPolicy.silent)
    plans.set_mode("0")
    note_kernels()
    findings["without a call"] = [name for name in wanted() if name not in CALLS]
    for name, calls in CALLS.items():
        for device in DEVICES:
            try:
                try_operator(name, calls, device)
            except Exception as error:
                findings["not planned"].append(f"{name} on {device}: {type(error).__name__}: {error}")
    print(json.dumps({"operators": len(CALLS), **findings}))
