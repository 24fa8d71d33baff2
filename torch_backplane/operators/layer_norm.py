"""Layer norm, RMS norm and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.norms import Affine, Saved, Sets, Statistics
from torch_backplane.operators.normalization import (
    Optional,
    Results,
    check_channels,
    check_gradients,
    check_parameters,
    check_shape,
    new_like,
    run_norm,
    run_norm_backward,
)
from torch_backplane.planning import Call, Refused, RunOnCPU, operator


def _normalized(
    self: torch.Tensor, normalized_shape: Sequence[int], weight: Optional, bias: Optional
) -> list[torch.Tensor] | None:
    """Meta tensors like the result, mean and rstd; None for dtypes for which PyTorch's meta function determines them.

    Raises:
        Refused: PyTorch refuses the shapes.
    """
    shape, outer = tuple(normalized_shape), self.dim() - len(normalized_shape)
    fits = shape and outer >= 0 and tuple(self.shape[outer:]) == shape
    if not fits or any(one is not None and tuple(one.shape) != shape for one in (weight, bias)):
        raise Refused("normalized_shape does not match self, weight or bias")
    check_parameters(self, weight, bias)
    if not self.is_floating_point() or any(one is not None and one.dtype != self.dtype for one in (weight, bias)):
        return None
    kept = [*self.shape[:outer], *[1] * len(shape)]
    statistics = torch.empty(kept, dtype=value_dtype(self.dtype), device="meta")
    return [torch.empty(self.shape, dtype=self.dtype, device="meta"), statistics, statistics]


@operator("native_layer_norm")
def native_layer_norm(
    call: Call, self: torch.Tensor, normalized_shape: list[int], weight: Optional, bias: Optional, eps: float
) -> Results:
    out, mean, rstd = call.outputs(like=_normalized(self, normalized_shape, weight, bias))
    size = math.prod(normalized_shape)
    sets = Sets.layer(self.numel() // max(1, size), size)
    run_norm(sets, out, self, Affine(weight, bias), Statistics(mean, rstd), eps)
    return out, mean, rstd


def _check_backward(
    grad: torch.Tensor,
    self: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: Optional,
    bias: Optional,
    *statistics: Optional,
) -> None:
    outer = self.dim() - len(normalized_shape)
    fits = outer >= 0 and tuple(self.shape[outer:]) == tuple(normalized_shape)
    torch._check(fits, lambda: f"expected an input of [*, {normalized_shape}], but got {list(self.shape)}")
    check_shape(self.shape, gradients=grad)
    check_shape(normalized_shape, weight=weight, bias=bias)
    for one in statistics:
        if one is not None:
            check_channels(math.prod(self.shape[:outer]), statistics=one)
    check_parameters(self, weight, bias)
    check_gradients(self, grad, *statistics)


@operator("native_layer_norm_backward")
def native_layer_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    normalized_shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Optional,
    bias: Optional,
    output_mask: list[bool],
) -> Results:
    size = math.prod(normalized_shape)
    _check_backward(grad, self, normalized_shape, weight, bias, mean, rstd)
    results = new_like([self, weight, bias], output_mask, first=torch.contiguous_format)
    sets = Sets.layer(self.numel() // max(1, size), size)
    run_norm_backward(sets, results, Saved(grad, self, weight, mean, rstd))
    return results


# RMS norm. csrc/aten/rms_norm.cpp composes calls that these planners leave.


def _check_real(self: torch.Tensor, weight: Optional) -> None:
    if not self.is_floating_point() or (weight is not None and weight.dtype != self.dtype):
        raise RunOnCPU("self is not floating-point, or weight has another dtype")


@operator("_fused_rms_norm", variants=False)
def rms_norm(
    call: Call, self: torch.Tensor, normalized_shape: list[int], weight: Optional, eps: float | None
) -> Results:
    """The result, and the reciprocal of the root mean square."""
    _check_real(self, weight)
    dtype = value_dtype(self.dtype)
    size, outer = math.prod(normalized_shape), self.shape[: self.dim() - len(normalized_shape)]
    out = torch.empty_like(self, memory_format=torch.contiguous_format)
    rstd = torch.empty([*outer, *[1] * len(normalized_shape)], dtype=dtype, device=self.device)
    if not out.numel():
        return out, rstd.fill_(math.nan)
    eps = torch.finfo(dtype).eps if eps is None else eps
    run_norm(Sets.layer(rstd.numel(), size), out, self, Affine(weight), Statistics(None, rstd), eps)
    return out, rstd


@operator("_fused_rms_norm_backward", variants=False)
def rms_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: Optional,
    output_mask: list[bool],
) -> Results:
    _check_real(self, weight)
    _check_backward(grad, self, normalized_shape, weight, None, rstd)
    results = new_like([self, weight], output_mask, first=torch.contiguous_format)
    sets = Sets.layer(rstd.numel(), math.prod(normalized_shape))
    run_norm_backward(sets, results, Saved(grad, self, weight, None, rstd))
    return results
