"""Kernels that apply one formula to many tensors in a single launch: each of several slots has its own tensors.

Optimizers update hundreds of small tensors; a launch for each would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.element import Stored, element_function, used_dtypes
from torch_backplane.kernels.expression import Formula, trace
from torch_backplane.kernels.kernel import Kernel, Parameter, entry_point
from torch_backplane.kernels.parameters import declarations, pointers
from torch_backplane.kernels.templates.spelling import macros

_RUN, _BLOCK = 1024, 64  # elements of a work item that is a thread; elements that it reads before it writes any


def slots_within(
    dialect: Dialect,
    most: int,
    *,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    singles: Sequence[torch.dtype] = (),
    scalars: Sequence[torch.dtype] = (),
) -> int:
    """The number of slots, at most `most`, whose arguments fit the target's limit on argument bytes; at least 1."""
    tensors = len(inputs) + len(outputs) + len(singles)
    each = tensors * dialect.buffer_bytes + sum(dtype.itemsize for dtype in (*scalars, torch.uint32))
    return max(1, min(most, dialect.target.max_argument_bytes // each))


def multi_tensor(
    name: str,
    formula: Formula,
    *,
    slots: int,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    dialect: Dialect,
    compute: torch.dtype,
    singles: Sequence[torch.dtype] = (),
    scalars: Sequence[torch.dtype] = (),
) -> Kernel:
    """Returns a kernel that computes `formula` for every element of each slot's tensors, which are contiguous.

    The parameters are the outputs of all slots, slot by slot; then the inputs and singles of all slots in the same
    order; then the scalars of all slots; then the number of elements (uint32) of each slot. A slot with 0 elements is
    skipped. A group belongs to one slot, so the launch needs the sum of the whole groups that each slot needs. A work
    item computes `Kernel.width` neighbouring elements.

    Args:
        formula: takes a traced value for each input, then each single, then each scalar; returns one for each output.
        slots: number of sets of tensors in one launch (see `slots_within`).
        inputs, outputs: dtypes of a slot's tensors, which have the same size. An output can share an input's memory.
        singles: dtypes of a slot's tensors of one element, whose value every element of the slot uses.
        compute: dtype to which inputs are converted for the formula. Singles are not converted to it.
        scalars: dtypes of a slot's numbers.

    Raises:
        TypeError: the formula returns a wrong number of results.
    """
    entry = entry_point(name)
    seen = [*([compute] * len(inputs)), *map(value_dtype, singles), *map(value_dtype, scalars)]
    program = trace(formula, seen, value_dtype(outputs[0]))
    if len(program.results) != len(outputs):
        raise TypeError(f"the formula returned {len(program.results)} values for {len(outputs)} outputs")
    read = [*inputs, *singles]
    numbers = [*scalars, torch.uint32]
    parameters = [
        *(
            Parameter("output", dtype, slot * len(outputs) + i)
            for slot in range(slots)
            for i, dtype in enumerate(outputs)
        ),
        *(Parameter("input", dtype, slot * len(read) + i) for slot in range(slots) for i, dtype in enumerate(read)),
        *(
            Parameter("scalar", dtype, slot * len(scalars) + i)
            for slot in range(slots)
            for i, dtype in enumerate(scalars)
        ),
        *(Parameter("scalar", torch.uint32, slots * len(scalars) + slot) for slot in range(slots)),
    ]
    width = dialect.target.run(_RUN)
    group = dialect.target.element_group_size if width == 1 else 1
    index = dialect.type(torch.uint32)

    def chosen(name: str, each: int, first: int) -> str:
        """The parameter `name` of the group's slot, whose number is `first` plus `each` times the slot.

        It is selected without branches, so that compilers can vectorize.
        """
        *others, last = [f"{name}{first + slot * each}" for slot in range(slots)]
        return "".join(f"slot == {slot} ? {one} : " for slot, one in enumerate(others)) + last

    counts = slots * len(scalars)
    body = [*pointers(dialect, parameters), f"  {index} rest = ({index})GROUP; int slot = 0;"]
    for slot in range(slots):
        count = f"scalar{counts + slot}"
        groups = f"{count} / {group * width} + ({count} % {group * width} != 0)"
        body.append(f"  if (slot == {slot} && rest >= {groups}) {{ rest -= {groups}; slot = {slot + 1}; }}")
    body.append(f"  const {index} count = {chosen('scalar', 1, counts)};")
    body.append(f"  const {index} first = rest * {group * width} + ({index})ITEM * {width};")
    for role, dtypes, written in (("out", outputs, True), ("in", read, False)):
        for i, dtype in enumerate(dtypes):
            pointer = f"{dialect.pointer_type(dtype, written)} this_{role}{i}"
            body.append(f"  {pointer} = {chosen(role, len(dtypes), i)};")
    for i, dtype in enumerate(scalars):
        number = chosen("scalar", len(scalars), i)
        body.append(f"  const {dialect.storage_type(dtype)} this_scalar{i} = {number};")
    body.append(f"  if (slot >= {slots} || first >= count) return;")
    for i, dtype in enumerate(singles, len(inputs)):
        body.append(f"  const {dialect.storage_type(dtype)} single{i} = this_in{i}[0];")
    numbers_given = [f"single{i}" for i in range(len(inputs), len(read))]
    numbers_given += [f"this_scalar{i}" for i in range(len(scalars))]
    body += (_element if width == 1 else _run)(dialect, inputs, outputs, numbers_given)
    element = element_function("element", program, dialect, Stored(read, scalars, outputs))
    text = "\n".join(
        [
            dialect.header(used_dtypes(program, read, outputs, numbers), element),
            macros(dialect, "GROUP ITEM"),
            element,
            dialect.kernel(entry, declarations(dialect, parameters), group, body, bounded=True),
        ]
    )
    return Kernel(entry, text, tuple(parameters), width, group)


def _element(
    dialect: Dialect, inputs: Sequence[torch.dtype], outputs: Sequence[torch.dtype], numbers: Sequence[str]
) -> list[str]:
    """Statements that compute the element at `first`."""
    passed = [f"this_in{i}[first]" for i in range(len(inputs))]
    results = [f"&r{i}" for i in range(len(outputs))]
    return [
        *(f"  {dialect.storage_type(dtype)} r{i};" for i, dtype in enumerate(outputs)),
        f"  element({', '.join([*passed, *numbers, *results])});",
        *(f"  this_out{i}[first] = r{i};" for i in range(len(outputs))),
    ]


def _run(
    dialect: Dialect, inputs: Sequence[torch.dtype], outputs: Sequence[torch.dtype], numbers: Sequence[str]
) -> list[str]:
    """Statements that compute a run of elements from `first` on, in blocks that are copied to private arrays.

    Private arrays cannot alias, so compilers vectorize loops over them. They do not vectorize loops over many tensors
    that can overlap.
    """
    index = dialect.type(torch.uint32)
    loop = f"for ({index} i = 0; i < here; ++i)"
    passed = [*(f"x{i}[i]" for i in range(len(inputs))), *numbers, *(f"&r{i}[i]" for i in range(len(outputs)))]
    return [
        f"  const {index} last = count - first > {_RUN} ? first + {_RUN} : count;",
        *(f"  {dialect.storage_type(dtype)} x{i}[{_BLOCK}];" for i, dtype in enumerate(inputs)),
        *(f"  {dialect.storage_type(dtype)} r{i}[{_BLOCK}];" for i, dtype in enumerate(outputs)),
        f"  for ({index} at = first; at < last; at += {_BLOCK}) {{",
        f"    const {index} here = last - at > {_BLOCK} ? {_BLOCK} : last - at;",
        *(f"    {loop} x{i}[i] = this_in{i}[at + i];" for i in range(len(inputs))),
        f"    {loop} element({', '.join(passed)});",
        *(f"    {loop} this_out{i}[at + i] = r{i}[i];" for i in range(len(outputs))),
        "  }",
    ]
