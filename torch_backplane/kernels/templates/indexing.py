"""Reading and writing elements whose places are in index tensors: gather, scatter, advanced indexing, embeddings.

A call goes over a shape. Each operand has a stride for each dimension of it, 0 where it does not depend on it, and each
index tensor adds (its element here) × (the stride of the dimension that it indexes) to the place in `self`:

    place(c) = Σ c[d] * kept[d] + Σ index_t[Σ c[d] * strides_t[d]] * step_t

`kept` are self's strides for the dimensions of the shape that are dimensions of self, 0 for those that indices have.
Index out of range: the element is left out, and the error reported as `errors` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.layouts import geometry
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import GROUP_SIZE, Call, make_call, named, split
from torch_backplane.kernels.templates.spelling import lane_count

_CPU_GROUP = 16


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
    errors: torch.Tensor,
    operator: str,
    *,
    wraps: bool = False,
) -> Call:
    """out[c] = self[place(c)] over out's shape; out and self have one dtype.

    Args:
        wraps: whether negative indices count from the end.
        errors: the device's four int32 words. operator: its name, for the error.
    """
    where = geometry(out.shape, [out.stride(), kept, *(index.strides for index in indices)])
    sizes, strides = where.sizes, where.strides
    run = all(s[0] == 1 for s in strides[:2]) and all(s[0] == 0 for s in strides[2:]) and sizes[0] > 1
    if run:
        sizes, strides = sizes[1:] or (1,), tuple(s[1:] or (0,) for s in strides)
    run_length = where.sizes[0] if run else 1
    chunk = 4 * lane_count(dialect, torch.float32) if run else 1
    rank, group_size = len(sizes), _group_size(dialect)
    items = math.prod(sizes) * -(-run_length // chunk)
    at = {"out_at": "out_stride", "place": "self_stride", **_index_places(indices)}
    body = f"""
  const index_t item = (index_t)GROUP * {group_size} + ITEM;
  if (item >= items) return;
  const index_t first = item % chunks * {chunk};
  const index_t element = item / chunks;
  {_places("element", rank, "size", at)}
  {_add_indices(indices, "return")}
  for (index_t i = first; i < min(first + {chunk}, run_length); ++i) out[out_at + i] = self[place + i];
"""
    integers = {"items": items, "chunks": -(-run_length // chunk), "run_length": run_length, **named("size", sizes)}
    operands = zip(
        ("out_stride", "self_stride", *(f"index{t}_stride" for t in range(len(indices)))), strides, strict=True
    )
    for name, operand in operands:
        integers |= named(name, operand)
    return _call(
        "indexed_read", dialect, {"out": out}, {"self": self}, indices, integers, wraps, errors, operator, body, items
    )


# How a value meets the one that is there, as an expression of `there` and `value`.
_COMBINE = {
    "assign": "value",
    "add": "there + value",
    "multiply": "there * value",
    "amin": "there < value || there != there ? there : value",
    "amax": "there > value || there != there ? there : value",
}


def write(
    dialect: Dialect,
    self: torch.Tensor,
    source: torch.Tensor | int | float | bool,
    shape: Sequence[int],
    kept: Sequence[int],
    source_strides: Sequence[int],
    indices: Sequence[Index],
    errors: torch.Tensor,
    operator: str,
    *,
    combine: str = "assign",
    alpha: int | float | None = None,
    wraps: bool = False,
    skip: int | None = None,
    deterministic: bool = False,
) -> Call:
    """self[place(c)] = combine(self[place(c)], source[c]) for every c in `shape`, in place.

    Args:
        source: of self's dtype, or a number.
        combine: "assign", "add", "multiply", "amin" or "amax".
        alpha: what source is multiplied by.
        skip: an index (of the first index tensor) whose elements are left out: padding_idx.

    On a CPU, where `deterministic`, and for dtypes without 32-bit atomics: one work item for each place in the
    dimensions that self keeps, which goes through the others in order; the last value assigned stays. Else one for each
    element: of several values assigned to one place any may stay, and sums are added in any order.
    """
    value = value_dtype(self.dtype)
    in_order = dialect.processor == "cpu" or deterministic or (combine != "assign" and self.dtype not in _ATOMIC_TYPES)
    is_tensor = isinstance(source, torch.Tensor)
    operands = [kept, *(index.strides for index in indices), *([source_strides] if is_tensor else [])]
    names = [
        "self_stride",
        *(f"index{t}_stride" for t in range(len(indices))),
        *(["source_stride"] if is_tensor else []),
    ]
    serial = [d for d in range(len(shape)) if in_order and kept[d] == 0]
    parallel = [d for d in range(len(shape)) if d not in serial]
    sizes, strides = _part(shape, parallel, operands)
    serial_sizes, serial_strides = _in_order(shape, serial, operands)
    rank, serial_rank, items = len(sizes), len(serial_sizes), math.prod(sizes)
    integers = {"items": items, "steps": math.prod(serial_sizes), "skip": -1 if skip is None else skip}
    integers |= named("size", sizes) | named("serial_size", serial_sizes)
    for name, operand, serial_operand in zip(names, strides, serial_strides, strict=True):
        integers |= named(name, operand) | named(f"serial_{name}", serial_operand)
    at = {"item_place": "self_stride", **{f"item_{k}": v for k, v in _index_places(indices).items()}}
    serial_at = {"place": "serial_self_stride", **{k: f"serial_{v}" for k, v in _index_places(indices).items()}}
    if is_tensor:
        at["item_source_at"], serial_at["source_at"] = "source_stride", "serial_source_stride"
    group_size = _group_size(dialect)
    scaled = "load_source(source_at)" if is_tensor else "number"
    body = f"""
  const index_t item = (index_t)GROUP * {group_size} + ITEM;
  if (item >= items) return;
  {_places("item", rank, "size", at)}
  for (index_t step = 0; step < steps; ++step) {{
    {_places("step", serial_rank, "serial_size", serial_at, "item_")}
    {"if (index0[index0_at] == skip) continue;" if skip is not None else ""}
    {_add_indices(indices, "continue")}
    const value_t value = {scaled}{" * alpha" if alpha is not None else ""};
    {_meet(combine, self.dtype, in_order)}
  }}
