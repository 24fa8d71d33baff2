"""torch.linalg, as far as elements do."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression
from torch_backplane.planning import Call, RunOnCPU, operator, run_pointwise


def cross_product(
    a: Expression, b: Expression, c: Expression, x: Expression, y: Expression, z: Expression
) -> tuple[Expression, ...]:
    return b * z - c * y, c * x - a * z, a * y - b * x


@operator("linalg_cross", dtypes="complex", one_dtype=["self", "other"])
def linalg_cross(call: Call, self: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    call.check_apart()
    (out,) = call.outputs()
    a, b = (tensor.expand(out.shape).unbind(dim) for tensor in (self, other))
    run_pointwise(cross_product, out.unbind(dim), [*a, *b], key="cross", name="cross")
    return out


@operator("_compute_linear_combination")
def _compute_linear_combination(call: Call, input: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The sums of the slices of `input` along its first dimension, times each row of coefficients. PyTorch adds
    them to `out=`, and reads beyond memory where there are fewer slices than coefficients.
    """
    if coefficients.dim() != 2 or not input.dim():
        raise RunOnCPU("other than a coefficient for each slice")
    rows, count = coefficients.shape
    torch._check(count <= input.shape[0], lambda: f"expected {count} slices, and got {list(input.shape)}")
    if input.dtype != coefficients.dtype or not input.numel():
        raise RunOnCPU("two dtypes, or nothing, which PyTorch refuses")
    (out,) = call.outputs(like=[torch.empty((rows, *input.shape[1:]), dtype=input.dtype, device="meta")])
    slices = input.reshape(input.shape[0], math.prod(input.shape[1:]))
    result = (coefficients @ slices[:count]).view(out.shape)
    return out.add_(result) if call.written else out.copy_(result)
