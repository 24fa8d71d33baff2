"""Checks integer divisors for zeros, and reports them (see `errors`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.layouts import geometry
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, named, split


def check_divisors(
    dialect: Dialect, divisor: torch.Tensor | int, dtype: torch.dtype, errors: torch.Tensor, operator: str
) -> Launch:
    """Reports a zero in `divisor`.

    Args:
        divisor: a tensor with any strides, or a number.
        dtype: the integer dtype to which elements are converted before the check.
        errors: the device's four int32 words.
        operator: the operator's name, for the error message.
    """
    inputs: dict[str, torch.Tensor] = {}
    numbers: dict[str, tuple[torch.dtype, Any]] = {
        "operator_number": (torch.int32, error_words.operator_number(operator))
    }
    items, integers = 1, {}
    statements, value = "", "(value_t)number"
    if isinstance(divisor, torch.Tensor):
        inputs["divisor"] = divisor
        where = geometry(divisor.shape, [divisor.stride()])
        rank = len(where.sizes)
        coordinates = [f"item_{d}" for d in reversed(range(rank))]
        statements = split("item", [f"size{d}" for d in reversed(range(rank))], coordinates)
        value = f"(value_t)load_divisor({' + '.join(f'item_{d} * stride{d}' for d in range(rank))})"
        items = math.prod(where.sizes)
        integers = {**named("size", where.sizes), **named("stride", where.strides[0])}
    else:
        numbers["number"] = (torch.int64, divisor)
    body = f"""
  {statements}
  if ({value} == 0 && atomic_swap(errors, 0u, {error_words.DIVISION_BY_ZERO}u) == 0u) errors[1] = operator_number;
"""
    return LaunchSpec(
        "check_divisors",
        dialect,
        outputs={"errors": errors},
        inputs=inputs,
        integers=integers,
        numbers=numbers,
        value=dtype,
        body=body,
        items=items,
        strided={"divisor"},
    ).launch()
