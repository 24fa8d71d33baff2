"""Batch norm and its gradient, helpers that all norms share, and renorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.kernels.templates.norms import (
    Affine,
    Evaluated,
    Saved,
    Sets,
    Statistics,
    norm,
    norm_backward,
    weight_grads,
)
from torch_backplane.operators import split_rows
from torch_backplane.operators.linear_algebra import NORMS
from torch_backplane.operators.reduce_ops import spread
from torch_backplane.planning import (
    Call,
    Refused,
    check,
    contiguous_result,
    operator,
    run_pointwise,
    run_reduction,
    run_template,
)
from torch_backplane.planning.call import as_meta, shares_memory

Optional = torch.Tensor | None
Results = tuple[Optional, ...]


def dense(tensor: Optional) -> Optional:
    return None if tensor is None else tensor.contiguous()


def new_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialized contiguous tensor like `tensor`."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def run_norm(
    sets: Sets,
    out: torch.Tensor,
    self: torch.Tensor,
    affine: Affine,
    statistics: Statistics,
    eps: float,
) -> None:
    mean, rstd, *_ = statistics
    if not out.numel():
        return
    self = self.contiguous()
    written = out if out.is_contiguous() else new_contiguous(out)
    means, deviations = (one if one is None or one.is_contiguous() else new_contiguous(one) for one in (mean, rstd))
    name = f"{sets.norm}_norm"
    affine, statistics = Affine(*map(dense, affine)), statistics._replace(mean=means, rstd=deviations)
    if split_rows.divides_sets(out.device, sets):
        split_rows.norm(sets, written, self, affine, statistics, eps)
    else:
        run_template(norm, out.device, sets, written, self, affine, statistics, eps, name=name)
    for given, result in ((out, written), (mean, means), (rstd, deviations)):
        if given is not None and result is not None and result is not given:
            given.copy_(result)


def run_norm_backward(
    sets: Sets,
    results: Sequence[Optional],
    saved: Saved,
) -> None:
    """Writes the gradients of self, weight and bias to the results that are not None."""
    out, *others = results
    wanted = Affine(*others)
    if not saved.self.numel():
        for result in results:
            if result is not None:
                result.zero_()
        return
    saved = Saved(*map(dense, saved))  # type: ignore[arg-type]
    device, name, of_weights = saved.self.device, f"{sets.norm}_norm_backward", any(one is not None for one in wanted)
    divides_weights = of_weights and split_rows.divides_weights(device, sets, value_dtype(saved.grad.dtype))
    if out is not None:
        with contiguous_result(out) as result:
            if not split_rows.divides_sets(device, sets):
                run_template(norm_backward, device, sets, result, saved, name=name)
            elif sets.norm == "layer":
                split_rows.norm_backward(sets, result, saved)
            else:
                split_rows.group_norm_backward(sets, result, wanted, saved)
                return
    if not of_weights:
        return
    if not divides_weights:
        run_template(weight_grads, device, sets, wanted, saved, name=name)
    elif sets.norm == "layer":
        split_rows.layer_weight_grads(sets, wanted, saved)
    else:
        split_rows.group_norm_backward(sets, None, wanted, saved)


def check_channels(channels: int, **tensors: Optional) -> None:
    """Raises PyTorch's error for a tensor without one number for each channel. PyTorch's kernels do not check."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() != channels:
            count = tensor.numel()
            torch._check(False, lambda: f"{name} should contain {channels} elements not {count}")  # noqa: B023, called here


def check_parameters(self: torch.Tensor, *parameters: Optional) -> bool:
    """Refuses integers, and parameters of another dtype than the input's. Half precision also accepts float32
    parameters. Returns whether it has those.
    """
    check(self.is_floating_point(), "self is not floating-point")
    given = {one.dtype for one in parameters if one is not None}
    mixed = given == {torch.float32} and self.dtype in (torch.float16, torch.bfloat16)
    check(given <= {self.dtype} or mixed, "weight, bias or statistics have another dtype than self")
    return mixed


def check_gradients(self: torch.Tensor, grad: torch.Tensor, *statistics: Optional) -> None:
    """Refuses gradients of another dtype than the input's, and statistics of dtypes that its norms do not have."""
    check(grad.dtype == self.dtype, "the gradient has another dtype than self")
    given = {one.dtype for one in statistics if one is not None}
    check(len(given) < 2 and given <= {self.dtype, value_dtype(self.dtype)}, "statistics have an unsupported dtype")


