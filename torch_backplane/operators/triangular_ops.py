"""Triangles of matrices, and where their elements are."""

from __future__ import annotations

import operator as compare
from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, RunOnCPU, each_once, operator, run_kernel, run_pointwise


@operator("tril", passed_through=["diagonal"], dtypes="complex")
def tril(call: Call, self: torch.Tensor, diagonal: Any) -> Any:
    return triangle(call, self, diagonal, compare.le, "tril")


@operator("triu", passed_through=["diagonal"], dtypes="complex")
def triu(call: Call, self: torch.Tensor, diagonal: Any) -> Any:
    return triangle(call, self, diagonal, compare.ge, "triu")


def triangle(call: Call, self: torch.Tensor, diagonal: Any, keeps: Any, key: str) -> Any:
    """The elements whose `keeps(column - row, diagonal)` is true, and zeros."""
    if call.is_in_place and each_once(self) is not self:
        raise RunOnCPU("a tensor whose elements share memory, which PyTorch takes here")
    (out,) = call.outputs()
    zero = False if self.dtype == torch.bool else 0
    run_pointwise(
        lambda x, diagonal: f.where(keeps(f.index(-1) - f.index(-2), diagonal), x, zero),
        [out],
        [self],
        [(diagonal, torch.int64)],
        key=key,
        name="triangle",
    )
    return out


# Where the elements of a triangle are, row by row. A row of tril has column numbers 0 to row + offset, within the
# matrix; so the number of elements before it is a sum of clamp(a, 0, columns) over a range of a, which `up_to` gives.
_TRIANGLE = """
FUNCTION index_t up_to(const index_t a, const index_t columns) {
  if (a <= 0) return 0;
  return a <= columns ? a * (a + 1) / 2 : columns * (columns + 1) / 2 + (a - columns) * columns;
}
"""
_ROW_OF_TRIL = """
  index_t at = up_to(item + offset, columns) - up_to(offset, columns);
  for (index_t column = 0; column <= item + offset && column < columns; ++column, ++at) {
    store_out(at, item);
    store_out(at + count, column);
  }
"""
_ROW_OF_TRIU = """
  index_t at = up_to(columns - offset, columns) - up_to(columns - offset - item, columns);
  for (index_t column = item + offset > 0 ? item + offset : 0; column < columns; ++column, ++at) {
    store_out(at, item);
    store_out(at + count, column);
  }
"""


def triangle_places(call: Call, body: str, name: str, rows: int, columns: int, offset: int) -> Any:
    (out,) = call.outputs()
    integers = {"columns": columns, "offset": offset, "count": out.shape[1]}
    if out.numel():
        value = torch.int64
        run_kernel(name, body, items=rows, outputs={"out": out}, integers=integers, value=value, functions=_TRIANGLE)
    return out


@operator("tril_indices")
def tril_indices(call: Call, row: int, col: int, offset: int, *options: Any) -> Any:
    return triangle_places(call, _ROW_OF_TRIL, "tril_indices", row, col, offset)


@operator("triu_indices")
def triu_indices(call: Call, row: int, col: int, offset: int, *options: Any) -> Any:
    return triangle_places(call, _ROW_OF_TRIU, "triu_indices", row, col, offset)
