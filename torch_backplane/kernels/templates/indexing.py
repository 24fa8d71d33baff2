"""Reads and writes of elements given by index tensors: gather, scatter, advanced indexing, embeddings.

A call iterates over coordinates c of a shape. Each operand has one stride per dimension d of the shape, 0 if it does
not depend on the dimension. Each index tensor t adds its element times the stride of the dimension that it indexes to
the offset in `self`:

    place(c) = Σ c[d] * kept[d] + Σ index_t[Σ c[d] * strides_t[d]] * step_t

`kept` has self's strides for dimensions of the shape that are dimensions of self, and 0 for dimensions of indices. An
element whose index is out of range is skipped, and the error is reported (see `errors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.layouts import geometry
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, extent, named, split

_INDEX_NAMES = tuple(f"index{t}" for t in range(64))  # PyTorch's maximum number of dimensions
_SMALL_GROUP = 16
# Elements of a row per work item; writes use _SHORTEST_RUN if there would be fewer than _ENOUGH_ITEMS work items.
_RUN, _SHORTEST_RUN, _ENOUGH_ITEMS = 64, 16, 64


@dataclass(frozen=True)
class Index:
    """An index tensor of a call.

    Args:
        tensor: int64 or int32.
        strides: one for each dimension of the call's shape.
        step, size: stride and size of the dimension of self that it indexes.
    """

    tensor: torch.Tensor
    strides: tuple[int, ...]
    step: int
    size: int


def read(
    dialect: Dialect,
    out: torch.Tensor,
    self: torch.Tensor,
    kept: Sequence[int],
    indices: Sequence[Index],
    report: error_words.Report,
    *,
    wraps: bool = False,
) -> Launch:
    """Computes out[c] = self[place(c)] for all coordinates c of out.

    Args:
        out, self: have the same dtype.
        kept: self's strides, one for each dimension of out; 0 where an index determines the position.
        wraps: whether negative indices count from the end.
    """
    operands = [out.stride(), kept, *(index.strides for index in indices)]
    names = ("out", "self", *_INDEX_NAMES[: len(indices)])
    rows = _Rows(*_part(out.shape, range(out.dim()), operands), names)
    chunk = dialect.target.run(_RUN)
    chunks = -(-rows.length // chunk)
    body = _read_body(rows.form, len(indices))
    items = math.prod(rows.sizes) * chunks
    integers = {"chunks": chunks, "chunk": chunk, **rows.integers()}
    _check_reach(out.shape, {"self": (self, kept)}, indices)
    spec = LaunchSpec(
        f"indexed_read_{rows.form.text}",
        dialect,
        outputs={"out": out},
        inputs={"self": self},
        integers=integers,
        value=value_dtype(self.dtype),
        body=body,
        items=items,
        group_size=dialect.target.small_group(_SMALL_GROUP),
    )
    return _with_indices(spec, indices, wraps, report)


@lru_cache(maxsize=256)
def _read_body(rows: _Form, indices: int) -> str:
    return f"""
  const index_t begin = item % chunks * chunk, end = min(begin + chunk, length), row = item / chunks;
  {rows.places("row")}
  {_add_indices(rows.constant(indices), "self_at", "return")}
  for (index_t i = begin; i < end; ++i) {{
    index_t place = self_at + i * {rows.step("self")};
    {_add_indices(rows.varying(indices), "place", "continue", rows)}
    out[out_at + i * {rows.step("out")}] = self[place];
  }}
