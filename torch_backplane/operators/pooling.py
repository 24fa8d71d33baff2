"""Maximum and average pooling and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels.templates import pooling
from torch_backplane.kernels.templates.unfold import Windows
from torch_backplane.planning import (
    Call,
    Refused,
    RunOnCPU,
    check,
    check_same_dtype,
    contiguous_result,
    operator,
    run_template,
)
from torch_backplane.planning import strides as layouts


def _planes(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """(…, *sizes) as (planes, *sizes), contiguous."""
    if tensor.dim() not in (rank + 1, rank + 2):
        raise Refused("a tensor has the wrong number of dimensions")
    return tensor.contiguous().view(math.prod(tensor.shape[:-rank]), *tensor.shape[-rank:])


def _check_grad(grad: torch.Tensor, self: torch.Tensor, rank: int) -> None:
    """Raises an error if the gradient has other planes than the images. PyTorch's meta functions do not check that, and
    its CPU kernels read and write out of bounds.
    """
    wanted, given = self.shape[:-rank], grad.shape[:-rank]
    torch._check(given == wanted, lambda: f"expected a gradient of {list(wanted)} planes, but got {list(given)}")


def _windows(
    image: torch.Tensor,
    out: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> Windows:
    rank = image.dim() - 1

    def each(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers) * rank if len(numbers) == 1 else tuple(numbers)

    sizes = tuple(image.shape[1:]), tuple(out.shape[1:])
    return Windows(*sizes, each(window), each(stride or window), each(padding), each(dilation))


def _run(template: Any, result: torch.Tensor, *arguments: Any, name: str) -> None:
    if result.numel():
        run_template(template, result.device, result, *arguments, name=name)


def _like(call: Call, self: torch.Tensor) -> list[torch.Tensor] | None:
    """Meta tensors like the results of channels-last 3d images without a batch, for which PyTorch's meta functions give
    other strides. None for other images.
    """
    if call.written or _rank(call) != 3 or self.dim() != 4 or self.is_contiguous():
        return None
    if layouts.suggested((1, *self.shape), (self.numel(), *self.stride())) != torch.channels_last_3d:
        return None
    return [one.new_empty((*one.shape[1:], one.shape[0])).movedim(-1, 0) for one in call.meta(call.functional)]


@operator("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(
    call: Call,
    self: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = (self.dtype, torch.int64)
    check(all(one.dtype == dtype for one, dtype in zip(call.written, wanted, strict=False)), "out has another dtype")
    out, indices = call.outputs(like=_like(call, self))
    rank = _rank(call)
    image = _planes(self, rank)
    with contiguous_result(out) as result, contiguous_result(indices) as places:
        values, places = _planes(result, rank), _planes(places, rank)
        windows = _windows(image, values, window, stride, padding, dilation)
        _run(pooling.max_pool, values, places, image, windows, name="max_pool")
    return out, indices


@operator("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_with_indices_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> torch.Tensor:
    check(grad.dtype == self.dtype and indices.dtype == torch.int64, "grad_output or indices have another dtype")
    rank = _rank(call)
    if rank == 3:
        check_same_dtype(call, self.dtype)
    (out,) = call.outputs(like=_like(call, self))
    _check_grad(grad, self, rank)
    check(grad.shape == indices.shape, "indices have another shape than grad_output")
    grad, indices = _planes(grad, rank), _planes(indices, rank)
    with contiguous_result(out) as result:
        image = _planes(result, rank)
        windows = _windows(image, grad, window, stride, padding, dilation)
        _run(pooling.max_pool_backward, image, grad, indices, windows, name="max_pool_backward")
    return out


@operator("avg_pool2d", "avg_pool3d")
def avg_pool(
    call: Call,
    self: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    (out,) = call.outputs()
    rank = _rank(call)
    image = _planes(self, rank)
    with contiguous_result(out) as result:
        values = _planes(result, rank)
        windows = _windows(image, values, window, stride, padding)
        _run(pooling.avg_pool, values, image, windows, count_include_pad, divisor_override, name="avg_pool")
    return out


@operator("avg_pool2d_backward", "avg_pool3d_backward", one_dtype=["grad_output", "self"])
def avg_pool_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    (out,) = call.outputs()
    rank = _rank(call)
    _check_grad(grad, self, rank)
    grad = _planes(grad, rank)
    with contiguous_result(out) as result:
        image = _planes(result, rank)
        windows = _windows(image, grad, window, stride, padding)
        arguments = (grad, windows, count_include_pad, divisor_override)
        _run(pooling.avg_pool_backward, image, *arguments, name="avg_pool_backward")
    return out


@operator("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(call: Call, self: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    rank = _rank(call)
    if 0 in self.shape[1:] or len(output_size) != rank:
        raise Refused("self is empty, or output_size has the wrong length")
    (out,) = call.outputs()
    with contiguous_result(out) as result:
        _run(pooling.adaptive_avg_pool, _planes(result, rank), _planes(self, rank), name="adaptive_avg_pool")
    return out


@operator("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", one_dtype=["grad_output", "self"])
def adaptive_avg_pool_backward(call: Call, grad: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    rank = _rank(call)
    _check_grad(grad, self, rank)
    (out,) = call.outputs()
    with contiguous_result(out) as result:
        arguments = (_planes(result, rank), _planes(grad, rank))
        _run(pooling.adaptive_avg_pool_backward, *arguments, name="adaptive_avg_pool_backward")
    return out


@operator("adaptive_avg_pool2d.out", "adaptive_avg_pool3d.out", variants=False)
def adaptive_avg_pool_out(call: Call, self: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """The functional forms are composed of `_adaptive_avg_pool2d` and `_adaptive_avg_pool3d`."""
    aten = torch.ops.aten
    result = (aten._adaptive_avg_pool3d if _rank(call) == 3 else aten._adaptive_avg_pool2d)(self, output_size)
    (out,) = call.outputs(like=[result])
    return out.copy_(result)


@operator("adaptive_avg_pool3d_backward.grad_input", variants=False)
def adaptive_avg_pool3d_backward_out(call: Call, grad: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    result = torch.ops.aten._adaptive_avg_pool3d_backward(grad, self)
    (out,) = call.outputs(like=[result])
    return out.copy_(result)


@operator("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(call: Call, self: torch.Tensor, output_size: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rank = _rank(call)
    image = _planes(self, rank)
    out, indices = call.outputs()
    with contiguous_result(out) as result, contiguous_result(indices) as places:
        arguments = _planes(result, rank), _planes(places, rank), image
        _run(pooling.adaptive_max_pool, *arguments, name="adaptive_max_pool")
    return out, indices


@operator("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(
    call: Call, grad: torch.Tensor, self: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    rank = _rank(call)
    check(grad.shape == indices.shape and indices.dtype == torch.int64, "indices have another shape or dtype")
    _check_grad(grad, self, rank)
    grad, indices = _planes(grad, rank), _planes(indices, rank)
    (out,) = call.outputs()
    with contiguous_result(out) as result:
        arguments = _planes(result, rank), grad, indices
        _run(pooling.adaptive_max_pool_backward, *arguments, name="adaptive_max_pool_backward")
    return out


@operator("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(
    call: Call, self: torch.Tensor, window: list[int], output_size: list[int], random_samples: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = _rank(call)
    image = _planes(self, rank)
    samples = random_samples.dim() == 3 and random_samples.numel() == image.shape[0] * rank
    if not samples or random_samples.dtype != self.dtype:
        raise Refused("not one random sample for each plane and dimension, of self's dtype")
    if len(window) != rank or len(output_size) != rank:
        raise Refused("kernel_size or output_size has the wrong length")
    if min(window) <= 0:
        raise RunOnCPU("kernel_size is not positive")
    out, indices = call.outputs()
    with contiguous_result(out) as result, contiguous_result(indices) as places:
        values, places = _planes(result, rank), _planes(places, rank)
        windows = _windows(image, values, window, [1], [0])
        arguments = values, places, image, random_samples.contiguous(), windows
        _run(pooling.fractional_max_pool, *arguments, name="fractional_max_pool")
    return out, indices


@operator("fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def fractional_max_pool_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    window: list[int],
    output_size: list[int],
    indices: torch.Tensor,
) -> torch.Tensor:
    rank = _rank(call)
    _check_grad(grad, self, rank)
    _check_grad(indices, self, rank)
    if grad.shape != indices.shape or tuple(grad.shape[-rank:]) != tuple(output_size):
        raise Refused("grad_output, indices and output_size do not match")
    check_same_dtype(call, self.dtype)
    (out,) = call.outputs(like=[torch.empty(self.shape, dtype=self.dtype, device="meta")])
    rows = [_planes(tensor, rank).flatten(1) for tensor in (self, indices, grad)]
    summed = torch.zeros_like(rows[0]).scatter_add_(1, *rows[1:])
    return out.copy_(summed.view(out.shape))


@operator("max_unpool2d", "max_unpool3d")
def max_unpool(
    call: Call, self: torch.Tensor, indices: torch.Tensor, output_size: list[int], *others: list[int]
) -> torch.Tensor:
    """Zeros, with the elements of self at the positions in `indices`, where max_pool found them."""
    rank = _rank(call)
    if self.shape != indices.shape or indices.dtype != torch.int64 or len(output_size) != rank or not self.numel():
        raise Refused("self is empty, or indices or output_size do not match it")
    if any(size <= 0 for sizes in (output_size, *others[:1]) for size in sizes):
        raise Refused("output_size or stride is not positive")
    values, places = (_planes(tensor, rank).flatten(1) for tensor in (self, indices))
    check_same_dtype(call, self.dtype)
    check(all(len(sizes) == rank for sizes in others), "stride or padding has the wrong length")
    if rank == 3 and any(not given.is_contiguous() for given in call.written):
        raise Refused("out is not contiguous")
    # PyTorch's decomposition is not used, because it refuses calls that are not deterministic on CUDA.
    shape = [*self.shape[:-rank], *output_size]
    memory_format = layouts.suggested(self.shape, self.stride()) if rank == 2 else torch.contiguous_format
    laid_out = layouts.laid_out(shape, memory_format)
    (out,) = call.outputs(like=[torch.empty_strided(shape, laid_out, dtype=self.dtype, device="meta")])
    result = values.new_zeros(values.shape[0], math.prod(output_size)).scatter_(1, places, values)
    return out.copy_(result.view(out.shape))


def _rank(call: Call) -> int:
    return 3 if "3d" in call.name else 2
