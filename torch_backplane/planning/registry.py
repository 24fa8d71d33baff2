"""The planners that operators have, by the operators' full names: what traces and tools look up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

# What the runtime calls for an operator.
planned: dict[str, Callable[..., Any]] = {}
# For each of them the arguments whose numbers are passed through: plans hold for any value.
passed: dict[str, list[str]] = {}


def full_name(overload: OpOverload) -> str:
    """Such as "aten::add.Tensor"."""
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
