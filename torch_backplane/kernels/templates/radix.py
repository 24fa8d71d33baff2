"""Stable radix sort of long rows, and radix selection of their first k elements.

`sort.key_function` maps a row's elements to unsigned integers, the keys. A row is divided into chunks. Sorting by one
digit takes three steps: count the elements of each chunk with each digit; scan these counts, to get the start of each
chunk and digit; and move every element to its position.

`radix_sort` sorts by each digit, least significant first. The first step reads the elements, the last one writes the
results. `select` determines the key of the k-th element digit by digit, most significant first, by counting the digits
of the keys that agree with it so far. Then it sorts by a digit that is 0, 1 or 2 for keys less than, equal to, or
greater than that key.

If `Target.team_size` is 1, as on CPUs, a work item processes a chunk in order. Otherwise a team sorts its chunk tile by
tile in local memory, so that elements with the same digit are written to adjacent positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.scan import accumulate
from torch_backplane.kernels.templates.sort import key_function
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split

_RUN = 4  # elements of a tile per work item of a team
_MIN_CHUNK = 4096  # minimum elements of a chunk
_DIGIT_BITS = {False: 8, True: 4}  # by Target.simt
_SIDES = 3  # less, equal, greater
_MIN_SORTED = {False: 256, True: 1024}  # minimum row size by Target.simt: merging is faster for shorter rows
_MIN_SELECTED, _FEWEST = 8192, 32  # minimum row size and minimum k for `select`: otherwise merging is faster
_PART = 16  # if k is at most 1/_PART of a row, the row is not sorted completely

# The range of bits in which the keys of a dtype can differ. float16 and bfloat16 use float32's keys.
_BITS = {torch.float16: (13, 32), torch.bfloat16: (16, 32), torch.bool: (0, 1)}


def suits_sorting(target: Target, size: int, k: int) -> bool:
    """Whether `radix_sort` finds the first `k` elements of rows of `size` faster than merging."""
    return size >= _MIN_SORTED[target.simt] and _PART * k > size and _has_room(target)


def suits_selection(target: Target, size: int, k: int) -> bool:
    """Whether `select`, followed by a sort, finds the first `k` elements of rows of `size` faster."""
    return size >= _MIN_SELECTED and k >= _FEWEST and _PART * k <= size and _has_room(target)


def _has_room(target: Target) -> bool:
    return not target.simt or _team(target) >= 4


def _team(target: Target) -> int:
    """Returns the team size. A tile, and a counter for each digit and work item, must fit into local memory."""
    return target.team_of(_RUN * 12 + 4 * (1 << _DIGIT_BITS[True]) + 8) if target.team_size > 1 else 1


def _chunks(target: Target, rows: int, size: int) -> int:
    """Returns the number of chunks of each row."""
    return max(1, min(-(-target.enough_groups // rows), size // _MIN_CHUNK))


def _shifts(target: Target, dtype: torch.dtype) -> list[int]:
    """Returns the first bit of each digit in the key, least significant digit first."""
    low, high = _bits(dtype)
    width = _DIGIT_BITS[target.simt]
    digits = -(-(high - low) // width)
    return [max(0, high - (digits - i) * width) for i in range(digits)]


def _bits(dtype: torch.dtype) -> tuple[int, int]:
    return _BITS.get(dtype, (0, facts(dtype).bits))


def _is_apart(dtype: torch.dtype) -> bool:
    """Whether keys have 64 bits, so that positions are in a separate tensor instead of in the same integer."""
    return facts(value_dtype(dtype)).bits == 64


class Keys(NamedTuple):
    """Elements between two steps.

    Args:
        keys: uint64, of the shape of the rows; includes positions if `places` is None.
        places: int32, each element's position in its original row.
    """

    keys: torch.Tensor
    places: torch.Tensor | None

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        named = {f"{prefix}keys": self.keys}
        return named if self.places is None else {**named, f"{prefix}places": self.places}


def _room(self: torch.Tensor) -> Keys:
    keys = torch.empty(self.shape, dtype=torch.uint64, device=self.device)
    return Keys(keys, torch.empty_like(keys, dtype=torch.int32) if _is_apart(self.dtype) else None)


def radix_sort(
    dialect: Dialect,
    values: torch.Tensor,
    indices: torch.Tensor,
    self: torch.Tensor,
    first: int,
    descending: bool,
) -> list[Launch]:
    """Sorts each row of self, of shape (rows, size), and writes the results from position `first` on.

    values and indices have the shape (rows, count). All tensors are contiguous; the results must not overlap self. The
    sort is stable; NaN is the greatest element.
    """
    step = _first_step(dialect, self, descending)
    shifts = _shifts(dialect.target, self.dtype)
    launches: list[Launch] = []
    for number, shift in enumerate(shifts):
        step = replace(step, shift=shift)
        sink = _room(self) if number < len(shifts) - 1 else None
        launches += [*step.count(), step.scatter(values, indices, first, sink)]
        step = replace(step, source=sink)
    return launches


def select(
    dialect: Dialect, values: torch.Tensor, indices: torch.Tensor, self: torch.Tensor, descending: bool
) -> list[Launch]:
    """Selects the first k elements, in sorting order, of each row of self, of shape (rows, size), without sorting them.

    values and indices have the shape (rows, k). All tensors are contiguous; the results must not overlap self. Elements
    that precede the k-th in sorting order come first, then those equal to it, both in the order of the row.
    """
    rows, k = values.shape
    found = torch.empty(rows, dtype=torch.uint64, device=self.device)
    left = torch.empty(rows, dtype=torch.int32, device=self.device)
    step = _first_step(dialect, self, descending)
    launches: list[Launch] = []
    for shift in reversed(_shifts(dialect.target, self.dtype)):
        step = replace(step, shift=shift)
        launches += [*step.count(), step.choose(found, left, k)]
        step = replace(step, found=found)
    sides = step.counts.new_empty(rows, _SIDES * step.chunks)
    step = replace(step, is_side=True, counts=sides)
    return [*launches, *step.count(), step.scatter(values, indices, 0, None)]


def _first_step(dialect: Dialect, self: torch.Tensor, descending: bool) -> _Step:
    rows, size = self.shape
    chunks, digits = _chunks(dialect.target, rows, size), 1 << _DIGIT_BITS[dialect.target.simt]
    counts = torch.empty(rows, digits * chunks, dtype=torch.int32, device=self.device)
    return _Step(dialect, self, descending, counts, chunks)


@dataclass(frozen=True)
class _Step:
    """The sort, or count, by one digit.

    Args:
        self: the rows.
        counts: int32, of shape (rows, digits × chunks).
        chunks: number of chunks of each row.
        shift: first bit of the digit in the key.
        source: the keys; None: they are computed from self.
        found: for each row, the higher digits of a key. Only keys with the same higher digits count.
        is_side: the digit is 0 for keys less than `found`, 1 for equal keys, and 2 for greater keys.
    """

    dialect: Dialect
    self: torch.Tensor
    descending: bool
    counts: torch.Tensor
    chunks: int
    shift: int = 0
    source: Keys | None = None
    found: torch.Tensor | None = None
    is_side: bool = False

    def count(self) -> list[Launch]:
        """Computes counts[row, digit, chunk]: the end position of the chunk's elements with that digit."""
        body = _COUNT if _team(self.dialect.target) == 1 else _COUNT_BY_TEAMS
        counted = self._over_chunks("count_digits", {"counts": self.counts}, {}, {}, body, {})
        return [counted, *accumulate(self.dialect, self.counts, self.counts, 1, "cumsum")]

    def scatter(self, values: torch.Tensor, indices: torch.Tensor, first: int, sink: Keys | None) -> Launch:
        """Moves every element to its position in `sink`; without it, writes those from `first` on to the results."""
        inputs = {"counts": self.counts}
        body = _SCATTER if _team(self.dialect.target) == 1 else _SCATTER_BY_TEAMS
        if sink is None:
            put = (
                "if ((to) >= begin && (to) - begin < wanted) { const index_t at_ = row * wanted + (to) - begin; "
                "values[at_] = self[row * size + (place)]; indices[at_] = (place); }"
            )
            outputs = {"values": values, "indices": indices}
            inputs["self"] = self.self
            integers = {"begin": first, "wanted": values.shape[1]}
            return self._over_chunks("take_by_digit", outputs, inputs, integers, body, {_PUT: put})
        if sink.places is not None:
            put = "to_keys[row * size + (to)] = (key); to_places[row * size + (to)] = (place);"
        else:
            put = "to_keys[row * size + (to)] = (uint64)(key) << 32 | (uint64)(place);"
        return self._over_chunks("sort_by_digit", sink.tensors("to_"), inputs, {}, body, {_PUT: put})

    def choose(self, found: torch.Tensor, left: torch.Tensor, k: int) -> Launch:
        """Adds the k-th element's digit to found[row].

        left[row] becomes the element's rank among the keys that agree with found[row].
        """
        digits = 1 << _DIGIT_BITS[self.dialect.target.simt]
        return LaunchSpec(
            "choose_digit" + ("_first" if self.found is None else ""),
            self.dialect,
            outputs={"found": found, "left": left},
            inputs={"counts": self.counts},
            integers={"rows": len(found), "chunks": self.chunks, "shift": self.shift, "k": k},
            constants={"DIGITS": digits, "IS_FIRST": int(self.found is None)},
            types={"uint64": torch.uint64},
            value=torch.uint64,
            body=_CHOOSE,
            items=len(found),
            group_size=self.dialect.target.small_group(8),
        ).launch()

    def _over_chunks(
        self,
        name: str,
        outputs: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        integers: Mapping[str, int],
        body: str,
        macros: Mapping[str, str],
    ) -> Launch:
        """Returns a launch of `body` for each chunk, elements `first` to `last` of `row`, by a work item or a team."""
        target, value = self.dialect.target, value_dtype(self.self.dtype)
        rows, size = self.self.shape
        team = _team(target)
        digits = _SIDES if self.is_side else 1 << _DIGIT_BITS[target.simt]
        tile = team * _RUN if team > 1 else 1
        chunk = -(-size // (self.chunks * tile)) * tile
        known = {"rows": rows, "size": size, "chunks": self.chunks, "chunk": chunk, "shift": self.shift}
        if team > 1:
            known["beyond"] = size + tile  # an upper bound of indices in the last tile, which index_t must represent
            end = "beyond - TEAM * RUN"
            where = "const int member = ITEM; const index_t chunk_number = GROUP % chunks, row = GROUP / chunks;"
        else:
            end = "size"
            where = split("item", ["rows", "chunks"], ["row", "chunk_number"])
        chunk_ends = f"first = min(chunk_number * chunk, size), last = first + min(chunk, {end} - first);"
        read = {"self": self.self} if self.source is None else self.source.tensors("from_")
        if self.found is not None:
            read["found"] = self.found
            where += " const key_t known = (key_t)found[row];"
        order = ("descending" if self.descending else "ascending") if self.source is None else ""
        role = "" if self.found is None else "side" if self.is_side else "agreeing"
        return LaunchSpec(
            "_".join(filter(None, [name, order, role])),
            self.dialect,
            outputs=outputs,
            inputs={**read, **inputs},
            integers={**known, **integers},
            constants={"DIGITS": digits, "TEAM": team, "RUN": _RUN, **self._access(), **macros},
            types={"uint64": torch.uint64, "key_t": torch.uint64 if _is_apart(self.self.dtype) else torch.uint32},
            functions=key_function(self.dialect, value),
            value=value,
            body=f"{where}\n  const index_t {chunk_ends}\n{body}",
            items=rows * self.chunks if team == 1 else None,
            groups=None if team == 1 else rows * self.chunks,
            group_size=team,
        ).launch()

    def _access(self) -> dict[str, str]:
        """Returns the macros KEY(at) and PLACE(at) of the source, DIGIT(key), and AGREES(key)."""
        low, high = _bits(self.self.dtype)
        width = _DIGIT_BITS[self.dialect.target.simt]
        if self.source is None:
            key, place = f"key_of(load_self(row * size + (at))){' ^ ~(key_t)0' if self.descending else ''}", "(int)(at)"
            if high - low not in (32, 64):
                key = f"({key}) & {(1 << high) - (1 << low):#x}u"
        elif self.source.places is not None:
            key, place = "from_keys[row * size + (at)]", "from_places[row * size + (at)]"
        else:
            key = "(key_t)(from_keys[row * size + (at)] >> 32)"
            place = "(int)(from_keys[row * size + (at)] & 0x7fffffffu)"
        digit = f"(int)((key) >> shift) & {(1 << width) - 1}"
        if self.is_side:
            digit = "(key) < known ? 0 : (key) == known ? 1 : 2"
        agrees = "1"
        if self.found is not None and not self.is_side:
            agrees = f"((key) ^ known) >> shift >> {width} == 0"
        macros = {"KEY(at)": key, "PLACE(at)": place, "DIGIT(key)": digit, "AGREES(key)": agrees}
        return {name: f"({text})" for name, text in macros.items()}


_PUT = "PUT(to, key, place)"

_COUNT = """
  int here[DIGITS];
  for (int digit = 0; digit < DIGITS; ++digit) here[digit] = 0;
  for (index_t at = first; at < last; ++at) {
    const key_t key = KEY(at);
    if (AGREES(key)) ++here[DIGIT(key)];
  }
  for (int digit = 0; digit < DIGITS; ++digit) counts[(row * DIGITS + digit) * chunks + chunk_number] = here[digit];
"""

_SCATTER = """
  int next[DIGITS];
  for (int digit = 0; digit < DIGITS; ++digit) {
    const index_t before = digit * chunks + chunk_number;
    next[digit] = before == 0 ? 0 : counts[row * DIGITS * chunks + before - 1];
  }
  for (index_t at = first; at < last; ++at) {
    const key_t key = KEY(at);
    const int place = PLACE(at);
    const index_t to = next[DIGIT(key)]++;
    PUT(to, key, place)
  }
"""

# Each work item has its own column of counters.
_COUNT_BY_TEAMS = """
  LOCAL int here[DIGITS * TEAM];
  for (int digit = 0; digit < DIGITS; ++digit) here[digit * TEAM + member] = 0;
  for (index_t at = first + member; at < last; at += TEAM) {
    const key_t key = KEY(at);
    if (AGREES(key)) ++here[DIGIT(key) * TEAM + member];
  }
  BARRIER;
  for (int half_size = TEAM / 2; half_size > 0; half_size >>= 1) {
    if (member < half_size)
      for (int at = member; at < DIGITS * TEAM; at += TEAM) here[at] += here[at + half_size];
    BARRIER;
  }
  for (int digit = member; digit < DIGITS; digit += TEAM)
    counts[(row * DIGITS + digit) * chunks + chunk_number] = here[digit * TEAM];
"""

# before[digit, item] is the number of elements of the tile that precede the work item's elements with that digit.
_SCATTER_BY_TEAMS = """
  LOCAL key_t keys_here[RUN * TEAM]; LOCAL int places_here[RUN * TEAM];
  LOCAL int before[DIGITS * TEAM]; LOCAL int sums[TEAM]; LOCAL int next[DIGITS]; LOCAL int starts[DIGITS];
  for (int digit = member; digit < DIGITS; digit += TEAM) {
    const index_t at = digit * chunks + chunk_number;
    next[digit] = at == 0 ? 0 : counts[row * DIGITS * chunks + at - 1];
  }
  for (index_t below = first; below < last; below += RUN * TEAM) {
    const int there = (int)min((index_t)(RUN * TEAM), last - below);
    for (int at = member; at < there; at += TEAM) {
      keys_here[at] = KEY(below + at);
      places_here[at] = PLACE(below + at);
    }
    for (int digit = 0; digit < DIGITS; ++digit) before[digit * TEAM + member] = 0;
    BARRIER;
    key_t keys_mine[RUN]; int places_mine[RUN];
    for (int i = 0; i < RUN; ++i) {
      const int at = min(member * RUN + i, there - 1);
      keys_mine[i] = keys_here[at]; places_mine[i] = places_here[at];
      if (member * RUN + i < there) ++before[DIGIT(keys_mine[i]) * TEAM + member];
    }
    BARRIER;
    int sum = 0;
    for (int i = 0; i < DIGITS; ++i) sum += before[member * DIGITS + i];
    sums[member] = sum;
    BARRIER;
    for (int apart = 1; apart < TEAM; apart <<= 1) {
      const int more = member >= apart ? sums[member - apart] : 0;
      BARRIER;
      sums[member] += more;
      BARRIER;
    }
    sum = sums[member] - sum;
    for (int i = 0; i < DIGITS; ++i) {
      const int one = before[member * DIGITS + i];
      before[member * DIGITS + i] = sum;
      sum += one;
    }
    BARRIER;
    for (int digit = member; digit < DIGITS; digit += TEAM) starts[digit] = before[digit * TEAM];
    BARRIER;
    for (int i = 0; i < RUN; ++i) {
      if (member * RUN + i < there) {
        const int to = before[DIGIT(keys_mine[i]) * TEAM + member]++;
        keys_here[to] = keys_mine[i]; places_here[to] = places_mine[i];
      }
    }
    BARRIER;
    for (int at = member; at < there; at += TEAM) {
      const key_t key = keys_here[at];
      const int place = places_here[at], digit = DIGIT(key);
      const index_t to = next[digit] + (at - starts[digit]);
      PUT(to, key, place)
    }
    BARRIER;
    for (int digit = member; digit < DIGITS; digit += TEAM)
      next[digit] += (digit + 1 < DIGITS ? starts[digit + 1] : there) - starts[digit];
    BARRIER;
  }
"""

# Finds the first digit whose cumulative count reaches the wanted rank, by binary search.
_CHOOSE = """
  const index_t row = item, begin = row * DIGITS * chunks;
  const int wanted = IS_FIRST ? k : left[row];
  int digit = 0;
  for (int half_digits = DIGITS / 2; half_digits > 0; half_digits >>= 1)
    if (counts[begin + (digit + half_digits) * chunks - 1] < wanted) digit += half_digits;
  found[row] = (IS_FIRST ? 0 : found[row]) | (uint64)digit << shift;
  left[row] = wanted - (digit == 0 ? 0 : counts[begin + digit * chunks - 1]);
"""
