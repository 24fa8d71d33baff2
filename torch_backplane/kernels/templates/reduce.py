"""Reductions without teams: a work item has LANES states, which are reduced side by side in a vector register.

Two forms. `rows`: lanes are neighbouring elements of one result. `columns`: lanes are neighbouring results, where the
elements of one result are far from each other in memory and those of the next result beside them. Where there are few
results, the elements of each are reduced in chunks to partial states, which a second launch combines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.element import element_function
from torch_backplane.kernels.expression import Number, trace
from torch_backplane.kernels.layouts import ReductionGeometry
from torch_backplane.kernels.reductions import BLOCK, Reduction
from torch_backplane.kernels.templates.source import Launch, make_launch

LANES = 16
_GROUP = 8
# With fewer work items than this, the elements of each result are divided among several; each takes at least _CHUNK.
_ENOUGH_ITEMS, _CHUNK = 64, 8 * LANES * BLOCK


def by_columns(where: ReductionGeometry, outputs: int) -> bool:
    """Whether neighbouring results, and not neighbouring elements, are beside each other in memory."""
    if not where.kept.sizes or where.kept.sizes[0] < LANES // 2:
        return False
    reduced = where.reduced.strides
    beside = all(not s or s[0] == 1 for s in reduced)
    return not beside and all(strides[0] == 1 for strides in where.kept.strides[outputs:])


def chunk_count(where: ReductionGeometry, columns: bool) -> int:
    """How many work items share the elements of a result."""
    results = where.kept.count
    items = results if not columns else results // where.kept.sizes[0] * -(-where.kept.sizes[0] // LANES)
    if items >= _ENOUGH_ITEMS:
        return 1
    smallest = _CHUNK if not columns else _CHUNK // LANES
    return max(1, min(_ENOUGH_ITEMS // items, where.reduced.count // smallest))


def lane_functions(
    dialect: Dialect,
    definition: Reduction,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype] | None,
    compute: torch.dtype | None = None,
) -> str:
    """The definition's functions as text.

    Args:
        inputs: dtypes.
        outputs: dtypes; None where there is nothing to finish, as results are reduced again.
        compute: what `start` sees the inputs as.
    """
    state, numbers = list(definition.state), [torch.int64, *definition.scalars]
    seen_as = [compute or value_dtype(dtype) for dtype in inputs]
    start = trace(definition.start, [*seen_as, *numbers], value_dtype(state[0]))
    combine = trace(definition.combine, [*state, *state], value_dtype(state[0]))
    add = combine if definition.add is None else trace(definition.add, [*state, *state], value_dtype(state[0]))
    functions = [
        element_function("add", add, dialect, [*state, *state], [], state),
        element_function("start", start, dialect, inputs, numbers, state),
        element_function("combine", combine, dialect, [*state, *state], [], state),
    ]
    if outputs is not None:
        finish = trace(definition.finish, [*state, *numbers], value_dtype(outputs[0]))
        functions.append(element_function("finish", finish, dialect, state, numbers, outputs))
    return "\n".join(functions)


def reduce_lanes(
    dialect: Dialect,
    name: str,
    definition: Reduction,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    where: ReductionGeometry,
    *,
    scalars: Sequence[int | float] = (),
    columns: bool = False,
    chunks: int = 1,
    total: int | None = None,
    compute: torch.dtype | None = None,
    functions: str | None = None,
) -> Launch:
    """Reduces `inputs` to `outputs`.

    Args:
        scalars: the definition's numbers.
        columns: which form.
        chunks: into how many parts each result's elements are divided. With more than one, outputs are the states,
            contiguous tensors of (results, chunks).
        total: the number of elements that `finish` is told, if it is not that of these inputs.
        compute: what `start` sees the inputs as.
        functions: what `lane_functions` says of this definition, where that is known.
    """
    output_dtypes = tuple([t.dtype for t in outputs])
    if functions is None:
        finished = output_dtypes if chunks == 1 else None
        functions = lane_functions(dialect, definition, [t.dtype for t in inputs], finished, compute)
    kept, reduced = where.kept, where.reduced
    count, reduced_count = kept.count, reduced.count
    row_size = kept.sizes[0] if columns else 1
    chunk = -(-reduced_count // (chunks * LANES * BLOCK)) * LANES * BLOCK if chunks > 1 else max(1, reduced_count)
    blocks = -(-row_size // LANES) if columns else 1
    items = count // row_size * blocks * chunks
    # Partial states are written by the number of their result.
    kept_strides = kept.strides if chunks == 1 else kept.strides[-len(inputs) :]
    operands = (len(outputs) if chunks == 1 else 0, len(inputs))
    ranks = (len(kept.sizes), len(reduced.sizes))
    names, integer_names = _names(operands, ranks)
    numbers = [items, chunks, chunk, blocks, row_size, reduced_count, reduced_count if total is None else total]
    numbers += (*kept.sizes, *reduced.sizes)
    for strides in (*kept_strides, *reduced.strides):
        numbers += strides
    state = tuple(definition.state)
    identity = tuple(definition.identity)
    exactly = tuple(map(repr, identity))  # 0.0 == -0.0
    text = _text(
        dialect, state, identity, exactly, output_dtypes, operands, ranks, columns, chunks > 1, len(definition.scalars)
    )
    return make_launch(
        f"{name}_{'columns' if columns else 'rows'}" + ("_chunks" if chunks > 1 else ""),
        dialect,
        outputs={f"out{i}": t for i, t in enumerate(outputs)},
        inputs={f"in{i}": t for i, t in enumerate(inputs)},
        integers=dict(zip(integer_names, numbers, strict=True)),
        numbers={f"scalar{i}": one for i, one in enumerate(zip(definition.scalars, scalars, strict=True))},
        value=value_dtype(definition.state[0]),
        types={"int64": torch.int64},
        functions=functions,
        body=text,
        groups=-(-items // _GROUP),
        group_size=_GROUP,
        strided=names,
        bounded=True,
    )


@lru_cache(maxsize=256)
def _names(operands: tuple[int, int], ranks: tuple[int, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of outputs and inputs, so many as `operands` says; and of all integers."""
    names = (*(f"out{i}" for i in range(operands[0])), *(f"in{i}" for i in range(operands[1])))
    kept, reduced = map(range, ranks)
    integers = (
        *("items", "chunks", "chunk", "blocks", "row_size", "reduced_count", "total"),
        *(f"size{d}" for d in kept),
        *(f"reduced_size{d}" for d in reduced),
        *(f"{name}_stride{d}" for name in names for d in kept),
        *(f"in{i}_reduced_stride{d}" for i in range(operands[1]) for d in reduced),
    )
    return names, integers


