"""The properties of dtypes that kernel text depends on: category, width, and the dtype to compute in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Facts(NamedTuple):
    category: str  # "bool", "signed", "unsigned", "float" or "complex"
    bits: int  # of both parts together, for complex


FACTS: dict[torch.dtype, Facts] = {
    torch.bool: Facts("bool", 8),
    torch.int8: Facts("signed", 8),
    torch.int16: Facts("signed", 16),
    torch.int32: Facts("signed", 32),
    torch.int64: Facts("signed", 64),
    torch.uint8: Facts("unsigned", 8),
    torch.uint16: Facts("unsigned", 16),
    torch.uint32: Facts("unsigned", 32),
    torch.uint64: Facts("unsigned", 64),
    torch.float16: Facts("float", 16),
    torch.bfloat16: Facts("float", 16),
    torch.float32: Facts("float", 32),
    torch.float64: Facts("float", 64),
    torch.complex64: Facts("complex", 64),
    torch.complex128: Facts("complex", 128),
}

# The dtype of the real and the imaginary part.
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}

# Dtypes that exist in memory only; kernels compute in float32, as PyTorch does.
STORAGE_ONLY = frozenset({torch.float16, torch.bfloat16})


def facts(dtype: torch.dtype) -> Facts:
    """The properties of `dtype`. Raises TypeError if kernels do not support it."""
    try:
        return FACTS[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in FACTS)
        raise TypeError(f"kernels have no {dtype}; they take {known}") from None


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in registers of a stored `dtype`: float32 for float16 and bfloat16, otherwise `dtype`."""
    facts(dtype)
    return torch.float32 if dtype in STORAGE_ONLY else dtype


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in memory, for kernels that only move data: uint8 for bool, uint16 for float16 and bfloat16."""
    facts(dtype)
    return torch.uint8 if dtype == torch.bool else torch.uint16 if dtype in STORAGE_ONLY else dtype


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; any other dtype itself."""
    facts(dtype)
    return _PARTS.get(dtype, dtype)


def integer_range(dtype: torch.dtype) -> tuple[int, int]:
    """(least, greatest) value of an integer dtype."""
    category, bits = facts(dtype)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if category == "signed" else (0, (1 << bits) - 1)


def least_as(number: float, dtype: torch.dtype) -> float:
    """The least number of the compute dtype that is at least `number` when it is stored as `dtype`."""
    stored = torch.tensor(number, dtype=dtype)
    if value_dtype(dtype) == dtype:
        return stored.item()
    before = torch.nextafter(stored, torch.tensor(-math.inf, dtype=dtype))
    middle = (stored.float() + before.float()) / 2
    if middle.to(dtype) != stored:
        middle = torch.nextafter(middle, stored.float())
    return middle.item()
