"""Stable merge sort of the rows of contiguous (rows, size) tensors, or of the first k elements of each row only.

An element is mapped to an unsigned integer of the same order, its key; the least key comes first. A 32-bit key and the
element's position in the row share one 64-bit integer: the key in the upper half, the position in the lower half. With
64-bit keys, positions are in a separate tensor.

In `sort_runs`, each work item sorts a run of RUN keys. `merge_runs` merges pairs of runs: each work item writes a piece
of the result, and finds the start of its piece in both runs by binary search. Runs are cut to k keys, so that finding
the first k elements costs little more than reading the row. If k is small, CPUs use `cpu/keep_runs.py` instead of
`sort_runs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split

RUN = 16
_SMALL_GROUP = 8
# Keys that a work item writes when merging: on CPUs, on SIMT targets.
_LONG_PIECE, _SHORT_PIECE = 1024, 32


@dataclass(frozen=True)
class Runs:
    """Sorted runs of keys. Each row of `size` keys has runs of `length` keys; the last run of a row can be shorter.

    Args:
        keys: uint64, contiguous.
        places: positions in the row, int32; None if the keys include them.
    """

    keys: torch.Tensor
    places: torch.Tensor | None
    rows: int
    size: int
    length: int

    @property
    def count(self) -> int:
        """The number of runs in each row."""
        return -(-self.size // self.length)

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        named = {f"{prefix}keys": self.keys}
        return named if self.places is None else {**named, f"{prefix}places": self.places}


def new_runs(self: torch.Tensor, rows: int, size: int, length: int) -> Runs:
    """Returns uninitialized runs for keys of `self`."""
    keys = torch.empty(rows * size, dtype=torch.uint64, device=self.device)
    apart = facts(value_dtype(self.dtype)).bits == 64
    places = torch.empty(rows * size, dtype=torch.int32, device=self.device) if apart else None
    return Runs(keys, places, rows, size, length)


def first_runs(self: torch.Tensor, k: int) -> Runs:
    """Returns uninitialized runs for the result of `sort_runs` for `self`."""
    return new_runs(self, self.shape[0], cut_size(self.shape[1], RUN, min(RUN, k)), min(RUN, k))


def merged_runs(self: torch.Tensor, runs: Runs, k: int) -> Runs:
    """Returns uninitialized runs for the result of `merge_runs` for `runs` of keys of `self`."""
    length = min(2 * runs.length, k)
    return new_runs(self, runs.rows, cut_size(runs.size, 2 * runs.length, length), length)


def cut_size(size: int, length: int, cut: int) -> int:
    """Returns how many of `size` keys remain when each run of `length` keys is cut to `cut` keys."""
    return size // length * cut + min(size % length, cut)


def sort_runs(dialect: Dialect, runs: Runs, self: torch.Tensor, descending: bool) -> Launch:
    """Sorts runs of RUN elements of the rows of self."""
    size = self.shape[1]
    apart = runs.places is not None
    pad = "keys_here[i] = ~(uint64)0;" + (" places_here[i] = 0x7fffffff;" if apart else "")
    encode = "keys_here[i] = key; places_here[i] = begin + i;" if apart else "keys_here[i] = key << 32 | (begin + i);"
    order = "\n  ".join(f"ORDER({a}, {b})" for a, b in network(RUN))
    body = f"""
  {split("item", ["rows", "runs"], ["row", "run"])}
  const index_t begin = run * {RUN};
  uint64 keys_here[{RUN}]; {f"int places_here[{RUN}];" if apart else ""}
  for (int i = 0; i < {RUN}; ++i) {{
    if (begin + i < size) {{
      const uint64 key = {"~" if descending else ""}key_of(load_self(row * size + begin + i)){"" if apart else LOW};
      {encode}
    }} else {{ {pad} }}
  }}
  {order}
  const index_t to = row * runs_size + run * length;
  // A constant number of steps: an array that is indexed in a loop of another length is not in registers.
  for (int i = 0; i < {RUN}; ++i) {{
    if (i < length && begin + i < size) {{
      keys[to + i] = keys_here[i];
      {"places[to + i] = places_here[i];" if apart else ""}
    }}
  }}
