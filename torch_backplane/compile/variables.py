"""Variables of generated kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.codegen.common import CSEVariable
from torch.utils._sympy.value_ranges import ValueRanges


class Variable(CSEVariable):
    """A variable or constant in the text of a kernel, with the dtype that it has in a register."""

    dtype: torch.dtype

    def __init__(self, name: str, bounds: ValueRanges[Any], dtype: torch.dtype, shape: tuple[str, ...] = ()) -> None:
        super().__init__(name, bounds, dtype, shape)
