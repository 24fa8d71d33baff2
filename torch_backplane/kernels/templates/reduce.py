"""Reductions: turns (start, combine, finish) into one launch, or into two for few results of many elements.

With two launches, the first reduces chunks of each result's elements to partial states, and the second combines these.
There are two forms:

- By threads, if `Target.team_size` is 1, as on CPUs. A work item has LANES states, which it reduces in parallel in a
  vector register. In rows, lanes are adjacent elements of one result; a short row has at most one block per lane. In
  columns, lanes are adjacent results: the elements of one result are far apart in memory, but next to those of the next
  result.
- By teams, otherwise. The work items of a team share a result, and combine their states in a tree: within subgroups by
  shuffles, otherwise in local memory. A work group has several teams. In rows, consecutive work items have adjacent
  elements; in columns, adjacent results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import stored_dtype, value_dtype
from torch_backplane.kernels.element import Stored, element_function
from torch_backplane.kernels.expression import Number
from torch_backplane.kernels.layouts import Geometry, Layout, ReductionGeometry
from torch_backplane.kernels.reductions import BLOCK, Reduction, programs
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import Launch, LaunchSpec

LANES = 16
_GROUP = 8  # group size by threads, if the device allows it
# Columns that a work item by threads handles before it moves to the next rows. So adjacent elements are read together,
# instead of in several passes over all rows, which are pages apart.
_WIDTH = 8 * LANES
# With fewer work items by threads than this, the elements of each result are divided among several.
_ENOUGH_THREADS = 64
# With at least this many elements per result, two adjacent results are enough for teams to work by columns.
_MANY = 256


class Form(NamedTuple):
    """How a reduction is computed.

    Args:
        along: work items that share a result, or its chunk; a power of two.
        adjacent: results per work group by teams; 0 means by threads.
        columns: whether adjacent lanes or work items have adjacent results instead of adjacent elements.
        chunks: number of chunks of each result's elements.
        wide: by threads: whether a work item has _WIDTH columns instead of LANES.
        short: by threads: whether a row has at most one block per lane.
    """

    along: int
    adjacent: int
    columns: bool
    chunks: int = 1
    wide: bool = False
    short: bool = False

    @property
    def by_teams(self) -> bool:
        return self.adjacent > 0

    @property
    def width(self) -> int:
        """Columns of a work item by threads."""
        return _WIDTH if self.wide else LANES

    @property
    def unit(self) -> int:
        """Elements in one block of all lanes or work items. Chunks are multiples of it."""
        return BLOCK * (self.along if self.by_teams else LANES)


def choose_form(target: Target, definition: Reduction, where: ReductionGeometry, outputs: int) -> Form:
    """Returns the default form for a target and a reduction with `outputs` outputs."""
    if target.team_size == 1:
        columns = _by_columns(where, outputs, LANES // 2)
        wide = columns and where.kept.sizes[0] >= _WIDTH and len(where.reduced.sizes) == 1
        chunks = _chunks_of_threads(where, columns)
        short = not columns and chunks == 1 and len(where.reduced.sizes) == 1 and where.reduced.count <= BLOCK * LANES
        return Form(1, 0, columns, chunks, wide, short)
    columns = _by_columns(where, outputs, LANES // 2 if where.reduced.count < _MANY else 2)
    size = target.team_of(sum(dtype.itemsize for dtype in definition.state))
    if columns:
        adjacent = 2
        while adjacent < 32 and adjacent < where.kept.sizes[0]:
            adjacent *= 2
        adjacent = min(size, adjacent)
        along = size // adjacent
    else:
        along = min(size, 4 if where.reduced.count <= 16 else 16 if where.reduced.count <= 128 else size)
        adjacent = size // along
    form = Form(along, adjacent, columns)
    groups = max(1, -(-where.kept.count // adjacent))
    enough = target.enough_groups
    if groups >= enough:
        return form
    return form._replace(chunks=max(1, min(enough // groups, where.reduced.count // form.unit)))


def _by_columns(where: ReductionGeometry, outputs: int, least: int) -> bool:
    """Whether the inputs of at least `least` adjacent results are contiguous, but those of one result are not.

    Some inputs can be the same for adjacent results.
    """
    if not where.kept.sizes or where.kept.sizes[0] < least:
        return False
    if all(not one or one[0] == 1 for one in where.reduced.strides):
        return False
    steps = [strides[0] for strides in where.kept.strides[outputs:]]
    return all(step in (0, 1) for step in steps) and 1 in steps


def _chunks_of_threads(where: ReductionGeometry, columns: bool) -> int:
    """Returns how many work items by threads share the elements of a result; each has at least 8 blocks."""
    results = where.kept.count
    items = results if not columns else results // where.kept.sizes[0] * -(-where.kept.sizes[0] // LANES)
    if items >= _ENOUGH_THREADS:
        return 1
    smallest = 8 * BLOCK * (1 if columns else LANES)
    return max(1, min(_ENOUGH_THREADS // items, where.reduced.count // smallest))


Functions = Callable[[str, Callable[[], str]], str]


class Options(NamedTuple):
    """Options of `reduction`.

    Args:
        scalars: values of the definition's scalars.
        compute: dtype to which inputs are converted for `start`; by default their own, float32 for float16 and
            bfloat16.
        form: by default the result of `choose_form`.
        known: cache for kernel text: returns the text for a part name, and calls its second argument to make it. The
            name distinguishes the texts of one definition with the same dtypes.
    """

    scalars: Sequence[int | float] = ()
    compute: torch.dtype | None = None
    form: Form | None = None
    known: Functions = lambda part, make: make()


def reduction(
    dialect: Dialect,
    name: str,
    definition: Reduction,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    where: ReductionGeometry,
    options: Options = Options(),  # noqa: B008, it cannot be changed
) -> list[Launch]:
    """Returns the launches, one or two, that reduce `inputs` to `outputs`.

    Args:
        where: the geometry of outputs and inputs.

    Raises:
        TypeError: the dialect's device lacks a dtype, or a formula returns the wrong number of values.
    """
    scalars, compute, form, known = options
    form = form or choose_form(dialect.target, definition, where, len(outputs))
    read, written = ([tensor.dtype for tensor in tensors] for tensors in (inputs, outputs))
    launch = partial(_launch, dialect, name, scalars)
    if form.chunks == 1:
        once = known("reduction", lambda: _functions(dialect, definition, read, written, compute))
        return [launch(_Part(definition, outputs, inputs, where, form, once))]
    results, device = where.kept.count, inputs[0].device
    states = [torch.empty(results, form.chunks, dtype=dtype, device=device) for dtype in definition.state]
    count = len(states)
    again = Reduction(
        definition.state,
        definition.identity,
        lambda *state: state[:count],
        definition.combine,
        definition.finish,
        scalars=definition.scalars,
    )
    strides = _contiguous_strides(where.kept.sizes, form.chunks)
    kept = Geometry(
        where.kept.layout, where.kept.sizes, (*where.kept.strides[: len(outputs)], *(strides for _ in states))
    )
    left = ReductionGeometry(kept, Geometry(Layout(1, 1, where.wide), (form.chunks,), tuple((1,) for _ in states)))
    whole = form.along * form.adjacent
    last = form._replace(columns=False, chunks=1, wide=False, along=max(1, whole), adjacent=min(whole, 1))
    first = known("parts", lambda: _functions(dialect, definition, read, None, compute))
    second = known("again", lambda: _functions(dialect, again, definition.state, written, None))
    return [
        launch(_Part(definition, states, inputs, where, form, first)),
        launch(_Part(again, outputs, states, left, last, second, where.reduced.count)),
    ]


def _functions(
    dialect: Dialect,
    definition: Reduction,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype] | None,
    compute: torch.dtype | None,
) -> str:
    """Returns the definition's functions as text; without `finish` if `outputs` is None, for partial states."""
    state, numbers = list(definition.state), [torch.int64, *definition.scalars]
    made = programs(definition, inputs, outputs, compute)
    functions = [
        element_function("add", made.add, dialect, Stored([*state, *state], [], state)),
        element_function("start", made.start, dialect, Stored(inputs, numbers, state)),
        element_function("combine", made.combine, dialect, Stored([*state, *state], [], state)),
    ]
    if outputs is not None:
        assert made.finish is not None
        functions.append(element_function("finish", made.finish, dialect, Stored(state, numbers, outputs)))
    return "\n".join(functions)


