"""Builds launches from kernel templates: the complete kernel text and its arguments.

A template is a function of tensors that returns a `Launch`. It depends only on the tensors' dtypes, sizes and strides.
In the kernel text, a tensor `x` is a pointer `x`. `load_x(at)` reads it and `store_x(at, value)` writes it; both
convert float16, bfloat16 and bool. Tensors must be contiguous, unless the template lists them in `LaunchSpec.strided`
and handles their strides. Integers are parameters of type `index_t`: `int`, or a 64-bit type if a tensor is too large
for `int`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import STORAGE_ONLY, value_dtype
from torch_backplane.kernels.kernel import Kernel, Parameter, entry_point
from torch_backplane.kernels.layouts import is_wide
from torch_backplane.kernels.templates import spelling


class Launch(NamedTuple):
    """A kernel and its arguments.

    `tensors` are in the order of the kernel's output and input parameters; `numbers` are in the order of its scalar
    parameters. `global_size` is a number of work items and a multiple of `group_size`.
    """

    kernel: Kernel
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]
    global_size: int
    group_size: int


class Operands(NamedTuple):
    """Tensors by their names in the kernel text. The kernel can also read outputs."""

    outputs: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]


def named(prefix: str, values: Sequence[int]) -> dict[str, int]:
    """Returns {prefix0: values[0], prefix1: values[1], …}, for use as `LaunchSpec.integers`."""
    return {f"{prefix}{i}": value for i, value in enumerate(values)}


def extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements in memory from the tensor's first element to its last, inclusive."""
    furthest = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        furthest += (size - 1) * step
    return 1 + furthest