"""


# The new element, as an expression of the current element `there` and `value`.
_COMBINE = {
    "assign": "value",
    "add": "there + value",
    "multiply": "there * value",
    "amin": "there < value || there != there ? there : value",
    "amax": "there > value || there != there ? there : value",
}


class Places(NamedTuple):
    """The positions of coordinates of `shape` in self and in a source.

    Args:
        kept: self's strides, one for each dimension of `shape`; 0 where an index determines the position.
        source_strides: the source's strides, one for each dimension of `shape`.
    """

    shape: Sequence[int]
    kept: Sequence[int]
    source_strides: Sequence[int]
    indices: Sequence[Index]


class WriteParams(NamedTuple):
    """How values are written.

    Args:
        combine: "assign", "add", "multiply", "amin" or "amax".
        alpha: factor of the source.
        wraps: whether negative indices count from the end.
        skip: a value of the first index tensor whose elements are skipped (padding_idx).
        deterministic: whether writes to the same position are in order.
        distinct: whether all positions are different, so that the order of writes does not matter.
    """

    combine: str = "assign"
    alpha: int | float | None = None
    wraps: bool = False
    skip: int | None = None
    deterministic: bool = False
    distinct: bool = False


def write(
    dialect: Dialect,
    self: torch.Tensor,
    source: torch.Tensor | int | float | bool,
    places: Places,
    report: error_words.Report,
    params: WriteParams = WriteParams(),  # noqa: B008, it cannot be changed
) -> Launch:
    """Computes self[place(c)] = combine(self[place(c)], source[c]) in place, for all coordinates c of `places.shape`.

    Writes are in order on non-SIMT targets, if `deterministic` is set, and for combinations other than "assign" of
    dtypes without atomics. Then there is one work item for each position in the dimensions that self keeps, which
    iterates over the other dimensions in order; the last value assigned to a position wins. Otherwise there is one work
    item per element: any of the values assigned to the same position can win, and sums are added in any order.

    Args:
        source: a tensor of self's dtype, or a number.
    """
    shape, kept, source_strides, indices = places
    combine, alpha, wraps, skip, deterministic, distinct = params
    value = value_dtype(self.dtype)
    target = dialect.target
    swaps = can_swap(target, self.dtype)
    in_order = not target.simt or deterministic or distinct or (combine != "assign" and not swaps)
    is_tensor = isinstance(source, torch.Tensor)
    sources = {"source": (source, source_strides)} if isinstance(source, torch.Tensor) else {}
    _check_reach(shape, {"self": (self, kept), **sources}, indices)
    operands = [kept, *(index.strides for index in indices), *([source_strides] if is_tensor else [])]
    names = ("self", *_INDEX_NAMES[: len(indices)], *(["source"] if is_tensor else []))
    serial = [d for d in range(len(shape)) if in_order and not distinct and kept[d] == 0]
    parallel = [d for d in range(len(shape)) if d not in serial]
    rows = _Rows(*_part(shape, parallel, operands), names)
    serial_sizes, serial_strides = _in_order(shape, serial, operands)
    # A work item handles several adjacent positions if their indices and source elements are not farther apart in
    # memory than those of its serial steps.
    adjacent = not serial or max(stride[0] for stride in rows.strides[1:]) <= max(
        stride[0] for stride in serial_strides[1:]
    )
    chunk = target.run(_RUN) if adjacent else 1
    if chunk > 1 and rows.length * math.prod(rows.sizes) < chunk * _ENOUGH_ITEMS:
        chunk = _SHORTEST_RUN
    chunks = -(-rows.length // chunk)
    items = math.prod(rows.sizes) * chunks
    integers = {"chunks": chunks, "chunk": chunk, "steps": math.prod(serial_sizes), **rows.integers()}
    integers |= {"skip": -1 if skip is None else skip, **named("serial_size", serial_sizes)}
    for name, stride in zip(names, serial_strides, strict=True):
        integers |= named(f"serial_{name}_stride", stride)
    skips = "if (index0[{at}] == skip) continue;" if skip is not None else ""
    form = rows.form
    constant, varying = form.constant(len(indices)), form.varying(len(indices))
    scaled = f"load_source(source_step + i * {form.step('source')})" if is_tensor else "number"
    body = f"""
  const index_t begin = item % chunks * chunk, end = min(begin + chunk, length), row = item / chunks;
  {form.places("row")}
  for (index_t step = 0; step < steps; ++step) {{
    {_serial_places(len(serial_sizes), names)}
    {skips.format(at="index0_step") if 0 in constant else ""}
    {_add_indices(constant, "self_step", "continue", suffix="step")}
    for (index_t i = begin; i < end; ++i) {{
      index_t place = self_step + i * {form.step("self")};
      {skips.format(at=f"index0_step + i * {form.step('index0')}") if 0 in varying else ""}
      {_add_indices(varying, "place", "continue", form, suffix="step")}
      const value_t value = {scaled}{" * alpha" if alpha is not None else ""};
      {_meet(combine, self.dtype, in_order)}
    }}
  }}
