"""Layer, group, batch and RMS norm, with backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from torch_backplane.kernels import Expression
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.reductions import summation
from torch_backplane.kernels.templates.norms import Sets, norm, norm_backward, weight_grads
from torch_backplane.operators.reductions import NORMS, spread
from torch_backplane.planning import (
    Call,
    RunOnCPU,
    contiguous_result,
    operator,
    run_pointwise,
    run_reduction,
    run_template,
)
from torch_backplane.planning.call import as_meta

Optional = torch.Tensor | None
Results = tuple[Optional, ...]


def _dense(tensor: Optional) -> Optional:
    return None if tensor is None else tensor.contiguous()


def _forward(
    sets: Sets,
    out: torch.Tensor,
    self: torch.Tensor,
    *arguments: Any,
    mean: Optional,
    rstd: Optional,
    **options: Any,
) -> None:
    if not out.numel():
        return
    with ExitStack() as stack:
        result, *saved = (
            None if tensor is None else stack.enter_context(contiguous_result(tensor)) for tensor in (out, mean, rstd)
        )
        options |= dict(zip(("mean", "rstd"), saved, strict=True))
        run_template(norm, out.device, sets, result, _dense(self), *arguments, name=f"{sets.kind}_norm", **options)


def _backward(
    sets: Sets,
    results: Sequence[Optional],
    grad: torch.Tensor,
    self: torch.Tensor,
    mean: Optional,
    rstd: torch.Tensor,
    weight: Optional,
) -> None:
    """Writes the gradients of self, and of weight and bias, as far as there are results to write to."""
    out, *others = results
    weight_grad, bias_grad = [*others, None][:2]
    if not self.numel():
        for result in results:
            if result is not None:
                result.zero_()
        return
    grad, self = grad.contiguous(), self.contiguous()
    mean, rstd, weight = _dense(mean), rstd.contiguous(), _dense(weight)
    name = f"{sets.kind}_norm_backward"
    if out is not None:
        with contiguous_result(out) as result:
            run_template(norm_backward, out.device, sets, result, grad, self, weight, mean, rstd, name=name)
    if weight_grad is not None or bias_grad is not None:
        arguments = (sets, weight_grad, bias_grad, grad, self, mean, rstd)
        run_template(weight_grads, self.device, *arguments, name=name)


def _normalized(
    self: torch.Tensor, normalized_shape: Sequence[int], weight: Optional, bias: Optional
) -> list[torch.Tensor] | None:
    """The result, means and deviations, on the meta device; None for dtypes of which PyTorch's meta function decides.

    Raises:
        RunOnCPU: shapes that it refuses.
    """
    shape, outer = tuple(normalized_shape), self.dim() - len(normalized_shape)
    fits = shape and outer >= 0 and tuple(self.shape[outer:]) == shape
    if not fits or any(one is not None and tuple(one.shape) != shape for one in (weight, bias)):
        raise RunOnCPU("another shape than is normalized over")
    if not self.is_floating_point() or any(one is not None and one.dtype != self.dtype for one in (weight, bias)):
        return None
    kept = [*self.shape[:outer], *[1] * len(shape)]
    statistics = [torch.empty(kept, dtype=value_dtype(self.dtype), device="meta") for _ in range(2)]
    return [torch.empty(self.shape, dtype=self.dtype, device="meta"), *statistics]


@operator("native_layer_norm")
def native_layer_norm(
    call: Call, self: torch.Tensor, normalized_shape: list[int], weight: Optional, bias: Optional, eps: float
) -> Results:
    out, mean, rstd = call.outputs(like=_normalized(self, normalized_shape, weight, bias))
    size = math.prod(normalized_shape)
    sets = Sets.layer(self.numel() // max(1, size), size)
    _forward(sets, out, self, _dense(weight), _dense(bias), eps, mean=mean, rstd=rstd)
    return out, mean, rstd


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
    results = _new_like([self, weight, bias], output_mask)
    _backward(Sets.layer(self.numel() // max(1, size), size), results, grad, self, mean, rstd, weight)
    return results


def _check_groups(self: torch.Tensor, batch: int, channels: int, length: int, groups: int) -> None:
    """Kernels would read what is not there; the CPU's does."""
    whole = batch * channels * length
    torch._check(self.numel() == whole, lambda: f"expected {whole} elements in groups, and got {list(self.shape)}")
    torch._check(
        groups > 0 and channels % groups == 0, lambda: f"expected {groups} groups to divide {channels} channels evenly"
    )


