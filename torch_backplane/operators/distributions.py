"""Random numbers: in-place fills (on which PyTorch builds rand, randn, …), normal, bernoulli and multinomial."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch

from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import integer_range, least_as, value_dtype
from torch_backplane.kernels.templates.random import WORDS_PER_CALL, fill, fill_integers
from torch_backplane.kernels.templates.values import NOT_NEGATIVE, UNIT_INTERVAL
from torch_backplane.planning import (
    Call,
    RunOnCPU,
    check,
    contiguous_result,
    expect_values,
    operator,
    random_numbers,
    run_pointwise,
    run_reduction,
    run_template,
    runtime,
)
from torch_backplane.planning.strides import is_dense

# All integers up to this one are exact in the dtype.
EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53, torch.bool: 1}


def _fill(self: torch.Tensor, template: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    """Draws in memory order if the tensor is dense, as CUDA; probabilities of elements need contiguous tensors."""
    if self.numel():
        name = str(arguments[0]) if template is fill else "random"
        in_place = is_dense(self.shape, self.stride()) and "chance" not in options
        with nullcontext(self) if in_place else contiguous_result(self) as result:
            drawn = random_numbers(WORDS_PER_CALL)
            arguments = (arguments[0], drawn, arguments[1:]) if template is fill else (*arguments, drawn)
            run_template(template, self.device, result, *arguments, name=name, **options)
    return self


@operator("uniform_", variants=False)
def uniform_(call: Call, self: torch.Tensor, low: float, high: float, generator: Any) -> torch.Tensor:
    check(self.is_floating_point(), "self is not floating-point")
    least, greatest = -torch.finfo(self.dtype).max, torch.finfo(self.dtype).max
    check(least <= low <= high <= greatest and high - low <= greatest, "the range is invalid or exceeds the dtype's")
    return _fill(self, fill, "uniform", low, high, least_as(high, self.dtype))


@operator("normal_", variants=False, dtypes="complex")
def normal_(call: Call, self: torch.Tensor, mean: float, std: float, generator: Any) -> torch.Tensor:
    check(std >= 0, "std is negative")
    if self.is_complex():
        # Each part has half of the variance. The mean is a real number.
        torch.view_as_real(self).normal_(0.0, std / math.sqrt(2), generator=generator)
        return self.add_(mean) if mean else self
    check(self.is_floating_point(), "self is an integer tensor")
    return _fill(self, fill, "normal", mean, std)


def _scaled_noise(call: Call, mean: Any, std: Any, generator: Any) -> torch.Tensor:
    """mean + std * noise. `mean` and `std` are tensors or numbers."""
    shapes = [one.shape for one in (mean, std) if isinstance(one, torch.Tensor)]
    runtime.check_broadcast([one for one in (mean, std) if isinstance(one, torch.Tensor)])
    if call.name == "aten::normal.Tensor_float_out":  # the CPU kernel does not resize `out`
        check(call.arguments[-1].shape == runtime.broadcast_shapes(*shapes), "out has another shape than the result")
    check(not (isinstance(mean, torch.Tensor) and mean.dtype == torch.bool), "mean is bool")
    asked = (mean if isinstance(mean, torch.Tensor) else std).dtype
    check(asked.is_floating_point or bool(call.written), "mean or std is an integer tensor")
    if asked.is_floating_point:
        # The dtype of mean, or of std if mean is a number, regardless of the meta function.
        (out,) = call.outputs(like=[torch.empty(runtime.broadcast_shapes(*shapes), dtype=asked, device="meta")])
    else:
        (out,) = call.outputs(contiguous=True)
    check(out.is_floating_point(), "the result is not floating-point")
    if isinstance(std, torch.Tensor):
        expect_values((std, NOT_NEGATIVE, "normal expects all elements of std >= 0.0"))
    dtype = value_dtype(out.dtype)
    noise = torch.empty_like(out, dtype=value_dtype(out.dtype)).normal_(generator=generator)
    tensors = {name: one for name, one in (("mean", mean), ("std", std)) if isinstance(one, torch.Tensor)}
    numbers = {name: one for name, one in (("mean", mean), ("std", std)) if name not in tensors}

    def formula(x: Expression, *values: Expression) -> Expression:
        given = dict(zip((*tensors, *numbers), values, strict=True))
        return given["mean"] + given["std"] * x

    scalars = [(number, dtype) for number in numbers.values()]
    key = ("normal", *tensors)
    run_pointwise(formula, [out], [noise, *tensors.values()], scalars, compute=dtype, key=key, name="normal")
    return out


@operator("normal.Tensor_Tensor")
def normal(call: Call, mean: torch.Tensor, std: torch.Tensor, generator: Any) -> torch.Tensor:
    return _scaled_noise(call, mean, std, generator)


@operator("normal.Tensor_float")
def normal_of_means(call: Call, mean: torch.Tensor, std: float, generator: Any) -> torch.Tensor:
    check(std >= 0, "std is negative")
    return _scaled_noise(call, mean, std, generator)


@operator("normal.float_Tensor", passed_through=["mean"])
def normal_of_deviations(call: Call, mean: Any, std: torch.Tensor, generator: Any) -> torch.Tensor:
    return _scaled_noise(call, mean, std, generator)


@operator("log_normal_", variants=False)
def log_normal_(call: Call, self: torch.Tensor, mean: float, std: float, generator: Any) -> torch.Tensor:
    check(self.is_floating_point() and std > 0, "self is not floating-point, or std is not positive")
    return _fill(self, fill, "log_normal", mean, std)


@operator("exponential_", variants=False)
def exponential_(call: Call, self: torch.Tensor, rate: float, generator: Any) -> torch.Tensor:
    check(self.is_floating_point() and rate > 0, "self is not floating-point, or lambd is not positive")
    if rate > torch.finfo(value_dtype(self.dtype)).max:
        return _fill(self, fill, "exponential", math.inf, 0.0)
    return _fill(self, fill, "exponential", rate, torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps)


@operator("cauchy_", variants=False)
def cauchy_(call: Call, self: torch.Tensor, median: float, scale: float, generator: Any) -> torch.Tensor:
    check(self.is_floating_point() and scale > 0, "self is not floating-point, or sigma is not positive")
    return _fill(self, fill, "cauchy", median, scale)


@operator("geometric_", variants=False)
def geometric_(call: Call, self: torch.Tensor, chance: float, generator: Any) -> torch.Tensor:
    check(0 < chance < 1, "p is not in (0, 1)")
    return _fill(self, fill, "geometric", chance)


@operator("bernoulli_.float", variants=False)
def bernoulli_float(call: Call, self: torch.Tensor, chance: float, generator: Any) -> torch.Tensor:
    check(0 <= chance <= 1, "p is not in [0, 1]")
    return _fill(self, fill, "bernoulli", chance)


@operator("bernoulli_.Tensor", variants=False)
def bernoulli_tensor(call: Call, self: torch.Tensor, chance: torch.Tensor, generator: Any) -> torch.Tensor:
    check(chance.device == self.device and chance.is_floating_point(), "p is on another device or not floating-point")
    _expect_chances(chance)
    return _fill(self, fill, "bernoulli_each", chance=chance.expand(self.shape).contiguous())


@operator("bernoulli")
def bernoulli(call: Call, self: torch.Tensor, generator: Any) -> torch.Tensor:
    """`out=` can have any dtype."""
    check(self.is_floating_point(), "self is not floating-point")
    (out,) = call.outputs(like=[torch.empty(self.shape, dtype=self.dtype, device="meta")])
    runtime.check_overlaps(call.written, [self])
    _expect_chances(self)
    return _fill(out, fill, "bernoulli_each", chance=self.contiguous())


def _expect_chances(chance: torch.Tensor) -> None:
    words = "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be improved?  "
    expect_values((chance, UNIT_INTERVAL, words + "If so, please report an enhancement request to PyTorch.)"))


@operator("random_", variants=False)
def random_(call: Call, self: torch.Tensor, generator: Any) -> torch.Tensor:
    greatest = EXACT[self.dtype] if self.dtype in EXACT else integer_range(self.dtype)[1]
    return _fill(self, fill_integers, 0, greatest + 1)


@operator("random_.to", variants=False)
def random_to(call: Call, self: torch.Tensor, to: int, generator: Any) -> torch.Tensor:
    return random_from(call, self, 0, to, generator)


@operator("random_.from", variants=False)
def random_from(call: Call, self: torch.Tensor, start: int, to: int | None, generator: Any) -> torch.Tensor:
    if to is None:
        to = (EXACT[self.dtype] if self.dtype in EXACT else integer_range(self.dtype)[1]) + 1
    least, greatest = (-EXACT[self.dtype], EXACT[self.dtype]) if self.dtype in EXACT else integer_range(self.dtype)
    check(start < to and least <= start and to - 1 <= greatest, "the range is empty or exceeds the dtype's")
    return _fill(self, fill_integers, start, to - start)


@operator("multinomial")
def multinomial(call: Call, self: torch.Tensor, num_samples: int, replacement: bool, generator: Any) -> torch.Tensor:
    """Draws indices with probabilities proportional to the weights `self`.

    Without replacement, or for one sample, each weight is the rate of an exponential variable: the indices of the least
    variables are drawn. With replacement, uniform numbers are looked up in the cumulative sums of the weights. Half
    precision is computed in float32: otherwise too many quotients would be equal, and sums would stop growing.
    """
    check(self.is_floating_point() and self.dim() in (1, 2), "weights are not a floating-point vector or matrix")
    check(num_samples > 0 and (replacement or num_samples <= self.shape[-1]), "num_samples is out of range")
    check(self.shape[-1] <= EXACT[torch.float32], "more than 2^24 weights")
    check(all(one.dtype == torch.int64 for one in call.written), "out is not int64")
    # Not `Refused`: on zeros, the CPU kernel would report that there is nothing to choose from.
    if not self.numel():
        raise RunOnCPU("there are no weights")
    dtype = value_dtype(self.dtype)
    (out,) = call.outputs(like=[torch.empty((*self.shape[:-1], num_samples), dtype=torch.int64, device="meta")])
    in_sums = replacement and num_samples > 1
    _expect_weights(self, dtype, in_sums)
    if in_sums:
        sums = self.to(dtype).cumsum(-1)
        # The last sum is 1 and the uniform numbers are less than 1, so an index found has a positive weight.
        sums /= sums[..., -1:].clone()
        noise = torch.empty(out.shape, dtype=dtype, device=self.device).uniform_(generator=generator)
        return out.copy_(torch.searchsorted(sums, noise, right=True))
    noise = torch.empty(self.shape, dtype=dtype, device=self.device).exponential_(generator=generator)
    order = self / noise
    return out.copy_(order.argmax(-1, keepdim=True) if num_samples == 1 else order.topk(num_samples).indices)


def _expect_weights(self: torch.Tensor, dtype: torch.dtype, in_sums: bool) -> None:
    """Reports invalid rows of weights. A row has kind 3 if a weight is negative or NaN, else 2 if one is infinite, else
    1 if one is positive, else 0. With `in_sums`, PyTorch's messages differ.
    """

    def kind(x: Expression, position: Expression) -> Expression:
        return f.where(x >= 0.0, f.where(x < math.inf, (x > 0.0).to(dtype), 2.0), 3.0)

    kinds = torch.empty(self.shape[:-1], dtype=dtype, device=self.device)
    found = Reduction([dtype], [0.0], kind, f.maximum, lambda state, count: state)
    run_reduction(found, [kinds], [self], [-1], key=("multinomial_weights", dtype), compute=dtype, name="weights")
    negative = infinite = "probability tensor contains either `inf`, `nan` or element < 0"
    if in_sums:
        negative = "invalid multinomial distribution (encountering probability entry < 0)"
        infinite = "invalid multinomial distribution (encountering probability entry = infinity or NaN)"
    expect_values(
        (kinds, "x < (value_t)3", negative),
        (kinds, "x < (value_t)2", infinite),
        (kinds, "x > (value_t)0", "invalid multinomial distribution (sum of probabilities <= 0)"),
    )
