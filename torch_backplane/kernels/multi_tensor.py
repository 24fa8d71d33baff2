"""One launch for many tensors: the same formula on each of several slots, every slot with tensors of its own.

Optimizers step over hundreds of small tensors; a launch for each would cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.element import element_function, used_dtypes
from torch_backplane.kernels.expression import Formula, trace
from torch_backplane.kernels.kernel import Kernel, Parameter, entry_point
from torch_backplane.kernels.parameters import declarations, pointers

WIDTH = 4  # elements for each work item


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
    then the scalars of all slots, then a count of elements (uint32) for each; a slot with count 0 is skipped. The
    launch takes a work item for each four elements of a slot, in sum.
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
    body = [*pointers(dialect, parameters), f"  {dialect.type(torch.uint32)} item = {dialect.global_index(False)};"]
    for slot in range(slots):
        count = f"scalar{slots * len(scalars) + slot}"
        passed = [f"out{slot * len(outputs) + i}" for i in range(len(outputs))]
        passed += [f"in{slot * len(read) + i}" for i in range(len(read))]
        passed += [f"scalar{slot * len(scalars) + i}" for i in range(len(scalars))]
        items = f"({count} + {WIDTH - 1}) / {WIDTH}"
        body.append(f"  if (item < {items}) {{ one_slot({', '.join(passed)}, item, {count}); return; }}")
        body.append(f"  item -= {items};")
    element = element_function("element", program, dialect, read, scalars, outputs)
    text = "\n".join(
        [
            dialect.header(used_dtypes(program, read, outputs, numbers), element),
            element,
            _slot_function(dialect, inputs, singles, scalars, outputs),
            dialect.kernel(entry, declarations(dialect, parameters), None, body, bounded=True),
        ]
    )
    return Kernel(entry, text, tuple(parameters), WIDTH)


def _slot_function(
    dialect: Dialect,
    inputs: Sequence[torch.dtype],
    singles: Sequence[torch.dtype],
    scalars: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
) -> str:
    """`one_slot(out0, …, in0, …, scalar0, …, item, count)`: four elements of one slot."""
    index = dialect.type(torch.uint32)
    read = [*inputs, *singles]
    declared = [f"{dialect.pointer_type(dtype, True)} out{i}" for i, dtype in enumerate(outputs)]
    declared += [f"{dialect.pointer_type(dtype, False)} in{i}" for i, dtype in enumerate(read)]
    declared += [f"const {dialect.storage_type(dtype)} scalar{i}" for i, dtype in enumerate(scalars)]
    elements = [f"in{i}[i]" for i in range(len(inputs))] + [f"in{len(inputs) + i}[0]" for i in range(len(singles))]
    passed = [*elements, *(f"scalar{i}" for i in range(len(scalars))), *(f"&r{i}" for i in range(len(outputs)))]
    return "\n".join(
        [
            f"FUNCTION void one_slot({', '.join(declared)}, const {index} item, const {index} count) {{",
            f"  const {index} first = item * {WIDTH};",
            f"  const {index} end = count - first < {WIDTH} ? count : first + {WIDTH};",
            f"  for ({index} i = first; i < end; ++i) {{",
            *(f"    {dialect.storage_type(dtype)} r{i};" for i, dtype in enumerate(outputs)),
            f"    element({', '.join(passed)});",
            *(f"    out{i}[i] = r{i};" for i in range(len(outputs))),
            "  }",
            "}\n",
        ]
    )
