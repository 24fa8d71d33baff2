"""Reductions over dimensions (sums, extrema, variances and others), and cumulative operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import facts, integer_range, value_dtype
from torch_backplane.kernels.reductions import summation, two_sum, whole
from torch_backplane.kernels.templates.scan import accumulate, complex_products, extremum
from torch_backplane.planning import (
    Call,
    Refused,
    RunOnCPU,
    check,
    check_fits,
    contiguous_result,
    operator,
    run_pointwise,
    run_reduction,
    run_template,
    runtime,
    same_storage,
)
from torch_backplane.planning.launch import traced

LAST_INDEX = 2**63 - 1

Dims = int | Sequence[int] | None


def reduce(
    call: Call,
    tensor: torch.Tensor,
    dims: Dims,
    definition: Callable[[torch.dtype], Reduction],
    scalars: Sequence[float] = (),
    *,
    key: Any,
    compute: torch.dtype | None = None,
    whole_if_empty: bool = True,
) -> Any:
    """Reduces `tensor` over `dims` to the call's outputs, and returns the operator's results.

    Args:
        dims: The dimensions to reduce. None means all, as does an empty list with `whole_if_empty`.
        definition: Makes the reduction for a compute dtype.
        scalars: The scalars of the reduction.
        compute: The compute dtype. Defaults to the dtype of the tensor (float32 for float16 and bfloat16).
    """
    outputs = call.outputs()
    compute = compute or value_dtype(tensor.dtype)
    facts(compute)
    dims = list_of(dims, tensor.dim(), whole_if_empty)
    if tensor.dim() == 0:
        tensor, dims = tensor.view(1), [0]
    if outputs[0].numel() > 0:
        run_reduction(
            traced(("definition", key, compute), lambda: definition(compute)),
            outputs,
            [tensor],
            dims,
            scalars,
            key=(key, compute),
            compute=compute,
            name=call.functional._schema.name.partition("::")[2],
        )
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def list_of(dims: Dims, rank: int, whole_if_empty: bool = True) -> list[int]:
    """The list of dimensions that `dims` means for a tensor of `rank` dimensions."""
    if isinstance(dims, int):
        return [dims]
    return list(range(rank)) if dims is None or (not dims and whole_if_empty) else list(dims)


def least(dtype: torch.dtype) -> float | int | bool:
    """The smallest value of a dtype."""
    category, _ = facts(dtype)
    return False if category == "bool" else -math.inf if category == "float" else integer_range(dtype)[0]


def greatest(dtype: torch.dtype) -> float | int | bool:
    """The largest value of a dtype."""
    category, _ = facts(dtype)
    return True if category == "bool" else math.inf if category == "float" else integer_range(dtype)[1]


# --- sums and products


def total(dtype: torch.dtype) -> Reduction:
    if dtype == torch.bool:
        return Reduction([dtype], [False], lambda x, _: x, lambda a, b: a | b, lambda s, _: s)
    return summation(dtype, lambda x, _: x)


def total_of_few(dtype: torch.dtype) -> Reduction:
    """`total` with the rounding error of every addition compensated: PyTorch's CPU kernel sums diagonals in float64."""
    return replace(total(dtype), add=None)


def bits_in_common(dtype: torch.dtype) -> Reduction:
    """The exclusive or of all numbers as uint64. Floats are converted to float64 and taken as bits."""

    def bits(x: Expression, _: Expression) -> Expression:
        return x.to(torch.float64).view(torch.uint64) if f.is_float(x) else x.to(torch.uint64)

    return Reduction([torch.uint64], [0], bits, lambda a, b: a ^ b, lambda s, _: s)


@operator("hash_tensor")
def hash_tensor(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool, mode: int) -> Any:
    check(mode == 0, "mode is not 0")
    return reduce(call, self, dim, bits_in_common, key="hash_tensor")


def average(dtype: torch.dtype) -> Reduction:
    return summation(dtype, lambda x, _: x, lambda total, count: total / count.to(dtype))


