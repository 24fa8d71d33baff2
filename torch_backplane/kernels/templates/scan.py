"""Scans along one dimension of contiguous tensors: cumulative sums, products, extrema and log-sum-exps.

A `Scan` defines the fields of a state, their values for one element, and how to combine a state with that of the
elements that follow. The elements along the dimension are a *line*. There are two forms:

- A work item scans a line in order. If the dimension is not the innermost, consecutive work items have adjacent lines,
  and on CPUs a work item scans several adjacent lines in parallel.
- On SIMT targets, a team of work items shares a line, tile by tile. Adjacent work items load adjacent elements to local
  memory. Each work item then reduces some consecutive elements, and the results are scanned in log2(team size) steps.

In both forms, few lines of many elements are scanned in chunks that fill the device, by three launches: the total of
each chunk, the scan of these totals, and the scan of each chunk from the total before it. As in torch.cuda, a product
or sum of a chunk can overflow although that of all elements up to there does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, Operands, rows_and_columns, split

_COLUMNS, _SMALL_GROUP = 16, 8
_RUN = 4  # consecutive elements of a tile per work item
# With 2 to 7 columns, one work item scans each line if there are this many elements in a line or this many lines. The
# elements of a team would be far apart, and all teams would read the same sectors.
_MANY = 1024
_MIN_CHUNK = {True: 4096, False: 64}  # minimum elements of a work item's chunk: on CPUs, on SIMT targets


class Field(NamedTuple):
    """One number of a state.

    Args:
        type: type in the kernel text.
        dtype: dtype in memory between launches.
        identity: value before the first element.
        element: value for the element at offset `at`, with index `k` in its line.
    """

    type: str
    dtype: torch.dtype
    identity: str
    element: str


class Scan(NamedTuple):
    """A definition of a scan.

    Args:
        fields: fields of the state, by name.
        step: statements that add one element, `x_…`, to `state_…`. FRESH tells whether it is the first element.
        join: statements that add the state `x_…` of several elements.
        store: statements that store the result of `state_…` at offset `at`.
        value: dtype of `value_t`.
    """

    fields: Mapping[str, Field]
    step: str
    join: str
    store: str
    value: torch.dtype


class Form(NamedTuple):
    """How a scan is computed.

    Args:
        along: work items that share a line, or its chunk: 4, 8, 16, … (PoCL fails to compile work groups of two). 1 if
            each work item scans its own line.
        adjacent: lines of a work group of teams, or of a work item if along is 1.
        chunks: number of chunks of each line.
    """

    along: int
    adjacent: int
    chunks: int = 1


def choose_form(target: Target, scan: Scan, lines: int, size: int, columns: int) -> Form:
    """Returns the default form for a target and `lines` lines of `size` elements, `columns` of which are adjacent."""
    threads = target.team_size == 1
    team = 1 if threads else target.team_of(sum(field.dtype.itemsize for field in scan.fields.values()) * (_RUN + 2))
    if threads or team < 4 or columns >= 8 or (columns > 1 and (size >= _MANY or lines >= _MANY)):
        form = Form(1, target.run(_COLUMNS) if columns > 1 else 1)
        unit = _MIN_CHUNK[threads] // form.adjacent
        if not threads and columns < 8:
            unit *= 2  # fewer chunks: one team per line scans their totals
    else:
        along = min(team, 4 if size <= 4 * _RUN else 16 if size <= 16 * _RUN else team)
        form = Form(along, team // along)
        unit = 4 * along * _RUN
    if threads:
        # The first and the last launch both read all elements, so two threads would gain nothing.
        most = target.compute_units // max(1, -(-lines // form.adjacent)) if target.compute_units >= 4 else 1
    else:
        # Without teams, a work group has several chunks of a line. With teams, each chunk has its own work group.
        at_once = target.group_size if form.along == 1 else form.adjacent
        most = target.enough_groups * at_once // max(lines, 1 if form.along == 1 else at_once)
    return form._replace(chunks=max(1, min(most, size // unit)))


# --- Scans


class Accumulation(NamedTuple):
    """Kernel text of an accumulation.

    Args:
        identity: value of the sum before the first element.
        step: statements that add the number `x_sum` to `state_sum`; `state_sum_lost` is the rounding error.
        join: statements that add another sum `x_sum` with the rounding error `x_sum_lost`.
        plain: both of these for sums without a rounding error, such as integers; empty if a simple form is not enough.
    """

    identity: str
    step: str
    join: str
    plain: str = ""


# Dekker's product without its splitting: fma computes the rounding error.
_MULTIPLY = (
    "const value_t product = state_sum * x_sum; "
    "state_sum_lost = fma(state_sum_lost, x_sum, fma(state_sum, x_sum, -product)){}; state_sum = product;"
)
# Starts from the greater operand, so that nothing overflows. The difference of equal infinities would be NaN.
_ADD_EXPONENTIALS = (
    "const bool greater = x_sum > state_sum || x_sum != x_sum; "
    "const value_t difference = greater ? (state_sum - x_sum) + (state_sum_lost{minus}) "
    ": (x_sum - state_sum) + ({plus}-state_sum_lost); "
    "const value_t more = state_sum == x_sum && fabs(x_sum) == {infinity} ? 0 : log1p(exp(difference)); "
    "if (greater) {{ state_sum = x_sum; state_sum_lost = {lost}; }} "
    "ADD(state_sum, more) if (state_sum_lost - state_sum_lost != 0) state_sum_lost = 0;"
)
_INFINITE = "{infinity}"

ACCUMULATIONS: Mapping[str, Accumulation] = {
    "cumsum": Accumulation(
        "0", "ADD(state_sum, x_sum)", "ADD(state_sum, x_sum) state_sum_lost += x_sum_lost;", "state_sum += x_sum;"
    ),
    "cumprod": Accumulation(
        "1", _MULTIPLY.format(""), _MULTIPLY.format(" + state_sum * x_sum_lost"), "state_sum *= x_sum;"
    ),
    "logcumsumexp": Accumulation(
        "-{infinity}",
        _ADD_EXPONENTIALS.format(minus="", plus="", lost="0", infinity=_INFINITE),
        _ADD_EXPONENTIALS.format(minus=" - x_sum_lost", plus="x_sum_lost ", lost="x_sum_lost", infinity=_INFINITE),
    ),
}
_BETTER = {"cummax": ">=", "cummin": "<="}


def accumulate(
    dialect: Dialect, out: torch.Tensor, self: torch.Tensor, dim: int, name: str, form: Form | None = None
) -> list[Launch]:
    """Computes out[k] = ACCUMULATIONS[name] of self[0] to self[k] along dim. Both have the same shape and dtype.

    Floating-point numbers are accumulated with their rounding errors. float32 is accumulated in float64 if that costs
    little (`Target.has_wide_sums`), as in PyTorch. Integers are accumulated modulo 2^64.
    """
    value = value_dtype(out.dtype)
    accumulation = ACCUMULATIONS[name]
    element = "(value_t)load_self(at)"
    is_float = facts(value).category == "float"
    if dialect.target.has_wide_sums and out.dtype == torch.float32:
        value = torch.float64
    if not is_float or (value != value_dtype(out.dtype) and accumulation.plain):
        value, step = value if is_float else torch.uint64, accumulation.plain
        sums = {"sum": Field("value_t", value, accumulation.identity, element)}
        scan = Scan(sums, step, step, "store_out(at, state_sum);", value)
    else:
        infinity = dialect.infinity(facts(value).bits)
        identity, step, join = (
            text.replace(_INFINITE, infinity) for text in (accumulation.identity, accumulation.step, accumulation.join)
        )
        fields = {
            "sum": Field("value_t", value, identity, element),
            "sum_lost": Field("value_t", value, "0", "0"),
        }
        # The rounding error of an infinite or NaN state is not finite, and must not be added. A zero error must not be
        # added because -0 + 0 is 0.
        lacks = "state_sum_lost - state_sum_lost == 0 && state_sum_lost != 0"
        store = f"store_out(at, ({lacks} ? state_sum + state_sum_lost : state_sum));"
        scan = Scan(fields, step, join, store, value)
    return _launches(name, dialect, {"out": out}, self, dim, scan, form)


def complex_products(
    dialect: Dialect, out: torch.Tensor, self: torch.Tensor, dim: int, form: Form | None = None
) -> list[Launch]:
    """Computes out[k] = the product of self[0] to self[k] along dim. Both are complex, of the same shape and dtype.

    Products are accumulated in complex128 if that costs little (`Target.has_wide_sums`), as in PyTorch.
    """
    value = torch.complex128 if dialect.target.has_wide_sums else out.dtype
    parts = "state_product.x * x_product.{} {} state_product.y * x_product.{}"
    product = dialect.complex(parts.format("x", "-", "y"), parts.format("y", "+", "x"), value)
    step = f"const value_t both = {product}; state_product = both;"
    element = dialect.cast(Value("load_self(at)", self.dtype), value)
    store = f"store_out(at, {dialect.cast(Value('state_product', value), out.dtype)});"
    fields = {"product": Field("value_t", value, dialect.constant(1, value), element)}
    return _launches("cumprod", dialect, {"out": out}, self, dim, Scan(fields, step, step, store, value), form)


def extremum(
    dialect: Dialect,
    values: torch.Tensor,
    indices: torch.Tensor,
    self: torch.Tensor,
    dim: int,
    name: str,
    form: Form | None = None,
) -> list[Launch]:
    """Computes values[k] = the maximum ("cummax") or minimum ("cummin") of self[0] to self[k] along dim.

    indices[k] is the index of its last occurrence. NaN wins over all numbers; the last NaN counts.
    """
    value = value_dtype(self.dtype)
    better = f"x_best {_BETTER[name]} state_best"
    if facts(value).category == "float":
        better = f"x_best != x_best || {better}"  # no number replaces NaN, as comparisons with NaN are false
    fields = {
        "best": Field("value_t", value, "0", "load_self(at)"),
        "place": Field("index_t", torch.int64, "-1", "k"),  # -1 before the first element
    }
    take = "state_best = taken ? x_best : state_best; state_place = taken ? x_place : state_place;"
    step = f"const bool taken = FRESH || {better}; {take}"
    join = f"const bool taken = x_place >= 0 && (state_place < 0 || {better}); {take}"
    store = "store_values(at, state_best); indices[at] = state_place;"
    outputs = {"values": values, "indices": indices}
    return _launches(name, dialect, outputs, self, dim, Scan(fields, step, join, store, value), form)


# --- Launches


def _launches(
    name: str,
    dialect: Dialect,
    outputs: Mapping[str, torch.Tensor],
    self: torch.Tensor,
    dim: int,
    scan: Scan,
    form: Form | None,
) -> list[Launch]:
    """Returns the launches of a scan, one or three. Tensors are contiguous; an output can be `self`."""
    rows, size, columns = rows_and_columns(self.shape, dim)
    lines = rows * columns
    form = form or choose_form(dialect.target, scan, lines, size, columns)
    inputs, shape = {"self": self}, (rows, size, columns)
    if form.chunks == 1:
        return [_launch(name, dialect, Operands(outputs, inputs), shape, scan, form, "whole")]
    # total_f[line, chunk] is field f of the chunk's total; after the second launch, of the total up to the chunk's end.
    totals = {
        f"total_{one}": torch.empty(lines, form.chunks, dtype=field.dtype, device=self.device)
        for one, field in scan.fields.items()
    }
    kept = {one: field._replace(element=f"({field.type})load_total_{one}(at)") for one, field in scan.fields.items()}
    store = " ".join(f"store_total_{one}(at, state_{one});" for one in scan.fields)
    again = Scan(kept, scan.join, scan.join, store, scan.value)
    once = choose_form(dialect.target, again, lines, form.chunks, 1)._replace(chunks=1)
    return [
        _launch(name, dialect, Operands(totals, inputs), shape, scan, form, "totals"),
        _launch(name, dialect, Operands(totals, {}), (lines, form.chunks, 1), again, once, "whole"),
        _launch(name, dialect, Operands(outputs, {**inputs, **totals}), shape, scan, form, "resumed"),
    ]


Phase = Literal["whole", "totals", "resumed"]


def _launch(
    name: str,
    dialect: Dialect,
    operands: Operands,
    shape: tuple[int, int, int],
    scan: Scan,
    form: Form,
    phase: Phase,
) -> Launch:
    """Returns one of the launches, for tensors of `shape`: rows, the size of a line, and columns."""
    rows, size, columns = shape
    unit = form.along * _RUN
    chunk = -(-size // (form.chunks * unit)) * unit
    integers = {"rows": rows, "size": size, "columns": columns, "chunks": form.chunks, "chunk": chunk}
    name = f"{name}_{'lines' if form.along == 1 else 'teams'}" + ("" if phase == "whole" else f"_{phase}")
    if form.along == 1:
        blocks = -(-columns // form.adjacent)
        return LaunchSpec(
            name,
            dialect,
            outputs=operands.outputs,
            inputs=operands.inputs,
            integers={**integers, "blocks": blocks},
            constants={
                "WIDTH": form.adjacent,
                "FRESH": f"(k == {'0' if phase == 'resumed' else 'first'})",
                **{f"state_{one}": f"lanes_{one}[lane]" for one in scan.fields},
            },
            value=scan.value,
            body=_by_items(scan, form.adjacent, phase),
            items=rows * form.chunks * blocks,
            group_size=dialect.target.small_group(_SMALL_GROUP),
        ).launch()
    return LaunchSpec(
        name,
        dialect,
        outputs=operands.outputs,
        inputs=operands.inputs,
        # `beyond` is an upper bound of indices in the last tile. index_t must be able to represent it.
        integers={**integers, "beyond": size + unit},
        constants={"FRESH": "(below == 0 && member == 0 && i == 0)"},
        value=scan.value,
        body=_by_teams(scan, form, phase),
        groups=-(-rows * columns // form.adjacent) * form.chunks,
        group_size=form.along * form.adjacent,
        bounded=True,
    ).launch()


def _declare(scan: Scan, prefix: str, values: Mapping[str, str] | None = None) -> str:
    """Returns declarations of a state named `prefix`, with the given values of its fields or the identity."""
    return " ".join(
        f"{field.type} {prefix}_{one} = {values[one] if values else field.identity};"
        for one, field in scan.fields.items()
    )


def _elements(scan: Scan) -> dict[str, str]:
    return {one: field.element for one, field in scan.fields.items()}


def _before(scan: Scan, phase: Phase, line: str) -> dict[str, str]:
    """Returns each field of the total before the chunk."""
    if phase != "resumed":
        return {one: field.identity for one, field in scan.fields.items()}
    known = "chunk_number > 0 ? ({})load_total_{}(({}) * chunks + chunk_number - 1) : {}"
    return {one: known.format(field.type, one, line, field.identity) for one, field in scan.fields.items()}


def _give_total(scan: Scan, prefix: str, line: str, suffix: str = "") -> str:
    return " ".join(
        f"store_total_{one}(({line}) * chunks + chunk_number, {prefix}_{one}{suffix});" for one in scan.fields
    )


def _by_items(scan: Scan, width: int, phase: Phase) -> str:
    """Returns the body for work items that scan `width` adjacent lines each, or a chunk of them."""
    line = "row * columns + column + lane"
    arrays = " ".join(f"{field.type} lanes_{one}[WIDTH];" for one, field in scan.fields.items())
    begin = " ".join(f"lanes_{one}[lane] = {value};" for one, value in _before(scan, phase, line).items())
    element = _declare(scan, "x", _elements(scan))
    store = "" if phase == "totals" else scan.store

    def over(lanes: str) -> str:
        loop = f"for (int lane = 0; lane < {lanes}; ++lane)"
        text = f"""
    {loop} {{ {begin} }}
    for (index_t k = first, below = start + first * columns; k < last; ++k, below += columns)
      {loop} {{ const index_t at = below + lane; {element} {scan.step} {store} }}"""
        if phase == "totals":
            text += f"\n    {loop} {{ {_give_total(scan, 'lanes', line, '[lane]')} }}"
        return text

    chunk = "const index_t first = min(chunk_number * chunk, size), last = first + min(chunk, size - first);"
    # Compilers vectorize the lanes if their number is constant.
    rest = f"else {{ const index_t lanes = columns - column; {over('lanes')} }}" if width > 1 else ""
    return f"""
  {split("item", ["rows", "chunks", "blocks"], ["row", "chunk_number", "block"])}
  const index_t column = block * WIDTH, start = row * size * columns + column;
  {"const index_t first = 0, last = size;" if phase == "whole" else chunk}
  {arrays}
  if (column + WIDTH <= columns) {{ {over("WIDTH")} }}
  {rest}
