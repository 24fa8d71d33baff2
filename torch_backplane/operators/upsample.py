"""Resampling of images: the operators of which PyTorch composes nn.functional.interpolate, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_backplane.kernels.templates.resample import Resampling, resample, resample_backward
from torch_backplane.planning import Call, Refused, contiguous_result, operator, run_template

_FILTERS = ("nearest", "linear", "cubic")


def _how(call: Call, sizes: list[int], output_size: list[int], align_corners: bool, factors: list[Any]) -> Resampling:
    """The resampling of a call. `factors` are the scale factors that the caller gave, if any: sizes can be rounded."""
    filter_ = next(filter_ for filter_ in _FILTERS if filter_ in call.name)
    exact = "exact" in call.name
    scales = []
    for size, out, factor in zip(sizes, output_size, factors, strict=True):
        # Equal or doubled sizes determine the scale, whatever the factor is.
        if out == size and not exact and not align_corners:
            scales.append(1.0)
        elif out == 2 * size and filter_ == "nearest" and not exact:
            scales.append(0.5)
        elif align_corners:
            scales.append((size - 1) / (out - 1) if out > 1 else 0.0)
        else:
            scales.append(1 / factor if factor is not None and factor > 0 else size / out)
    centred = exact or (filter_ != "nearest" and not align_corners)
    return Resampling(filter_, 0.5 * centred, 0.5 * (centred and not exact), tuple(scales))


def _planes(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """(batch, channels, *sizes) as (planes, *sizes), contiguous."""
    return tensor.contiguous().view(math.prod(tensor.shape[:-rank]), *tensor.shape[-rank:])


def _check(call: Call, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point() and ("nearest" not in call.name or tensor.dtype != torch.uint8):
        raise Refused(f"images of {tensor.dtype}".replace("torch.", ""))


def _forward(
    call: Call, self: torch.Tensor, output_size: list[int], align_corners: bool, factors: list[Any]
) -> torch.Tensor:
    _check(call, self)
    (out,) = call.outputs()
    rank = len(output_size)
    how = _how(call, list(self.shape[2:]), output_size, align_corners, factors)
    if out.numel():
        with contiguous_result(out) as result:
            run_template(resample, out.device, _planes(result, rank), _planes(self, rank), how, name="upsample")
    return out


def _backward(
    call: Call,
    grad: torch.Tensor,
    output_size: list[int],
    input_size: list[int],
    align_corners: bool,
    factors: list[Any],
) -> torch.Tensor:
    _check(call, grad)
    (out,) = call.outputs()
    rank = len(output_size)
    how = _how(call, input_size[2:], output_size, align_corners, factors)
    if out.numel():
        with contiguous_result(out) as result:
            images = _planes(result, rank), _planes(grad, rank)
            run_template(resample_backward, out.device, *images, how, name="upsample_backward")
    return out


@operator(*(f"{name}{rank}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)))
def nearest(call: Call, self: torch.Tensor, output_size: list[int], *factors: float | None) -> torch.Tensor:
    return _forward(call, self, output_size, False, list(factors))


@operator(
    *(f"{name}{rank}d_backward" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3))
)
def nearest_backward(
    call: Call, grad: torch.Tensor, output_size: list[int], input_size: list[int], *factors: float | None
) -> torch.Tensor:
    return _backward(call, grad, output_size, input_size, False, list(factors))


_WEIGHTED = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")


@operator(*_WEIGHTED)
def weighted(
    call: Call, self: torch.Tensor, output_size: list[int], align_corners: bool, *factors: float | None
) -> torch.Tensor:
    return _forward(call, self, output_size, align_corners, list(factors))


@operator(*(f"{name}_backward" for name in _WEIGHTED))
def weighted_backward(
    call: Call,
    grad: torch.Tensor,
    output_size: list[int],
    input_size: list[int],
    align_corners: bool,
    *factors: float | None,
) -> torch.Tensor:
    return _backward(call, grad, output_size, input_size, align_corners, list(factors))