@lru_cache(maxsize=1024)
def _text(
    dialect: Dialect,
    state: tuple[torch.dtype, ...],
    identity: tuple[Number, ...],
    exactly: tuple[str, ...],
    outputs: tuple[torch.dtype, ...],
    operands: tuple[int, int],
    ranks: tuple[int, int],
    columns: bool,
    partial: bool,
    scalars: int,
) -> str:
    """The body. `exactly` is `identity` as text, which tells zeros apart."""
    names, _ = _names(operands, ranks)
    types, output_types = (tuple(map(dialect.storage_type, dtypes)) for dtypes in (state, outputs))
    constants = tuple(map(dialect.constant, identity, state))
    writer = _Writer(operands[1], ranks, columns, partial, names, scalars, types, output_types, constants)
    return writer.body()


class _Writer:
    def __init__(
        self,
        inputs: int,
        ranks: tuple[int, int],
        columns: bool,
        partial: bool,
        names: Sequence[str],
        scalars: int,
        types: Sequence[str],
        output_types: Sequence[str],
        identity: Sequence[str],
    ) -> None:
        self.inputs, self.columns, self.partial, self.names = inputs, columns, partial, names
        self.kept_rank, self.reduced_rank = ranks
        self.scalars = "".join(f", scalar{i}" for i in range(scalars))
        self.types, self.output_types, self.identity = types, output_types, identity

    def body(self) -> str:
        return f"""
  const index_t item = (index_t)GROUP * {_GROUP} + ITEM;
  if (item >= items) return;
  const index_t chunk_number = item % chunks, first_result = item / chunks / blocks * row_size
    + item / chunks % blocks * {LANES};
  const index_t first = chunk_number * chunk, last = min(first + chunk, reduced_count);
  {self._places("first_result", self.kept_rank, "size", "stride", self.names)}
  {self._by_columns() if self.columns else self._by_rows()}
"""

    def _by_rows(self) -> str:
        half = LANES // 2
        # What is left of rows is reduced by itself, and counts as a block when it has the elements of one.
        return f"""{self._declare("state", "part", "block")} {self._declare("rest", lanes="1")}
  {self._identity("state")} {self._identity("part")} {self._identity("rest", "1")}
  int whole_blocks = 0, left = 0;
  for (index_t row_first = first; row_first < last;) {{
    {self._reduced_places("row_first", outer_only=True)}
    const index_t row_begin = {"row_first % reduced_size0" if self.reduced_rank else "0"};
    const index_t row_last = min(last, row_first - row_begin + {"reduced_size0" if self.reduced_rank else "1"});
    index_t position = row_first;
    while (position + {LANES} <= row_last) {{
      {self._identity("block")}
      for (int step = 0; step < {BLOCK} && position + {LANES} <= row_last; ++step, position += {LANES})
        for (int lane = 0; lane < {LANES}; ++lane) {{
          const index_t along = row_begin + (position - row_first) + lane;
          {self._step("block", "position + lane", "along")}
        }}
      {self._add_block()}
    }}
    for (; position < row_last; ++position, ++left) {{
      const int lane = 0;
      const index_t along = row_begin + (position - row_first);
      {self._step("rest", "position", "along")}
    }}
    if (left >= {BLOCK}) {{
      {self._combine("part", "0", "rest", "0")} {self._identity("rest", "1")}
      left = 0;
      {self._add_part(f"++whole_blocks >= {BLOCK}")}
    }}
    row_first = row_last;
  }}
  if (last - first >= {LANES}) {{
    {self._add_part("true")}
    for (int half_size = {half}; half_size > 0; half_size /= 2)
      for (int lane = 0; lane < half_size; ++lane) {{ {self._combine("state", "lane", "state", "lane + half_size")} }}
  }}
  {self._combine("state", "0", "rest", "0")}
  {self._finish("0", "first_result", "")}
"""

    def _add_block(self, lanes: str = str(LANES)) -> str:
        """Statements that add the lanes of a block to a part, and after BLOCK of them the part to the state."""
        return f"""for (int lane = 0; lane < {lanes}; ++lane) {{ {self._combine("part", "lane", "block", "lane")} }}
      {self._add_part(f"++whole_blocks >= {BLOCK}", lanes)}"""

    def _add_part(self, when: str, lanes: str = str(LANES)) -> str:
        return f"""if ({when}) {{
        for (int lane = 0; lane < {lanes}; ++lane) {{ {self._combine("state", "lane", "part", "lane")} }}
        {self._identity("part")}
        whole_blocks = 0;
      }}"""

    def _by_columns(self) -> str:
        def loop(lanes: str) -> str:
            return f"""for (index_t position = first; position < last;) {{
      {self._identity("block")}
      for (int step = 0; step < {BLOCK} && position < last; ++step, ++position) {{
        {self._reduced_places("position")}
        for (int lane = 0; lane < {lanes}; ++lane) {{
          const index_t along = lane;
          {self._step("block", "position", None)}
        }}
      }}
      {self._add_block(lanes)}
    }}
    {self._add_part("true", lanes)}"""

        finish = self._finish("lane", "first_result + lane", " + lane * {name}_stride0")
        return f"""{self._declare("state", "part", "block")}
  const index_t left = row_size - item / chunks % blocks * {LANES};
  const int columns = left < {LANES} ? (int)left : {LANES};
  {self._identity("state")} {self._identity("part")}
  int whole_blocks = 0;
  if (columns == {LANES}) {{ {loop(str(LANES))} }} else {{ {loop("columns")} }}
  for (int lane = 0; lane < columns; ++lane) {{ {finish} }}
"""

    def _places(self, index: str, rank: int, size: str, stride: str, names: Sequence[str]) -> str:
        lines = [f"index_t {index}_rest = {index};"] + [f"index_t {name}_at = 0;" for name in names]
        for d in range(rank):
            at = f"{index}_rest"
            if d < rank - 1:
                at = f"{index}_{d}"
                lines.append(f"const index_t {at} = {index}_rest % {size}{d}; {index}_rest /= {size}{d};")
            lines += [f"{name}_at += {at} * {name}_{stride}{d};" for name in names]
        return " ".join(lines)

    def _reduced_places(self, index: str, *, outer_only: bool = False) -> str:
        """Statements that declare in0_from, …: where the element at position `index` is; or the row that it is in."""
        rank = self.reduced_rank
        names = [f"in{i}" for i in range(self.inputs)]
        lines = [f"index_t {name}_from = {name}_at;" for name in names]
        if rank > 1 or not outer_only:
            lines.append(f"index_t {index}_rest = {index};")
        for d in range(rank):
            at = f"{index}_rest"
            if d < rank - 1:
                at = f"{index}_{d}"
                lines.append(f"const index_t {at} = {index}_rest % reduced_size{d}; {index}_rest /= reduced_size{d};")
            if d or not outer_only:
                lines += [f"{name}_from += {at} * {name}_reduced_stride{d};" for name in names]
        return " ".join(lines)

    def _declare(self, *names: str, lanes: str = str(LANES)) -> str:
        arrays = (", ".join(f"{name}{i}[{lanes}]" for name in names) for i in range(len(self.types)))
        return " ".join(f"{t} {array};" for t, array in zip(self.types, arrays, strict=True))

    def _identity(self, name: str, lanes: str = str(LANES)) -> str:
        sets = " ".join(f"{name}{i}[lane] = {value};" for i, value in enumerate(self.identity))
        return f"for (int lane = 0; lane < {lanes}; ++lane) {{ {sets} }}"

    def _step(self, name: str, position: str, along: str | None) -> str:
        """Adds the element to the lane of `name`; `along` is where it is in its row, or None for columns."""
        step = "in{i}_reduced_stride0" if self.reduced_rank else "0"
        offset = f"{along} * {step}" if along else "lane"
        elements = ", ".join(f"in{i}[in{i}_from + {offset.format(i=i)}]" for i in range(self.inputs))
        declared = " ".join(f"{t} next{i};" for i, t in enumerate(self.types))
        pointers = ", ".join(f"&next{i}" for i in range(len(self.types)))
        own = ", ".join(f"{name}{i}[lane]" for i in range(len(self.types)))
        others = ", ".join(f"next{i}" for i in range(len(self.types)))
        results = ", ".join(f"&{name}{i}[lane]" for i in range(len(self.types)))
        start = f"start({elements}, (int64)({position}){self.scalars}, {pointers});"
        return f"{declared} {start} add({own}, {others}, {results});"

    def _combine(self, to: str, lane: str, name: str, other: str) -> str:
        numbers = range(len(self.types))
        own, others = (", ".join(f"{n}{i}[{at}]" for i in numbers) for n, at in ((to, lane), (name, other)))
        return f"combine({own}, {others}, {', '.join(f'&{to}{i}[{lane}]' for i in numbers)});"

    def _finish(self, lane: str, result: str, offset: str) -> str:
        numbers = range(len(self.types))
        if self.partial:
            return " ".join(f"out{i}[({result}) * chunks + chunk_number] = state{i}[{lane}];" for i in numbers)
        declared = " ".join(f"{t} out{i}_value;" for i, t in enumerate(self.output_types))
        states = ", ".join(f"state{i}[{lane}]" for i in numbers)
        pointers = ", ".join(f"&out{i}_value" for i in range(len(self.output_types)))
        stores = " ".join(
            f"out{i}[out{i}_at{offset.format(name=f'out{i}')}] = out{i}_value;" for i in range(len(self.output_types))
        )
        return f"{declared} finish({states}, (int64)total{self.scalars}, {pointers}); {stores}"


def contiguous_strides(sizes: Sequence[int], step: int) -> tuple[int, ...]:
    """Strides of `sizes`, the innermost first, where neighbours are `step` apart."""
    return tuple(step * math.prod(sizes[:d]) for d in range(len(sizes)))
