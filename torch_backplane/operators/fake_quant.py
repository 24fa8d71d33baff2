"""Fake quantization: rounds numbers to the values that quantized numbers represent, with a mask for the gradient."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, Refused, RunOnCPU, operator, run_pointwise

Pair = tuple[torch.Tensor, torch.Tensor]


def _quantized(
    x: Expression, scale: Expression, zero: Expression, least: Expression, most: Expression
) -> tuple[Expression, Expression]:
    """The rounded value, and whether x is in the range. All arguments but x are float32; NaN becomes the lower end."""
    one = zero + f.round(x * (1.0 / scale).to(x.dtype)).to(torch.float32)
    kept = f.fmin(f.fmax(one, least), most)
    return ((kept - zero) * scale).to(x.dtype), (one >= least) & (one <= most)


def _quantized_if(
    x: Expression,
    scale: Expression,
    zero: Expression,
    enabled: Expression,
    least: Expression,
    most: Expression,
) -> tuple[Expression, Expression]:
    value, inside = _quantized(x, scale, zero, least, most)
    return f.where(enabled, value, x), f.where(enabled, inside, f.full_like(inside, True))


def _results(call: Call, self: torch.Tensor) -> Pair:
    output, mask = call.outputs(like=[torch.empty_like(self, dtype=t, device="meta") for t in (self.dtype, torch.bool)])
    return output, mask


def _check(self: torch.Tensor, quant_min: int, quant_max: int, zero_point: int | None = None) -> None:
    """Refuses bad arguments: the CPU kernel raises the error."""
    if not self.is_floating_point() or quant_min > quant_max:
        raise Refused("self is not floating-point, or quant_min is greater than quant_max")
    if zero_point is not None and not quant_min <= zero_point <= quant_max:
        raise Refused("zero_point is outside the range")


def _range(quant_min: int, quant_max: int) -> list[tuple[float, torch.dtype]]:
    return [(float(end), torch.float32) for end in (quant_min, quant_max)]


@operator("fake_quantize_per_tensor_affine_cachemask")
def per_tensor(call: Call, self: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Pair:
    _check(self, quant_min, quant_max, zero_point)
    results = _results(call, self)
    numbers = [(scale, torch.float32), (float(zero_point), torch.float32), *_range(quant_min, quant_max)]
    compute = value_dtype(self.dtype)
    run_pointwise(_quantized, results, [self], numbers, key="fake_quantize", compute=compute, name="fake_quantize")
    return results


@operator("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def per_tensor_of_tensors(
    call: Call,
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    fake_quant_enabled: torch.Tensor,
    quant_min: int,
    quant_max: int,
) -> Pair:
    """Returns `self` unchanged if `fake_quant_enabled` is 0. Does not check the zero point, which is in memory."""
    _check(self, quant_min, quant_max)
    given = [scale, zero_point, fake_quant_enabled]
    if any(tensor.numel() != 1 for tensor in given):
        raise RunOnCPU("scale, zero_point or fake_quant_enabled does not have exactly one element")
    results = _results(call, self)
    run_pointwise(
        _quantized_if,
        results,
        [self, *(tensor.reshape(()) for tensor in given)],
        _range(quant_min, quant_max),
        key="fake_quantize of tensors",
        compute=[value_dtype(self.dtype), torch.float32, torch.float32, torch.bool],
        name="fake_quantize",
    )
    return results


@operator("fake_quantize_per_channel_affine_cachemask")
def per_channel(
    call: Call,
    self: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Pair:
    """Checks the zero points on the host, as PyTorch does, so calls have no plan."""
    _check(self, quant_min, quant_max)
    of_channels = scale.dim() == zero_point.dim() == 1 and 0 <= axis < self.dim()
    if not of_channels or not scale.shape == zero_point.shape == self.shape[axis : axis + 1]:
        raise Refused("not one scale and one zero point for each channel")
    if zero_point.dtype != torch.int32 or scale.dtype != torch.float32:
        raise RunOnCPU("scale is not float32, or zero_point is not int32")
    if bool(((zero_point < quant_min) | (zero_point > quant_max)).any().item()):
        raise RunOnCPU("a zero point is outside the range")
    results = _results(call, self)
    along = [-1 if dim == axis else 1 for dim in range(self.dim())]
    run_pointwise(
        _quantized,
        results,
        [self, scale.view(along), zero_point.view(along)],
        _range(quant_min, quant_max),
        key="fake_quantize",
        compute=[value_dtype(self.dtype), torch.float32, torch.float32],
        name="fake_quantize",
    )
    return results
