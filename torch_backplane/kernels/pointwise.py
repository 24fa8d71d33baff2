"""Pointwise kernels from scalar formulas: one result for each element of broadcast operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_backplane.kernels.cpu import squares
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.element import Stored, element_function, used_dtypes
from torch_backplane.kernels.expression import Formula, Program, trace
from torch_backplane.kernels.kernel import Kernel, Parameter, Role, entry_point
from torch_backplane.kernels.layouts import Layout, tile_pitch
from torch_backplane.kernels.parameters import advance, declarations, pointers
from torch_backplane.kernels.templates.spelling import macros

_Place = Callable[[str], str]  # maps a tensor's name to the index of its element


def pointwise(
    name: str,
    formula: Formula | Program,
    *,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    layout: Layout,
    dialect: Dialect,
    compute: torch.dtype | Sequence[torch.dtype] | None = None,
    scalars: Sequence[torch.dtype] = (),
) -> Kernel:
    """Returns a kernel that computes `formula` for every element.

    Args:
        name: a C identifier, which the entry point's name ends with.
        formula: takes a traced value for each input, then for each scalar; returns one for each output. Or the program
            that `pointwise_program` returns for it.
        inputs, outputs: dtypes of the tensors. Results are converted to the outputs' dtypes.
        layout: from `layouts.geometry`, whose operands are the outputs, the inputs, and the program's indices, with
            `index_strides`.
        compute: dtype in which the formula sees the inputs, one for all or a list with one for each. By default it is
            the input's own, and float32 for float16 and bfloat16. In a list, float16 or bfloat16 means that an input of
            another dtype is rounded to it.
        scalars: dtypes of numbers that are kernel arguments, so that other values need no other kernel.

    Raises:
        TypeError: the dialect's device lacks a dtype, or the formula returns a wrong number of results.
        ValueError: there are no outputs, or `compute` has a wrong number of dtypes.
    """
    entry = entry_point(name)
    program = formula if isinstance(formula, Program) else pointwise_program(formula, inputs, outputs, compute, scalars)
    writer = Writer(dialect, inputs, outputs, scalars, len(program.indices), layout)
    body, parameters = writer.write()
    rounded = list(compute) if isinstance(compute, (list, tuple)) else []
    element = element_function("element", program, dialect, Stored(inputs, scalars, outputs), True, rounded)
    text = "\n".join(
        [
            dialect.header(used_dtypes(program, inputs, outputs, scalars, rounded), "\n".join([element, *body])),
            *([macros(dialect, "LOCAL ITEM GROUP BARRIER")] if layout.tile else []),
            *writer.functions,
            element,
            dialect.kernel(entry, declarations(dialect, parameters), writer.tile_group, body, bounded=True),
        ]
    )
    target = dialect.target
    group_size = writer.tile_group or (target.large_group if layout.rank else target.element_group_size)
    width = None if layout.tile else layout.width
    return Kernel(entry, text, tuple(parameters), width, None if layout.rows else group_size, writer.local_bytes)


def pointwise_program(
    formula: Formula,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    compute: torch.dtype | Sequence[torch.dtype] | None = None,
    scalars: Sequence[torch.dtype] = (),
) -> Program:
    """Traces the formula of a pointwise kernel; arguments as for `pointwise`."""
    program = trace(formula, [*_seen_as(inputs, compute), *map(value_dtype, scalars)], _number_dtype(outputs))
    if len(program.results) != len(outputs):
        raise TypeError(f"the formula returned {len(program.results)} values for {len(outputs)} outputs")
    return program


def index_strides(dim: int | None, sizes: Sequence[int]) -> list[int]:
    """The strides of an index operand: positions along `dim` of `sizes`, as if they were offsets in memory.

    Raises:
        IndexError: there is no such dimension.
    """
    if dim is None:
        return [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    if not -len(sizes) <= dim < len(sizes):
        raise IndexError(f"the position in dimension {dim} of {len(sizes)}")
    return [int(at == dim % len(sizes)) for at in range(len(sizes))]


def _seen_as(
    inputs: Sequence[torch.dtype], compute: torch.dtype | Sequence[torch.dtype] | None
) -> Sequence[torch.dtype]:
    if compute is None:
        return [value_dtype(dtype) for dtype in inputs]
    if isinstance(compute, torch.dtype):
        return [compute] * len(inputs)
    if len(compute) != len(inputs):
        raise ValueError(f"compute has {len(compute)} dtypes for {len(inputs)} inputs")
    return [value_dtype(dtype) for dtype in compute]


def _number_dtype(outputs: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype of plain numbers that a formula returns, such as fill's."""
    if not outputs:
        raise ValueError("a kernel needs at least one output")
    return value_dtype(outputs[0])


