"""Inductor's scans: for each element, the combination of all elements up to it, by an associative function of scalars.

- A work item that computes results alone keeps the combination of all earlier elements, the *carry*.
- A team scans as many elements at a time as it has work items, in log2(team) steps (Hillis and Steele 1986): each item
  combines what it has with what the item `distance` before it has. The first item begins with the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.value_ranges import ValueRanges

from torch_backplane.compile.reductions import accumulated_dtype
from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dtypes import value_dtype

if TYPE_CHECKING:
    from torch_backplane.compile.kernel import GraphKernel

# Takes the numbers of two states, that of the earlier elements first, and returns those of a state.
Combine = Callable[[tuple[Variable, ...], tuple[Variable, ...]], Sequence[Any]]

# Which half of its arrays a team writes next. Items can still read the other half.
_SIDE = "scan_side"


class Scan:
    """A scan in the loop over elements that `kernel` is writing.

    Args:
        number: makes the names of variables unique.
        dtypes: of the results.
    """

    def __init__(self, kernel: GraphKernel, number: int, dtypes: Sequence[torch.dtype], combine: Combine) -> None:
        self._kernel, self._combine, self._dtypes = kernel, combine, dtypes
        tree = kernel.reduced_tree()
        self._index = f"{tree.prefix}index"
        self._state: list[Variable] = []
        self._carry: list[Variable] = []
        # Whether a team has more elements than it scans at a time.
        self._has_carry = kernel.team == 1 or not V.graph.sizevars.statically_known_leq(tree.numel, kernel.team)
        lanes = f"[{kernel.tile}]" if kernel.tile > 1 else ""
        for k, dtype in enumerate(accumulated_dtype(one, kernel.dialect.target.has_wide_sums) for one in dtypes):
            name = f"scan{number}_{k}"
            self._state.append(_variable(kernel, name, dtype))
            self._carry.append(_variable(kernel, f"{name}_carry[lane]" if lanes else f"{name}_carry", dtype))
            if self._has_carry:
                begin = "" if lanes else f" = {kernel.dialect.constant(0, dtype)}"  # not read before it is assigned
                kernel.body.writeline(f"{kernel.dialect.type(dtype)} {name}_carry{lanes}{begin};")

    def write(self, values: Sequence[Variable]) -> tuple[Variable, ...]:
        """Writes the statements for the loop's element, whose operands are `values`. Returns its results."""
        kernel = self._kernel
        for one, value in zip(self._state, values, strict=True):
            kernel.compute.writeline(f"{kernel.dialect.type(one.dtype)} {one} = {kernel.cast(value, one.dtype)};")
        kernel.compute.writelines(list(self._by_team() if kernel.team > 1 else self._by_item()))
        return tuple(
            kernel.cast(one, value_dtype(dtype)) for one, dtype in zip(self._state, self._dtypes, strict=True)
        )

    def _by_item(self) -> Iterator[str]:
        yield f"if ({self._index} > 0) {{"
        yield from self._combined(self._carry)
        yield "}"
        yield from (f"{carry} = {one};" for carry, one in zip(self._carry, self._state, strict=True))

    def _by_team(self) -> Iterator[str]:
        kernel, team, group, item = self._kernel, self._kernel.team, self._kernel.group, self._kernel.item
        kernel.variables[_SIDE] = f"int {_SIDE} = 0;"
        arrays = [kernel.shared_array("scanned", one.dtype, k, 2 * group) for k, one in enumerate(self._state)]
        put = [f"{array}[{_SIDE} + ITEM] = {one};" for array, one in zip(arrays, self._state, strict=True)]
        swap = f"{_SIDE} = {group} - {_SIDE};"
        before = [_variable(kernel, f"{one}_before", one.dtype) for one in self._state]
        if self._has_carry:
            yield f"if ({item} == 0 && {self._index} > 0) {{"
            yield from self._combined(self._carry)
            yield "}"
        yield f"for (int distance = 1; distance < {team}; distance <<= 1) {{"
        yield from (*put, "BARRIER;", f"if ({item} >= distance) {{")
        for one, array in zip(before, arrays, strict=True):
            yield f"const {kernel.dialect.type(one.dtype)} {one} = {array}[{_SIDE} + ITEM - distance];"
        yield from self._combined(before)
        yield from ("}", swap, "}")
        if self._has_carry:
            yield from (*put, "BARRIER;")
            for one, array in zip(self._carry, arrays, strict=True):
                yield f"{one} = {array}[{_SIDE} + {kernel.first_item}{team - 1}];"
            yield swap

    def _combined(self, earlier: Sequence[Variable]) -> Iterator[str]:
        """Statements that combine `earlier` with the state."""
        kernel, inner = self._kernel, IndentedBuffer()
        with kernel.swap_buffers(inner):
            found = self._combine(tuple(earlier), tuple(self._state))
            values = [one.value if isinstance(one, OpsValue) else one for one in found]
            values = [kernel.cast(one, kept.dtype) for one, kept in zip(values, self._state, strict=True)]
        yield from inner.getvalue().splitlines()
        yield from kernel.assignments([one.dtype for one in self._state], [str(one) for one in self._state], values)


def _variable(kernel: GraphKernel, name: str, dtype: torch.dtype) -> Variable:
    return kernel.create_cse_var(name, ValueRanges.unknown(), dtype, ())
