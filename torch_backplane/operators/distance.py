"""Distances between rows of matrices: torch.cdist, torch.pdist and their gradients."""

from __future__ import annotations

import math

import torch

from torch_backplane.planning import Call, Refused, contiguous_result, operator, run_kernel, runtime

# For each order of the norm: the statement that adds a difference; the final distance; the derivative of a distance
# with respect to a difference; and the condition under which a difference has no gradient, even for infinite factors.
_ORDERS = {
    0.0: ("ADD(total, (value_t)(difference != 0))", "TOTAL(total)", "0", "1"),
    1.0: ("ADD(total, fabs(difference))", "TOTAL(total)", "direction", "0"),
    2.0: ("ADD(total, difference * difference)", "sqrt(TOTAL(total))", "difference / distance", "distance == 0"),
    math.inf: (
        "total = fmax(total, fabs(difference));",
        "TOTAL(total)",
        "fabs(difference) == distance ? direction : (value_t)0",
        "0",
    ),
}
_ANY = (
    "ADD(total, pow(fabs(difference), order))",
    "pow(TOTAL(total), 1 / order)",
    "direction * pow(fabs(difference), order - 1) / pow(distance, order - 1)",
    "distance == 0 || (difference == 0 && order < 1)",
)

_FORWARD = """
const index_t place = item / columns, at_a = place * size, at_b = (place / rows * columns + item % columns) * size;
SUM(total);
for (index_t i = 0; i < size; ++i) {
  value_t difference = load_a(at_a + i) - load_b(at_b + i);
  if (difference != difference) { total = difference; total_lost = 0; break; }
  $add
}
store_out(item, $finish);
"""

_BACKWARD = """
const index_t place = item / size, i = item % size;
const value_t own = load_a(item);
SUM(sum);
for (index_t column = 0; column < columns; ++column) {
  const value_t difference = own - load_b((place / rows * columns + column) * size + i);
  const value_t distance = load_distances(place * columns + column);
  if ($none) continue;
  const value_t direction = difference > 0 ? 1 : difference < 0 ? -1 : 0;
  ADD(sum, load_grad(place * columns + column) * ($slope))
}
store_out(item, TOTAL(sum));
"""


def _check(*tensors: torch.Tensor) -> None:
    """Refuses dtypes that PyTorch refuses."""
    dtype = tensors[0].dtype
    if dtype not in (torch.float32, torch.float64) or any(tensor.dtype != dtype for tensor in tensors):
        raise Refused("tensors are not all float32 or all float64")


def _run(
    name: str, body: str, p: float, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **inputs: torch.Tensor
) -> None:
    """Args:
    out: (…, rows, columns) or (…, rows, size). a: (…, rows, size). b: (…, columns, size).
    """
    batch = out.shape[:-2]
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    add, finish, slope, none = _ORDERS.get(p, _ANY)
    body = body.replace("$add", add).replace("$finish", finish).replace("$slope", slope).replace("$none", none)
    known = p in _ORDERS
    with contiguous_result(out) as result:
        run_kernel(
            f"{name}_{'any' if not known else 'inf' if p == math.inf else int(p)}",
            body,
            items=result.numel(),
            outputs={"out": result},
            inputs={one: tensor.contiguous() for one, tensor in {"a": a, "b": b, **inputs}.items()},
            integers={"rows": a.shape[-2], "columns": b.shape[-2], "size": a.shape[-1]},
            numbers=None if known else {"order": (out.dtype, p)},
            value=out.dtype,
        )


@operator("_cdist_forward", static={"p": _ORDERS})
def _cdist_forward(call: Call, x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    _check(x1, x2)
    if p < 0 or compute_mode not in (None, 0, 1, 2):
        raise Refused("p is negative or compute_mode is unknown")
    (out,) = call.outputs()
    _run("cdist", _FORWARD, p, out, x1, x2)
    return out


@operator("_cdist_backward", static={"p": _ORDERS})
def _cdist_backward(
    call: Call, grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, cdist: torch.Tensor
) -> torch.Tensor:
    """The gradient of x1, with the broadcast batch dimensions of x1 and x2."""
    _check(grad, x1, x2, cdist)
    ranks = x1.dim(), x2.dim()
    torch._check(min(ranks) > 1, lambda: f"cdist only supports at least 2D tensors, not of {ranks} dimensions")
    batch = runtime.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    if not x1.numel() or not x2.numel():  # PyTorch does not expand the batch then
        (out,) = call.outputs(like=[torch.empty(x1.shape, dtype=x1.dtype, device="meta")])
        return out.zero_()
    shape = (*batch, *x1.shape[-2:])
    (out,) = call.outputs(like=[torch.empty(shape, dtype=x1.dtype, device="meta")])
    wide = (*batch, x1.shape[-2], x2.shape[-2])
    _run("cdist_backward", _BACKWARD, p, out, x1, x2, grad=grad.expand(wide), distances=cdist.expand(wide))
    return out


def _pairs(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and column indices of the distances that pdist returns, in its order."""
    rows, columns = torch.triu_indices(len(self), len(self), 1, device=self.device)
    return rows, columns


@operator("_pdist_forward", static={"p": _ORDERS})
def _pdist_forward(call: Call, self: torch.Tensor, p: float) -> torch.Tensor:
    _check(self)
    if self.dim() != 2 or p < 0:
        raise Refused("self is not two-dimensional or p is negative")
    pairs = len(self) * (len(self) - 1) // 2
    (out,) = call.outputs(like=[torch.empty(pairs, dtype=self.dtype, device="meta")])
    if out.numel():
        out.copy_(torch.ops.aten._cdist_forward(self, self, p, None)[_pairs(self)])
    return out


@operator("_pdist_backward", static={"p": _ORDERS})
def _pdist_backward(call: Call, grad: torch.Tensor, self: torch.Tensor, p: float, pdist: torch.Tensor) -> torch.Tensor:
    _check(grad, self, pdist)
    if self.dim() != 2 or not grad.dim():
        raise Refused("self is not two-dimensional or grad is zero-dimensional")
    (out,) = call.outputs(like=[torch.empty(self.shape, dtype=self.dtype, device="meta")])
    if not pdist.numel() or not out.numel():
        return out.zero_()
    rows, columns = _pairs(self)
    whole = [self.new_zeros(len(self), len(self)).index_put_((rows, columns), tensor) for tensor in (grad, pdist)]
    grads, distances = (half + half.t() for half in whole)
    return out.copy_(torch.ops.aten._cdist_backward(grads, self, self, p, distances))
