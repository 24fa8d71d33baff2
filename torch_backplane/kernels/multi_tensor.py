"""One launch for many tensors: the same formula on each of several slots, every slot with tensors of its own.

Optimizers step over hundreds of small tensors; a launch for each would cost more than the arithmetic.
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

_RUN, _BLOCK = 1024, 64  # elements of a work item that is a thread, and of those that it reads before it writes any


def slots_within(
    dialect: Dialect,
    most: int,
    *,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    singles: Sequence[torch.dtype] = (),
    scalars: Sequence[torch.dtype] = (),
) -> int:
    """How many slots a launch can have, `most` at most, by what the target takes as arguments; at least 1."""
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
    """A kernel that computes `formula` for every element of each slot's tensors, which are contiguous.

    Args:
        formula: takes a traced value for each input, then each single, then each scalar; returns one for each output.
        slots: how many sets of tensors one launch takes (`slots_within`).
        inputs, outputs: dtypes of a slot's tensors, all of one size. An output may be an input's memory.
        singles: dtypes of a slot's tensors of one element, which all of its elements see.
        compute: what the formula sees inputs as; singles are seen as they are.
        scalars: dtypes of a slot's numbers.

    The parameters are the outputs of all slots, slot by slot, then the inputs and singles of all slots in the same way,
    then the scalars of all slots, then a count of elements (uint32) for each; a slot with count 0 is skipped. A group
    is of one slot: the launch takes as many whole groups as each slot needs, in sum. A work item has `Kernel.width`
    neighbouring elements.
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
        """Which of a name's numbers is the group's slot's: `first` plus `each` for every slot before. Slots are chosen
        among and not branched to, so that vectors can be made.
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
    """The element at `first`."""
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
    """Those from `first` on, by blocks in memory of the work item's own, which no pointer reaches: of loops over it
    compilers make vectors, and not where so many tensors may overlap.
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
