"""The first runs of a sort on CPUs, if only the first few elements of long rows are needed.

A work item is a thread. It scans a chunk of a row and keeps the least k keys.
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.sort import LOW, Runs, cut_size, key_function, new_runs
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split

_BLOCK = 16  # elements that are tested together for keys to keep
_MAX_KEPT, _MIN_CHUNK = 256, 4096  # maximum number of keys that a work item keeps; rows have no smaller chunks
_KEPT_PART = 8  # at most 1 / _KEPT_PART of a chunk is kept


def suits_keeping(target: Target, size: int, k: int) -> bool:
    """Whether `keep_runs` is faster than sorting for the first `k` elements of rows of `size`."""
    return not target.simt and 0 < k <= _MAX_KEPT and _KEPT_PART * k <= size and size >= _MIN_CHUNK // 4


def kept_runs(target: Target, self: torch.Tensor, k: int) -> tuple[Runs, int]:
    """New runs for `keep_runs` to write for `self`, and the size of the chunks."""
    rows, size = self.shape
    chunks = max(1, min(-(-target.enough_groups // rows), size // max(_MIN_CHUNK, _KEPT_PART * k)))
    chunk = -(-size // chunks)
    return new_runs(self, rows, cut_size(size, chunk, k), k), chunk


def keep_runs(dialect: Dialect, runs: Runs, self: torch.Tensor, chunk: int, descending: bool) -> Launch:
    """Writes the least keys of each chunk of self's rows, sorted.

    The keys are kept in a heap. A lesser key replaces the greatest one, which is the root.
    """
    apart = runs.places is not None
    key_type = "uint64" if apart else "uint"
    key = f"({'~' if descending else ''}key_of(load_self(at + %s)){'' if apart else LOW})"
    entry = "key" if apart else "(uint64)key << 32 | (uint64)place"
    less = "x < y || (x == y && v < w)" if apart else "x < y"

    def places(text: str) -> str:
        return text if apart else ""

    body = f"""
  {split("item", ["rows", "runs"], ["row", "run"])}
  const index_t begin = run * chunk, here = min(chunk, size - begin), count = min(length, here);
  const index_t at = row * size + begin, to = row * runs_size + run * length;
  GLOBAL uint64* heap = keys + to; {places("GLOBAL int* heap_places = places + to;")}
  #define LESS(x, v, y, w) ({less})
  // Sifts (x, v) down from `root` in the heap of the first `n` entries.
  #define SINK(root, n, x, v) {{ \
    index_t up = root; \
    for (;;) {{ \
      index_t down = 2 * up + 1; \
      if (down >= n) break; \
      if (down + 1 < n && LESS(heap[down], {places("heap_places[down]") or 0}, heap[down + 1], \
          {places("heap_places[down + 1]") or 0})) ++down; \
      if (!LESS(x, v, heap[down], {places("heap_places[down]") or 0})) break; \
      heap[up] = heap[down]; {places("heap_places[up] = heap_places[down];")} up = down; \
    }} \
    heap[up] = x; {places("heap_places[up] = v;")} }}
  for (index_t i = 0; i < count; ++i) {{
    const {key_type} key = {key % "i"}; const index_t place = begin + i;
    heap[i] = {entry}; {places("heap_places[i] = (int)place;")}
  }}
  for (index_t i = count / 2 - 1; i >= 0; --i) {{
    const uint64 x = heap[i]; {places("const int v = heap_places[i];")} SINK(i, count, x, v)
  }}
  {key_type} most = ({key_type})(heap[0]{"" if apart else " >> 32"});
  for (index_t i = count; i < here; i += {_BLOCK}) {{
    if (i + {_BLOCK} <= here) {{
      int any = 0;
      for (int j = 0; j < {_BLOCK}; ++j) any |= {key % "i + j"} < most;
      if (!any) continue;
    }}
    for (index_t j = i; j < min(i + {_BLOCK}, here); ++j) {{
      const {key_type} key = {key % "j"}; const index_t place = begin + j;
      if (key < most) {{ // of equal keys, the first is kept
        const uint64 x = {entry}; {places("const int v = (int)place;")} SINK(0, count, x, v)
        most = ({key_type})(heap[0]{"" if apart else " >> 32"});
      }}
    }}
  }}
  for (index_t i = count - 1; i > 0; --i) {{
    const uint64 x = heap[i]; {places("const int v = heap_places[i];")}
    heap[i] = heap[0]; {places("heap_places[i] = heap_places[0];")} SINK(0, i, x, v)
  }}
"""
    integers = {"rows": runs.rows, "runs": runs.count, "size": self.shape[1], "runs_size": runs.size}
    return LaunchSpec(
        "keep_runs_" + ("descending" if descending else "ascending"),
        dialect,
        outputs=runs.tensors(),
        inputs={"self": self},
        integers={**integers, "length": runs.length, "chunk": chunk},
        value=value_dtype(self.dtype),
        functions=key_function(dialect, value_dtype(self.dtype)),
        types={"uint64": torch.uint64},
        body=body,
        items=runs.rows * runs.count,
        group_size=1,
    ).launch()
