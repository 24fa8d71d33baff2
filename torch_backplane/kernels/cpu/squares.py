"""Pointwise kernels on CPUs with tiles, for operands whose order in memory differs from that of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_backplane.kernels.templates.spelling import turning

if TYPE_CHECKING:
    from torch_backplane.kernels.pointwise import Writer

# The side of the squares that are transposed in registers, by the size of an element in bytes.
_EDGES = {1: 16, 2: 16, 4: 16, 8: 8}


def body(writer: Writer) -> list[str]:
    """Statements for a thread's tile.

    Inputs whose neighbours along y are neighbours in memory are first transposed in registers, square by square. All
    other accesses go along x, where compilers vectorize.
    """
    assert writer.layout.tile
    along, width, height = writer.layout.tile
    wide, names, dtypes = writer.dialect.index_type(True), writer.names(), dict((*writer.outputs, *writer.inputs))
    staged = [name for name in writer.staged() if writer.dialect.vectors and _edge(dtypes[name]) > 0]
    lines = writer.tile_start()
    lines += [
        f"const {writer.index} here_x = min(size0 - tile_x, ({writer.index}){width});",
        f"const {writer.index} here_y = min(size{along} - tile_y, ({writer.index}){height});",
    ]
    for name in staged:
        kind, edge = writer.dialect.storage_type(dtypes[name]), _edge(dtypes[name])
        stride = f"stride{names.index(name)}_{along}"
        each = f"for (int i = 0; i < {edge}; ++i)"
        lines += [
            f"{kind} {name}_tile[{width * height}];",
            f"for ({writer.index} x = 0; x < here_x; x += {edge})",
            f"  for ({writer.index} y = 0; y < here_y; y += {edge}) {{",
            f"    const {writer.index} end_x = min(x + {edge}, here_x), end_y = min(y + {edge}, here_y);",
            f"    if (end_x == x + {edge} && end_y == y + {edge} && {stride} == 1) {{",
            f"      {kind}{edge} square[{edge}];",
            f"      {each} square[i] = vload{edge}(0, {name} + {writer.in_tile(name, '(x + i)')});",
            f"      turn_{kind}(square);",
            f"      {each} vstore{edge}(square[i], 0, {name}_tile + (y + i) * {width} + x);",
            "      continue;",
            "    }",
            f"    for ({writer.index} i = x; i < end_x; ++i) {{",
            f"      const {wide} from = {writer.in_tile(name, 'i', 'y')}, step = {stride};",
            f"      for ({wide} j = 0; j < end_y - y; ++j)",
            f"        {name}_tile[(y + j) * {width} + i] = {name}[from + j * step];",
            "    }",
            "  }",
        ]

    def place(name: str) -> str:
        if name in staged:
            return f"y * {width} + x"
        operand = names.index(name)
        return f"{name}_row" + writer.step(operand, "x")

    def row(end: str) -> list[str]:
        return [f"    for ({wide} x = 0; x < {end}; ++x) {{", *writer.one_element(place, "      ", staged), "    }"]

    for dtype in {writer.dialect.storage_type(dtypes[name]): dtypes[name] for name in staged}.values():
        kind, edge = writer.dialect.storage_type(dtype), _edge(dtype)
        writer.functions.append(turning(f"turn_{kind}", f"{kind}{edge}", edge, 8 * dtype.itemsize))
    lines += [
        f"for ({writer.index} y = 0; y < here_y; ++y) {{",
        # 64 bits cannot wrap, so a compiler sees that accesses are to neighbouring elements.
        *(f"  const {wide} {name}_row = {writer.in_tile(name, '0')};" for name in names if name not in staged),
        f"  if (here_x == {width}) {{",
        *row(str(width)),
        "  } else {",
        *row("here_x"),
        "  }",
        "}",
    ]
    return ["  " + line for line in lines]


def _edge(dtype: torch.dtype) -> int:
    """The side of a square of this dtype; 0 for complex dtypes, which are not transposed in registers."""
    return 0 if dtype.is_complex else _EDGES[dtype.itemsize]
