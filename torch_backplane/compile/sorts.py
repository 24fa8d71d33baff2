"""Inductor's sorts: a team of work items sorts the elements along the reduced dimension, one element per item.

Each item stores its element's key in local memory. The keys are unsigned integers in the order of the elements
(templates/sort.py). Then it counts the keys that come before its own: this is the position of its element among the
sorted ones. Of equal keys, that of the earlier element comes first, so that all sorts are stable. The work grows with
the square of the length. Up to `reduction_form.LONGEST_SORT` elements, it costs less than the launches and the memory
traffic of the kernels of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import ValueRanges

from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dtypes import facts

if TYPE_CHECKING:
    from torch_backplane.compile.kernel import GraphKernel


@dataclass(frozen=True)
class Order:
    """The combine function of an ir.Scan that is a sort."""

    descending: bool


def key_dtype(value: torch.dtype) -> torch.dtype:
    """The dtype of the keys of values of dtype `value` in registers."""
    return torch.uint64 if facts(value).bits == 64 else torch.uint32


def sort(kernel: GraphKernel, number: int, values: Sequence[Variable], order: Order) -> tuple[Variable, ...]:
    """Writes the statements of a sort in the loop over elements that `kernel` is writing. Returns its results.

    Args:
        number: makes the names of variables unique.
        values: the element that decides the order, and others that move with it, such as its position.
    """
    dialect, item, first, name = kernel.dialect, kernel.item, kernel.first_item, f"sort{number}"
    tree = kernel.reduced_tree()
    length = kernel.numel_text(tree)
    assert V.graph.sizevars.statically_known_leq(tree.numel, kernel.team)
    dtype = key_dtype(values[0].dtype)
    keys = kernel.shared_array("keys", dtype, 0, kernel.group)
    arrays = [kernel.shared_array("sorted", one.dtype, k, kernel.group) for k, one in enumerate(values)]
    key = f"{'~' if order.descending else ''}{kernel.key_function(values[0].dtype)}({values[0]})"
    # The arrays are written again after a barrier that follows their last use: keys after the second one of the
    # previous sort, the elements after the first one of the next sort.
    kernel.compute.writelines(
        [
            f"const {dialect.type(dtype)} {name}_key = {key};",
            f"if (inside) {keys}[ITEM] = {name}_key;",
            "BARRIER;",
            "if (inside) {",
            "  int before = 0;",
            f"  for (int other = 0; other < {length}; ++other) {{",
            f"    const {dialect.type(dtype)} key = {keys}[{first}other];",
            f"    before += (key < {name}_key) | ((key == {name}_key) & (other < {item}));",
            "  }",
            *(f"  {array}[{first}before] = {one};" for array, one in zip(arrays, values, strict=True)),
            "}",
            "BARRIER;",
        ]
    )
    results = []
    for k, (array, value) in enumerate(zip(arrays, values, strict=True)):
        result = kernel.create_cse_var(f"{name}_{k}", ValueRanges.unknown(), value.dtype, ())
        text = f"inside ? {dialect.decode(f'{array}[ITEM]', value.dtype)} : {dialect.constant(0, value.dtype)}"
        kernel.compute.writeline(f"const {dialect.type(value.dtype)} {result} = {text};")
        results.append(result)
    return tuple(results)
