"""Stable sorting of long rows, and finding their first few, by digits of keys.

A row's elements, as `sort.key_function` makes unsigned integers of them, are taken apart in chunks. To sort by a digit
takes three steps: how many elements of each chunk have which digit; where those of a chunk and digit begin, by a scan
of these numbers; and every element to its place.

`radix_sort` does so for each digit, the least significant one first. The first digit's step reads the elements, the
last one's writes the results. `select` finds the key of the k-th element from its most significant digit on, by
counting the digits of those that agree with it so far; then it sorts by a digit that says what is less, equal or
greater.

Where a work item is a thread, it goes through a chunk in order. Where items run in lockstep, a team sorts its chunk
tile by tile in local memory, so that those of a digit are written side by side.
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

_RUN = 4  # elements of a tile for each item of a team
_LEAST_CHUNK = 4096
_DIGIT_BITS = {False: 8, True: 4}  # by whether items run in lockstep
_SIDES = 3  # less, equal, greater
_LEAST_SORTED = {False: 256, True: 1024}  # size of rows: shorter ones are better merged
_LEAST_SELECTED, _FEWEST = 8192, 32  # size of rows and how many of them: else they are better merged, too
_PART = 16  # where less than this part of a row is wanted, it is not sorted whole

# Where the keys of dtypes differ: bits from and to. Those of half precision are float32's.
_BITS = {torch.float16: (13, 32), torch.bfloat16: (16, 32), torch.bool: (0, 1)}


def suits_sorting(target: Target, size: int, k: int) -> bool:
    """Whether the first `k` of rows of `size` are better found by `radix_sort` than by merging."""
    return size >= _LEAST_SORTED[target.simt] and _PART * k > size and _has_room(target)


def suits_selection(target: Target, size: int, k: int) -> bool:
    """Whether the first `k` of rows of `size` are better found by `select`, and then sorted."""
    return size >= _LEAST_SELECTED and k >= _FEWEST and _PART * k <= size and _has_room(target)


def _has_room(target: Target) -> bool:
    return not target.simt or _team(target) >= 4


def _team(target: Target) -> int:
    """Work items of a team; its tile, and a counter for each digit and item, are in local memory."""
    return target.team_of(_RUN * 12 + 4 * (1 << _DIGIT_BITS[True]) + 8) if target.team_size > 1 else 1


def _chunks(target: Target, rows: int, size: int) -> int:
    """Of each row."""
    return max(1, min(-(-target.enough_groups // rows), size // _LEAST_CHUNK))


def _shifts(target: Target, dtype: torch.dtype) -> list[int]:
    """Where in the key each digit begins, the least significant one first."""
    low, high = _bits(dtype)
    width = _DIGIT_BITS[target.simt]
    digits = -(-(high - low) // width)
    return [max(0, high - (digits - i) * width) for i in range(digits)]


def _bits(dtype: torch.dtype) -> tuple[int, int]:
    return _BITS.get(dtype, (0, facts(dtype).bits))


def _is_apart(dtype: torch.dtype) -> bool:
    """Whether keys are of 64 bits, and have places beside them and not behind them."""
    return facts(value_dtype(dtype)).bits == 64


class Keys(NamedTuple):
    """Elements on their way: keys, uint64, of the shape of the rows, and where in its row each element is, int32."""

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
    """values and indices (rows, count) = those from `first` on in the order of each row of self (rows, size).

    All contiguous, and results not where self is. Equal elements stay in their order, and NaN is the greatest.
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
    """values and indices (rows, k) = the first k in the order of each row of self (rows, size).

    All contiguous, and results not where self is. Those that are less than the k-th come first, then those equal to it,
    all as they come in the row.
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
    """What is done for one digit.

    Args:
        self: the rows.
        counts: int32, (rows, digits × chunks).
        shift: where in the key the digit begins.
        source: of the keys; None: they are made of self.
        found: what is known of a key for each row. Only what agrees with it counts.
        is_side: the digit is 0 for less than `found`, 1 for equal, 2 for greater.
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
        """counts[row, digit, chunk] = where elements of that digit and chunk end in the order by the digit."""
        body = _COUNT if _team(self.dialect.target) == 1 else _COUNT_BY_TEAMS
        counted = self._over_chunks("count_digits", {"counts": self.counts}, {}, {}, body, {})
        return [counted, *accumulate(self.dialect, self.counts, self.counts, 1, "cumsum")]

    def scatter(self, values: torch.Tensor, indices: torch.Tensor, first: int, sink: Keys | None) -> Launch:
        """Every element to its place, in `sink`, or those from `first` on in the results."""
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
        """found[row] gets the digit of the k-th element; left[row] = which one of those that agree with it that is."""
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
        """`body` for each chunk, of elements `first` to `last` of `row`, by an item or a team."""
        target, value = self.dialect.target, value_dtype(self.self.dtype)
        rows, size = self.self.shape
        team = _team(target)
        digits = _SIDES if self.is_side else 1 << _DIGIT_BITS[target.simt]
        tile = team * _RUN if team > 1 else 1
        chunk = -(-size // (self.chunks * tile)) * tile
        known = {"rows": rows, "size": size, "chunks": self.chunks, "chunk": chunk, "shift": self.shift}
        if team > 1:
            known["beyond"] = size + tile  # by as much as a tile adds to an index
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
        """Macros: KEY(at) and PLACE(at) of the source, DIGIT(key), and AGREES(key)."""
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

# Each item counts in a column of its own.
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

# before[digit, item]: how many of the tile come before those that the item has of the digit.
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

# Of counts, which were summed up, the first digit by which there are enough.
_CHOOSE = """
  const index_t row = item, begin = row * DIGITS * chunks;
  const int wanted = IS_FIRST ? k : left[row];
  int digit = 0;
  for (int half_digits = DIGITS / 2; half_digits > 0; half_digits >>= 1)
    if (counts[begin + (digit + half_digits) * chunks - 1] < wanted) digit += half_digits;
  found[row] = (IS_FIRST ? 0 : found[row]) | (uint64)digit << shift;
  left[row] = wanted - (digit == 0 ? 0 : counts[begin + digit * chunks - 1]);
"""
