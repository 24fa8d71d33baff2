"""Products of tiles in the kernels of attention: by work items, or by matrix instructions.

A work group of SIDE × SIDE work items has a tile of TILE = SIDE * PER_ITEM rows. It multiplies them with TILE other
rows, which gives a tile of scores. A work item has PER_ITEM × PER_ITEM of these, `[x][y]` in row item_row + x * SIDE
and column item_column + y * SIDE. Later the group multiplies a tile of weights with the rows that are added up.

Work items multiply and add elements in registers, converted to value_t. Where the dialect has matrix instructions for
the dtype (`Dialect.matrix_functions`), subgroups multiply elements as memory has them, and accumulate in float32. The
scores then go through local memory, and weights are rounded to the dtype. A subgroup computes 16 rows and 32 columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import substitute

PER_ITEM, _DEPTH, _SIDES = 4, 16, (16, 8, 4)
_BITS = torch.uint32  # in which a work item stores the keep flags of 16 keys
STEPS = ("batch", "head", "row", "column")
# With matrix instructions: the side; elements behind each row of a tile and numbers behind each row of scores, so that
# rows begin in different banks; elements that one instruction copies; an upper bound for the local memory of kernels.
_MATRIX_SIDE, _PAD, _SCORES_PAD, _LINE, _MATRIX_BYTES = 16, 8, 4, 8, 41 << 10


def side_of(target: Target, itemsize: int, rows: int) -> int | None:
    """Returns the side of a work group for `rows` rows; None if no tile fits into the target's limits."""

    def fits(side: int) -> bool:
        tile = side * PER_ITEM
        numbers = 2 * _DEPTH * (tile + 1) + tile * (tile + 1) + 3 * tile + side * side
        needed = numbers * itemsize + side * side * _BITS.itemsize
        return side * side <= target.max_group_size and needed <= target.local_memory

    possible = list(filter(fits, _SIDES))
    # A side of 8 at most if its tile has room for all rows: the largest tile would be half empty.
    return next((side for side in possible if side <= 8 or rows > 8 * PER_ITEM), None)


def has_lines(tensor: torch.Tensor) -> bool:
    """Whether 8 columns from a multiple of 8 on are together in memory, all in the tensor, at a multiple of 16 bytes
    from its first element."""
    steps = [tensor.stride(d) for d in range(3) if tensor.shape[d] != 1]
    return tensor.stride(3) == 1 and tensor.shape[3] % _LINE == 0 and all(step % _LINE == 0 for step in steps)