class _Part(NamedTuple):
    """The parameters of one of the launches.

    Args:
        outputs: with chunks, the states: contiguous tensors of shape (results, chunks).
        functions: of the definition, as text.
        total: number of elements for `finish`, if it is not that of these inputs.
    """

    definition: Reduction
    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    where: ReductionGeometry
    form: Form
    functions: str
    total: int | None = None


def _launch(dialect: Dialect, name: str, scalars: Sequence[int | float], part: _Part) -> Launch:
    definition, outputs, inputs, where, form, functions, total = part
    kept, reduced = where.kept, where.reduced
    results, reduced_count, chunks = kept.count, reduced.count, form.chunks
    partial_states = chunks > 1
    chunk = -(-reduced_count // (chunks * form.unit)) * form.unit if partial_states else max(1, reduced_count)
    numbers: dict[str, int] = {"chunks": chunks, "chunk": chunk, "reduced_count": reduced_count}
    numbers["total"] = reduced_count if total is None else total
    if form.by_teams:
        # Positions exceed the last element by less than a step of the team. index_t must be able to represent them.
        numbers |= {"results": results, "beyond": reduced_count + form.along}
        groups, group_size = -(-results // form.adjacent) * chunks, form.along * form.adjacent
    else:
        row_size = kept.sizes[0] if form.columns else 1
        blocks = -(-row_size // form.width)
        items = results // row_size * blocks * chunks
        numbers |= {"items": items, "blocks": blocks, "row_size": row_size}
        group_size = _group(dialect, form)
        groups = -(-items // group_size)
    # Partial states are indexed by their result's number, so they need no strides.
    kept_strides = kept.strides[-len(inputs) :] if partial_states else kept.strides
    operands = (0 if partial_states else len(outputs), len(inputs))
    ranks = (len(kept.sizes), len(reduced.sizes))
    names, integer_names = _names(operands, ranks)
    lists = [kept.sizes, reduced.sizes, *kept_strides, *reduced.strides]
    numbers |= zip(integer_names, [number for one in lists for number in one], strict=True)
    identity = tuple(definition.identity)
    exactly = tuple(map(repr, identity))  # 0.0 == -0.0
    output_dtypes = tuple([tensor.dtype for tensor in outputs])
    text = _Text(
        dialect,
        form._replace(chunks=1),
        tuple(definition.state),
        identity,
        exactly,
        output_dtypes,
        operands,
        ranks,
        partial_states,
        len(definition.scalars),
        _steps(form, where, len(inputs)),
    )
    kind = "team_" if form.by_teams else "wide_" if form.wide else "short_" if form.short else ""
    kind += "columns" if form.columns else "rows"
    return LaunchSpec(
        f"{name}_{kind}" + ("_chunks" if partial_states else ""),
        dialect,
        outputs={f"out{i}": t for i, t in enumerate(outputs)},
        inputs={f"in{i}": t for i, t in enumerate(inputs)},
        integers=numbers,
        numbers={f"scalar{i}": one for i, one in enumerate(zip(definition.scalars, scalars, strict=True))},
        value=value_dtype(definition.state[0]),
        types={"int64": torch.int64, **_shared_types(dialect, form, definition)},
        functions=functions,
        body=_body(text),
        groups=groups,
        group_size=group_size,
        strided=names,
        bounded=True,
    ).launch()


def _steps(form: Form, where: ReductionGeometry, inputs: int) -> tuple[int, ...]:
    """Returns each input's stride from one lane to the next: 0, 1, or 2 for any other.

    Compilers vectorize known strides.
    """
    if form.by_teams or not (form.columns or where.reduced.sizes):
        return (2,) * inputs
    strides = where.kept.strides[-inputs:] if form.columns else where.reduced.strides
    return tuple([int(min(one[0], 2)) for one in strides])


def _group(dialect: Dialect, form: Form) -> int:
    """Returns the group size by threads."""
    return 1 if form.wide else dialect.target.group(_GROUP)


def _subgroup_steps(dialect: Dialect, form: Form, state: Sequence[torch.dtype]) -> int:
    """Returns how many work items of a team combine their states by shuffles, a power of two.

    1 if all steps go through local memory, as for complex numbers.
    """
    if not form.by_teams or any(dtype.is_complex for dtype in state):
        return 1
    apart = form.adjacent if form.columns else 1
    return min(form.along, max(1, dialect.subgroup_size // apart))


def _shared_types(dialect: Dialect, form: Form, definition: Reduction) -> dict[str, torch.dtype]:
    """Returns the dtypes of the arrays in local memory by type name."""
    if form.along == _subgroup_steps(dialect, form, definition.state):
        return {}
    return {f"shared{i}_t": stored_dtype(dtype) for i, dtype in enumerate(definition.state)}


@lru_cache(maxsize=256)
def _names(operands: tuple[int, int], ranks: tuple[int, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of outputs and inputs, and the names of sizes and strides.

    Args:
        operands: numbers of outputs and inputs.
        ranks: numbers of kept and reduced dimensions.
    """
    names = (*(f"out{i}" for i in range(operands[0])), *(f"in{i}" for i in range(operands[1])))
    kept, reduced = map(range, ranks)
    integers = (
        *(f"size{d}" for d in kept),
        *(f"reduced_size{d}" for d in reduced),
        *(f"{name}_stride{d}" for name in names for d in kept),
        *(f"in{i}_reduced_stride{d}" for i in range(operands[1]) for d in reduced),
    )
    return names, integers


class _Text(NamedTuple):
    """Everything that a kernel's body depends on.

    Args:
        exactly: `identity` as text, which distinguishes 0.0 and -0.0.
        operands: numbers of outputs and inputs.
        ranks: numbers of kept and reduced dimensions.
        scalars: number of scalars.
        steps: the result of `_steps`.
    """

    dialect: Dialect
    form: Form
    state: tuple[torch.dtype, ...]
    identity: tuple[Number, ...]
    exactly: tuple[str, ...]
    outputs: tuple[torch.dtype, ...]
    operands: tuple[int, int]
    ranks: tuple[int, int]
    partial_states: bool
    scalars: int
    steps: tuple[int, ...]


@lru_cache(maxsize=1024)
def _body(of: _Text) -> str:
    writer = _Writer(of)
    return writer.by_teams() if of.form.by_teams else writer.by_threads()


class _Writer:
    def __init__(self, of: _Text) -> None:
        self.subgroup = _subgroup_steps(of.dialect, of.form, of.state)
        self.form, self.group, self.steps = of.form, _group(of.dialect, of.form), of.steps
        self.inputs, self.partial = of.operands[1], of.partial_states
        self.names, _ = _names(of.operands, of.ranks)
        self.kept_rank, self.reduced_rank = of.ranks
        self.scalars = "".join(f", scalar{i}" for i in range(of.scalars))
        storage = of.dialect.storage_type
        self.types, self.output_types = ([storage(dtype) for dtype in dtypes] for dtypes in (of.state, of.outputs))
        self.identity = tuple(map(of.dialect.constant, of.identity, of.state))

    def by_teams(self) -> str:
        along, adjacent = self.form.along, self.form.adjacent
        size = along * adjacent
        member, team, apart = f"ITEM % {along}", f"ITEM / {along}", 1
        if self.form.columns:
            member, team, apart = f"ITEM / {adjacent}", f"ITEM % {adjacent}", adjacent
        shared = " ".join(f"LOCAL shared{i}_t shared{i}[{size}];" for i in range(len(self.types)))
        give = " ".join(f"shared{i}[ITEM] = state{i}[0];" for i in range(len(self.types)))
        return f"""
  {shared if along > self.subgroup else ""}
  const int member = {member};
  const index_t chunk_number = GROUP % chunks;
  const index_t result = (index_t)(GROUP / chunks) * {adjacent} + {team};
  const index_t known = result < results ? result : 0;
  const index_t first = chunk_number * chunk;
  const index_t last = result < results ? min(first + chunk, beyond - {along}) : first;
  const int lane = 0;
  {self._places("known", self.kept_rank, "size", "stride", self.names)}
  {self._declare("state", "part", "block", lanes="1")}
  {self._set("state")}
  for (index_t position = first + member; position < last;) {{
    {self._set("part")}
    for (int whole = 0; whole < {BLOCK} && position < last; ++whole) {{
      {self._set("block")}
      for (int step = 0; step < {BLOCK} && position < last; ++step, position += {along}) {{
        {self._reduced_places("position")}
        {self._step("block", "position", "0")}
      }}
      {self._combine("part", "0", "block", "0")}
    }}
    {self._combine("state", "0", "part", "0")}
  }}
  {self._meet(along, apart, give) if along > 1 else ""}
  if (member == 0 && result < results) {{ {self._finish("0", "result", "")} }}
"""

    def _meet(self, along: int, apart: int, give: str) -> str:
        """Returns statements that combine the states of each team into that of its first work item."""
        lines = []
        if along > self.subgroup:
            lines.append(f"""{give}
  BARRIER;
  for (int half_size = {along // 2}; half_size >= {self.subgroup}; half_size >>= 1) {{
    if (member < half_size) {{
      {self._combine("state", "0", "shared", f"ITEM + half_size * {apart}")}
      {give}
    }}
    BARRIER;
  }}""")
        if self.subgroup > 1:
            # Work items in the upper half of a step receive unrelated values, but these never reach a first work item.
            shuffle = f"other{{i}}[0] = subgroup_shuffle_down(state{{i}}[0], half_size * {apart});"
            lines.append(f"""for (int half_size = {self.subgroup // 2}; half_size > 0; half_size >>= 1) {{
    {self._declare("other", lanes="1")} {" ".join(shuffle.format(i=i) for i in range(len(self.types)))}
    {self._combine("state", "0", "other", "0")}
  }}""")
        return "\n  ".join(lines)

    def by_threads(self) -> str:
        return f"""
  const index_t item = (index_t)GROUP * {self.group} + ITEM;
  if (item >= items) return;
  const index_t chunk_number = item % chunks, first_result = item / chunks / blocks * row_size
    + item / chunks % blocks * {self.form.width};
  const index_t first = chunk_number * chunk, last = min(first + chunk, reduced_count);
  {self._places("first_result", self.kept_rank, "size", "stride", self.names)}
  {self._statements()}
"""

    def _statements(self) -> str:
        if self.form.columns:
            return self._by_wide_columns() if self.form.wide else self._by_columns()
        return self._by_short_rows() if self.form.short else self._by_rows()

    def _by_short_rows(self) -> str:
        return f"""{self._declare("state")} {self._declare("rest", lanes="1")}
  {self._identity("state")} {self._identity("rest", "1")}
  {self._reduced_places("first", outer_only=True)}
  index_t position = first;
  for (; position + {LANES} <= last; position += {LANES})
    for (int lane = 0; lane < {LANES}; ++lane) {{ {self._step("state", "position + lane", "(position + lane)")} }}
  for (; position < last; ++position) {{
    const int lane = 0;
    {self._step("rest", "position", "position")}
  }}
  if (last - first >= {LANES}) {{ {self._meet_lanes("add")} }}
  {self._combine("state", "0", "rest", "0", "add")}
  {self._finish("0", "first_result", "")}
"""

    def _meet_lanes(self, by: str = "combine") -> str:
        """Returns statements that combine the states of all lanes into that of the first lane."""
        step = self._combine("state", "lane", "state", "lane + half_size", by)
        return f"""for (int half_size = {LANES // 2}; half_size > 0; half_size /= 2)
      for (int lane = 0; lane < half_size; ++lane) {{ {step} }}"""

    def _by_rows(self) -> str:
        # Remainders of rows are reduced separately in `rest`, which counts as a block once it has BLOCK elements.
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
    {self._meet_lanes()}
  }}
  {self._combine("state", "0", "rest", "0")}
  {self._finish("0", "first_result", "")}
"""

    def _add_block(self, lanes: str = str(LANES)) -> str:
        """Returns statements that add a block to the part, and after BLOCK blocks the part to the state."""
        return f"""for (int lane = 0; lane < {lanes}; ++lane) {{ {self._combine("part", "lane", "block", "lane")} }}
      {self._add_part(f"++whole_blocks >= {BLOCK}", lanes)}"""

    def _add_part(self, when: str, lanes: str = str(LANES), all: str = str(LANES)) -> str:
        """Returns statements that, if `when` holds, add `lanes` of the part to the state and reset `all` of it."""
        return f"""if ({when}) {{
        for (int lane = 0; lane < {lanes}; ++lane) {{ {self._combine("state", "lane", "part", "lane")} }}
        {self._identity("part", all)}
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
          {self._step("block", "position", None, "lane")}
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

    def _by_wide_columns(self) -> str:
        """Handles a block of rows, LANES columns after LANES columns, before it moves to the next block of rows."""

        def block(lanes: str) -> str:
            return f"""{self._identity("block")}
        for (index_t position = begin; position < end; ++position) {{
          {self._reduced_places("position")}
          for (int lane = 0; lane < {lanes}; ++lane) {{ {self._step("block", "position", None, "column + lane")} }}
        }}
        for (int lane = 0; lane < {lanes}; ++lane) {{ {self._combine("part", "column + lane", "block", "lane")} }}"""

        finish = self._finish("lane", "first_result + lane", " + lane * {name}_stride0")
        return f"""{self._declare("state", "part", lanes=str(_WIDTH))} {self._declare("block")}
  const index_t left = row_size - item / chunks % blocks * {_WIDTH};
  const int columns = left < {_WIDTH} ? (int)left : {_WIDTH};
  {self._identity("state", str(_WIDTH))} {self._identity("part", str(_WIDTH))}
  int whole_blocks = 0;
  for (index_t begin = first; begin < last; begin += {BLOCK}) {{
    const index_t end = min(last, begin + {BLOCK});
    int column = 0;
    for (; column + {LANES} <= columns; column += {LANES}) {{ {block(str(LANES))} }}
    if (column < columns) {{ {block("columns - column")} }}
    {self._add_part(f"++whole_blocks >= {BLOCK}", "columns", str(_WIDTH))}
  }}
  {self._add_part("true", "columns", str(_WIDTH))}
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
        """Returns statements that declare in0_from, …, the offsets of the element at position `index`.

        With `outer_only`, they are the offsets of its row.
        """
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

    def _set(self, name: str) -> str:
        """Returns statements that set the single state `name` to the identity."""
        return " ".join(f"{name}{i}[0] = {value};" for i, value in enumerate(self.identity))

    def _step(self, name: str, position: str, along: str | None, column: str = "") -> str:
        """Returns statements that add the element to the lane of `name`.

        Args:
            along: the element's position in its row; None for columns.
            column: the element's column, for columns.
        """
        any_step = f"{along} * in{{i}}_reduced_stride0" if along and self.reduced_rank else "0"
        offsets = [("0", along or column, any_step)[step].format(i=i) for i, step in enumerate(self.steps)]
        elements = ", ".join(f"in{i}[in{i}_from + {offset}]" for i, offset in enumerate(offsets))
        declared = " ".join(f"{t} next{i};" for i, t in enumerate(self.types))
        pointers = ", ".join(f"&next{i}" for i in range(len(self.types)))
        own = ", ".join(f"{name}{i}[lane]" for i in range(len(self.types)))
        others = ", ".join(f"next{i}" for i in range(len(self.types)))
        results = ", ".join(f"&{name}{i}[lane]" for i in range(len(self.types)))
        start = f"start({elements}, (int64)({position}){self.scalars}, {pointers});"
        return f"{declared} {start} add({own}, {others}, {results});"

    def _combine(self, to: str, lane: str, name: str, other: str, by: str = "combine") -> str:
        numbers = range(len(self.types))
        own, others = (", ".join(f"{n}{i}[{at}]" for i in numbers) for n, at in ((to, lane), (name, other)))
        return f"{by}({own}, {others}, {', '.join(f'&{to}{i}[{lane}]' for i in numbers)});"

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


def _contiguous_strides(sizes: Sequence[int], step: int) -> tuple[int, ...]:
    """Returns contiguous strides for `sizes`, innermost first, with innermost stride `step`."""
    return tuple(step * math.prod(sizes[:d]) for d in range(len(sizes)))
