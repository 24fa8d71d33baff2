"""PyTorch's functions on traced values: in a formula, `torch.exp(a)` calls `functions.exp(a)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_backplane.kernels import functions, special
from torch_backplane.kernels.expression import Expression, apply, registered


def call(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Calls the equivalent of PyTorch's `function` on traced values. Raises TypeError if there is none."""
    name = getattr(function, "__name__", str(function))
    found = _OTHERWISE.get(name)
    if found is None:
        for module in (functions, special):
            found = found or getattr(module, name.removeprefix("special_"), None)
    if found is None:
        raise TypeError(f"formulas do not support torch.{name}; see torch_backplane.kernels.functions")
    return found(*arguments, **named)


def _clamp(a: Expression, min: Any = None, max: Any = None) -> Expression:
    a = a if min is None else functions.maximum(a, min)
    return a if max is None else functions.minimum(a, max)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Expression:
    if rounding_mode is None:
        return apply("divide", a, b)
    return functions.trunc_divide(a, b) if rounding_mode == "trunc" else functions.floor_divide(a, b)


def _operation(name: str) -> Callable[..., Expression]:
    return lambda *operands: apply(name, *operands)


# Functions whose name or arguments differ from those in functions.py.
_OTHERWISE: dict[str, Callable[..., Expression]] = {
    "abs": functions.absolute,
    "pow": functions.power,
    "clamp": _clamp,
    "clip": _clamp,
    "div": _divide,
    "divide": _divide,
    "true_divide": _divide,
    "relu": lambda a: functions.maximum(a, 0),
    "square": lambda a: a * a,
    "reciprocal": lambda a: 1.0 / a,
    "logical_and": lambda a, b: a.to(torch.bool) & b.to(torch.bool),
    "logical_or": lambda a, b: a.to(torch.bool) | b.to(torch.bool),
    "logical_not": lambda a: ~a.to(torch.bool),
    **{
        name: _operation(operation)
        for operation, names in {
            "add": "add",
            "subtract": "sub subtract",
            "multiply": "mul multiply",
            "negative": "neg negative",
            "equal": "eq",
            "not_equal": "ne",
            "less": "lt less",
            "less_equal": "le less_equal",
            "greater": "gt greater",
            "greater_equal": "ge greater_equal",
            "bitwise_and": "bitwise_and",
            "bitwise_or": "bitwise_or",
            "bitwise_xor": "bitwise_xor",
            "bitwise_not": "bitwise_not",
            "shift_left": "bitwise_left_shift",
            "shift_right": "bitwise_right_shift",
        }.items()
        for name in names.split()
    },
}

registered["torch function"] = call
