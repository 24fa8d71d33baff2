"""A generated kernel: its text, and the meaning of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Role = Literal["output", "input", "scalar", "count", "rows", "tiles", "size", "stride"]


@dataclass(frozen=True)
class Parameter:
    """The meaning of one parameter of a kernel.

    Args:
        role: "output" and "input" are memory (in OpenCL C two arguments: the handle, and the offset in bytes as ulong);
            "scalar" is a number from the caller; the others are numbers of a Geometry.
        dtype: dtype of the tensor or number.
        operand: index of the output, input or scalar; for a stride, index of the Geometry's operand.
        dimension: dimension of a size or stride; 0 is the innermost.
    """

    role: Role
    dtype: torch.dtype
    operand: int = 0
    dimension: int = 0


@dataclass(frozen=True)
class Kernel:
    """A generated kernel.

    Args:
        name: the entry point in the text.
        text: the whole text; kernels with equal text are the same kernel.
        parameters: the parameters in order, memory before numbers.
        width: elements per work item; None if the caller determines the number of work items.
        group_size: work items per group; None if the launch chooses it.
        local_bytes: bytes of local memory per group.
    """

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    width: int | None
    group_size: int | None = None
    local_bytes: int = 0

    def work_items(self, count: int) -> int:
        """The number of work items for `count` elements."""
        assert self.width is not None
        return -(-count // self.width)


def entry_point(name: str) -> str:
    """The name of the kernel `name` in the text, with a prefix: names like `exp` exist in both languages.

    Raises:
        ValueError: `name` is not a C identifier.
    """
    if not name.isidentifier() or not name.isascii():
        raise ValueError(f"a kernel's name must be a C identifier, got {name!r}")
    return f"bp_{name}"
