"""Whole kernels that reduce: a group of work items for each result, which meet in a tree in local memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.element import element_function, used_dtypes
from torch_backplane.kernels.expression import Expression, Formula, Number, Program, constant, trace
from torch_backplane.kernels.kernel import Kernel, Parameter, entry_point
from torch_backplane.kernels.layouts import ReductionGeometry
from torch_backplane.kernels.parameters import advance, declarations, pointers

# A work item reduces this many elements to a block, as many blocks to a part, and the parts: rounding errors grow with
# the longest chain of combinations.
BLOCK = 32


@dataclass(frozen=True)
class Reduction:
    """How elements become results, by way of a state of one or more numbers.

    Args:
        state: dtypes of the state.
        identity: the state of no elements; combining with it changes nothing.
        start: takes an element of each input, its position (int64) in the reduced dimensions, and the numbers of
            `scalars`; returns a state.
        combine: takes two states, all numbers of the one and then of the other; returns one. Associative, and
            commutative: the order in which states meet is not that of the elements.
        finish: takes a state, the number of elements (int64), and the numbers of `scalars`; returns a value for each
            output.
        add: combines the state of at most BLOCK elements with that of one more; without it, `combine` does.
        scalars: dtypes of numbers that are arguments of the kernel: another number is the same kernel.
    """

    state: Sequence[torch.dtype]
    identity: Sequence[Number]
    start: Formula
    combine: Formula
    finish: Formula
    add: Formula | None = None
    scalars: Sequence[torch.dtype] = ()

    def __post_init__(self) -> None:
        if not self.state or len(self.state) != len(self.identity):
            raise ValueError(f"{len(self.identity)} numbers of identity for {len(self.state)} dtypes of state")
        for number, dtype in zip(self.identity, self.state, strict=True):
            constant(number, dtype)  # raises where it is none of this dtype


class Programs(NamedTuple):
    """The formulas of a Reduction, traced."""

    start: Program
    combine: Program
    add: Program
    finish: Program


def programs(
    definition: Reduction,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    compute: torch.dtype | None = None,
) -> Programs:
    """Raises TypeError where a formula does not take these dtypes, or returns another number of values."""
    state, numbers = list(definition.state), [torch.int64, *definition.scalars]
    seen_as = [compute or value_dtype(dtype) for dtype in inputs]
    combine = _program("combine", definition.combine, [*state, *state], state)
    return Programs(
        _program("start", definition.start, [*seen_as, *numbers], state),
        combine,
        combine if definition.add is None else _program("add", definition.add, [*state, *state], state),
        _program("finish", definition.finish, [*state, *numbers], outputs),
    )


def summation(
    dtype: torch.dtype,
    start: Formula,
    finish: Callable[..., Any] = lambda total, count, *scalars: total,
    scalars: Sequence[torch.dtype] = (),
) -> Reduction:
    """The reduction to the sum of what `start` makes of elements; `finish` and `scalars` as in `Reduction`.

    Beside a sum of blocks stands what its additions have lost: Knuth's two-sum says what each one does, exactly. So the
    error is that of a few additions, however many there are. Of integers nothing is lost.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return Reduction([dtype], [0], start, lambda a, b: a + b, finish, scalars=scalars)

    def combine(a: Expression, lost_a: Expression, b: Expression, lost_b: Expression) -> tuple[Expression, Expression]:
        total, lost = two_sum(a, b)
        return total, lost_a + (lost + lost_b)

    def add(a: Expression, _: Expression, b: Expression, __: Expression) -> tuple[Expression, float]:
        return a + b, 0.0

    def with_nothing_lost(*elements: Expression) -> tuple[Any, float]:
        return start(*elements), 0.0

    def finish_whole(total: Expression, lost: Expression, *count_and_scalars: Expression) -> Any:
        return finish(whole(total, lost), *count_and_scalars)

    return Reduction([dtype] * 2, [0.0, 0.0], with_nothing_lost, combine, finish_whole, add, scalars)


