"""Complex numbers made of real ones, and conjugated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Formula
from torch_backplane.operators.masks import check_same_dtype
from torch_backplane.planning import Call, RunOnCPU, operator, plan_pointwise, socket


def polar(magnitude: Expression, angle: Expression) -> Expression:
    return f.complex(magnitude * f.cos(angle), magnitude * f.sin(angle))


def made_of_parts(name: str, formula: Formula, parts: Sequence[str]) -> None:
    @operator(name, dtypes="complex", one_dtype=parts)
    def plan(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in (torch.float16, torch.float32, torch.float64):
            raise RunOnCPU(f"parts of {a.dtype}".replace("torch.", ""))  # which refuses them
        (result,) = call.meta(call.functional)
        check_same_dtype(call, result.dtype)
        return plan_pointwise(name, formula, call, (a, b), "inputs")


made_of_parts("complex", f.complex, ["real", "imag"])
made_of_parts("polar", polar, ["abs", "angle"])


@operator("_conj_physical", dtypes="complex")
@operator("conj_physical.out", "conj_physical_", variants=False, dtypes="complex")  # the functional form is composed
def conj_physical(call: Call, self: torch.Tensor) -> torch.Tensor:
    """Also of a tensor that is conjugated lazily, which PyTorch passes on to this operator."""
    if call.name == "aten::conj_physical_" and not self.is_complex():
        return self
    socket.check_overlaps(call.written, [])  # before they are resized
    if not self.is_complex():
        check_same_dtype(call, self.dtype)
    (out,) = call.outputs(elementwise=True)
    return out.copy_(self.conj())
