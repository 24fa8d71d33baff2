"""Device functions generated from programs: from stored inputs to stored outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import STORAGE_ONLY, value_dtype
from torch_backplane.kernels.expression import Loop, Program


def statements(
    program: Program,
    dialect: Dialect,
    arguments: Sequence[str],
    prefix: str = "t",
    indices: Mapping[int | None, str] = MappingProxyType({}),
) -> tuple[list[str], list[Value]]:
    """The program as declarations of t0, t1, …, and the variables (or constants) that hold its results.

    Args:
        arguments: names of the variables that hold the program's arguments.
        prefix: prefix of the names of the declared variables.
        indices: names of the variables that hold the element's position, by dimension.
    """
    lines: list[str] = []
    values: list[Value] = []
    for instruction in program.instructions:
        if instruction.operation == "argument":
            assert isinstance(instruction.value, int)
            name = arguments[instruction.value]
        elif instruction.operation == "index":
            assert not isinstance(instruction.value, (Loop, float, complex))
            if instruction.value not in indices:
                raise TypeError("the position of an element is available only in pointwise kernels, outside of loops")
            name = indices[instruction.value]
        elif instruction.operation == "constant":
            assert instruction.value is not None
            assert not isinstance(instruction.value, Loop)
            name = dialect.constant(instruction.value, instruction.dtype)
        elif instruction.operation == "loop":
            assert isinstance(instruction.value, Loop)
            name = f"{prefix}{len(lines)}_"
            state = [values[number] for number in instruction.operands]
            lines += loop_statements(instruction.value, dialect, state, name)
        elif instruction.operation == "loop_result":
            name = f"{values[instruction.operands[0]]}{instruction.value}"
        else:
            name = f"{prefix}{len(lines)}"
            operands = [values[number] for number in instruction.operands]
            text = dialect.spell(instruction.operation, operands, instruction.dtype)
            lines.append(f"  const {dialect.type(instruction.dtype)} {name} = {text};")
        values.append(Value(name, instruction.dtype))
    return lines, [values[number] for number in program.results]


def loop_statements(loop: Loop, dialect: Dialect, initial: Sequence[Value], name: str) -> list[str]:
    """Statements that run the loop. The final state is in variables called `name` plus the position in the state."""
    state = [Value(f"{name}{i}", value.dtype) for i, value in enumerate(initial)]
    names = [variable.name for variable in state]
    tested, (holds,) = statements(loop.condition, dialect, names, f"{name}c")
    repeated, results = statements(loop.body, dialect, names, f"{name}b")
    inner = [
        *tested,
        f"  if (!({holds})) break;",
        *repeated,
        # Compute the whole new state before assigning any of it.
        *(
            f"  const {dialect.type(value.dtype)} {value}_next = {new};"
            for value, new in zip(state, results, strict=True)
        ),
        *(f"  {value} = {value}_next;" for value in state),
    ]
    return [
        *(f"  {dialect.type(value.dtype)} {value} = {first};" for value, first in zip(state, initial, strict=True)),
        "  for (;;) {",
        *(f"  {line}" for line in inner),
        "  }",
    ]


def load(dialect: Dialect, position: int, stored: str, source: torch.dtype, target: torch.dtype) -> list[str]:
    """Statements that declare `a{position}`: the element `stored`, of dtype `source`, converted to `target`.

    Formulas do not compute in float16 and bfloat16. With one of these as `target`, the value is rounded to it and kept
    as float32.
    """
    name, registers, seen = f"a{position}", value_dtype(source), value_dtype(target)
    value, lines = dialect.decode(stored, source, position), []
    if registers != seen:
        loaded = Value(f"{name}_loaded", registers)
        lines.append(f"  const {dialect.type(registers)} {loaded} = {value};")
        value = dialect.cast(loaded, seen)
    if target in STORAGE_ONLY and source != target:
        lines.append(f"  const {dialect.type(seen)} {name}_wide = {value};")
        value = dialect.decode(dialect.encode(f"{name}_wide", target), target, position)
    return [*lines, f"  const {dialect.type(seen)} {name} = {value};"]



def store(dialect: Dialect, place: str, value: Value, target: torch.dtype, name: str) -> list[str]:
    """Statements that write `value`, converted to `target`, to `place`. `name` is a free name for a variable."""
    registers = value_dtype(target)
    lines = [f"  const {dialect.type(registers)} {name} = {dialect.cast(value, registers)};"]
    return [*lines, f"  {place} = {dialect.encode(name, target)};"]


class Stored(NamedTuple):
    """The dtypes in memory of the operands of an element function."""

    inputs: Sequence[torch.dtype]
    scalars: Sequence[torch.dtype]
    outputs: Sequence[torch.dtype]


def element_function(
    name: str,
    program: Program,
    dialect: Dialect,
    stored: Stored,
    indexed: bool = False,
    rounded: Sequence[torch.dtype] = (),
) -> str:
    """The definition of the device function `name(in0, …, scalar0, …, index0, …, &out0, …)`, which runs `program`.

    It converts inputs to the dtypes of the program's arguments, and results to those of the outputs.

    Args:
        indexed: whether the function takes an index (int64) for each of the program's indices.
        rounded: dtypes that the first inputs are converted to instead of the program's, as in `load`.
    """
    inputs, scalars, outputs = stored
    indices = {dim: f"index{i}" for i, dim in enumerate(program.indices)} if indexed else {}
    parameters = [f"const {dialect.storage_type(dtype)} in{i}" for i, dtype in enumerate(inputs)]
    parameters += [f"const {dialect.storage_type(dtype)} scalar{i}" for i, dtype in enumerate(scalars)]
    parameters += [f"const {dialect.type(torch.int64)} {index}" for index in indices.values()]
    parameters += [f"{dialect.storage_type(dtype)}* out{i}" for i, dtype in enumerate(outputs)]
    given = [(f"in{i}", dtype) for i, dtype in enumerate(inputs)]
    given += [(f"scalar{i}", dtype) for i, dtype in enumerate(scalars)]
    lines: list[str] = []
    targets = [*rounded, *program.arguments[len(rounded) :]]
    for position, ((text, source), target) in enumerate(zip(given, targets, strict=True)):
        lines += load(dialect, position, text, source, target)
    arguments = [f"a{position}" for position in range(len(given))]
    body, results = statements(program, dialect, arguments, indices=indices)
    lines += body
    for i, (result, target) in enumerate(zip(results, outputs, strict=True)):
        lines += store(dialect, f"*out{i}", result, target, f"r{i}")
    return "\n".join([f"FUNCTION void {name}({', '.join(parameters)}) {{", *lines, "}\n"])


def used_dtypes(program: Program, *stored: Sequence[torch.dtype]) -> frozenset[torch.dtype]:
    """Every dtype that the text of `program` uses, with the dtypes `stored`."""
    used = {*program.arguments, *(dtype for dtypes in stored for dtype in dtypes)}
    for instruction in program.instructions:
        used.add(instruction.dtype)
        if isinstance(instruction.value, Loop):
            used |= used_dtypes(instruction.value.condition) | used_dtypes(instruction.value.body)
    return frozenset(used)
