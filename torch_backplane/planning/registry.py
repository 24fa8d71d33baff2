"""Registered planners, by the operators' full names, for traces and tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

# For each operator, the function that the runtime calls to plan it.
planned: dict[str, Callable[..., Any]] = {}
# For each operator, the arguments whose numbers are passed through: one plan serves all their values.
passed: dict[str, list[str]] = {}


def full_name(overload: OpOverload) -> str:
    """The overload's full name, such as "aten::add.Tensor"."""
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