@dataclass(frozen=True, eq=False)
class LaunchSpec:
    """The parts of a launch of the kernel `name` with the statements `body`.

    Args:
        outputs, inputs: tensors by their names in the kernel text. The kernel can also read outputs.
        integers: sizes, strides and other integers, passed as `index_t`.
        numbers: other numbers, each with its dtype in the kernel text.
        groups: number of work groups.
        items: alternative to `groups`: number of work items that run the body. The body can use `item`, the index of
            the work item, and `items`.
        value: dtype of `value_t`.
        types: additional type names for the kernel text. float16 and bfloat16 are their form in memory.
        functions: text between the macros and the kernel.
        constants: `#define` lines. The kernel is compiled separately for each combination of values.
        group_size: work items per work group. Default: `Target.group_size`.
        strided: the tensors whose strides the body handles, with strides from `integers`. All other tensors must be
            contiguous.
        bounded: work groups beyond the last have no effect, so launchers can add some. Always true with `items`.
        reached: integers that `index_t` must hold, in addition to those that follow from the other parts.
    """

    name: str
    dialect: Dialect
    _: KW_ONLY
    outputs: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    integers: Mapping[str, int]
    body: str
    value: torch.dtype
    groups: int | None = None
    items: int | None = None
    numbers: Mapping[str, tuple[torch.dtype, int | float]] | None = None
    types: Mapping[str, torch.dtype] | None = None
    functions: str = ""
    constants: Mapping[str, int | str] | None = None
    group_size: int | None = None
    strided: Collection[str] = ()
    bounded: bool = False
    reached: Collection[int] = ()

    def launch(self) -> Launch:
        """Returns the launch.

        Raises:
            TypeError: neither `groups` nor `items` is given.
            AssertionError: a tensor is neither contiguous nor listed in `strided`.
        """
        numbers, tensors = self.numbers or {}, {**self.outputs, **self.inputs}
        group_size = self.group_size or self.dialect.target.group_size
        body, groups, integers = self.body, self.groups, self.integers
        if self.items is not None:
            groups, integers = -(-self.items // group_size), {"items": self.items, **integers}
            body = f"const index_t item = (index_t)GROUP * {group_size} + ITEM;\n  if (item >= items) return;\n{body}"
        if groups is None:
            raise TypeError(f"{self.name} needs groups or items")
        extents = [self._extent(name, tensor) for name, tensor in tensors.items()]
        wide = is_wide(groups * group_size, *integers.values(), *extents, *self.reached)
        types = {"index_t": torch.int64 if wide else torch.int32, "value_t": self.value, **(self.types or {})}
        text = _Text(
            self.name,
            self.dialect,
            tuple([(one, tensor.dtype, one in self.outputs) for one, tensor in tensors.items()]),
            tuple(integers),
            tuple([(one, dtype) for one, (dtype, _) in numbers.items()]),
            tuple(types.items()),
            self.functions,
            tuple([(constant, str(text)) for constant, text in (self.constants or {}).items()]),
            body,
            group_size,
            self.bounded or self.items is not None,
        )
        arguments = (*integers.values(), *(number for _, number in numbers.values()))
        return Launch(_kernel(text), tuple(tensors.values()), arguments, groups * group_size, group_size)

    def _extent(self, name: str, tensor: torch.Tensor) -> int:
        if name in self.strided:
            return extent(tensor)
        if tensor.is_contiguous():
            return tensor.numel()
        raise AssertionError(f"{self.name}: {name} must be contiguous or listed in strided; strides {tensor.stride()}")


class _Text(NamedTuple):
    """Everything that a kernel's text depends on. A tensor is (name, dtype, whether the kernel writes it)."""

    name: str
    dialect: Dialect
    tensors: tuple[tuple[str, torch.dtype, bool], ...]
    integers: tuple[str, ...]
    numbers: tuple[tuple[str, torch.dtype], ...]
    types: tuple[tuple[str, torch.dtype], ...]
    functions: str
    constants: tuple[tuple[str, str], ...]
    body: str
    group_size: int
    bounded: bool


@lru_cache(maxsize=1024)
def _kernel(of: _Text) -> Kernel:
    dialect, tensors, functions, body = of.dialect, of.tensors, of.functions, of.body
    aliases = dict(of.types)
    used = {*(dtype for _, dtype, _ in tensors), *(dtype for _, dtype in of.numbers), *aliases.values()}
    outputs = [dtype for _, dtype, written in tensors if written]
    inputs = [dtype for _, dtype, written in tensors if not written]
    parameters = [Parameter("output", dtype, i) for i, dtype in enumerate(outputs)]
    parameters += [Parameter("input", dtype, i) for i, dtype in enumerate(inputs)]
    parameters += [Parameter("scalar", aliases["index_t"], i) for i in range(len(of.integers))]
    parameters += [Parameter("scalar", dtype, len(of.integers) + i) for i, (_, dtype) in enumerate(of.numbers)]
    declared: list[str] = []
    pointers: list[str] = []
    for tensor, dtype, written in tensors:
        declared += dialect.buffer_parameters(tensor, dtype, written)
        pointers += dialect.buffer_pointer(tensor, dtype, written)
    declared += [f"const index_t {integer}" for integer in of.integers]
    # A bool argument is passed as a byte that is 0 or 1.
    for number, dtype in of.numbers:
        kind = dialect.storage_type(dtype) if dtype == torch.bool else dialect.type(dtype)
        declared.append(f"const {kind} {number}")

    lanes = re.search(r"\bLANES\b|\bvalue_t_lanes\b|\bSUM_lanes\b|\b(load|store)_\w+_lanes\b", body)
    parts = [
        dialect.header(frozenset(used), functions + body),
        spelling.macros(dialect, functions + body),
        *(f"typedef {_type(dialect, dtype)} {alias};" for alias, dtype in of.types),
        *(f"#define {constant} {text}" for constant, text in of.constants),
        *(_access(dialect, tensor, dtype) for tensor, dtype, _ in tensors),
    ]
    if lanes:
        value = aliases["value_t"]
        parts.append(spelling.lanes(dialect, value))
        parts.append(spelling.lane_functions(dialect, frozenset(used), value))
        parts += [spelling.lane_access(dialect, tensor, dtype, value) for tensor, dtype, _ in tensors]
    parts += [spelling.pointers(dialect, tensor, dtype) for tensor, dtype, _ in tensors if f"{tensor}_pointer" in body]
    entry = entry_point(of.name)
    parts += [functions, dialect.kernel(entry, declared, of.group_size, [*pointers, body], of.bounded)]
    shared = local_bytes(functions + body, aliases, dict(of.constants))
    return Kernel(entry, "\n".join(parts), tuple(parameters), None, of.group_size, shared)


def _type(dialect: Dialect, dtype: torch.dtype) -> str:
    return dialect.storage_type(dtype) if dtype in STORAGE_ONLY else dialect.type(dtype)


_LOCAL = re.compile(r"\bLOCAL (?:ALIGNED )?(\w+) ([^;]+);")
_ARRAY = re.compile(r"\w+((?:\[[^]]+\])+)")
_C_TYPES = {"int": torch.int32, "uint": torch.uint32, "float": torch.float32}  # the same in all dialects


def local_bytes(text: str, types: Mapping[str, torch.dtype], constants: Mapping[str, str] | None = None) -> int:
    """Returns the bytes of local memory that `text` declares as `LOCAL TYPE NAME[SIZE]…, NAME[SIZE]…;`.

    Args:
        text: kernel text.
        types: dtypes by type name, in addition to int, uint and float.
        constants: values of named constants. An array size is a sum of products of decimal numbers and constants.

    Raises:
        ValueError: the size or type of an array is not of this form.
    """
    total, known = 0, constants or {}
    for kind, arrays in _LOCAL.findall(text):
        dtype = types.get(kind, _C_TYPES.get(kind))
        for array in arrays.split(","):
            found = _ARRAY.fullmatch(array.strip())
            sizes = re.findall(r"\[([^]]+)\]", found[1]) if found is not None else []
            words = [[one.strip() for one in part.split("*")] for size in sizes for part in size.split("+")]
            numbers = {one: known.get(one, one) for part in words for one in part}
            if dtype is None or not sizes or not all(number.isdecimal() for number in numbers.values()):
                raise ValueError(f"cannot determine the size of LOCAL {kind} {array.strip()}")
            terms = [
                sum(math.prod(int(numbers[one.strip()]) for one in part.split("*")) for part in size.split("+"))
                for size in sizes
            ]
            total += math.prod(terms) * dtype.itemsize
    return total


def _access(dialect: Dialect, name: str, dtype: torch.dtype) -> str:
    registers = dialect.type(value_dtype(dtype))
    value = "(x) != 0" if dtype == torch.bool else f"({registers})(x)"
    return (
        f"#define load_{name}(at) ({dialect.decode(f'{name}[at]', dtype)})\n"
        f"#define store_{name}(at, x) {name}[at] = {dialect.encode(value, dtype)}"
    )


def rows_per_group(dialect: Dialect) -> int:
    """Returns the group size for kernels with one row per work item; small on non-SIMT targets."""
    return dialect.target.small_group(8)


def row_groups(dialect: Dialect, rows: int) -> tuple[int, int]:
    """Returns (groups, group_size) for kernels in which one team of `Target.team_size` work items handles each row."""
    team = dialect.target.team_size
    if team > 1:
        return rows, team
    size = rows_per_group(dialect)
    return -(-rows // size), size


def row_start(dialect: Dialect) -> str:
    """Returns statements that declare `row` and `member`, the work item's index in its team.

    Work items without a row return.
    """
    if dialect.target.team_size > 1:
        return "const index_t row = GROUP; const int member = ITEM;"
    size = rows_per_group(dialect)
    return f"const index_t row = (index_t)GROUP * {size} + ITEM; const int member = 0; if (row >= rows) return;"


def row_loop(dialect: Dialect, statement: str, size: str = "size") -> str:
    """Returns a loop that runs `statement` for every index `i` below `size`.

    The loop handles LANES elements per step, then the remaining elements one by one. `@` in `statement` becomes
    `_lanes` in the vector part and nothing in the scalar part.
    """
    team = dialect.target.team_size
    lines = [f"{{ index_t i = (index_t)member * LANES;\nfor (; i + LANES <= {size}; i += {team} * LANES) {{"]
    lines.append(statement.replace("@", "_lanes") + "}")
    if team == 1:
        lines.append(f"for (; i < {size}; ++i) {{ {statement.replace('@', '')} }}")
    return "\n".join([*lines, "}"])


def team_shared(dialect: Dialect) -> str:
    """Returns the local memory declarations for `team_reduce` and `team_sum`, for the beginning of the body."""
    team = dialect.target.team_size
    places = team if team > dialect.subgroup_size else 1
    return f"LOCAL value_t team_shared[{places}], team_lost[{places}];" if team > 1 else ""


def team_reduce(dialect: Dialect, variable: str, combine: str = "{0} + {1}") -> str:
    """Returns statements that reduce `variable` over the team with `combine`. Every member receives the result."""
    if dialect.target.team_size == 1:
        return ""
    return _meet(dialect, {variable: "team_shared"}, f"{variable} = {combine.format(variable, f'other_{variable}')};")


def team_sum(dialect: Dialect, name: str) -> str:
    """Returns statements that add up the sum `name`, declared by SUM and SUM_lanes, over all lanes and team members.

    Every member receives the result.
    """
    meet = f"MEET({name});"
    if dialect.target.team_size == 1:
        return meet
    lost = f"{name}_lost"
    return f"\n  {meet}" + _meet(
        dialect, {name: "team_shared", lost: "team_lost"}, f"ADD({name}, other_{name}); {lost} += other_{lost};"
    )


def _meet(dialect: Dialect, shared: Mapping[str, str], add: str) -> str:
    """Returns statements that reduce variables over a team by a tree and broadcast the result to every member.

    Steps within a subgroup use shuffles; other steps use local memory.

    Args:
        shared: the `value_t` variables, each with its array in local memory.
        add: statements that combine each variable NAME with `other_NAME`, the value of another member.
    """
    team = dialect.target.team_size
    subgroup = min(team, dialect.subgroup_size)

    def each(statement: str) -> str:
        return " ".join(statement.format(name=name, array=array) for name, array in shared.items())

    put = each("{array}[member] = {name};")
    lines = []
    if subgroup < team:
        lines.append(f"""{put}
  BARRIER;
  for (int half_size = {team // 2}; half_size >= {subgroup}; half_size >>= 1) {{
    if (member < half_size) {{ {each("const value_t other_{name} = {array}[member + half_size];")} {add} {put} }}
    BARRIER;
  }}""")
    if subgroup > 1:
        lines.append(f"""for (int half_size = {subgroup // 2}; half_size > 0; half_size >>= 1) {{
    {each("const value_t other_{name} = subgroup_shuffle_down({name}, half_size);")} {add}
  }}
  if (member == 0) {{ {each("{array}[0] = {name};")} }}
  BARRIER;""")
    lines.append(f"{each('{name} = {array}[0];')}\n  BARRIER;")
    return "".join(f"\n  {line}" for line in lines)


def split(index: str, sizes: Sequence[str], names: Sequence[str]) -> str:
    """Returns statements that declare `names`, the coordinates of linear `index` in `sizes` (innermost last)."""
    lines = [f"index_t {index}_rest = {index};"]
    for size, name in zip(reversed(sizes[1:]), reversed(names[1:]), strict=True):
        lines.append(f"const index_t {name} = {index}_rest % {size}; {index}_rest /= {size};")
    return " ".join([*lines, f"const index_t {names[0]} = {index}_rest;"])


def rows_and_columns(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Returns (product of sizes before `dim`, size of `dim`, product of sizes after `dim`).

    A 0-dim shape counts as one row of one element.
    """
    if not shape:
        return 1, 1, 1
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def substitute(text: str, parts: Mapping[str, str]) -> str:
    """Replaces each $name in `text` by its text in `parts`, recursively. KeyError if `parts` lacks a name."""
    return re.sub(r"\$(\w+)", lambda match: substitute(parts[match[1]], parts), text)