"""
    number = _number_dtype(value)
    numbers: dict[str, tuple[torch.dtype, Any]] = {} if is_tensor else {"number": (number, source)}
    if alpha is not None:
        numbers["alpha"] = (number, alpha)
    return _call(
        f"indexed_{combine}" + ("" if in_order else "_anyhow"),
        dialect,
        {"self": self},
        {"source": source} if isinstance(source, torch.Tensor) else {},
        indices,
        integers,
        wraps,
        errors,
        operator,
        body,
        items,
        numbers,
    )


_ATOMIC_TYPES = frozenset({torch.float32, torch.int32})


def _meet(combine: str, dtype: torch.dtype, in_order: bool) -> str:
    expression = _COMBINE[combine]
    if combine == "assign":
        return "store_self(place, value);"
    if in_order:
        return f"const value_t there = load_self(place); store_self(place, {expression});"
    to_bits, from_bits = ("as_uint", "as_float") if dtype == torch.float32 else ("(uint)", "(int)")
    return f"""uint expected = ((GLOBAL uint*)self)[place], found;
    while (true) {{
      const value_t there = {from_bits}(expected);
      found = atomic_swap(self + place, expected, {to_bits}({expression}));
      if (found == expected) break;
      expected = found;
    }}"""


def _number_dtype(value: torch.dtype) -> torch.dtype:
    return value if facts(value).kind == "float" else torch.int64


def _group_size(dialect: Dialect) -> int:
    return _CPU_GROUP if dialect.processor == "cpu" else GROUP_SIZE


def _index_places(indices: Sequence[Index]) -> dict[str, str]:
    return {f"index{t}_at": f"index{t}_stride" for t in range(len(indices))}


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


def _places(index: str, rank: int, size: str, places: dict[str, str], start: str = "") -> str:
    """Statements that declare each of `places` for the linear `index`; `start` begins the name of what it starts at."""
    coordinates = [f"{index}_{d}" for d in reversed(range(rank))]
    lines = [split(index, [f"{size}{d}" for d in reversed(range(rank))], coordinates)]
    for place, stride in places.items():
        terms = " + ".join(f"{index}_{d} * {stride}{d}" for d in range(rank))
        lines.append(f"index_t {place} = {start + place + ' + ' if start else ''}{terms};")
    return "\n  ".join(lines)


def _add_indices(indices: Sequence[Index], leave: str) -> str:
    return "\n  ".join(
        f"const index_t found{t} = checked_index(errors, operator_number, index{t}[index{t}_at], index_size{t}); "
        f"if (found{t} < 0) {leave}; place += found{t} * step{t};"
        for t in range(len(indices))
    )


def _call(
    name: str,
    dialect: Dialect,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    indices: Sequence[Index],
    integers: dict[str, int],
    wraps: bool,
    errors: torch.Tensor,
    operator: str,
    body: str,
    items: int,
    numbers: dict[str, tuple[torch.dtype, int | float]] | None = None,
) -> Call:
    for position, index in enumerate(indices):
        integers |= {f"step{position}": index.step, f"index_size{position}": index.size}
    self = outputs.get("self", inputs.get("self"))
    assert self is not None
    group_size = _group_size(dialect)
    return make_call(
        name,
        dialect,
        outputs={**outputs, "errors": errors},
        inputs={**inputs, **{f"index{t}": index.tensor for t, index in enumerate(indices)}},
        integers=integers,
        numbers={**(numbers or {}), "operator_number": (torch.int32, error_words.operator_number(operator))},
        constants={"WRAPS": int(wraps)},
        types={"int64": torch.int64},
        value=value_dtype(self.dtype),
        functions=error_words.FUNCTIONS,
        body=body,
        groups=-(-items // group_size),
        group_size=group_size,
    )
