"""Counts of values: bincount and histc."""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, Refused, RunOnCPU, check_fits, operator, part, run_pointwise

# A sum of this many ones fits in int32, which has atomic additions.
_MAX_COUNTED = 2**31 - 1


@operator("bincount")
def bincount(call: Call, self: torch.Tensor, weights: torch.Tensor | None, minlength: int) -> torch.Tensor:
    if self.dim() != 1 or self.dtype == torch.bool or self.is_floating_point() or minlength < 0:
        raise Refused("self is not a vector of integers, or minlength is negative")
    if self.numel() == 0:
        (out,) = call.outputs(like=[torch.empty(minlength, dtype=torch.int64, device="meta")])
        return out.zero_()
    if weights is not None and (weights.shape != self.shape or self.device != weights.device):
        raise Refused("weights have another shape than self or are on another device")
    least, most = least_and_most(self).tolist()
    if least < 0 or self.numel() > _MAX_COUNTED:
        raise RunOnCPU("negative numbers, or too many numbers")
    counted = torch.int64 if weights is None else torch.float64
    dtype = torch.float32 if weights is not None and weights.dtype == torch.float32 else counted
    (out,) = call.outputs(like=[torch.empty(max(most + 1, minlength), dtype=dtype, device="meta")])
    sum_by_value(out, self, weights)
    return out


@part("(Tensor self) -> Tensor")
def least_and_most(call: Call, self: torch.Tensor) -> torch.Tensor:
    return torch.stack([self.amin(), self.amax()])


@part("(Tensor(a!) out, Tensor self, Tensor? weights) -> ()")
def sum_by_value(call: Call, out: torch.Tensor, self: torch.Tensor, weights: torch.Tensor | None) -> None:
    """out[i] = the sum of the weights (without weights, the number of elements) where self is i."""
    if weights is None:
        added = torch.ones(1, dtype=torch.int32, device=self.device).expand(self.shape)
    else:
        added = weights.to(out.dtype)
    index = self if self.dtype in (torch.int32, torch.int64) else self.to(torch.int64)
    out.copy_(torch.zeros_like(out, dtype=added.dtype).index_add_(0, index, added))


@operator("histc", by_value=["min", "max"])
def histc(call: Call, self: torch.Tensor, bins: int, least: float, most: float) -> torch.Tensor:
    """Waits for the range of self, unless a range is given."""
    integers = self.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not (integers or self.dtype in (torch.float32, torch.float64)) or bins <= 0:
        raise Refused("an unsupported dtype, or bins is not positive")
    check_fits(self.dtype, least, most)
    least, most = least.real, most.real
    if integers:  # as on CUDA, where the range has self's dtype
        least, most = torch.tensor([least, most]).to(self.dtype).tolist()
    if least == most and self.numel():
        least, most = least_and_most(self).tolist()
    if not (math.isfinite(least) and math.isfinite(most) and least <= most):
        raise RunOnCPU("an invalid range")
    if least == most:
        least, most = least - 1, most + 1
    if any(given.dtype != self.dtype for given in call.written):
        raise Refused("out has another dtype than self")
    # PyTorch's meta function is not used, because it refuses calls that are not deterministic on CUDA.
    (out,) = call.outputs(like=[torch.empty(bins, dtype=self.dtype, device="meta")])

    def place(
        x: Expression, first: Expression, last: Expression, bins: Expression, last_bin: Expression
    ) -> tuple[Expression, Expression]:
        within = (x >= first) & (x <= last)
        scaled = (f.where(within, x, first) - first) * bins
        at = f.floor_divide(scaled, last - first) if integers else scaled / (last - first)
        return f.minimum(at, last_bin).to(torch.int64), within.to(torch.int32)

    index = torch.empty(self.shape, dtype=torch.int64, device=self.device)
    counted = torch.empty_like(index, dtype=torch.int32)
    compute = torch.int64 if integers else self.dtype
    numbers = [(number, compute) for number in (least, most, bins, bins - 1)]
    key = ("histc", integers)
    run_pointwise(place, [index, counted], [self], numbers, key=key, compute=compute, name="histc")
    counts = torch.zeros(bins, dtype=torch.int32, device=self.device)
    return out.copy_(counts.index_add_(0, index.view(-1), counted.view(-1)))
