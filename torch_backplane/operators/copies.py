"""Copies within a device, and fills."""

from __future__ import annotations

import torch

from torch_backplane.planning import Call, copy_elements, operator, pointwise


@operator("backplane::copy_elements", variants=False, dtypes="any")
def copy(call: Call, source: torch.Tensor, destination: torch.Tensor, conjugate: bool, negate: bool) -> None:
    """What Tensor.copy_ comes to within a device, where it is more than to move a run of bytes (csrc/aten/copy.cpp)."""
    copy_elements(destination, source, conjugate, negate)


pointwise("fill.Scalar", lambda self, value: value, dtypes="complex", fitting="stored", idempotent=True)
pointwise("fill.Tensor", lambda self, value: value, dtypes="complex", idempotent=True)
pointwise("zero", lambda self: False if self.dtype == torch.bool else 0, dtypes="complex", idempotent=True)
