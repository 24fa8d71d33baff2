"""Complex numbers made of real ones, and conjugated."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, operator, pointwise


def polar(magnitude: Expression, angle: Expression) -> Expression:
    return f.complex(magnitude * f.cos(angle), magnitude * f.sin(angle))


pointwise("complex", f.complex, compute="inputs", dtypes="complex")
pointwise("polar", polar, compute="inputs", dtypes="complex")


@operator("_conj_physical", dtypes="complex")
@operator("conj_physical.out", "conj_physical_", variants=False, dtypes="complex")  # the functional form is composed
def conj_physical(call: Call, self: torch.Tensor) -> torch.Tensor:
    """Also of a tensor that is conjugated lazily, which PyTorch passes on to this operator."""
    (out,) = call.outputs()
    return out.copy_(self.conj())