class Tiles(NamedTuple):
    """How a work group multiplies tiles.

    Args:
        side: side of a work group.
        element: dtype of all operands, if subgroups multiply matrices.
        functions: `Dialect.matrix_functions`, or empty.
        element_text: text that converts `x`, a value_t, to an element.
        loads: for matrices, how operands are loaded, by name: "lines" of 16 bytes, or elements, along "rows" or
            "columns" of the operand.
    """

    side: int
    element: torch.dtype | None = None
    functions: str = ""
    element_text: str = ""
    loads: Mapping[str, str] = {}

    @classmethod
    def of(cls, dialect: Dialect, side: int, operands: Mapping[str, torch.Tensor], aligned: bool) -> Tiles:
        """Returns the tiles for operands of four dimensions, by name.

        Args:
            aligned: the operands begin at multiples of 16 bytes.
        """
        element, *others = {one.dtype for one in operands.values()}
        functions = dialect.matrix_functions(element)
        fits = side == _MATRIX_SIDE and dialect.target.local_memory >= _MATRIX_BYTES
        if others or not functions or not fits:
            return cls(side)
        loads = {
            name: "lines" if aligned and has_lines(one) else "rows" if one.stride(3) == 1 else "columns"
            for name, one in operands.items()
        }
        return cls(side, element, functions, dialect.encode("(value_t)(x)", element), loads)

    @property
    def types(self) -> dict[str, torch.dtype]:
        """Types of the kernel text."""
        return {} if self.element is None else {"element_t": self.element}

    @property
    def constants(self) -> dict[str, int | str]:
        """Constants of the kernel text. KEEP(i, j, x) keeps x as the weight in row i and column j of the tile."""
        shape = {"TILE": self.side * PER_ITEM, "SIDE": self.side, "ITEMS": self.side * self.side, "PER_ITEM": PER_ITEM}
        if self.element is None:
            return {**shape, "DEPTH": _DEPTH, "ACROSS": shape["TILE"] + 1, "KEEP(i, j, x)": "weights[i][j] = (x)"}
        keep = f"own_tile[i][j] = {self.element_text}"
        return {**shape, "LINE": shape["TILE"] + _PAD, "ACROSS": shape["TILE"] + _SCORES_PAD, "KEEP(i, j, x)": keep}

    @property
    def declared(self) -> str:
        """Declares the local memory for tiles of operands, and the work item's place."""
        return _PLACE + (_ITEM_TILES if self.element is None else _MATRIX_TILES)

    @property
    def exchange(self) -> str:
        """Declares `weights`, as `WEIGHTS` does, if products need it."""
        return "" if self.element is None else WEIGHTS

    def product(self, a: str, b: str, result: str, depth: str, ends: tuple[str, str] = ("rows", "others")) -> str:
        """Returns statements that declare `result`, the products of the work item's rows in the tiles of `a` and `b`.

        With matrix instructions, it needs `weights`, which then has the results of all work items.

        Args:
            a, b: operands. The rows of a are from first_own on, those of b from `first` on.
            depth: name of the number of products.
            ends: the ends of the rows of `a` and `b`.
        """
        steps = {f"{x}_{step}": f"{name}_{step}" for x, name in (("a", a), ("b", b)) for step in STEPS}
        parts = {"a": a, "b": b, "result": result, "depth": depth, "own_end": ends[0], "other_end": ends[1], **steps}
        if self.element is None:
            return substitute(_PRODUCT, parts)
        loads = {
            f"load_{x}": self._load(
                name,
                {
                    "tile": tile,
                    "inside": f"{first} + i < {end} && step + k < {depth}",
                    "at": f"from_{name} + ({first} + i) * {name}_row + (step + k) * {name}_column",
                },
            )
            for x, name, tile, first, end in (
                ("a", a, "own_tile", "first_own", ends[0]),
                ("b", b, "other_tile", "first", ends[1]),
            )
        }
        return substitute(_MATRIX_PRODUCT, {**parts, **loads})

    def _load(self, name: str, parts: Mapping[str, str]) -> str:
        """Statements that load a tile of the operand `name` into local memory. Elements that are not inside are 0."""
        how = self.loads[name]
        text = {"lines": _LOAD_LINES, "rows": _LOAD_ROWS, "columns": _LOAD_COLUMNS}[how]
        return substitute(text, {**parts, "name": name, "line": str(_LINE)})

    @property
    def sums(self) -> str:
        """Declares the sums, which are 0."""
        return _SUMS if self.element is None else _MATRIX_SUMS

    @property
    def scale(self) -> str:
        """Statements that multiply the sums of each row of the tile by `correction[row]`."""
        return _SCALE if self.element is None else _MATRIX_SCALE

    def add(self, end: str) -> str:
        """Returns statements that add the rows of the operand `added` from `first` to `end`, weighted by the tile's
        weights."""
        if self.element is None:
            return substitute(_ADD, {"end": end})
        inside = f"first + i < {end} && first_column + block * TILE + k < columns"
        at = "from_added + (first + i) * added_row + (first_column + block * TILE + k) * added_column"
        load = self._load("added", {"tile": "other_tile", "inside": inside, "at": at})
        return substitute(_MATRIX_ADD, {"load": load})

    def store(self, total: str) -> str:
        """Returns statements that store the results.

        Args:
            total: expression for the result in row `tile_row` of the tile, with SUM for its sum.
        """
        if self.element is None:
            return _STORE.replace("TOTAL", total.replace("SUM", "sum[block][x][y]"))
        total = total.replace("SUM", "weights[tile_row][item_column + y * SIDE]")
        return "\n  #pragma unroll" + _STORE.replace("{\n", "{" + _GATHER, 1).replace("TOTAL", total)