def product(dtype: torch.dtype) -> Reduction:
    if dtype == torch.bool:
        return whether_all(dtype)
    if not dtype.is_floating_point:
        return Reduction([dtype], [1], lambda x, _: x, lambda a, b: a * b, lambda s, _: s)

    # The state is the product and its rounding error, which fma computes.
    def combine(a: Expression, lost_a: Expression, b: Expression, lost_b: Expression) -> tuple[Expression, Expression]:
        both = a * b
        return both, f.fma(lost_a, b, f.fma(a, b, -both) + a * lost_b)

    def finish(both: Expression, lost: Expression, _: Expression) -> Expression:
        return f.where((lost == 0.0) | f.isinf(lost) | f.isnan(lost), both, both + lost)

    return Reduction([dtype] * 2, [1.0, 0.0], lambda x, _: (x, 0.0), combine, finish)


def total_without_nan(dtype: torch.dtype) -> Reduction:
    return summation(dtype, lambda x, _: f.where(f.isnan(x), 0.0, x))


def sum_dtype(call: Call) -> torch.dtype:
    """The dtype in which a sum is computed: the compute dtype of PyTorch's result."""
    return value_dtype(call.meta(call.functional)[0].dtype)


@operator("sum.dim_IntList", dtypes="complex")
def sum_dims(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Any:
    return reduce(call, self, dim, total, key="sum", compute=sum_dtype(call))


@operator("mean.dim", dtypes="complex")
def mean_dims(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Any:
    for given in call.written:
        if not (given.is_floating_point() or given.is_complex()):
            raise Refused("out is not floating-point or complex")
    return reduce(call, self, dim, average, key="mean", compute=sum_dtype(call))


@operator("nansum")
def nansum(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Any:
    compute = sum_dtype(call)
    if dim is not None and not dim:  # means all dimensions, but not to PyTorch's meta kernel
        (result,) = call.meta(call.functional)
        call.outputs(like=[result.new_empty([1] * self.dim() if keepdim else [])])
    return reduce(
        call, self, dim, total_without_nan if compute.is_floating_point else total, key="nansum", compute=compute
    )


@operator("prod.dim_int", dtypes="complex")
def prod_dim(call: Call, self: torch.Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> Any:
    return reduce(call, self, dim, product, key="prod", compute=sum_dtype(call))


@operator("prod", dtypes="complex")
def prod(call: Call, self: torch.Tensor, dtype: torch.dtype | None) -> Any:
    return reduce(call, self, None, product, key="prod", compute=sum_dtype(call))


@operator("trace", dtypes="complex")
def trace(call: Call, self: torch.Tensor) -> Any:
    if self.dim() != 2:
        raise Refused("self is not a matrix")
    return reduce(call, self.diagonal(), None, total_of_few, key="trace", compute=sum_dtype(call))


# --- logical


def whether_any(dtype: torch.dtype) -> Reduction:
    return Reduction([torch.bool], [False], lambda x, _: x, lambda a, b: a | b, lambda s, _: s)


def whether_all(dtype: torch.dtype) -> Reduction:
    return Reduction([torch.bool], [True], lambda x, _: x, lambda a, b: a & b, lambda s, _: s)


@operator("any.dim", "any.dims", dtypes="complex")
def any_dims(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
    return reduce(call, self, dim, whether_any, key="any", compute=torch.bool, whole_if_empty=False)


@operator("all.dim", "all.dims", dtypes="complex")
def all_dims(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
    return reduce(call, self, dim, whether_all, key="all", compute=torch.bool, whole_if_empty=False)


@operator("any", dtypes="complex")
def any_whole(call: Call, self: torch.Tensor) -> Any:
    return reduce(call, self, None, whether_any, key="any", compute=torch.bool)


@operator("all", dtypes="complex")
def all_whole(call: Call, self: torch.Tensor) -> Any:
    return reduce(call, self, None, whether_all, key="all", compute=torch.bool)


@operator("equal", dtypes="complex")
def equal(call: Call, self: torch.Tensor, other: torch.Tensor) -> bool:
    """Waits for the device, because it returns a Python bool. Calls that compare elements therefore have no plan."""
    if self.dtype != other.dtype:
        raise RunOnCPU("self and other have different dtypes")
    if self.shape != other.shape:
        return False
    if self.numel() == 0:
        return True
    if self.dim() == 0:
        self, other = self.view(1), other.view(1)
    same = Reduction([torch.bool], [True], lambda a, b, _: a == b, lambda a, b: a & b, lambda s, _: s)
    found = torch.empty((), dtype=torch.bool, device=self.device)
    dims, dtype = range(self.dim()), value_dtype(self.dtype)
    run_reduction(same, [found], [self, other], dims, key=("equal", dtype), compute=dtype, name="equal")
    return bool(found.item())


# --- extrema


def leave_nothing(tensor: torch.Tensor, dims: Dims) -> None:
    """Refuses reductions without an identity over no elements: the CPU kernel raises the error."""
    rank = tensor.dim()
    if tensor.numel() == 0 and any(not -rank <= dim < rank or not tensor.shape[dim] for dim in list_of(dims, rank)):
        raise Refused("a reduction without an identity over no elements")


def extreme(
    call: Call, tensor: torch.Tensor, dims: Dims, definition: Callable[[torch.dtype], Reduction], *, key: str
) -> Any:
    """`reduce` in a dtype whose numbers can be compared."""
    leave_nothing(tensor, dims)
    return reduce(call, tensor, dims, definition, key=key, compute=comparable(tensor.dtype))


def maximum(dtype: torch.dtype) -> Reduction:
    return Reduction([dtype], [least(dtype)], lambda x, _: x, f.maximum, lambda s, _: s)


def minimum(dtype: torch.dtype) -> Reduction:
    return Reduction([dtype], [greatest(dtype)], lambda x, _: x, f.minimum, lambda s, _: s)


def first(wins: Callable[[Expression, Expression], Expression], dtype: torch.dtype) -> tuple[Any, Any]:
    """(start, combine) for the first element that no other one wins against. NaN wins against all numbers."""

    def combine(a: Expression, a_at: Expression, b: Expression, b_at: Expression) -> tuple[Expression, Expression]:
        better, same = wins(b, a), b == a
        if facts(dtype).category == "float":
            better = (better | f.isnan(b)) & ~f.isnan(a)
            same = same | (f.isnan(a) & f.isnan(b))
        take = better | (same & (b_at < a_at))
        return f.where(take, b, a), f.where(take, b_at, a_at)

    return (lambda x, position: (x, position)), combine


def argument_of(greater: bool, with_value: bool) -> Callable[[torch.dtype], Reduction]:
    """The reduction to the position of the greatest (or least) element; to (element, position) if `with_value`."""

    def definition(dtype: torch.dtype) -> Reduction:
        start, combine = first((lambda b, a: b > a) if greater else (lambda b, a: b < a), dtype)
        worst = least(dtype) if greater else greatest(dtype)
        finish = (lambda x, at, _: (x, at)) if with_value else (lambda x, at, _: at)
        return Reduction([dtype, torch.int64], [worst, LAST_INDEX], start, combine, finish)

    return definition


def comparable(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else value_dtype(dtype)


@operator("amax")
def amax(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
    return extreme(call, self, dim, maximum, key="amax")


@operator("amin")
def amin(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
    return extreme(call, self, dim, minimum, key="amin")


@operator("max")
def max_whole(call: Call, self: torch.Tensor) -> Any:
    return extreme(call, self, None, maximum, key="amax")


@operator("min")
def min_whole(call: Call, self: torch.Tensor) -> Any:
    return extreme(call, self, None, minimum, key="amin")


@operator("argmax")
def argmax(call: Call, self: torch.Tensor, dim: int | None, keepdim: bool) -> Any:
    return extreme(call, self, dim, argument_of(True, False), key="argmax")


@operator("argmin")
def argmin(call: Call, self: torch.Tensor, dim: int | None, keepdim: bool) -> Any:
    return extreme(call, self, dim, argument_of(False, False), key="argmin")


# --- variance, logsumexp


def moments(finish: Callable[..., Any], dtype: torch.dtype) -> Reduction:
    """A reduction with the state (mean, rounding error of the mean, sum of squared differences from the mean, count),
    combined as by Chan, Golub and LeVeque (1979). `finish` also takes one scalar.

    Without its rounding error, a mean that is thousands of times the deviation would be too inexact.
    """

    def combine(*states: Expression) -> tuple[Expression, ...]:
        (mean_a, low_a, m2_a, n_a), (mean_b, low_b, m2_b, n_b) = states[:4], states[4:]
        n = n_a + n_b
        share = f.where(n > 0.0, n_b / f.maximum(n, 1.0), 0.0)
        delta = (mean_b - mean_a) + (low_b - low_a)
        mean, lost = two_sum(mean_a, delta * share)
        none = n_a == 0.0  # then delta is the whole mean of b: adding it would lose b's rounding error
        mean, low = f.where(none, mean_b, mean), f.where(none, low_b, low_a + lost)
        return mean, low, m2_a + (m2_b + delta * share * n_a * delta), n  # this order avoids inf * 0 for an empty side

    return Reduction([dtype] * 4, [0.0] * 4, lambda x, *_: (x, 0.0, 0.0, 1.0), combine, finish, scalars=[dtype])


def spread(root: bool, with_mean: bool) -> Callable[[torch.dtype], Reduction]:
    """Variance (or its square root), and the mean if `with_mean`. The scalar is the correction: the number of elements
    minus the degrees of freedom.
    """

    def definition(dtype: torch.dtype) -> Reduction:
        def finish(
            mean: Expression, low: Expression, m2: Expression, n: Expression, count: Expression, correction: Expression
        ) -> Any:
            divisor = f.where(count.to(dtype) > correction, count.to(dtype) - correction, 0.0)
            variance = f.where(count == 0, math.nan, m2 / divisor)
            value = f.sqrt(variance) if root else variance
            return (value, f.where(count == 0, math.nan, whole(mean, low))) if with_mean else value

        return moments(finish, dtype)

    return definition


def _declare_spread(name: str, root: bool, with_mean: bool) -> None:
    @operator(f"{name}.correction", by_value=("correction",), dtypes="complex")
    def plan(call: Call, self: torch.Tensor, dim: Dims, correction: float | None, keepdim: bool) -> Any:
        if not (self.is_floating_point() or self.is_complex()):
            raise Refused("a variance of integers")
        correction = 1 if correction is None else correction
        check_fits(torch.float64, correction)
        degrees = float(correction.real)
        if self.is_complex():
            return complex_spread(call, self, dim, degrees, keepdim, root, with_mean)
        found = reduce(call, self, dim, spread(root, with_mean), [degrees], key=name)
        warn_of_degrees(name, self, dim, degrees)
        return found


def warn_of_degrees(name: str, self: torch.Tensor, dim: Dims, correction: float) -> None:
    """Issues PyTorch's warning if there are no degrees of freedom."""
    dims = {one % max(1, self.dim()) for one in list_of(dim, self.dim())}
    reduced = math.prod(size for d, size in enumerate(self.shape) if d in dims)
    kept = math.prod(size for d, size in enumerate(self.shape) if d not in dims)
    if not kept or reduced <= correction:
        runtime.warn(
            f"{name}(): degrees of freedom is <= 0. Correction should be strictly less than the reduction factor "
            "(input numel divided by output numel)."
        )


def complex_spread(
    call: Call, self: torch.Tensor, dim: Dims, degrees: float, keepdim: bool, root: bool, with_mean: bool
) -> Any:
    """The variance of complex numbers is the sum of the variances of their real and imaginary parts."""
    outputs = call.outputs()
    real, imaginary = torch.view_as_real(self).unbind(-1)
    dims = list_of(dim, self.dim())
    parts = [torch.var(one, dims, correction=degrees, keepdim=keepdim) for one in (real, imaginary)]
    run_pointwise(
        lambda a, b: f.sqrt(a + b) if root else a + b, outputs[:1], parts, key=("variance", root), name="variance"
    )
    if not with_mean:
        return outputs[0]
    outputs[1].copy_(torch.mean(self, dims, keepdim=keepdim))
    return tuple(outputs)


_declare_spread("var", root=False, with_mean=False)
_declare_spread("std", root=True, with_mean=False)
_declare_spread("var_mean", root=False, with_mean=True)
_declare_spread("std_mean", root=True, with_mean=True)


def log_of_summed_exponentials(dtype: torch.dtype) -> Reduction:
    """The state is (greatest, sum of exp(x - greatest)), so that no exponential overflows."""

    def combine(a: Expression, sum_a: Expression, b: Expression, sum_b: Expression) -> tuple[Expression, Expression]:
        top = f.maximum(a, b)

        def scaled(x: Expression, summed: Expression) -> Expression:
            return f.where(x == top, summed, summed * f.exp(x - top))

        return top, scaled(a, sum_a) + scaled(b, sum_b)

    def finish(top: Expression, summed: Expression, _: Expression) -> Expression:
        return f.where(f.isinf(top), top, top + f.log(summed))

    return Reduction([dtype] * 2, [-math.inf, 0.0], lambda x, _: (x, 1.0), combine, finish)


@operator("logsumexp")
def logsumexp(call: Call, self: torch.Tensor, dim: Dims, keepdim: bool) -> Any:
    if list_of(dim, self.dim(), whole_if_empty=False) == [] and self.dim() and self.numel() and not keepdim:
        raise Refused("an empty dim, which means all dimensions to PyTorch's sum and none to its maximum")
    return reduce(call, self, dim, log_of_summed_exponentials, key="logsumexp", compute=sum_dtype(call))


# --- cumulative


def _accumulate(out: torch.Tensor, self: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    if out.dtype == torch.bool:
        raise Refused("a bool result")
    if out.numel():
        with contiguous_result(out) as result:
            source = self.to(out.dtype).contiguous()
            if not out.is_complex():
                run_template(accumulate, out.device, result, source, dim, name, name=name)
            elif name == "cumprod":
                run_template(complex_products, out.device, result, source, dim, name=name)
            else:
                parts = (torch.view_as_real(one if one.dim() else one.view(1)) for one in (result, source))
                run_template(accumulate, out.device, *parts, dim % max(out.dim(), 1), name, name=name)
    return out


@operator("cumsum", dtypes="complex")
def cumsum(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    (out,) = call.outputs()
    runtime.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "cumsum")


@operator("cumprod", dtypes="complex")
def cumprod(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    (out,) = call.outputs()
    runtime.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "cumprod")


@operator("_logcumsumexp")
def logcumsumexp(call: Call, self: torch.Tensor, dim: int) -> torch.Tensor:
    if not self.dtype.is_floating_point:
        raise Refused(f"logcumsumexp of {self.dtype}".replace("torch.", ""))
    # PyTorch has no meta kernel for it; cumsum has the same result and the same errors.
    like = torch.empty(self.shape, dtype=self.dtype, device="meta").cumsum(dim)
    (out,) = call.outputs(like=[like])
    runtime.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "logcumsumexp")


@operator("_cummax_helper", "_cummin_helper", variants=False)
def cumulative_extremum(call: Call, self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
    name = "cummax" if "cummax" in call.name else "cummin"
    if self.numel():
        self = self.clone() if same_storage(self, values) else self  # which PyTorch allows
        with contiguous_result(values) as best, contiguous_result(indices) as places:
            run_template(extremum, self.device, best, places, self.contiguous(), dim, name, name=name)