def check_shape(wanted: Sequence[int], **tensors: Optional) -> None:
    """Raises an error for a tensor of another shape, with which PyTorch's CPU kernels would read out of bounds."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(wanted):
            given = list(tensor.shape)
            torch._check(False, lambda: f"expected {name} of shape {list(wanted)}, but got {given}")  # noqa: B023


def new_like(
    tensors: Sequence[Optional], wanted: Sequence[bool], first: torch.memory_format = torch.preserve_format
) -> Results:
    """An uninitialized tensor like each one, or None if it is not wanted. All but the first are gradients of
    parameters, which are contiguous in PyTorch and as kernels write them.
    """
    formats = [first, *[torch.contiguous_format] * (len(tensors) - 1)]
    return tuple(
        torch.empty_like(tensor, memory_format=memory_format) if want and tensor is not None else None
        for tensor, want, memory_format in zip(tensors, wanted, formats, strict=True)
    )


# Batch norm


def _batch_sets(self: torch.Tensor) -> Sets:
    return Sets.batch(self.shape[0], self.shape[1], math.prod(self.shape[2:]))


def _check_channel_tensors(self: torch.Tensor, parameters: Sequence[Optional], statistics: Sequence[Optional]) -> None:
    """Refuses parameters and statistics of unsupported dtypes, and statistics that are not one-dimensional."""
    check_parameters(self, *parameters, *statistics)
    check(all(one is None or one.dim() == 1 for one in statistics), "running statistics are not one-dimensional")


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
    return _batch_norm(call, self, Affine(weight, bias), (running_mean, running_var), _How(training, momentum, eps))


class _How(NamedTuple):
    training: bool
    momentum: float
    eps: float


def _batch_norm(
    call: Call,
    self: torch.Tensor,
    affine: Affine,
    running_stats: tuple[Optional, Optional],
    how: _How,
    with_reserve: bool = False,
) -> Results:
    (weight, bias), (running_mean, running_var), training = affine, running_stats, how.training
    check(self.dim() > 1, "self has no channels")
    check_channels(self.shape[1], running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    moved = [] if running_mean is None or running_var is None else [running_mean, running_var]
    _check_channel_tensors(self, (weight, bias), (running_mean, running_var))
    if training:
        torch._check(
            self.numel() > 0,
            lambda: f"input tensor must have at least one element, but got input_sizes = {list(self.shape)}",
        )
    # The meta kernel of the base operator, as those of the others take fewer arguments. In training it runs without
    # running statistics, because their update divides by zero if a channel has only one number.
    given = (self, weight, bias, *((None, None) if training else running_stats), *how)
    results = list(torch.ops.aten.native_batch_norm(*(as_meta(value) for value in given)))
    results[0] = torch.empty_like(results[0], memory_format=suggest_memory_format(self))  # not the meta kernel's format
    if with_reserve:
        # PyTorch does not change a given reserve.
        reserve = as_meta(call.written[3]) if call.written else self.new_empty(0, dtype=torch.uint8, device="meta")
        results.append(reserve)
    if not training:
        if running_mean is None or running_var is None:
            raise Refused("evaluation without running statistics")
        # As on the CPU: no statistics are saved.
        results[1:3] = [saved.new_empty(0) for saved in results[1:3]]
    out, mean, rstd, *reserve = call.outputs(like=results)
    if training and shares_memory(self, moved):
        self = self.clone()  # PyTorch allows running statistics that share memory with self
    running = [tensor.contiguous() for tensor in moved]
    statistics = Statistics(mean, rstd) if training else Statistics(None, None)
    if running:
        statistics = statistics._replace(running=(running[0], running[1]), momentum=how.momentum)
    run_norm(_batch_sets(self), out, self, Affine(weight, bias), statistics, how.eps)
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
    return _batch_norm(call, self, Affine(weight, bias), (running_mean, running_var), _How(True, momentum, eps), True)


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
    return _batch_norm(call, self, Affine(weight, bias), (running_mean, running_var), _How(False, momentum, eps), True)


@operator("batch_norm_update_stats")
def batch_norm_update_stats(
    call: Call, self: torch.Tensor, running_mean: Optional, running_var: Optional, momentum: float
) -> Results:
    """Mean and variance of each channel. Running statistics are updated, the variance with the unbiased variance."""
    if self.dim() < 2 or not self.numel() or not self.is_floating_point():
        raise Refused("self has no channels, is empty or is not floating-point")
    compute = value_dtype(self.dtype)
    channels = self.shape[1]
    check_channels(channels, running_mean=running_mean, running_var=running_var)
    given = [tensor for tensor in (running_mean, running_var) if tensor is not None]
    if any(tensor.shape != (channels,) or tensor.dtype not in (self.dtype, compute) for tensor in given):
        raise Refused("running statistics have another shape or dtype")
    result = given[0] if given else self
    outputs = call.outputs(like=[result.new_empty(channels, device="meta")] * 2)
    dims = [dim for dim in range(self.dim()) if dim != 1]
    variance = spread(root=False, with_mean=True)(compute)
    key, name = ("var_mean", compute), "batch_norm_update_stats"
    run_reduction(variance, outputs[::-1], [self], dims, [0.0], key=key, compute=compute, name=name)
    count = self.numel() // channels
    # The kernel divides: it gives infinity or NaN where a division on the host would raise an error.
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
    return _batch_norm(call, self, Affine(weight, bias), (None, None), _How(training, momentum, eps))


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
    if mean is None or rstd is None:
        raise Refused("mean or variance is missing")
    check_shape(self.shape, gradients=grad)
    torch._check(self.dim() > 1, lambda: f"expected an input with channels, but got shape {list(self.shape)}")
    check_channels(self.shape[1], weight=weight, mean=mean, rstd=rstd)
    saved = (save_mean, save_invstd)
    _check_channel_tensors(self, (weight,), (running_mean, running_var))
    check_gradients(self, grad, *saved)
    check(all(one is None or one.dim() == 1 for one in (weight, *saved)), "weight or statistics are not vectors")
    channel = mean if weight is None else weight
    results = new_like([self, channel, channel], output_mask)
    if not self.numel():
        for result in results:
            if result is not None:
                result.zero_()
        return results
    # The kernel always writes the gradient of self.
    out = results[0] if results[0] is not None else torch.empty_like(self)
    sets = _batch_sets(self)
    how = Affine(results[1], results[2]), Evaluated(train, not train, eps)
    with contiguous_result(out) as result:
        of = Saved(grad.contiguous(), self.contiguous(), dense(weight), mean.contiguous(), rstd.contiguous())
        if split_rows.divides_sets(self.device, sets):
            split_rows.norm_backward(sets, result, of, *how)
        else:
            run_template(norm_backward, self.device, sets, result, of, *how, name="batch_norm_backward")
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


# Slices with a limited norm


@operator(
    "renorm", by_value=("p",), static={"p": [p for p in NORMS if p > 0]}, checks=["maxnorm >= 0"], dtypes="complex"
)
def renorm(call: Call, self: torch.Tensor, p: float, dim: int, maxnorm: Any) -> Any:
    """Scales down each slice along `dim` whose norm exceeds `maxnorm`."""
    if not -self.dim() <= dim < self.dim():
        raise Refused("dim is out of range")  # PyTorch's meta function does not raise the error
    (out,) = call.outputs()
    others = [d for d in range(self.dim()) if d != dim % self.dim()]
    dtype = value_dtype(self.dtype)
    norms = torch.linalg.vector_norm(self, p, others, keepdim=True, dtype=dtype)  # half precision is too inexact

    # Complex numbers are multiplied by a complex factor, in which infinity times 0 is NaN. The 0 is a kernel argument,
    # because compilers remove products with a constant 0 (Mesa's; Intel's if contraction is disabled).
    def shrink(x: Expression, size: Expression, most: Expression, zero: Expression) -> Expression:
        factor = f.where(size > most, most / (size + 1e-7), 1.0)
        return x * (f.complex(factor, zero) if dtype.is_complex else factor.to(dtype))

    compute, part = [dtype, value_dtype(norms.dtype)], part_dtype(dtype)
    numbers = [(maxnorm, part), (0.0, part)]
    run_pointwise(shrink, [out], [self, norms], numbers, compute=compute, key="renorm", name="renorm")
    return out