# The tile of weights, or of scores. Kernels can write to it between a product and the next one.
WEIGHTS = """
  LOCAL value_t weights[TILE][ACROSS];
"""

_PLACE = """
  const int item_row = ITEM / SIDE, item_column = ITEM % SIDE;
"""

_ITEM_TILES = """
  LOCAL value_t a_tile[DEPTH][TILE + 1];
  LOCAL value_t b_tile[DEPTH][TILE + 1];
"""

# Tiles are filled along the contiguous dimension, so that consecutive work items read consecutive elements. Elements
# beyond the last row or column are zero.
_PRODUCT = """
      value_t $result[PER_ITEM][PER_ITEM];
      for (int x = 0; x < PER_ITEM; ++x)
        for (int y = 0; y < PER_ITEM; ++y) $result[x][y] = 0;
      const index_t from_$a = batch * $a_batch + head * $a_head, from_$b = batch * $b_batch + head_of_others * $b_head;
      for (index_t step = 0; step < $depth; step += DEPTH) {
        BARRIER;
        for (int e = ITEM; e < DEPTH * TILE; e += ITEMS) {
          const int a_k = $a_column == 1 ? e % DEPTH : e / TILE, a_i = $a_column == 1 ? e / DEPTH : e % TILE;
          a_tile[a_k][a_i] = first_own + a_i < $own_end && step + a_k < $depth
            ? (value_t)load_$a(from_$a + (first_own + a_i) * $a_row + (step + a_k) * $a_column) : (value_t)0;
          const int b_k = $b_column == 1 ? e % DEPTH : e / TILE, b_i = $b_column == 1 ? e / DEPTH : e % TILE;
          b_tile[b_k][b_i] = first + b_i < $other_end && step + b_k < $depth
            ? (value_t)load_$b(from_$b + (first + b_i) * $b_row + (step + b_k) * $b_column) : (value_t)0;
        }
        BARRIER;
        for (int k = 0; k < DEPTH; ++k) {
          value_t a_part[PER_ITEM], b_part[PER_ITEM];
          for (int x = 0; x < PER_ITEM; ++x) a_part[x] = a_tile[k][item_row + x * SIDE];
          for (int y = 0; y < PER_ITEM; ++y) b_part[y] = b_tile[k][item_column + y * SIDE];
          for (int x = 0; x < PER_ITEM; ++x)
            for (int y = 0; y < PER_ITEM; ++y) $result[x][y] = fma(a_part[x], b_part[y], $result[x][y]);
        }
      }
"""

_SUMS = """
  value_t sum[BLOCKS][PER_ITEM][PER_ITEM];
  for (int block = 0; block < BLOCKS; ++block)
    for (int x = 0; x < PER_ITEM; ++x)
      for (int y = 0; y < PER_ITEM; ++y) sum[block][x][y] = 0;
"""

_SCALE = """
      for (int block = 0; block < BLOCKS; ++block)
        for (int x = 0; x < PER_ITEM; ++x)
          for (int y = 0; y < PER_ITEM; ++y) sum[block][x][y] *= correction[item_row + x * SIDE];
"""

# Compilers do not unroll a loop with barriers by themselves, and then sum is in memory.
_ADD = """
      #pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
        for (int part = 0; part < TILE; part += DEPTH) {
          BARRIER;
          for (int e = ITEM; e < DEPTH * TILE; e += ITEMS) {
            const index_t other_at = first + part + e / TILE, column = first_column + block * TILE + e % TILE;
            b_tile[e / TILE][e % TILE] = other_at < $end && column < columns
              ? (value_t)load_added(from_added + other_at * added_row + column * added_column) : (value_t)0;
          }
          BARRIER;
          for (int k = 0; k < DEPTH; ++k)
            for (int x = 0; x < PER_ITEM; ++x) {
              const value_t weight = weights[item_row + x * SIDE][part + k];
              for (int y = 0; y < PER_ITEM; ++y)
                sum[block][x][y] = fma(weight, b_tile[k][item_column + y * SIDE], sum[block][x][y]);
            }
        }
"""

