"""Tuning problems: calls of a heavy operator, described as text by everything that their speed depends on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_SUFFIX = "TunableOp_"
_DTYPES = {str(one).removeprefix("torch."): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


class Problem(NamedTuple):
    """A call of a heavy operator.

    Args:
        operator: the operator's name, such as "Product".
        dtype: the dtype's name, such as "float32".
        parameters: sizes and strides of tensors, integers, and lists of integers, such as "a=64x32:32x1 b=32x8:8x1
            added=0".
    """

    operator: str
    dtype: str
    parameters: str

    @property
    def name(self) -> str:
        """The first field of a line in a file: operator and dtype, such as "ProductTunableOp_float32"."""
        return f"{self.operator}{_SUFFIX}{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def values(self) -> dict[str, str]:
        """The text of each parameter, by name."""
        return dict(one.split("=", 1) for one in self.parameters.split())

    @classmethod
    def of(cls, operator: str, dtype: torch.dtype, **given: Any) -> Problem:
        """Describes a call.

        Args:
            operator: the operator's name.
            dtype: the dtype.
            given: the parameters: tensors, integers, bools, lists of integers, and None. Symbols are guarded, so a
                dynamic-shape plan is only valid for their values in this call.
        """
        parameters = " ".join(f"{name}={_written(value)}" for name, value in given.items())
        return cls(operator, str(dtype).removeprefix("torch."), parameters)

    @classmethod
    def parse(cls, name: str, parameters: str) -> Problem:
        """Parses the first two fields of a line.

        Args:
            name: operator and dtype.
            parameters: the parameters.

        Raises:
            ValueError: a field is malformed; the message says what is wrong.
        """
        operator, found, dtype = name.partition(_SUFFIX)
        if not operator.isidentifier() or not found or dtype not in _DTYPES:
            raise ValueError(f"{name!r} is not an operator and dtype such as ProductTunableOp_float32")
        for one in parameters.split() or [""]:
            if not re.fullmatch(r"\w+=(-|-?\d+(x-?\d+)*(:\d+(x\d+)*)?)", one):
                raise ValueError(f"{one!r} is not a parameter such as a=64x32:32x1 or groups=1")
        return cls(operator, dtype, parameters)


def _written(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return f"{_written(value.shape)}:{_written(value.stride())}"
    if isinstance(value, Sequence):
        return "x".join(str(int(one)) for one in value)
    return str(int(value))
