"""A generated kernel: its text, and what to pass for each of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Role = Literal["output", "input", "scalar", "count", "rows", "tiles", "size", "stride"]


@dataclass(frozen=True)
class Parameter:
    """What one argument of a kernel means.

    Args:
        role: "output" and "input" are memory (in OpenCL C two arguments: the handle, and the offset in bytes as ulong);
            "scalar" is a number given by the caller; the others are numbers of a Geometry.
        dtype: of the tensor, or of the number.
        operand: which output, input or scalar; for a stride, which operand of the Geometry.
        dimension: of a size or stride; 0 is the innermost.
    """

    role: Role
    dtype: torch.dtype
    operand: int = 0
    dimension: int = 0


@dataclass(frozen=True)
class Kernel:
    """Args:
    name: the entry point, in the text.
    text: all of it; equal text is the same kernel.
    parameters: in order, memory before numbers.
    width: elements for each work item, or None where whoever launches it knows how many there are.
    group_size: the number of work items of a group, where the launch shall not choose it.
    local_bytes: of local memory that a group shares.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    width: int | None
    group_size: int | None = None
    local_bytes: int = 0

    def work_items(self, count: int) -> int:
        """How many work items `count` elements need."""
        assert self.width is not None
        return -(-count // self.width)


def entry_point(name: str) -> str:
    """What the text calls the kernel `name`: `exp` alone is taken in both languages. ValueError where it is no name."""
    if not name.isidentifier() or not name.isascii():
        raise ValueError(f"a kernel's name is a C identifier, and got {name!r}")
    return f"bp_{name}"
