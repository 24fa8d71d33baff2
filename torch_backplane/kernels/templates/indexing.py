"""Reading and writing elements whose places are in index tensors: gather, scatter, advanced indexing, embeddings.

A call goes over a shape. Each operand has a stride for each dimension of it, 0 where it does not depend on it, and each
index tensor adds (its element here) × (the stride of the dimension that it indexes) to the place in `self`:

    place(c) = Σ c[d] * kept[d] + Σ index_t[Σ c[d] * strides_t[d]] * step_t

`kept` are self's strides for the dimensions of the shape that are dimensions of self, 0 for those that indices have.
Index out of range: the element is left out, and the error reported as `errors` says.
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

_INDEX_NAMES = tuple(f"index{t}" for t in range(64))  # as many as a tensor has dimensions
_SMALL_GROUP = 16
# Elements of a row that a work item goes through; fewer where there would be few work items.
_RUN, _SHORTEST_RUN, _ENOUGH_ITEMS = 64, 16, 64


@dataclass(frozen=True)
class Index:
    """An index tensor (int64 or int32) of a call.

    Args:
        strides: for each dimension of the call's shape.
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
    """out[c] = self[place(c)] over out's shape; out and self have one dtype.

    Args:
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


# How a value meets the one that is there, as an expression of `there` and `value`.
_COMBINE = {
    "assign": "value",
    "add": "there + value",
    "multiply": "there * value",
    "amin": "there < value || there != there ? there : value",
    "amax": "there > value || there != there ? there : value",
}


class Places(NamedTuple):
    """Where the elements c of `shape` are in self and in a source.

    Args:
        kept: self's strides, 0 where an index says the place. source_strides: the source's. Both for each dimension of
            `shape`.
    """

    shape: Sequence[int]
    kept: Sequence[int]
    source_strides: Sequence[int]
    indices: Sequence[Index]


class WriteParams(NamedTuple):
    """How values are written.

    Args:
        combine: "assign", "add", "multiply", "amin" or "amax".
        alpha: what the source is multiplied by.
        wraps: whether negative indices count from the end.
        skip: an index (of the first index tensor) whose elements are left out: padding_idx.
        distinct: whether no two elements have one place, so that their order does not matter.
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
    """self[place(c)] = combine(self[place(c)], source[c]) for every c in `places.shape`, in place.

    Args:
        source: of self's dtype, or a number.

    Where work items are threads' (not `Target.simt`), where `deterministic`, and for dtypes without 32-bit atomics: one
    work item for each place in the dimensions that self keeps, which goes through the others in order; the last value
    assigned stays. Else one for each element: of several values assigned to one place any may stay, and sums are added
    in any order.
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
    # A work item has several neighbours side by side where they are beside each other in memory, and what it goes
    # through in order is not.
    beside = not serial or max(stride[0] for stride in rows.strides[1:]) <= max(
        stride[0] for stride in serial_strides[1:]
    )
    chunk = target.run(_RUN) if beside else 1
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
    group = 1 if serial else _SMALL_GROUP  # few that go through all in order are for a thread each
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


_SWAPPED = frozenset({torch.float32, torch.int32})  # as their bits, by 32-bit compare-and-swap


def _meet(combine: str, dtype: torch.dtype, in_order: bool) -> str:
    expression = _COMBINE[combine]
    if combine == "assign":
        return "store_self(place, value);" if in_order else "ANY_MAY_STAY(store_self(place, value));"
    if in_order:
        return f"const value_t there = load_self(place); store_self(place, {expression});"
    return atomically("self + place", dtype, expression)


def can_swap(target: Target, dtype: torch.dtype) -> bool:
    """Whether kernels for the target have `atomically` for the dtype."""
    return dtype in _SWAPPED and torch.uint32 in target.atomics


def atomically(at: str, dtype: torch.dtype, expression: str) -> str:
    """Statements that put what `expression` makes of `there`, the number at the address `at`, in its place."""
    to_bits, from_bits = ("as_uint", "as_float") if dtype == torch.float32 else ("(uint)", "(int)")
    # Memory that atomics change may not even be read in another way: what is there comes from the first swap, which
    # succeeds where it is 0.
    return f"""uint expected = 0, found;
    while (true) {{
      const value_t there = {from_bits}(expected);
      found = atomic_swap({at}, expected, {to_bits}({expression}));
      if (found == expected) break;
      expected = found;
    }}"""


def _number_dtype(value: torch.dtype) -> torch.dtype:
    """What a number is passed as: a fraction is true, and no integer keeps that."""
    return value if facts(value).category in ("float", "bool") else torch.int64


def _check_reach(
    shape: Sequence[int], operands: Mapping[str, tuple[torch.Tensor, Sequence[int]]], indices: Sequence[Index]
) -> None:
    """Strides that a planner has not from the tensor itself are seen here: all of an index is read, and no more than
    there is of the others.
    """
    if 0 in shape:
        return
    for at, index in enumerate(indices):
        if _reach(shape, index.strides) != extent(index.tensor):
            raise AssertionError(f"index {at} has strides {index.tensor.stride()}, and is read with {index.strides}")
    for name, (tensor, strides) in operands.items():
        steps = sum((index.size - 1) * index.step for index in indices if index.size) if name == "self" else 0
        if tensor.numel() and _reach(shape, strides) + steps > extent(tensor):
            raise AssertionError(f"{name} has strides {tensor.stride()}, and is read with {strides}")


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    furthest = 0
    for size, step in zip(shape, strides, strict=True):
        furthest += (size - 1) * step
    return 1 + furthest


def _part(
    shape: Sequence[int], dims: Sequence[int], operands: Sequence[Sequence[int]]
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """Sizes and each operand's strides in `dims`, merged where possible, the innermost first."""
    where = geometry([shape[d] for d in dims], [[operand[d] for d in dims] for operand in operands])
    # A single element is visited at 0, whatever its strides; `geometry` says 1 of them then.
    return where.sizes, where.strides


