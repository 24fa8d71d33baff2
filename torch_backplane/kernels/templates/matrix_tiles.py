"""The body of tiled products by matrix instructions (`tiles.tiled`, `Dialect.matrix_functions`).

Tiles of the operands have the elements as memory has them, along the operand's contiguous dimension. There are two of
each: while subgroups multiply one, the next is loaded. A subgroup computes half of the tile's rows and 32 of its
columns. It accumulates in float32 without error compensation: the results are rounded to 11 bits or fewer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_backplane.kernels.templates.source import substitute

DEPTH, SIDES = 32, (128, 64)
_SUBGROUP, _COLUMNS, _FRAGMENT = 32, 32, 16  # work items, columns of a subgroup; rows and columns of a fragment
_LINE = 8  # elements that one instruction copies, 16 bytes
_PAD = 8  # elements behind each row of a tile, so that the rows of a fragment are in different banks


def items(side: int) -> int:
    """Returns the work items of a group that computes `side` × `side` results."""
    return 2 * side // _COLUMNS * _SUBGROUP


def local_bytes(side: int) -> int:
    """Returns the bytes of local memory for tiles of the operands, and for a fragment of results of each subgroup."""
    return 2 * 2 * 2 * side * (DEPTH + _PAD) + items(side) // _SUBGROUP * 4 * _FRAGMENT * _FRAGMENT


def tiled(side: int, parts: Mapping[str, str]) -> str:
    """Returns the body, with the parts of `tiles.tiled`. `a_along_depth` and `b_along_depth` are "true" or "false"."""
    of_operands: dict[str, str] = {}
    for operand, at in (("a", "i"), ("b", "j")):
        along = parts[f"{operand}_along_depth"] == "true"
        line = DEPTH if along else side
        width = _LINE if f"{operand}_line" in parts else 1
        inner, outer = ("k", at) if along else (at, "k")
        first, step = ("first_row", "x") if operand == "a" else ("first_column", "y")
        across = f"{first} + {step} * {_FRAGMENT}"
        of_operands |= {
            f"{operand}_size": f"[2][{side if along else DEPTH}][{line + _PAD}]",
            f"{operand}_loads": str(DEPTH * side // width // items(side)),
            f"{operand}_place": f"const int {operand}_{inner} = e % {line // width} * {width}, "
            f"{operand}_{outer} = e / {line // width};",
            f"{operand}_fill": (_COPY if width > 1 else _ELEMENT).replace("OPERAND", operand),
            f"{operand}_at": f"{operand}_tile[stage][{operand}_{outer}][{operand}_{inner}]",
            f"{operand}_load": f"load_fragment_{operand}{'' if along else '_across'}(&{operand}_part[{step}], "
            f"&{operand}_tile[1 - stage]{f'[{across}][k]' if along else f'[k][{across}]'}, {line + _PAD});",
        }
    return substitute(
        _TILED,
        {
            **parts,
            **of_operands,
            "fragment": str(_FRAGMENT),
            "rows": str(side // 2 // _FRAGMENT),
            "columns": str(_COLUMNS // _FRAGMENT),
            "subgroup": str(_SUBGROUP),
            "subgroups": str(items(side) // _SUBGROUP),
        },
    )


_COPY = "copy_16_bytes(&$OPERAND_at, inside ? OPERAND + ($OPERAND_line) : OPERAND, inside);"
_ELEMENT = "element_t OPERAND_element = 0; if (inside) { $OPERAND } $OPERAND_at = OPERAND_element;"
_TILED = """
  LOCAL ALIGNED element_t a_tile$a_size;
  LOCAL ALIGNED element_t b_tile$b_size;
  LOCAL ALIGNED float results[$subgroups][$fragment * $fragment];
  $shared
  const index_t tile = GROUP;
  const index_t row_tiles = (rows + $tile - 1) / $tile, column_tiles = (columns + $tile - 1) / $tile;
  $split
  const int subgroup = ITEM / $subgroup;
  const int first_row = subgroup % 2 * ($rows * $fragment), first_column = subgroup / 2 * ($columns * $fragment);
  const index_t first_of_all = $first, last = $last;
  $prepare
  Sums sum[$rows][$columns] = {0};
  int stage = 0;
  for (index_t first = first_of_all;; first += $depth, stage = 1 - stage) {
    if (first < last) {
      $next
      #pragma unroll 4
      for (int n = 0; n < $a_loads; ++n) {
        const int e = ITEM + n * $group;
        $a_place
        const index_t i = row_tile * $tile + a_i;
        const bool inside = i < rows && first + a_k < last;
        $a_fill
      }
      #pragma unroll 4
      for (int n = 0; n < $b_loads; ++n) {
        const int e = ITEM + n * $group;
        $b_place
        const index_t j = column_tile * $tile + b_j;
        const bool inside = j < columns && first + b_k < last;
        $b_fill
      }
    }
    if (first > first_of_all)
      for (int k = 0; k < $depth; k += $fragment) {
        Fragment a_part[$rows], b_part[$columns];
        for (int x = 0; x < $rows; ++x) $a_load
        for (int y = 0; y < $columns; ++y) $b_load
        for (int x = 0; x < $rows; ++x)
          for (int y = 0; y < $columns; ++y) multiply_fragments(&sum[x][y], &a_part[x], &b_part[y]);
      }
    if (first >= last) break;
    wait_for_copies();
    BARRIER;
  }
  for (int x = 0; x < $rows; ++x)
    for (int y = 0; y < $columns; ++y) {
      store_fragment(&sum[x][y], results[subgroup], $fragment);
      BARRIER;
      #pragma unroll 1
      for (int e = ITEM % $subgroup; e < $fragment * $fragment; e += $subgroup) {
        const int tile_i = first_row + x * $fragment + e / $fragment;
        const int tile_j = first_column + y * $fragment + e % $fragment;
        const index_t i = row_tile * $tile + tile_i, j = column_tile * $tile + tile_j;
        $store
      }
      BARRIER;
    }
"""