"""


def _by_teams(scan: Scan, form: Form, phase: Phase) -> str:
    """Returns the body for teams that share a line, or its chunk; see the module docstring."""
    along, adjacent, tile = form.along, form.adjacent, form.along * _RUN
    padded = tile + along  # avoids bank conflicts of work items that read _RUN elements apart
    names = list(scan.fields)
    shared = " ".join(
        f"LOCAL {field.type} tile_{one}[{adjacent * padded}]; LOCAL {field.type} team_{one}[{along * adjacent}];"
        for one, field in scan.fields.items()
    )

    def copy(to: str, source: str) -> str:
        """Returns assignments for all fields; `@` is replaced by the field's name."""
        return " ".join(f"{to} = {source};".replace("@", one) for one in names)

    def state(prefix: str, source: str) -> str:
        return _declare(scan, prefix, {one: source.replace("@", one) for one in names})

    mine = f"base + member * {_RUN + 1} + i"
    finish = f"""
    {{
      {state("before", "carry_@")}
      if (member > 0) {{ {state("state", "carry_@")} {state("x", "team_@[ITEM - 1]")} {scan.join}
        {copy("before_@", "state_@")} }}
      {state("state", "before_@")}
      for (int i = 0; i < {_RUN}; ++i) {{
        {state("x", f"tile_@[{mine}]")} {{ {scan.step} }} {copy(f"tile_@[{mine}]", "state_@")}
      }}
    }}
    BARRIER;
    for (int i = 0; i < {_RUN}; ++i) {{
      const index_t place = i * {along} + member, k = below + place;
      if (is_line && k < last) {{
        const index_t at = start + k * columns;
        {state("state", f"tile_@[base + place + place / {_RUN}]")} {scan.store}
      }}
    }}"""
    total = f"if (is_line && member == 0) {{ {_give_total(scan, 'carry', 'line')} }}"
    return f"""
  {shared}
  const int member = ITEM % {along}, team = ITEM / {along}, base = team * {padded};
  const index_t lines = rows * columns, chunk_number = GROUP % chunks;
  const index_t line = (index_t)(GROUP / chunks) * {adjacent} + team;
  const bool is_line = line < lines;
  const index_t known = is_line ? line : 0;
  const index_t start = known / columns * size * columns + known % columns;
  const index_t first = min(chunk_number * chunk, size), last = first + min(chunk, beyond - {tile} - first);
  {_declare(scan, "carry", _before(scan, phase, "known"))}
  for (index_t below = first; below < last; below += {tile}) {{
    for (int i = 0; i < {_RUN}; ++i) {{
      const index_t place = i * {along} + member, k = below + place;
      {_declare(scan, "x")}
      if (is_line && k < last) {{
        const index_t at = start + k * columns;
        {" ".join(f"x_{one} = {field.element};" for one, field in scan.fields.items())}
      }}
      {copy(f"tile_@[base + place + place / {_RUN}]", "x_@")}
    }}
    BARRIER;
    {_declare(scan, "state")}
    for (int i = 0; i < {_RUN}; ++i) {{ {state("x", f"tile_@[{mine}]")} {scan.join} }}
    {copy("team_@[ITEM]", "state_@")}
    BARRIER;
    for (int apart = 1; apart < {along}; apart <<= 1) {{
      if (member >= apart) {{ {state("x", "state_@")} {copy("state_@", "team_@[ITEM - apart]")} {scan.join} }}
      BARRIER;
      {copy("team_@[ITEM]", "state_@")}
      BARRIER;
    }}
    {"" if phase == "totals" else finish}
    {{ {state("state", "carry_@")} {state("x", f"team_@[ITEM - member + {along - 1}]")} {scan.join}
      {copy("carry_@", "state_@")} }}
    BARRIER;
  }}
  {total if phase == "totals" else ""}
"""