"""
    number = _number_dtype(value)
    numbers: dict[str, tuple[torch.dtype, Any]] = {} if is_tensor else {"number": (number, source)}
    if alpha is not None:
        numbers["alpha"] = (number, alpha)
    group = 1 if serial else _SMALL_GROUP  # serial work items are few, so each gets its own thread on CPUs
    spec = LaunchSpec(
        f"indexed_{combine}_{form.text}" + ("" if in_order else "_anyhow"),
        dialect,
        outputs={"self": self},
        inputs={"source": source} if isinstance(source, torch.Tensor) else {},
        integers=integers,
        numbers=numbers,
        value=value_dtype(self.dtype),
        body=body,
        items=items,
        group_size=target.small_group(group),
    )
    return _with_indices(spec, indices, wraps, report)


_SWAPPED = frozenset({torch.float32, torch.int32})  # updated by a 32-bit compare-and-swap of their bits


def _meet(combine: str, dtype: torch.dtype, in_order: bool) -> str:
    expression = _COMBINE[combine]
    if combine == "assign":
        return "store_self(place, value);" if in_order else "ANY_MAY_STAY(store_self(place, value));"
    if in_order:
        return f"const value_t there = load_self(place); store_self(place, {expression});"
    return atomically("self + place", dtype, expression)


def can_swap(target: Target, dtype: torch.dtype) -> bool:
    """Whether `atomically` works for the dtype on the target."""
    return dtype in _SWAPPED and torch.uint32 in target.atomics


def atomically(at: str, dtype: torch.dtype, expression: str) -> str:
    """Returns statements that atomically replace `there`, the number at the address `at`, by `expression`."""
    to_bits, from_bits = ("as_uint", "as_float") if dtype == torch.float32 else ("(uint)", "(int)")
    # A plain read would race with the atomic operations of other work items. So the first swap, which assumes 0, also
    # reads the current value.
    return f"""uint expected = 0, found;
    while (true) {{
      const value_t there = {from_bits}(expected);
      found = atomic_swap({at}, expected, {to_bits}({expression}));
      if (found == expected) break;
      expected = found;
    }}"""


def _number_dtype(value: torch.dtype) -> torch.dtype:
    """Returns the dtype of a number argument. It is not an integer for bool, as 0.5 is True but would become 0."""
    return value if facts(value).category in ("float", "bool") else torch.int64


def _check_reach(
    shape: Sequence[int], operands: Mapping[str, tuple[torch.Tensor, Sequence[int]]], indices: Sequence[Index]
) -> None:
    """Checks strides that a planner did not take from the tensor itself.

    Raises:
        AssertionError: the strides do not cover exactly the whole of an index tensor, or exceed another operand.
    """
    if 0 in shape:
        return
    for at, index in enumerate(indices):
        if _reach(shape, index.strides) != extent(index.tensor):
            raise AssertionError(f"index {at} has strides {index.tensor.stride()}, but is read with {index.strides}")
    for name, (tensor, strides) in operands.items():
        steps = sum((index.size - 1) * index.step for index in indices if index.size) if name == "self" else 0
        if tensor.numel() and _reach(shape, strides) + steps > extent(tensor):
            raise AssertionError(f"{name} has strides {tensor.stride()}, but is accessed with {strides}")


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    furthest = 0
    for size, step in zip(shape, strides, strict=True):
        furthest += (size - 1) * step
    return 1 + furthest


def _part(
    shape: Sequence[int], dims: Sequence[int], operands: Sequence[Sequence[int]]
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Returns the sizes and each operand's strides in `dims`, merged where possible, innermost first."""
    where = geometry([shape[d] for d in dims], [[operand[d] for d in dims] for operand in operands])
    # For a single element, `geometry` returns stride 1. That is correct, as its offset is 0 with any strides.
    return where.sizes, where.strides