def _check_channels(channels: int, **tensors: Optional) -> None:
    """Raises PyTorch's error for a tensor that has not one number for each channel. Its kernels do not look."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() != channels:
            count = tensor.numel()
            torch._check(False, lambda: f"{name} should contain {channels} elements not {count}")  # noqa: B023, at once


@operator("native_group_norm")
def native_group_norm(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    batch: int,
    channels: int,
    length: int,
    groups: int,
    eps: float,
) -> Results:
    if any(one is not None and one.shape != (channels,) for one in (weight, bias)):
        raise RunOnCPU("a weight or bias of another shape")
    _check_groups(self, batch, channels, length, groups)
    out, mean, rstd = call.outputs()
    sets = Sets.group(batch, channels, length, groups)
    _forward(sets, out, self, _dense(weight), _dense(bias), eps, mean=mean, rstd=rstd)
    return out, mean, rstd


@operator("native_group_norm_backward")
def native_group_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Optional,
    batch: int,
    channels: int,
    length: int,
    groups: int,
    output_mask: list[bool],
) -> Results:
    _check_groups(self, batch, channels, length, groups)
    _check_groups(grad, batch, channels, length, groups)
    _check_channels(channels, weight=weight)
    _check_channels(batch * groups, mean=mean, rstd=rstd)
    channel = self.new_empty(channels) if weight is None else weight
    results = _new_like([self, channel, channel], output_mask)
    _backward(Sets.group(batch, channels, length, groups), results, grad, self, mean, rstd, weight)
    return results


def _batch_sets(self: torch.Tensor) -> Sets:
    return Sets.batch(self.shape[0], self.shape[1], math.prod(self.shape[2:]))


@operator("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> Results:
    return _batch_norm(call, self, weight, bias, running_mean, running_var, training, momentum, eps)


def _batch_norm(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
    with_reserve: bool = False,
) -> Results:
    _check_channels(self.shape[1], running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if training:
        torch._check(
            self.numel() > 0,
            lambda: f"input tensor must have at least one element, but got input_sizes = {list(self.shape)}",
        )
    # Of the base operator: PyTorch's meta kernels of the others take fewer arguments. Without what it would update, as
    # updating divides by zero where there is one number in a channel.
    running_stats = (None, None) if training else (running_mean, running_var)
    given = (self, weight, bias, *running_stats, training, momentum, eps)
    results = list(torch.ops.aten.native_batch_norm(*(as_meta(value) for value in given)))
    results[0] = torch.empty_like(results[0], memory_format=suggest_memory_format(self))  # not its meta kernel's
    if with_reserve:
        results.append(self.new_empty(0, dtype=torch.uint8, device="meta"))
    if not training:
        if running_mean is None or running_var is None:
            raise RunOnCPU("evaluation without running statistics")
        # As the CPU has it: nothing is saved.
        results[1:3] = [saved.new_empty(0) for saved in results[1:3]]
    out, mean, rstd, *reserve = call.outputs(like=results)
    moved = [] if running_mean is None or running_var is None else [running_mean, running_var]
    running = [tensor.contiguous() for tensor in moved]
    arguments = (_dense(weight), _dense(bias), eps)
    saved = {"mean": mean, "rstd": rstd} if training else {"mean": None, "rstd": None}
    _forward(_batch_sets(self), out, self, *arguments, running=running or None, momentum=momentum, **saved)
    for tensor, updated in zip(moved, running, strict=True):
        if training and not tensor.is_contiguous():
            tensor.copy_(updated)
    return out, mean, rstd, *reserve


@operator("_batch_norm_with_update")
def _batch_norm_with_update(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> Results:
    return _batch_norm(call, self, weight, bias, running_mean, running_var, True, momentum, eps, with_reserve=True)


@operator("_batch_norm_no_update")
def _batch_norm_no_update(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
) -> Results:
    return _batch_norm(call, self, weight, bias, running_mean, running_var, False, momentum, eps, with_reserve=True)


@operator("batch_norm_update_stats")
def batch_norm_update_stats(
    call: Call, self: torch.Tensor, running_mean: Optional, running_var: Optional, momentum: float
) -> Results:
    """Mean and variance of each channel; those that run move towards them, the variance to the unbiased one."""
    if self.dim() < 2 or not self.numel() or not self.is_floating_point():
        raise RunOnCPU("no numbers of channels")
    compute = value_dtype(self.dtype)
    channels = self.shape[1]
    given = [tensor for tensor in (running_mean, running_var) if tensor is not None]
    if any(tensor.shape != (channels,) or tensor.dtype not in (self.dtype, compute) for tensor in given):
        raise RunOnCPU("running statistics of another shape or dtype")
    result = given[0] if given else self
    outputs = call.outputs(like=[result.new_empty(channels, device="meta")] * 2)
    dims = [dim for dim in range(self.dim()) if dim != 1]
    variance = spread(root=False, with_mean=True)(compute)
    key, name = ("var_mean", compute), "batch_norm_update_stats"
    run_reduction(variance, outputs[::-1], [self], dims, [0.0], key=key, compute=compute, name=name)
    count = self.numel() // channels
    # As a number of the kernel's, which has infinity and NaN where the host would have an error.
    for tensor, value, degrees in ((running_mean, outputs[0], count), (running_var, outputs[1], count - 1)):
        if tensor is not None:
            scalars = [(float(number), compute) for number in (momentum, count, degrees)]
            run_pointwise(_moved, [tensor], [tensor, value], scalars, key=name, compute=compute, name=name)
    return tuple(outputs)


def _moved(
    running: Expression, value: Expression, momentum: Expression, count: Expression, degrees: Expression
) -> Expression:
    return momentum * (value * count / degrees) + (1.0 - momentum) * running


@operator("_native_batch_norm_legit.no_stats")
def _native_batch_norm_legit(
    call: Call, self: torch.Tensor, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> Results:
    return _batch_norm(call, self, weight, bias, None, None, training, momentum, eps)


@operator("native_batch_norm_backward")
def native_batch_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_invstd: Optional,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> Results:
    mean, rstd = (save_mean, save_invstd) if train else (running_mean, running_var)
    assert mean is not None
    assert rstd is not None
    _check_channels(self.shape[1], weight=weight, mean=mean, rstd=rstd)
    channel = mean if weight is None else weight
    results = _new_like([self, channel, channel], output_mask)
    if not self.numel():
        for result in results:
            if result is not None:
                result.zero_()
        return results
    # The kernel writes the gradient of self in any case.
    out = results[0] if results[0] is not None else torch.empty_like(self)
    with contiguous_result(out) as result:
        run_template(
            norm_backward,
            self.device,
            _batch_sets(self),
            result,
            grad.contiguous(),
            self.contiguous(),
            _dense(weight),
            mean.contiguous(),
            rstd.contiguous(),
            weight_grad=results[1],
            bias_grad=results[2],
            training=train,
            variance=not train,
            eps=eps,
            name="batch_norm_backward",
        )
    return results


@operator("batch_norm_backward")
def batch_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    weight: torch.Tensor,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_var: Optional,
    update: bool,
    eps: float,
    output_mask: list[bool],
    reserve: torch.Tensor,
) -> Results:
    return native_batch_norm_backward(
        call, grad, self, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


def _new_like(tensors: Sequence[Optional], wanted: Sequence[bool]) -> Results:
    """An uninitialized tensor like each, or None where it is not wanted. Those of parameters, all but the first, are
    contiguous, as PyTorch makes them and as kernels write them.
    """
    formats = [torch.preserve_format, *[torch.contiguous_format] * (len(tensors) - 1)]
    return tuple(
        torch.empty_like(tensor, memory_format=memory_format) if want and tensor is not None else None
        for tensor, want, memory_format in zip(tensors, wanted, formats, strict=True)
    )


# RMS norm. What these leave is composed of other operators (csrc/aten/rms_norm.cpp).


def _check_real(self: torch.Tensor, weight: Optional) -> None:
    if not self.is_floating_point() or (weight is not None and weight.dtype != self.dtype):
        raise RunOnCPU("an input that is not real, or a weight of another dtype")


@operator("_fused_rms_norm", variants=False)
def rms_norm(
    call: Call, self: torch.Tensor, normalized_shape: list[int], weight: Optional, eps: float | None
) -> Results:
    """The result, and one over the root of the mean square."""
    _check_real(self, weight)
    dtype = value_dtype(self.dtype)
    size, outer = math.prod(normalized_shape), self.shape[: self.dim() - len(normalized_shape)]
    out = torch.empty_like(self, memory_format=torch.contiguous_format)
    rstd = torch.empty([*outer, *[1] * len(normalized_shape)], dtype=dtype, device=self.device)
    if not out.numel():
        return out, rstd.fill_(math.nan)
    eps = torch.finfo(dtype).eps if eps is None else eps
    _forward(Sets.layer(rstd.numel(), size), out, self, _dense(weight), None, eps, mean=None, rstd=rstd)
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
    results = _new_like([self, weight], output_mask)
    _backward(Sets.layer(rstd.numel(), math.prod(normalized_shape)), results, grad, self, None, rstd, weight)
    return results


# Weight norm: the direction of v, with the length g, for each index of its first or last dimension


def _check_lengths(v: torch.Tensor, g: torch.Tensor, dim: int) -> list[int]:
    """The dimensions that lengths are taken over."""
    if not v.numel():
        # The CPU kernel would end the process: it divides by the size.
        torch._check(False, lambda: f"weight norm needs elements, and got a tensor of shape {list(v.shape)}")
    if dim not in (0, v.dim() - 1) or g.numel() != v.shape[dim] or g.dtype != v.dtype or not v.is_floating_point():
        raise RunOnCPU("lengths of another shape or dtype")
    return [other for other in range(v.dim()) if other != dim]


def _along(lengths: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    """One number for each index of `dim`, as a view that broadcasts to v."""
    return lengths.reshape(-1).view([-1 if other == dim else 1 for other in range(v.dim())])


@operator("_weight_norm_interface")
def _weight_norm_interface(call: Call, v: torch.Tensor, g: torch.Tensor, dim: int) -> Results:
    """v * g / |v|, and |v|, of g's shape, in float32 for numbers of 16 bits."""
    dims, compute = _check_lengths(v, g, dim), value_dtype(v.dtype)
    out, norms = call.outputs(
        like=[torch.empty_like(v, device="meta"), torch.empty_like(g, dtype=compute, device="meta")]
    )
    found = torch.empty(v.shape[dim], dtype=compute, device=v.device)
    run_reduction(
        NORMS[2](compute), [found], [v], dims, key=("norm", 2.0, compute), compute=compute, name="norm"
    )
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
        raise RunOnCPU("saved tensors that are not contiguous")  # for PyTorch's error
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