_STORE = """
  for (int block = 0; block < BLOCKS; ++block) {
    for (int x = 0; x < PER_ITEM; ++x)
      for (int y = 0; y < PER_ITEM; ++y) {
        const int tile_row = item_row + x * SIDE;
        const index_t own_at = first_own + tile_row, column = first_column + block * TILE + item_column + y * SIDE;
        if (own_at < $own_end && column < columns)
          store_out($out_part + batch * out_batch + head * out_head + own_at * out_row + column * out_column, TOTAL);
      }
  }
"""

# The rows of own_tile are operands of products first, and weights later.
_MATRIX_TILES = """
  LOCAL ALIGNED element_t own_tile[TILE][LINE];
  LOCAL ALIGNED element_t other_tile[TILE][LINE];
  const int matrix_row = ITEM / 32 % 4 * 16, matrix_column = ITEM / 128 * 32;
"""

_LOAD_LINES = """
        #pragma unroll
        for (int e = ITEM; e < TILE * TILE / $line; e += ITEMS) {
          const int i = e / (TILE / $line), k = e % (TILE / $line) * $line;
          const bool inside = $inside;
          copy_16_bytes(&$tile[i][k], inside ? $name + ($at) : $name, inside);
        }
"""

_LOAD_ROWS = """
        #pragma unroll 4
        for (int e = ITEM; e < TILE * TILE; e += ITEMS) {
          const int i = e / TILE, k = e % TILE;
          $tile[i][k] = $inside ? $name[$at] : (element_t)0;
        }
"""

_LOAD_COLUMNS = _LOAD_ROWS.replace("i = e / TILE, k = e % TILE", "i = e % TILE, k = e / TILE")

_MATRIX_PRODUCT = """
      const index_t from_$a = batch * $a_batch + head * $a_head, from_$b = batch * $b_batch + head_of_others * $b_head;
      value_t $result[PER_ITEM][PER_ITEM];
      {
        Sums found[2] = {0};
        for (index_t step = 0; step < $depth; step += TILE) {
          BARRIER;
          $load_a
          $load_b
          wait_for_copies();
          BARRIER;
          for (int k = 0; k < TILE && step + k < $depth; k += 16) {
            Fragment a_part, b_part;
            load_fragment_a(&a_part, &own_tile[matrix_row][k], LINE);
            for (int y = 0; y < 2; ++y) {
              load_fragment_b(&b_part, &other_tile[matrix_column + y * 16][k], LINE);
              multiply_fragments(&found[y], &a_part, &b_part);
            }
          }
        }
        BARRIER;
        for (int y = 0; y < 2; ++y)
          store_fragment(&found[y], &weights[matrix_row][matrix_column + y * 16], ACROSS);
        BARRIER;
        for (int x = 0; x < PER_ITEM; ++x)
          for (int y = 0; y < PER_ITEM; ++y) $result[x][y] = weights[item_row + x * SIDE][item_column + y * SIDE];
      }
"""

_MATRIX_SUMS = """
  Sums sum[BLOCKS][2] = {0};
"""

_MATRIX_SCALE = """
      for (int block = 0; block < BLOCKS; ++block)
        for (int y = 0; y < 2; ++y) scale_rows(&sum[block][y], &correction[matrix_row]);
"""

_MATRIX_ADD = """
      #pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        BARRIER;
        $load
        wait_for_copies();
        BARRIER;
        for (int k = 0; k < TILE; k += 16) {
          Fragment weights_part, added_part;
          load_fragment_a(&weights_part, &own_tile[matrix_row][k], LINE);
          for (int y = 0; y < 2; ++y) {
            load_fragment_b_across(&added_part, &other_tile[k][matrix_column + y * 16], LINE);
            multiply_fragments(&sum[block][y], &weights_part, &added_part);
          }
        }
      }
"""

_GATHER = """
    BARRIER;
    for (int y = 0; y < 2; ++y) store_fragment(&sum[block][y], &weights[matrix_row][matrix_column + y * 16], ACROSS);
    BARRIER;
"""