def _in_order(
    shape: Sequence[int], dims: Sequence[int], operands: Sequence[Sequence[int]]
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Like `_part`, but keeps the order of `dims`.

    `geometry` orders dimensions by the strides of the first operand, so a contiguous operand is put first.
    """
    sizes = [shape[d] for d in dims]
    contiguous = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    where = geometry(sizes, [contiguous, *([operand[d] for d in dims] for operand in operands)])
    return where.sizes, where.strides[1:]


class _Form(NamedTuple):
    """Everything that the kernel text for rows depends on.

    Args:
        names: of the operands.
        rank: number of dimensions without the one along rows.
        steps: each operand's stride along a row: 0, 1, or 2 for any other.
    """

    names: tuple[str, ...]
    rank: int
    steps: tuple[int, ...]

    def _step_of(self, name: str) -> int:
        return self.steps[self.names.index(name)]

    def step(self, name: str) -> str:
        """The operand's stride along the row, as text. Compilers vectorize a literal 1."""
        return "1" if self._step_of(name) == 1 else f"{name}_row_step"

    @property
    def text(self) -> str:
        """For a kernel's name."""
        return "".join(map(str, self.steps))

    def constant(self, indices: int) -> list[int]:
        """Returns the numbers of the indices that are constant along a row."""
        return [t for t in range(indices) if self._step_of(f"index{t}") == 0]

    def varying(self, indices: int) -> list[int]:
        return [t for t in range(indices) if self._step_of(f"index{t}") != 0]

    def places(self, index: str) -> str:
        """Returns statements that declare NAME_at, each operand's offset at the beginning of row number `index`."""
        return _places(index, self.rank, "size", {f"{name}_at": f"{name}_stride" for name in self.names})


class _Rows:
    """A shape as rows along the innermost dimension. Work items handle chunks of rows.

    Args:
        sizes: innermost first.
        strides: for each of the operands `names`, innermost first.
    """

    def __init__(self, sizes: Sequence[int], strides: Sequence[Sequence[int]], names: tuple[str, ...]) -> None:
        self.length, self.sizes = sizes[0], sizes[1:] or (1,)
        self.strides = strides
        self.form = _Form(names, len(self.sizes), tuple([int(min(stride[0], 2)) for stride in strides]))

    def integers(self) -> dict[str, int]:
        found = {"length": self.length, **named("size", self.sizes)}
        for name, stride in zip(self.form.names, self.strides, strict=True):
            found |= {f"{name}_row_step": stride[0], **named(f"{name}_stride", stride[1:] or (0,))}
        return found


def _serial_places(rank: int, names: Sequence[str]) -> str:
    """Returns statements that declare NAME_step, each operand's offset for `step`, starting from NAME_at."""
    places = {f"{name}_step": f"serial_{name}_stride" for name in names}
    return _places("step", rank, "serial_size", places, {f"{name}_step": f"{name}_at" for name in names})


def _places(
    index: str, rank: int, size: str, places: Mapping[str, str], starts: Mapping[str, str] | None = None
) -> str:
    """Returns statements that declare offsets for the linear `index`.

    Args:
        places: name of each offset, and the name of its strides without the dimension's number.
        starts: name of the variable that each offset starts from; default 0.
    """
    coordinates = [f"{index}_{d}" for d in reversed(range(rank))]
    lines = [split(index, [f"{size}{d}" for d in reversed(range(rank))], coordinates)]
    for place, stride in places.items():
        terms = " + ".join(f"{index}_{d} * {stride}{d}" for d in range(rank))
        lines.append(f"index_t {place} = {starts[place] + ' + ' if starts else ''}{terms};")
    return "\n  ".join(lines)


def _add_indices(which: Sequence[int], place: str, leave: str, rows: _Form | None = None, suffix: str = "at") -> str:
    """Returns statements that add the offsets of the indices `which` to `place`; with `rows`, for element i of the row.

    Args:
        leave: the statement to run if an index is out of range.
    """
    lines = []
    for t in which:
        at = f"index{t}_{suffix}" + (f" + i * {rows.step(f'index{t}')}" if rows else "")
        checked = f"checked_index(errors, operator_number, index{t}[{at}], index_size{t})"
        lines.append(f"const index_t found{t} = {checked}; if (found{t} < 0) {leave}; {place} += found{t} * step{t};")
    return "\n  ".join(lines)


def _with_indices(spec: LaunchSpec, indices: Sequence[Index], wraps: bool, report: error_words.Report) -> Launch:
    """Adds the index tensors and the error report to `spec`, whose text handles all strides, and returns the launch."""
    integers = dict(spec.integers)
    for position, index in enumerate(indices):
        integers |= {f"step{position}": index.step, f"index_size{position}": index.size}
    tensors = {name: index.tensor for name, index in zip(_INDEX_NAMES, indices, strict=False)}
    number = error_words.operator_number(report.operator)
    return replace(
        spec,
        outputs={**spec.outputs, "errors": report.words},
        inputs={**spec.inputs, **tensors},
        integers=integers,
        numbers={**(spec.numbers or {}), "operator_number": (torch.int32, number)},
        constants={"WRAPS": int(wraps)},
        types={"int64": torch.int64},
        functions=error_words.FUNCTIONS,
        strided={*spec.outputs, *spec.inputs, *tensors},
    ).launch()
