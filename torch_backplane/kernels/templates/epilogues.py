"""Elementwise operations that the kernel of a product computes on its results, instead of storing these.

Kernels store a result by `STORE_RESULT(i, j, x)`: row i and column j of the matrix `batch`. `STORE_RESULTS(i, j, x)`
stores LANES results from column j on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect


class Epilogue(NamedTuple):
    """Statements that a kernel runs for each result.

    Args:
        statements: text that uses `product`, the result as value_t, and its place: the row `yindex`, counted through
            all matrices, and the column `xindex`.
        flat: the place is `xindex` alone, which counts all results in row-major order.
        index_dtype: dtype of `xindex` and `yindex`.
        functions: text before the kernel.
        dtypes: dtypes of variables in the statements.
        outputs, inputs: tensors by their names in the statements, which handle the strides.
        numbers: other arguments by name, each with its dtype.
    """

    statements: str
    flat: bool
    index_dtype: torch.dtype
    functions: str
    dtypes: frozenset[torch.dtype]
    outputs: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[torch.dtype, Any]]


class Results(NamedTuple):
    """What becomes of the results of a product, as parts of a `LaunchSpec`. `functions` defines STORE_RESULT."""

    outputs: Mapping[str, torch.Tensor]
    functions: str
    inputs: Mapping[str, torch.Tensor] = {}
    numbers: Mapping[str, tuple[torch.dtype, Any]] = {}
    types: Mapping[str, torch.dtype] = {}


# For a tensor `out` with strides in the kernel's integers; lanes need a stride of 1 between columns.
_STORE = """\
#define OUT_AT(i) batch / inner_batches * out_outer + batch % inner_batches * out_inner + (i) * out_row
#define STORE_RESULT(i, j, x) store_out(OUT_AT(i) + (j) * out_column, x)
#define STORE_RESULTS(i, j, x) store_out_lanes(OUT_AT(i) + (j), x)
"""

# Compilers vectorize the loop: its length is a constant, and no iteration reads what another one writes. It reads from
# a whole vector, because loads of what vstore has stored in parts stall.
_RUN_LANES = """
#define STORE_RESULTS(i, j, x) { \\
  const value_t_lanes result_lanes = (x); \\
  const INDEX first_column = (j); \\
  _Pragma("clang loop vectorize(assume_safety)") \\
  for (int lane = 0; lane < LANES; ++lane) STORE_RESULT(i, first_column + lane, ((const value_t*)&result_lanes)[lane]) }
"""


def stored_results(dialect: Dialect, out: torch.Tensor, epilogue: Epilogue | None) -> Results:
    """Returns what becomes of the results of a product: they are stored in `out`, or the epilogue uses them."""
    if epilogue is None:
        return Results({"out": out}, _STORE)
    index = dialect.type(epilogue.index_dtype)
    row = f"(({index})batch * rows + (i))"
    place = f"xindex = {row} * columns + (j)" if epilogue.flat else f"yindex = {row}, xindex = (j)"
    lines = [
        "#define STORE_RESULT(i, j, x) {",
        f"const {index} {place}; const value_t product = (x);",
        *epilogue.statements.splitlines(),
        "}",
    ]
    types = {f"epilogue_{str(one).removeprefix('torch.')}": one for one in epilogue.dtypes}
    functions = epilogue.functions + " \\\n".join(lines) + _RUN_LANES.replace("INDEX", index)
    return Results(epilogue.outputs, functions, epilogue.inputs, epilogue.numbers, types)
