"""Tensors made from nothing but numbers: ranges, identities, triangles."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.planning import Call, RunOnCPU, operator, run_kernel, run_pointwise


def positions(count: int, device: torch.device) -> torch.Tensor:
    """The numbers 0, 1, … count - 1 as int64; shape (count,)."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    run_kernel("positions", "store_out(item, item);", items=count, outputs={"out": out}, value=torch.int64)
    return out


@operator("arange", by_value=("end",), variants=False)
def arange(call: Call, end: float, *options: Any) -> Any:
    return line(call, 0, 1)


@operator("arange.start", by_value=("start", "end"), variants=False)
def arange_from(call: Call, start: float, end: float, *options: Any) -> Any:
    return line(call, start, 1)


@operator("arange.start_step", by_value=("start", "end", "step"), variants=False)
@operator("arange.start_out", by_value=("start", "end", "step"), variants=False)
def arange_by(call: Call, start: float, end: float, step: float, *options: Any) -> Any:
    return line(call, start, step)


def line(call: Call, start: float, step: float) -> torch.Tensor:
    """The output of a range, whose length the meta kernel knows."""
    (out,) = call.outputs()
    compute = value_dtype(out.dtype)
    number = float if compute.is_floating_point else int
    write_line(out, number(start), number(step), compute)
    return out


def write_line(out: torch.Tensor, start: float, step: float, compute: torch.dtype) -> None:
    """start + i * step for every position i of `out`, which has one dimension."""
    run_pointwise(
        lambda i, first, by: first + i.to(compute) * by,
        [out],
        [positions(out.numel(), out.device).view(out.shape)],
        [(start, compute), (step, compute)],
        key="line",
        name="line",
    )


@operator("linspace", by_value=("start", "end"))
def linspace(call: Call, start: float, end: float, steps: int, *options: Any) -> Any:
    """As the CPU computes it: the first half counted from the start, the other from the end."""
    (out,) = call.outputs()
    if not out.dtype.is_floating_point:
        raise RunOnCPU("it rounds to integers")
    compute = value_dtype(out.dtype)
    if steps == 0:
        return out
    step = (float(end) - float(start)) / max(steps - 1, 1)

    def formula(i: Any, first: Any, last: Any, by: Any, half: Any, greatest: Any) -> Any:
        return f.where(i < half, first + i.to(compute) * by, last - (greatest - i).to(compute) * by)

    run_pointwise(
        formula,
        [out],
        [positions(steps, out.device)],
        [
            *((number, compute) for number in (float(start), float(end), step)),
            *((number, torch.int64) for number in (max(steps // 2, 1), steps - 1)),
        ],
        key="linspace",
        name="linspace",
    )
    return out


@operator("eye", "eye.m", "eye.m_out", variants=False)
def eye(call: Call, *sizes: Any) -> Any:
    (out,) = call.outputs()
    rows, columns = rows_and_columns(out)
    run_pointwise(lambda i, j: i == j, [out], [rows, columns], key="eye", name="eye")
    return out


def rows_and_columns(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row's and the column's number of each element of a matrix or a batch of them, to be broadcast."""
    *_, height, width = matrix.shape
    return positions(height, matrix.device).view(height, 1), positions(width, matrix.device)


@operator("tril")
def tril(call: Call, self: torch.Tensor, diagonal: int) -> Any:
    return triangle(call, self, lambda j_minus_i: j_minus_i <= diagonal, ("tril", diagonal))


@operator("triu")
def triu(call: Call, self: torch.Tensor, diagonal: int) -> Any:
    return triangle(call, self, lambda j_minus_i: j_minus_i >= diagonal, ("triu", diagonal))


def triangle(call: Call, self: torch.Tensor, keeps: Any, key: Any) -> Any:
    """The elements that `keeps(column - row)` keeps, and zeros."""
    (out,) = call.outputs()
    zero = False if self.dtype == torch.bool else 0
    run_pointwise(
        lambda x, i, j: f.where(keeps(j - i), x, zero), [out], [self, *rows_and_columns(self)], key=key, name="triangle"
    )
    return out
