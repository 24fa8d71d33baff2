"""Elementwise operations that the kernel of a product or of a convolution computes itself: an epilogue on its results,
instead of storing these, and prologues on elements of its operands, instead of loading these.

Products store a result by `STORE_RESULT(i, j, x)`: row i and column j of the matrix `batch`. `STORE_RESULTS(i, j, x)`
stores LANES results from column j on. `LOAD_x(at, element)` assigns the element of operand x at offset `at`, as value_t
or, for matrix instructions, in the form in which memory has it. Convolutions store a result by `STORE_AT(at, x)`, at
offset `at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect


class Operations(NamedTuple):
    """Statements that a kernel runs for each result or for each element of an operand.

    Args:
        statements: text. An epilogue uses `product`, the result as value_t. A prologue assigns `operand`, the element
            as value_t.
        flat: the text uses `place`, the position of the result or of the element in its tensor's memory. Otherwise it
            uses the row `yindex` of a result, counted through all matrices, and its column `xindex`.
        index_dtype: dtype of `place`, `xindex` and `yindex`.
        functions: text before the kernel.
        dtypes: dtypes of variables in the statements.
        inputs, outputs: tensors by their names in the statements, which handle the strides.
        numbers: other arguments by name, each with its dtype.
    """

    statements: str
    flat: bool
    index_dtype: torch.dtype
    functions: str
    dtypes: frozenset[torch.dtype]
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[torch.dtype, Any]]


class Parts(NamedTuple):
    """Parts of a `LaunchSpec` for an operand or for results. `functions` defines the macros."""

    functions: str
    inputs: Mapping[str, torch.Tensor] = {}
    outputs: Mapping[str, torch.Tensor] = {}
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


def stored_results(dialect: Dialect, out: torch.Tensor, epilogue: Operations | None) -> Parts:
    """Returns what becomes of the results of a product: they are stored in `out`, or the epilogue uses them."""
    if epilogue is None:
        return Parts(_STORE, outputs={"out": out})
    index = dialect.type(epilogue.index_dtype)
    row = f"(({index})batch * rows + (i))"
    place = f"place = {row} * columns + (j)" if epilogue.flat else f"yindex = {row}, xindex = (j)"
    first = f"const {index} {place}; const value_t product = (x);"
    made = _parts("STORE_RESULT(i, j, x)", epilogue, [first, *epilogue.statements.splitlines()])
    return made._replace(functions=made.functions + _RUN_LANES.replace("INDEX", index))


def stored_at(dialect: Dialect, out: torch.Tensor, epilogue: Operations | None) -> Parts:
    """Returns what becomes of results at offsets of `out`, which has any strides.

    They are stored, or the epilogue uses them, which must be flat.
    """
    if epilogue is None:
        return Parts("#define STORE_AT(at, x) store_out(at, x)\n", outputs={"out": out})
    assert epilogue.flat
    first = f"const {dialect.type(epilogue.index_dtype)} place = (at); const value_t product = (x);"
    return _parts("STORE_AT(at, x)", epilogue, [first, *epilogue.statements.splitlines()])


def loaded_operand(
    dialect: Dialect, name: str, operand: torch.Tensor, prologue: Operations | None, stored: torch.dtype | None = None
) -> Parts:
    """Returns how elements of an operand are loaded: from its memory, or by the prologue, which computes them.

    Args:
        stored: the dtype of elements that stay in the form in which memory has them; None for value_t.
    """
    if prologue is None:
        load = f"(value_t)load_{name}(at)" if stored is None else f"{name}[at]"
        return Parts(f"#define LOAD_{name}(at, element) element = {load};\n", inputs={name: operand})
    first = f"const {dialect.type(prologue.index_dtype)} place = (at); value_t operand;"
    last = "operand" if stored is None else dialect.encode("operand", stored)
    statements = [first, *prologue.statements.splitlines(), f"element = {last};"]
    return _parts(f"LOAD_{name}(at, element)", prologue, statements)


def _parts(macro: str, operations: Operations, statements: Iterable[str]) -> Parts:
    _, _, _, functions, dtypes, inputs, outputs, numbers = operations
    types = {f"type_{str(one).removeprefix('torch.')}": one for one in dtypes}
    text = " \\\n".join([f"#define {macro} {{", *statements, "}\n"])
    return Parts(f"{functions}\n{text}", inputs, outputs, numbers, types)


def joined(parts: Iterable[Parts]) -> Parts:
    """Returns all parts together."""
    functions = ""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    numbers: dict[str, tuple[torch.dtype, Any]] = {}
    types: dict[str, torch.dtype] = {}
    for one in parts:
        functions += one.functions
        inputs |= one.inputs
        outputs |= one.outputs
        numbers |= one.numbers
        types |= one.types
    return Parts(functions, inputs, outputs, numbers, types)
