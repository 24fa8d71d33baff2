"""Evenly spaced numbers: arange, range, linspace and logspace."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, Refused, RunOnCPU, check_fits, operator, run_pointwise, runtime


@operator("arange", sizes=("end",), variants=False)
def arange(call: Call, end: float, *options: Any) -> Any:
    return line(call, 0, end, 1)


@operator("arange.start", sizes=("start", "end"), variants=False)
def arange_from(call: Call, start: float, end: float, *options: Any) -> Any:
    return line(call, start, end, 1)


@operator("arange.start_step", sizes=("start", "end", "step"), variants=False)
@operator("arange.start_out", sizes=("start", "end", "step"), variants=False)
def arange_by(call: Call, start: float, end: float, step: float, *options: Any) -> Any:
    return line(call, start, end, step)


# The dtype to which PyTorch converts the ends of a range, int64 for integers. It refuses ends that do not fit.
_COUNTED_IN = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64,
    torch.float64: torch.float64,
}  # fmt: skip


def row(call: Call, like: torch.Tensor) -> torch.Tensor:
    """The output of a range, like the meta kernel's result. An `out=` with as many elements keeps its shape."""
    for given in call.written:
        if given.numel() == like.numel():
            like = given
    (out,) = call.outputs(like=[like])
    return out


def line(call: Call, start: float, end: float, step: float) -> torch.Tensor:
    """start, start + step, …: one number for each element of the output."""
    (like,) = call.meta()
    check_counted(like.dtype, start, end, step)
    for given in call.written:
        if given.numel() not in (0, like.numel()):
            runtime.warn(
                f"The number of elements in the out tensor of shape {list(given.shape)} is {given.numel()} which does "
                f"not match the computed number of elements {like.numel()}. Note that this may occur as a result of "
                f"rounding error. The out tensor will be resized to a tensor of shape ({like.numel()},)."
            )
    out = row(call, like)
    compute = value_dtype(out.dtype)
    if compute == torch.bool or compute.is_complex:
        raise Refused("a range of bools or complex numbers")
    check_fits(_COUNTED_IN.get(out.dtype, torch.int64), start, step)
    if compute.is_floating_point:
        check_fits(compute, start, step)  # the CPU computes in float64, and accepts a larger step that is not used
    number = torch.sym_float if compute.is_floating_point else torch.sym_int
    write_line(out, number(start), number(step), compute)
    return out


def check_counted(dtype: torch.dtype, *numbers: float) -> None:
    """Leaves ranges of large numbers to the CPU. PyTorch's kernels compute their length in int64, which overflows, or
    for other dtypes in float64, which rounds. Meta kernels compute it exactly."""
    most = 2**61 if dtype == torch.int64 else 2**52
    for number in numbers:
        if (not isinstance(number, float) or dtype == torch.int64) and (number < -most or number > most):
            raise RunOnCPU("a range of large numbers, whose length PyTorch rounds")


def write_line(out: torch.Tensor, start: float, step: float, compute: torch.dtype) -> None:
    """start + i * step for the i-th element of `out`."""
    run_pointwise(
        lambda first, by: first + f.index().to(compute) * by,
        [out],
        [],
        [(start, compute), (step, compute)],
        key="line",
        name="line",
    )


@operator("range.out", sizes=("start", "end", "step"), variants=False)
def range_by(call: Call, start: float, end: float, step: float) -> Any:
    if not call.written[0].is_floating_point():  # PyTorch's kernels divide by the step, converted to an integer
        torch._check(not -1 < step < 1, lambda: "step must be nonzero")
    return line(call, start, end, step)


@operator("linspace", "linspace.out", by_value=("start", "end"), variants=False, dtypes="complex")
def linspace(call: Call, start: float, end: float, steps: int, *options: Any) -> Any:
    return spaced(call, start, end, steps, None)


@operator("logspace.out", by_value=("start", "end"), variants=False, dtypes="complex")
def logspace(call: Call, start: float, end: float, steps: int, base: float) -> Any:
    return spaced(call, start, end, steps, base)


def spaced(call: Call, start: float, end: float, steps: int, base: float | None) -> torch.Tensor:
    """`steps` numbers from start to end, or powers of `base` with these exponents. As on the CPU, the first half is
    computed from the start and the second half from the end."""
    (like,) = call.meta()
    out = row(call, like)
    if not (out.is_floating_point() or out.is_complex()):
        raise RunOnCPU("the result is rounded to integers")
    compute = value_dtype(out.dtype)
    if steps == 0:
        return out
    check_fits(out.dtype, start, end)
    if compute != out.dtype and base is None:
        return spaced_narrowly(out, float(start), float(end), steps)
    number = complex if out.is_complex() else float
    step = (number(end) - number(start)) / (steps - 1) if steps > 1 else number(0)

    def formula(half: Any, greatest: Any, first: Any, last: Any, by: Any, *of: Any) -> Any:
        i = f.index()
        value = f.where(i < half, first + i.to(compute) * by, last - (greatest - i).to(compute) * by)
        return f.power(of[0], value) if of else value

    numbers = [number(start), number(end), step, *([] if base is None else [number(base)])]
    places = [(number, torch.int64) for number in halves(steps)]
    scalars = [*places, *((number, compute) for number in numbers)]
    name = "linspace" if base is None else "logspace"
    run_pointwise(formula, [out], [], scalars, key=name, name=name)
    return out


def halves(steps: int) -> tuple[int, int]:
    """(first position that is computed from the end, last position)."""
    return max(steps // 2, 1), steps - 1


def spaced_narrowly(out: torch.Tensor, start: float, end: float, steps: int) -> torch.Tensor:
    """linspace in float16 and bfloat16. PyTorch's kernels round the ends, their distance, the step, the position, the
    product of step and position, and the sum. Kernels here round when they store, so each product is stored."""
    first, last = (torch.tensor(one, dtype=out.dtype) for one in (start, end))
    step = ((last - first) / torch.tensor(steps - 1, dtype=out.dtype)).item() if steps > 1 else 0.0
    half, greatest = ((place, torch.int64) for place in halves(steps))
    counted, distance = (torch.empty(out.shape, dtype=out.dtype, device=out.device) for _ in range(2))
    compute, i = value_dtype(out.dtype), f.index()
    for formula, result, inputs, scalars in (
        (lambda half, most: f.where(i < half, i, most - i).to(compute), counted, [], [half, greatest]),
        (lambda n, by: n * by, distance, [counted], [(step, compute)]),
        (
            lambda distance, half, first, last: f.where(i < half, first + distance, last - distance),
            out,
            [distance],
            [half, (first.item(), compute), (last.item(), compute)],
        ),
    ):
        key = ("linspace", len(inputs), len(scalars))
        run_pointwise(formula, [result], inputs, scalars, key=key, name="linspace")
    return out
