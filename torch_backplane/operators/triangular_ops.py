"""Triangles of matrices, and the indices of their elements."""

from __future__ import annotations

import operator as compare
from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.planning import Call, RunOnCPU, dialect_of, each_once, operator, run_kernel, run_pointwise


@operator("tril", passed_through=["diagonal"], dtypes="complex")
def tril(call: Call, self: torch.Tensor, diagonal: Any) -> Any:
    return triangle(call, self, diagonal, compare.le, "tril")


@operator("triu", passed_through=["diagonal"], dtypes="complex")
def triu(call: Call, self: torch.Tensor, diagonal: Any) -> Any:
    return triangle(call, self, diagonal, compare.ge, "triu")


def triangle(call: Call, self: torch.Tensor, diagonal: Any, keeps: Any, key: str) -> Any:
    """Keeps elements for which `keeps(column - row, diagonal)` is true; others become zero."""
    if call.is_in_place and each_once(self) is not self:
        raise RunOnCPU("self is expanded, which PyTorch allows in place")
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


# The indices of a triangle's elements, row by row. A row of tril has the columns 0 to row + offset, within the matrix.
# So the number of elements before a row is a sum of clamp(a, 0, columns) over a range of a, which `up_to` computes.
_TRIANGLE = """
FUNCTION value_t up_to(const value_t a, const value_t columns) {
  if (-a >= 0) return 0; // not a <= 0: Mesa's compiler takes an int32 that was converted to int64 to be non-negative
  return a <= columns ? a * (a + 1) / 2 : columns * (columns + 1) / 2 + (a - columns) * columns;
}
"""
_TRIL = {
    "BEFORE(row)": "(up_to((value_t)(row) + offset, columns) - up_to(offset, columns))",
    "FIRST(row)": "0",
    "END(row)": "((row) + offset + 1 < columns ? (row) + offset + 1 : columns)",
}
_TRIU = {
    "BEFORE(row)": "(up_to((value_t)columns - offset, columns) - up_to((value_t)columns - offset - (row), columns))",
    "FIRST(row)": "((row) + offset > 0 ? (row) + offset : 0)",
    "END(row)": "columns",
}
# A work item searches for the row of its first element. From there to the last element, no row is empty.
_PLACES = """
  const index_t begin = item * chunk, end = min(begin + chunk, count);
  index_t row = 0, last = rows - 1;
  while (row < last) {
    const index_t middle = row + (last - row + 1) / 2;
    if (BEFORE(middle) <= begin) row = middle;
    else last = middle - 1;
  }
  index_t column = FIRST(row) + (index_t)(begin - BEFORE(row));
  for (index_t at = begin; at < end; ++at) {
    store_out(at, row);
    store_out(at + count, column);
    if (++column >= END(row)) { ++row; column = FIRST(row); }
  }
"""
_RUN = 256  # adjacent elements for each work item, where it is a CPU thread


def triangle_places(call: Call, constants: dict[str, str], name: str, rows: int, columns: int, offset: int) -> Any:
    (out,) = call.outputs()
    count = out.shape[1]
    chunk = dialect_of(out.device).target.run(_RUN)
    offset = max(-rows, min(offset, columns))  # beyond these, all elements are on one side of the diagonal
    if out.numel():
        run_kernel(
            name,
            _PLACES,
            items=-(-count // chunk),
            outputs={"out": out},
            integers={"rows": rows, "columns": columns, "offset": offset, "count": count, "chunk": chunk},
            value=torch.int64,
            functions=_TRIANGLE,
            constants=constants,
        )
    return out


@operator("tril_indices")
def tril_indices(call: Call, row: int, col: int, offset: int, *options: Any) -> Any:
    return triangle_places(call, _TRIL, "tril_indices", row, col, offset)


@operator("triu_indices")
def triu_indices(call: Call, row: int, col: int, offset: int, *options: Any) -> Any:
    return triangle_places(call, _TRIU, "triu_indices", row, col, offset)
