"""Weight norm and its gradient: the direction of v with the length g, for each index of its first or last dimension."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.reductions import summation
from torch_backplane.operators.linear_algebra import NORMS
from torch_backplane.operators.normalization import Results
from torch_backplane.planning import Call, Refused, operator, run_pointwise, run_reduction


def _check_lengths(v: torch.Tensor, g: torch.Tensor, dim: int) -> list[int]:
    """Checks the arguments, and returns the dimensions over which lengths are computed."""
    if not v.numel():
        # The CPU kernel would crash: it divides by the size.
        torch._check(False, lambda: f"weight norm needs elements, but got a tensor of shape {list(v.shape)}")
    if 0 <= dim < v.dim():  # PyTorch does not check their number, and reads out of bounds
        torch._check(g.numel() >= v.shape[dim], lambda: f"expected {v.shape[dim]} lengths, but got {g.numel()}")
    if dim not in (0, v.dim() - 1) or g.numel() != v.shape[dim] or g.dtype != v.dtype or not v.is_floating_point():
        raise Refused("dim, or the shape or dtype of g, does not match v")
    return [other for other in range(v.dim()) if other != dim]


def _along(lengths: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    """One number for each index of `dim`, as a view that broadcasts to v."""
    return lengths.reshape(-1).view([-1 if other == dim else 1 for other in range(v.dim())])


@operator("_weight_norm_interface")
def _weight_norm_interface(call: Call, v: torch.Tensor, g: torch.Tensor, dim: int) -> Results:
    """v * g / |v|, and |v| in g's shape (float32 for half precision)."""
    dims, compute = _check_lengths(v, g, dim), value_dtype(v.dtype)
    out, norms = call.outputs(
        like=[torch.empty_like(v, device="meta"), torch.empty_like(g, dtype=compute, device="meta")]
    )
    found = torch.empty(v.shape[dim], dtype=compute, device=v.device)
    run_reduction(NORMS[2](compute), [found], [v], dims, key=("norm", 2.0, compute), compute=compute, name="norm")
    inputs = [v, _along(g, v, dim), _along(found, v, dim)]
    run_pointwise(
        lambda v, g, norm: v * (g / norm), [out], inputs, key="weight_norm", compute=compute, name="weight_norm"
    )
    norms.copy_(found.view(norms.shape))
    return out, norms


def _weight_norm_gradient(
    grad: Expression, v: Expression, g: Expression, norm: Expression, product: Expression
) -> Expression:
    return g / norm * (grad - v * (product / (norm * norm)))


@operator("_weight_norm_interface_backward")
def _weight_norm_interface_backward(
    call: Call,
    grad_w: torch.Tensor,
    saved_v: torch.Tensor,
    saved_g: torch.Tensor,
    saved_norms: torch.Tensor,
    dim: int,
) -> Results:
    dims, compute = _check_lengths(saved_v, saved_g, dim), value_dtype(saved_v.dtype)
    if not all(tensor.is_contiguous() for tensor in (saved_v, saved_g, saved_norms)):
        raise Refused("saved tensors are not contiguous")
    grad_v, grad_g = call.outputs()
    products = torch.empty(saved_v.shape[dim], dtype=compute, device=saved_v.device)
    summed = summation(compute, lambda a, b, _: a * b)
    name = "weight_norm_backward"
    run_reduction(summed, [products], [grad_w, saved_v], dims, key=(name, compute), compute=compute, name=name)
    along = [_along(tensor, saved_v, dim) for tensor in (saved_g, saved_norms, products)]
    inputs = [grad_w, saved_v, *along]
    run_pointwise(_weight_norm_gradient, [grad_v], inputs, key=name, compute=compute, name=name)
    lengths = [products.view(saved_norms.shape), saved_norms]
    run_pointwise(lambda a, b: a / b, [grad_g], lengths, key=f"{name} of g", compute=compute, name=name)
    return grad_v, grad_g