def _in_order(
    shape: Sequence[int], dims: Sequence[int], operands: Sequence[Sequence[int]]
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """As `_part`, in the order of `dims`: that of a contiguous operand, as `geometry` orders by the first one."""
    sizes = [shape[d] for d in dims]
    contiguous = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    where = geometry(sizes, [contiguous, *([operand[d] for d in dims] for operand in operands)])
    return where.sizes, where.strides[1:]


class _Form(NamedTuple):
    """What the text for rows depends on.

    Args:
        rank: dimensions beside the one that rows go along.
        steps: each operand's stride along a row: 0, 1, or 2 for anything else.
    """

    names: tuple[str, ...]
    rank: int
    steps: tuple[int, ...]

    def _step_of(self, name: str) -> int:
        return self.steps[self.names.index(name)]

    def step(self, name: str) -> str:
        """The operand's stride along the row. Compilers make vectors where they see that it is 1."""
        return "1" if self._step_of(name) == 1 else f"{name}_row_step"

    @property
    def text(self) -> str:
        """For a kernel's name."""
        return "".join(map(str, self.steps))

    def constant(self, indices: int) -> list[int]:
        """The indices that are the same for a whole row."""
        return [t for t in range(indices) if self._step_of(f"index{t}") == 0]

    def varying(self, indices: int) -> list[int]:
        return [t for t in range(indices) if self._step_of(f"index{t}") != 0]

    def places(self, index: str) -> str:
        """Statements that declare each operand's place, NAME_at, at the beginning of row number `index`."""
        return _places(index, self.rank, "size", {f"{name}_at": f"{name}_stride" for name in self.names})


class _Rows:
    """The innermost dimension of a shape, which work items go along in chunks, and the others.

    Args:
        sizes, strides: the innermost first; strides of each of the operands `names`.
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
    """Statements that declare each operand's place for `step`, NAME_step, from NAME_at on."""
    places = {f"{name}_step": f"serial_{name}_stride" for name in names}
    return _places("step", rank, "serial_size", places, {f"{name}_step": f"{name}_at" for name in names})


def _places(
    index: str, rank: int, size: str, places: Mapping[str, str], starts: Mapping[str, str] | None = None
) -> str:
    """Statements that declare `places`, from `starts` on, for the linear `index`; the values are names of strides."""
    coordinates = [f"{index}_{d}" for d in reversed(range(rank))]
    lines = [split(index, [f"{size}{d}" for d in reversed(range(rank))], coordinates)]
    for place, stride in places.items():
        terms = " + ".join(f"{index}_{d} * {stride}{d}" for d in range(rank))
        lines.append(f"index_t {place} = {starts[place] + ' + ' if starts else ''}{terms};")
    return "\n  ".join(lines)


def _add_indices(which: Sequence[int], place: str, leave: str, rows: _Form | None = None, suffix: str = "at") -> str:
    """Statements that add to `place` what the indices `which` say; with `rows`, for the element i of the row."""
    lines = []
    for t in which:
        at = f"index{t}_{suffix}" + (f" + i * {rows.step(f'index{t}')}" if rows else "")
        checked = f"checked_index(errors, operator_number, index{t}[{at}], index_size{t})"
        lines.append(f"const index_t found{t} = {checked}; if (found{t} < 0) {leave}; {place} += found{t} * step{t};")
    return "\n  ".join(lines)


def _with_indices(spec: LaunchSpec, indices: Sequence[Index], wraps: bool, report: error_words.Report) -> Launch:
    """The launch of a kernel that looks at indices, and knows strides of all of its tensors."""
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
