"""Branchless float32 functions for OpenCL devices that are CPUs.

CPU compilers vectorize over neighbouring work items if the code is pure arithmetic. The libraries of CPU
implementations use branches or tables and process one element at a time, which is 5 to 50 times slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch_backplane.kernels.cpu.function_texts import TEXTS
from torch_backplane.kernels.dialects.base import LIBRARY

_NAME = re.compile(r"\bcpu_(\w+)\(")


def _horner(call: re.Match[str]) -> str:
    """Expands POLYNOMIAL(x, …, c1, c0), with the coefficient of the highest power first, by Horner's rule."""
    x, *coefficients = (word.strip() for word in call[1].split(","))
    text = coefficients[0]
    for coefficient in coefficients[1:]:
        text = f"({text} * {x} + {coefficient})"
    return text


_EXPANDED = [re.sub(r"POLYNOMIAL\(([^)]*)\)", _horner, text) for text in TEXTS]
_BY_NAME = {_NAME.findall(text)[0]: text for text in _EXPANDED}
_USES = {name: frozenset(_NAME.findall(text)) - {name} for name, text in _BY_NAME.items()}

# Functions of the math library that are defined here as cpu_….
BRANCHLESS = tuple(name for name in _BY_NAME if name in (*LIBRARY.values(), "fmod"))


def _with_what_they_use(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        found |= waiting
        waiting = set().union(*(_USES[name] for name in waiting)) - found
    return found


def needs_float64(name: str) -> bool:
    """Whether the function `name` of BRANCHLESS, or a function that it calls, computes in float64."""
    return any("double" in _BY_NAME[one] for one in _with_what_they_use([name]))


def definitions(text: str) -> list[str]:
    """The functions `cpu_…` that `text` calls, and those that they call, each before its first use."""
    needed = _with_what_they_use(name for name in _NAME.findall(text) if name in _BY_NAME)
    return [definition for name, definition in _BY_NAME.items() if name in needed]
