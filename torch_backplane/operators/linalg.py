"""torch.linalg, as far as elements do."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.planning import Call, operator, run_pointwise


def cross_product(
    a: Expression, b: Expression, c: Expression, x: Expression, y: Expression, z: Expression
) -> tuple[Expression, ...]:
    return b * z - c * y, c * x - a * z, a * y - b * x


@operator("linalg_cross", dtypes="complex")
def linalg_cross(call: Call, self: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    (out,) = call.outputs()
    a, b = (tensor.expand(out.shape).unbind(dim) for tensor in (self, other))
    run_pointwise(cross_product, out.unbind(dim), [*a, *b], key="cross", name="cross")
    return out
