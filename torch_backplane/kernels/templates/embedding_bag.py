"""Embedding bags: sums, means or maxima of the rows of a weight matrix that belong to a bag, and their gradients.

Bag b has the elements from offsets[b] up to the start of the next bag, or to the end. An element is an index of a row
of `weight`. Elements with the index `padding` are left out, and not counted. An index or an offset out of range is
skipped, and reported (see `errors`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, substitute

SUM, MEAN, MAX = 0, 1, 2  # PyTorch's numbers of the modes
OFFSETS = "offsets of embedding_bag"  # in error messages


class Elements(NamedTuple):
    """The elements of the bags.

    Args:
        indices: shape (elements,), int64 or int32.
        scale: a factor of each element, or None. Has the weight's dtype.
        padding: the index of elements that are left out; negative: none is.
    """

    indices: torch.Tensor
    scale: torch.Tensor | None
    padding: int

    def inputs(self) -> dict[str, torch.Tensor]:
        return {"indices": self.indices} | ({} if self.scale is None else {"scale": self.scale})

    def is_padding(self, at: str) -> str:
        return f"indices[{at}] == padding" if self.padding >= 0 else "0"

    @property
    def factor(self) -> str:
        return "" if self.scale is None else " * load_scale(i)"


class Results(NamedTuple):
    """What the forward kernel writes.

    Args:
        out: shape (bags, columns).
        bag_of: the bag of each element; -1 for elements before the first or after the last bag.
        sizes: the number of elements of each bag.
        positions: the index of the row of each maximum; -1 in bags without elements. Written only for maxima.
    """

    out: torch.Tensor
    bag_of: torch.Tensor
    sizes: torch.Tensor
    positions: torch.Tensor


def embedding_bag(
    dialect: Dialect,
    results: Results,
    weight: torch.Tensor,
    elements: Elements,
    offsets: torch.Tensor,
    mode: int,
    report: error_words.Report,
) -> Launch:
    """Computes the bags. The first work item of a bag also writes `bag_of` and `sizes`.

    Args:
        weight: shape (rows, columns), with at least one column.
        offsets: one for each bag, or one more, which is the end of the last bag.
    """
    out, bag_of, sizes, positions = results
    maxima = {"positions": positions} if mode == MAX else {}
    return LaunchSpec(
        f"embedding_bag_{('sum', 'mean', 'max')[mode]}" + ("" if elements.scale is None else "_scaled"),
        dialect,
        outputs={"out": out, "bag_of": bag_of, "sizes": sizes, **maxima, "errors": report.words},
        inputs={"weight": weight, "offsets": offsets, **elements.inputs()},
        integers={
            "rows": weight.shape[0], "columns": weight.shape[1], "count": elements.indices.shape[0],
            "starts": offsets.shape[0], "padding": elements.padding,
        },
        **_checked(report),
        value=value_dtype(weight.dtype),
        body=substitute(_LOOP, {
            **(_EXTREMUM if mode == MAX else _TOTAL), "factor": elements.factor,
            "is_padding": elements.is_padding("i"),
            "count": "max(used, (index_t)1)" if mode == MEAN else "1",
        }),
        items=out.numel(),
    ).launch()  # fmt: skip


def spread(
    dialect: Dialect,
    out: torch.Tensor,
    grad: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor | None,
    elements: Elements,
) -> Launch:
    """Writes the gradient of each element's row, (elements, columns), of sums or, with `sizes`, of means."""
    share = "" if sizes is None else " / (value_t)sizes[bag]"
    return LaunchSpec(
        "embedding_bag_spread" + ("" if sizes is None else "_mean") + ("" if elements.scale is None else "_scaled"),
        dialect,
        outputs={"out": out},
        inputs={"grad": grad, "bag_of": bag_of, **({} if sizes is None else {"sizes": sizes}), **elements.inputs()},
        integers={"bags": grad.shape[0], "columns": out.shape[1], "padding": elements.padding},
        value=value_dtype(grad.dtype),
        body=f"""
  const index_t i = item / columns, bag = bag_of[i];
  const int in_bag = bag >= 0 && bag < bags && !({elements.is_padding("i")});
  store_out(item, in_bag ? load_grad(bag * columns + item % columns){share}{elements.factor} : (value_t)0);
""",
        items=out.numel(),
    ).launch()


def scale_gradient(
    dialect: Dialect,
    out: torch.Tensor,
    grad: torch.Tensor,
    weight: torch.Tensor,
    bag_of: torch.Tensor,
    elements: Elements,
    report: error_words.Report,
) -> Launch:
    """Writes the gradient of each element's factor: the product of its row and the gradient of its bag."""
    return LaunchSpec(
        "embedding_bag_scale_gradient",
        dialect,
        outputs={"out": out, "errors": report.words},
        inputs={"grad": grad, "weight": weight, "bag_of": bag_of, "indices": elements.indices},
        integers={
            "bags": grad.shape[0], "rows": weight.shape[0], "columns": weight.shape[1], "padding": elements.padding,
        },
        **_checked(report),
        value=value_dtype(grad.dtype),
        body=f"""
  SUM(total);
  const index_t bag = bag_of[item];
  if (bag >= 0 && bag < bags && !({elements.is_padding("item")})) {{
    const index_t row = checked_index(errors, operator_number, indices[item], rows);
    if (row >= 0)
      for (index_t k = 0; k < columns; ++k) {{
        const value_t product = load_grad(bag * columns + k) * load_weight(row * columns + k);
        ADD(total, product)
      }}
  }}
  store_out(item, TOTAL(total));
""",
        items=out.numel(),
    ).launch()  # fmt: skip


def _checked(report: error_words.Report) -> dict[str, Any]:
    """The parts of a LaunchSpec that checked_index needs, for indices of rows and for offsets."""
    names = {"operator_number": report.operator, "offsets_number": OFFSETS}
    return {
        "numbers": {key: (torch.int32, error_words.operator_number(name)) for key, name in names.items()},
        "types": {"int64": torch.int64},
        "constants": {"WRAPS": 0},
        "functions": error_words.FUNCTIONS,
    }


# The elements of the bag, in order. PyTorch requires that the first bag starts at 0 and the last offset is not beyond
# the last element.
_LOOP = """
  const index_t bag = item / columns, column = item % columns;
  const index_t begin = checked_index(errors, offsets_number, offsets[bag], bag == 0 ? 1 : count + 1);
  const index_t end = bag + 1 < starts ? checked_index(errors, offsets_number, offsets[bag + 1], count + 1) : count;
  index_t used = 0;
  $state
  for (index_t i = begin < 0 ? end : begin; i < end; ++i) {
    if (column == 0) bag_of[i] = bag;
    if ($is_padding) continue;
    const index_t row = checked_index(errors, operator_number, indices[i], rows);
    if (row < 0) continue;
    const value_t value = load_weight(row * columns + column)$factor;
    $combine
    ++used;
  }
  if (column == 0) sizes[bag] = used;
  $finish
"""
_TOTAL = {
    "state": "SUM(total);", "combine": "ADD(total, value)", "finish": "store_out(item, TOTAL(total) / $count);",
}  # fmt: skip
_EXTREMUM = {
    "state": "value_t most = 0; index_t best = -1;",
    "combine": "if (used == 0 || value > most) { most = value; best = row; }",
    "finish": "store_out(item, most); positions[item] = best;",
}