"""
    items = self.shape[0] * -(-size // RUN)
    integers = {"rows": runs.rows, "runs": -(-size // RUN), "size": size, "runs_size": runs.size}
    integers["length"] = runs.length
    return LaunchSpec(
        "sort_runs_" + ("descending" if descending else "ascending"),
        dialect,
        outputs=runs.tensors(),
        inputs={"self": self},
        integers=integers,
        value=value_dtype(self.dtype),
        functions=key_function(dialect, value_dtype(self.dtype)) + (_ORDER_APART if apart else _ORDER),
        types={"uint64": torch.uint64},
        body=body,
        items=items,
        group_size=dialect.target.small_group(_SMALL_GROUP),
    ).launch()


def merge_runs(dialect: Dialect, merged: Runs, runs: Runs) -> Launch:
    """Merges pairs of adjacent runs, and keeps `merged.length` keys of each result."""
    apart = runs.places is not None
    piece = min(merged.length, _SHORT_PIECE if dialect.target.simt else _LONG_PIECE)
    pieces = -(-merged.length // piece)
    store_place = "places[to] = from_places[taken];" if apart else ""
    body = f"""
  {split("item", ["rows", "pairs", "pieces"], ["row", "pair", "piece_number"])}
  const index_t begin = pair * 2 * length, a = row * size + begin, b = a + length;
  const index_t a_size = min(length, size - begin), b_size = max(min(length, size - begin - length), (index_t)0);
  const index_t first = piece_number * piece, last = min(min(first + piece, merged_length), a_size + b_size);
  if (first >= last) return;
  // Number of keys of the first run that precede the piece. Equal keys of the first run come first.
  index_t i = max(first - b_size, (index_t)0), most = min(first, a_size);
  while (i < most) {{
    const index_t middle = (i + most) / 2;
    if (from_keys[b + first - 1 - middle] < from_keys[a + middle]) most = middle; else i = middle + 1;
  }}
  index_t j = first - i;
  uint64 a_key = i < a_size ? from_keys[a + i] : 0, b_key = j < b_size ? from_keys[b + j] : 0;
  const index_t end = a + a_size + b_size - 1;
  index_t to = row * merged_size + pair * merged_length + first;
  for (index_t k = first; k < last; ++k, ++to) {{
    // Without branches, as they would be unpredictable.
    const int second = (j < b_size) & ((i >= a_size) | (b_key < a_key));
    keys[to] = second ? b_key : a_key;
    const index_t taken = second ? b + j : a + i;
    {store_place}
    j += second; i += 1 - second;
    const uint64 next = from_keys[min(taken + 1, end)];
    a_key = second ? a_key : next; b_key = second ? next : b_key;
  }}
"""
    integers = {"rows": runs.rows, "pairs": merged.count, "pieces": pieces, "piece": piece}
    integers |= {"size": runs.size, "length": runs.length, "merged_size": merged.size, "merged_length": merged.length}
    return LaunchSpec(
        "merge_runs",
        dialect,
        outputs=merged.tensors(),
        inputs=runs.tensors("from_"),
        integers=integers,
        value=torch.uint64,
        types={"uint64": torch.uint64},
        body=body,
        items=runs.rows * merged.count * pieces,
        group_size=dialect.target.small_group(_SMALL_GROUP),
    ).launch()


def take_sorted(
    dialect: Dialect, values: torch.Tensor, indices: torch.Tensor, self: torch.Tensor, runs: Runs, first: int
) -> Launch:
    """Writes the elements from position `first` on of each row's only run to values and indices, (rows, count)."""
    place = "places[from]" if runs.places is not None else "(index_t)(keys[from] & 0xffffffffu)"
    body = f"""
  {split("item", ["rows", "count"], ["row", "column"])}
  const index_t from = row * runs_size + first + column;
  const index_t place = {place};
  values[item] = self[row * size + place];
  indices[item] = place;
"""
    integers = {"rows": runs.rows, "count": values.shape[1], "first": first, "runs_size": runs.size}
    return LaunchSpec(
        "take_sorted",
        dialect,
        outputs={"values": values, "indices": indices},
        inputs={"self": self, **runs.tensors()},
        integers={**integers, "size": self.shape[1]},
        value=value_dtype(self.dtype),
        types={"uint64": torch.uint64},
        body=body,
        items=values.numel(),
        group_size=dialect.target.small_group(_SMALL_GROUP),
    ).launch()


def network(size: int) -> list[tuple[int, int]]:
    """Returns the compare-exchange pairs of Batcher's odd-even merge sort of `size` elements, a power of two."""
    pairs = []
    p = 1
    while p < size:
        k = p
        while k:
            for j in range(k % p, size - k, 2 * k):
                for i in range(min(k, size - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs


LOW = " & 0xffffffffu"

_ORDER = """
#define ORDER(a, b) { \\
  const uint64 x = keys_here[a], y = keys_here[b]; keys_here[a] = x < y ? x : y; keys_here[b] = x < y ? y : x; }
"""
_ORDER_APART = """
#define ORDER(a, b) { \\
  const uint64 x = keys_here[a], y = keys_here[b]; const int v = places_here[a], w = places_here[b]; \\
  const bool swap = y < x || (y == x && w < v); \\
  keys_here[a] = swap ? y : x; keys_here[b] = swap ? x : y; \\
  places_here[a] = swap ? w : v; places_here[b] = swap ? v : w; }
"""


def key_function(dialect: Dialect, value: torch.dtype, name: str = "key_of") -> str:
    """Returns the function `name`(x): an unsigned integer in the order of x, of 64 bits if x has as many, else of 32.

    NaN is the greatest; -0 equals 0.

    Args:
        value: dtype of x in registers.
    """
    category, bits = facts(value)
    kind = dialect.type(value)
    type_ = "uint64" if bits == 64 else "uint"
    top = f"(({type_})1 << {max(bits, 32) - 1})"
    if category == "float":
        found = dialect.float_bits(Value("number", value), torch.uint64 if bits == 64 else torch.uint32)
        text = (
            # Not x + 0: compilers that ignore signs of zeros (Mesa's) would remove the addition.
            f"const {kind} number = x == ({kind})0 ? ({kind})0 : x; const {type_} bits = {found}; "
            f"return x != x ? ~({type_})0 : bits & {top} ? ~bits : bits | {top};"
        )
    else:
        mask = f"{(1 << bits) - 1:#x}u" if bits < 64 else f"~({type_})0"
        text = f"return (({type_})x" + (f" ^ ({type_})1 << {bits - 1}" if category == "signed" else "") + f") & {mask};"
    return f"FUNCTION {type_} {name}(const {kind} x) {{ {text} }}\n"