def two_sum(a: Expression, b: Expression) -> tuple[Expression, Expression]:
    """The sum of a and b, and what it lacks; NaN where the sum is infinite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def whole(total: Expression, lost: Expression) -> Expression:
    """A sum with what it has lost."""
    if total.is_complex:
        return f.complex(whole(total.real, lost.real), whole(total.imag, lost.imag))
    return f.where(f.isnan(lost), total, total + lost)


def reduction(
    name: str,
    definition: Reduction,
    *,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    geometry: ReductionGeometry,
    dialect: Dialect,
    compute: torch.dtype | None = None,
    group_size: int | None = None,
) -> Kernel:
    """A kernel that computes `definition` for every result, with one group of `group_size` work items for each.

    Args:
        name: a C identifier, which the entry point's name ends with.
        geometry: only its ranks and index width matter, so another shape is the same kernel.
        compute: what `start` sees each input as; without it the input's own, float32 for float16 and bfloat16.
        group_size: a power of two; without it, what the target has for a team with this state.

    Raises TypeError where the dialect's device lacks a dtype, or a formula returns another number of values.
    """
    entry = entry_point(name)
    state_bytes = sum(dtype.itemsize for dtype in definition.state)
    if group_size is None:
        group_size = dialect.target.team_of(state_bytes)
    if group_size < 1 or group_size & (group_size - 1):
        raise ValueError(f"group_size is a power of two, and got {group_size}")
    state, numbers = list(definition.state), [torch.int64, *definition.scalars]
    start, combine, add, finish = programs(definition, inputs, outputs, compute)

    parameters = _parameters(inputs, outputs, definition.scalars, geometry)
    used = used_dtypes(start, inputs, outputs) | used_dtypes(combine) | used_dtypes(add) | used_dtypes(finish)
    elements = [
        element_function("start", start, dialect, inputs, numbers, state),
        element_function("combine", combine, dialect, [*state, *state], [], state),
        element_function("add", add, dialect, [*state, *state], [], state),
        element_function("finish", finish, dialect, state, numbers, outputs),
    ]
    text = "\n".join(
        [
            dialect.header(used, "\n".join(elements)),
            *elements,
            dialect.kernel(
                entry,
                declarations(dialect, parameters),
                group_size,
                _body(definition, len(inputs), outputs, geometry, dialect, group_size, parameters),
            ),
        ]
    )
    return Kernel(entry, text, tuple(parameters), None, group_size, group_size * state_bytes)


def _program(part: str, formula: Formula, arguments: list[torch.dtype], results: Sequence[torch.dtype]) -> Program:
    program = trace(formula, arguments, value_dtype(results[0]))
    if len(program.results) != len(results):
        raise TypeError(f"{part} returned {len(program.results)} values, and {len(results)} are needed")
    return program


def _parameters(
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    scalars: Sequence[torch.dtype],
    geometry: ReductionGeometry,
) -> list[Parameter]:
    index = torch.uint64 if geometry.wide else torch.uint32
    kept, reduced = geometry.kept.layout.rank, geometry.reduced.layout.rank
    operands = len(outputs) + len(inputs)
    return [
        *(Parameter("output", dtype, i) for i, dtype in enumerate(outputs)),
        *(Parameter("input", dtype, i) for i, dtype in enumerate(inputs)),
        *(Parameter("scalar", dtype, i) for i, dtype in enumerate(scalars)),
        Parameter("reduced_count", index),
        *(Parameter("size", index, dimension=d) for d in range(kept - 1)),
        *(Parameter("reduced_size", index, dimension=d) for d in range(reduced - 1)),
        *(Parameter("stride", index, operand, d) for operand in range(operands) for d in range(kept)),
        *(Parameter("reduced_stride", index, i, d) for i in range(len(inputs)) for d in range(reduced)),
    ]


def _body(
    definition: Reduction,
    inputs: int,
    outputs: Sequence[torch.dtype],
    geometry: ReductionGeometry,
    dialect: Dialect,
    group_size: int,
    parameters: Sequence[Parameter],
) -> list[str]:
    index = dialect.index_type(geometry.wide)
    names = [f"out{i}" for i in range(len(outputs))] + [f"in{i}" for i in range(inputs)]
    places = {f"{name}_at": f"stride{operand}_" for operand, name in enumerate(names)}
    elements = {f"in{i}_element": f"reduced_stride{i}_" for i in range(inputs)}
    numbers = range(len(definition.state))
    types = [dialect.storage_type(dtype) for dtype in definition.state]
    identity = [
        dialect.constant(number, dtype) for number, dtype in zip(definition.identity, definition.state, strict=True)
    ]

    def listed(text: str) -> str:
        return ", ".join(text.format(i=i) for i in numbers)

    element = ", ".join(f"in{i}[in{i}_element]" for i in range(inputs))
    results = ", ".join(f"&out{i}_value" for i in range(len(outputs)))
    # With the numbers that are arguments of the kernel.
    position, count = (
        ", ".join([f"({dialect.type(torch.int64)}){name}", *(f"scalar{i}" for i in range(len(definition.scalars)))])
        for name in ("position", "reduced_count")
    )
    return [
        *(f"  {dialect.local_array(f'shared{i}', definition.state[i], group_size)}" for i in numbers),
        *pointers(dialect, parameters),
        f"  const {index} result = {dialect.group_index};",
        f"  const {index} item = {dialect.local_index};",
        *(f"  {index} {place} = 0;" for place in places),
        *advance(index, "result", geometry.kept.layout.rank, places),
        *(f"  {types[i]} state{i} = {identity[i]};" for i in numbers),
        f"  {index} position = item;",
        "  while (position < reduced_count) {",
        *(f"    {types[i]} part{i} = {identity[i]};" for i in numbers),
        f"    for (int blocks = 0; blocks < {BLOCK} && position < reduced_count; ++blocks) {{",
        *(f"      {types[i]} block{i} = {identity[i]};" for i in numbers),
        f"      for (int step = 0; step < {BLOCK} && position < reduced_count; ++step, position += {group_size}) {{",
        *(f"        {index} in{i}_element = in{i}_at;" for i in range(inputs)),
        *advance(index, "position", geometry.reduced.layout.rank, elements, "reduced_size", "        "),
        *(f"        {types[i]} next{i};" for i in numbers),
        f"        start({element}, {position}, {listed('&next{i}')});",
        f"        add({listed('block{i}')}, {listed('next{i}')}, {listed('&block{i}')});",
        "      }",
        f"      combine({listed('part{i}')}, {listed('block{i}')}, {listed('&part{i}')});",
        "    }",
        f"    combine({listed('state{i}')}, {listed('part{i}')}, {listed('&state{i}')});",
        "  }",
        *(f"  shared{i}[item] = state{i};" for i in numbers),
        f"  {dialect.barrier}",
        f"  for ({index} half_size = {group_size // 2}; half_size > 0; half_size >>= 1) {{",
        f"    if (item < half_size) combine({listed('state{i}')}, {listed('shared{i}[item + half_size]')}, "
        f"{listed('&state{i}')});",
        *(f"    if (item < half_size) shared{i}[item] = state{i};" for i in numbers),
        f"    {dialect.barrier}",
        "  }",
        "  if (item == 0) {",
        *(f"    {dialect.storage_type(dtype)} out{i}_value;" for i, dtype in enumerate(outputs)),
        f"    finish({listed('state{i}')}, {count}, {results});",
        *(f"    out{i}[out{i}_at] = out{i}_value;" for i in range(len(outputs))),
        "  }",
    ]