class Writer:
    """Writes the kernel around `element`: which elements a work item computes, and their indices in memory."""

    def __init__(
        self,
        dialect: Dialect,
        inputs: Sequence[torch.dtype],
        outputs: Sequence[torch.dtype],
        scalars: Sequence[torch.dtype],
        indices: int,
        layout: Layout,
    ) -> None:
        self.dialect, self.layout = dialect, layout
        self.inputs = [(f"in{i}", dtype) for i, dtype in enumerate(inputs)]
        self.outputs = [(f"out{i}", dtype) for i, dtype in enumerate(outputs)]
        self.scalars = [(f"scalar{i}", dtype) for i, dtype in enumerate(scalars)]
        self.indices = [f"index{i}" for i in range(indices)]  # operands without memory: the offset is the value
        self.index = dialect.index_type(layout.wide)
        self.tile_group: int | None = None
        self.local_bytes = 0
        self.functions: list[str] = []
        if layout.tile:
            _, width, height = layout.tile
            self.tile_group = min(dialect.target.large_group, width * height) if dialect.target.simt else 1

    def write(self) -> tuple[list[str], list[Parameter]]:
        """The kernel's body and its parameters."""
        index_dtype = torch.uint64 if self.layout.wide else torch.uint32
        parameters = [Parameter("output", dtype, i) for i, (_, dtype) in enumerate(self.outputs)]
        parameters += [Parameter("input", dtype, i) for i, (_, dtype) in enumerate(self.inputs)]
        parameters += [Parameter("scalar", dtype, i) for i, (_, dtype) in enumerate(self.scalars)]
        rank, operands = self.layout.rank, len(self.outputs) + len(self.inputs) + len(self.indices)
        count: Role = "tiles" if self.layout.tile else "rows" if self.layout.rows else "count"
        parameters.append(Parameter(count, index_dtype))
        # The outermost index is the last quotient, so its size is needed only as the length of a row or for tiles.
        sizes = rank if self.layout.tile else max(rank - 1, 1) if self.layout.rows else rank - 1
        parameters += [Parameter("size", index_dtype, dimension=dimension) for dimension in range(sizes)]
        parameters += [
            Parameter("stride", index_dtype, operand, dimension)
            for operand in range(operands)
            for dimension in range(rank)
            if dimension or not self.layout.inner or self.layout.inner[operand] >= 2  # 0 and 1 are in the text
        ]
        body = pointers(self.dialect, parameters)
        if self.layout.rows:
            return body + self._in_rows(), parameters
        if self.layout.tile:
            return body + (self._in_tiles() if self.dialect.target.simt else squares.body(self)), parameters
        body.append(f"  const {self.index} item = {self.dialect.global_index(self.layout.wide)};")
        if rank:
            return body + self._strided(), parameters
        return body + (self._vectorised() if self.layout.width > 1 else self._contiguous()), parameters

    def _contiguous(self) -> list[str]:
        return [
            f"  if ({self.dialect.beyond(('item', 'count'))}) return;",
            *self.one_element(lambda name: "item", "  "),
        ]

    def _vectorised(self) -> list[str]:
        width, dialect = self.layout.width, self.dialect
        return [
            f"  const {self.index} first = item * {width};",
            "  if (first >= count) return;",
            f"  if (count - first >= {width}) {{",
            *(f"    {dialect.load_lanes(f'{n}_lanes', dtype, n, 'item', width)}" for n, dtype in self.inputs),
            *(f"    {dialect.declare_lanes(f'{n}_lanes', dtype, width)}" for n, dtype in self.outputs),
            f"    for (int lane = 0; lane < {width}; ++lane) {{",
            f"      {self._call(lambda name: f'{name}_lanes[lane]', lambda name: 'first + lane')}",
            "    }",
            *(f"    {dialect.store_lanes(f'{n}_lanes', dtype, n, 'item', width)}" for n, dtype in self.outputs),
            "    return;",
            "  }",
            f"  for ({self.index} i = first; i < count; ++i) {{",
            *self.one_element(lambda name: "i", "    "),
            "  }",
        ]

    def _strided(self) -> list[str]:
        names = [*(name for name, _ in (*self.outputs, *self.inputs)), *self.indices]
        places = {f"{name}_at": f"stride{operand}_" for operand, name in enumerate(names)}
        return [
            f"  if ({self.dialect.beyond(('item', 'count'))}) return;",
            *(f"  {self.index} {place} = 0;" for place in places),
            *advance(self.index, "item", self.layout.rank, places),
            *self.one_element(lambda name: f"{name}_at", "  "),
        ]

    def _in_rows(self) -> list[str]:
        in_memory = [name for name, _ in (*self.outputs, *self.inputs)]
        names = [*in_memory, *self.indices]
        steps = {0: "0", 1: "item", 2: "item * stride{}_0"}
        places = {
            name: steps[step].format(operand)
            for operand, (name, step) in enumerate(zip(names, self.layout.inner, strict=True))
        }
        strides = {f"{name}_at": f"stride{operand}_" for operand, name in enumerate(names)}
        return [
            # 64 bits cannot wrap, so a compiler sees that neighbouring items access neighbouring elements.
            f"  const {self.dialect.index_type(True)} item = {self.dialect.global_index(True)};",
            f"  const {self.index} row = {self.dialect.global_row(self.layout.wide)};",
            *(f"  {self.index} {place} = 0;" for place in strides),
            # Before the bounds check, because a compiler hoists divisions out of its loop over work items only if all
            # items execute them.
            *advance(self.index, "row", self.layout.rank, strides, first=1),
            *(f"  {name} += {name}_at;" for name in in_memory),
            f"  if ({self.dialect.beyond(('item', 'size0'), ('row', 'rows'))}) return;",
            *self.one_element(lambda name: places[name] + (f" + {name}_at" if name in self.indices else ""), "  "),
        ]

    def _in_tiles(self) -> list[str]:
        """Statements for a group's tile.

        Inputs whose neighbours along y are neighbours in memory are first read in that order, into local memory. All
        other accesses go along x.
        """
        assert self.layout.tile
        along, width, height = self.layout.tile
        index = self.index
        dtypes = dict((*self.outputs, *self.inputs))
        staged = self.staged()
        pitches = {name: tile_pitch(self.layout.tile, dtypes[name].itemsize) for name in staged}
        sizes = {name: width * pitch for name, pitch in pitches.items()}
        self.local_bytes = sum(size * dtypes[name].itemsize for name, size in sizes.items())
        lines = [
            f"LOCAL {self.dialect.storage_type(dtypes[name])} {name}_tile[{size}];"
            for name, size in sizes.items()
        ]
        lines += self.tile_start()
        assert self.tile_group is not None
        rounds, left = divmod(width * height, self.tile_group)
        # The counter is the same in all items: with a loop that starts at ITEM, PoCL 3.1 computes a wrong x where x is
        # the same in all steps.
        loop = [
            f"for ({index} step = 0; step < {rounds + (left > 0)}; ++step) {{",
            f"  const {index} i = step * {self.tile_group} + ITEM;",
        ]
        whole = f"i < {width * height} && " if left else ""
        inside = f"  if ({whole}x < size0 - tile_x && y < size{along} - tile_y) {{"
        lines += [
            *loop,
            f"  const {index} x = i / {height}, y = i % {height};",
            inside,
            *(f"    {name}_tile[x * {pitches[name]} + y] = {name}[{self.in_tile(name)}];" for name in staged),
            "  }",
            "}",
            "BARRIER;",
            *loop,
            f"  const {index} x = i % {width}, y = i / {width};",
            inside,
            *self.one_element(
                lambda name: f"x * {pitches[name]} + y" if name in pitches else self.in_tile(name),
                "    ",
                staged,
            ),
            "  }",
            "}",
        ]
        return ["  " + line for line in lines]

    def names(self) -> list[str]:
        """The names of all operands, in the order of the geometry."""
        return [*(name for name, _ in (*self.outputs, *self.inputs)), *self.indices]

    def staged(self) -> list[str]:
        """The inputs that are first read along the tile's other dimension."""
        return [name for name, step in zip(self.names(), self.layout.inner, strict=True) if step == 3]

    def in_tile(self, name: str, x: str = "x", y: str = "y") -> str:
        """The index of an element of the tile, which begins at NAME_at."""
        assert self.layout.tile
        operand = self.names().index(name)
        return f"{name}_at{self.step(operand, x)} + {y} * stride{operand}_{self.layout.tile[0]}"

    def step(self, operand: int, x: str) -> str:
        """The text that advances an index by `x` elements along the innermost dimension."""
        step = self.layout.inner[operand]
        return "" if step == 0 else f" + {x}" if step == 1 else f" + {x} * stride{operand}_0"

    def tile_start(self) -> list[str]:
        """Statements that declare tile_x, tile_y, and for each operand NAME_at, the index where the tile begins."""
        assert self.layout.tile
        along, width, height = self.layout.tile
        index, names = self.index, self.names()
        outer = [dim for dim in range(1, self.layout.rank) if dim != along]
        lines = [
            f"const {index} tile = ({index})GROUP;",
            "if (tile >= tiles) return;",
            f"const {index} across = size0 / {width} + (size0 % {width} != 0);",
            f"const {index} down = size{along} / {height} + (size{along} % {height} != 0);",
            f"const {index} tile_x = tile % across * {width}, tile_y = tile / across % down * {height};",
            *([f"{index} rest = tile / across / down;"] if outer else []),
            *(f"{index} {self.in_tile(name, 'tile_x', 'tile_y').replace('_at', '_at = 0', 1)};" for name in names),
        ]
        for dim in outer:
            place = "rest"
            if dim != outer[-1]:
                place = f"at{dim}"
                lines += [f"const {index} {place} = rest % size{dim};", f"rest /= size{dim};"]
            lines += [f"{name}_at += {place} * stride{operand}_{dim};" for operand, name in enumerate(names)]
        return lines

    def one_element(self, at: _Place, indent: str, staged: Sequence[str] = ()) -> list[str]:
        # In OpenCL C, `element` can write only to private memory, so results are written to variables first.
        inputs = {name: f"{name}_tile" if name in staged else name for name, _ in self.inputs}
        call = self._call(lambda name: f"{inputs[name]}[{at(name)}]" if name in inputs else f"{name}_value", at)
        return [
            *(f"{indent}{self.dialect.storage_type(dtype)} {name}_value;" for name, dtype in self.outputs),
            indent + call,
            *(f"{indent}{name}[{at(name)}] = {name}_value;" for name, _ in self.outputs),
        ]

    def _call(self, place: _Place, position: _Place) -> str:
        arguments = [place(name) for name, _ in self.inputs] + [name for name, _ in self.scalars]
        arguments += [f"({self.dialect.type(torch.int64)})({position(name)})" for name in self.indices]
        arguments += [f"&{place(name)}" for name, _ in self.outputs]
        return f"element({', '.join(arguments)});"
