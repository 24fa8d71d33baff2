"""Convolutions of 3 × 3 windows that are one place apart, by Winograd's minimal filtering F(2 × 2, 3 × 3).

Four results that are neighbours in two rows and two columns take 16 products of numbers which the window and the 4 × 4
elements below it are transformed to, instead of 36; the products of all places and channels are 16 of matrices, one for
each of those numbers. Images are (batch, channels, rows, columns), contiguous. The matrices, and that they suffice:
Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split
from torch_backplane.kernels.templates.unfold import Windows

POINTS = 16  # numbers that a window, and what is below it in a tile of results, is transformed to
WINDOW, _RESULTS, _TILE = 3, 2, 4  # sizes of a window, of the results of a tile, and of what they are made of


def takes(window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether convolutions with such windows can be computed so. The last two may be one number for all dimensions."""
    return len(window) == 2 and set(window) == {WINDOW} and {*stride, *dilation} == {1}


def tiles(windows: Windows) -> tuple[int, int]:
    """How many tiles of results cover the places, along rows and columns."""
    rows, columns = windows.places
    return -(-rows // _RESULTS), -(-columns // _RESULTS)


def transform_weight(
    dialect: Dialect, to: torch.Tensor, weight: torch.Tensor, groups: int, of_image: bool = False
) -> Launch:
    """Fills (POINTS, groups, rows, depth) of the weight: rows are channels of results, the depth is that of sums.

    Args:
        of_image: for the gradient of the image, where windows are turned round, and the image's channels are rows.
    """
    of_values, of_group = weight.shape[0] // groups, weight.shape[1]
    rows, depth = (of_group, of_values) if of_image else (of_values, of_group)
    taps = WINDOW * WINDOW
    row, deep = (taps, of_group * taps) if of_image else (of_group * taps, taps)
    loads = [
        f"const value_t t{i}{j} = (value_t)load_weight(from + "
        f"{taps - 1 - i * WINDOW - j if of_image else i * WINDOW + j});"
        for i in range(WINDOW)
        for j in range(WINDOW)
    ]
    half = "(value_t)0.5"
    body = f"""
  {split("item", ["groups", "rows", "depth"], ["group", "row", "deep"])}
  const index_t from = group * group_step + row * row_step + deep * deep_step;
  {" ".join(loads)}
{_both_ways(WINDOW, lambda a, b, c: [a, f"{half} * (({a} + {c}) + {b})", f"{half} * (({a} + {c}) - {b})", c])}
  {_store("to")}
"""
    integers = {"groups": groups, "rows": rows, "depth": depth}
    integers |= {"group_step": of_values * of_group * taps, "row_step": row, "deep_step": deep}
    return LaunchSpec(
        f"winograd_weight{'_of_image' if of_image else ''}",
        dialect,
        outputs={"to": to},
        inputs={"weight": weight},
        integers=integers,
        value=value_dtype(weight.dtype),
        body=body,
        items=weight.shape[0] * of_group,
    ).launch()


def transform_image(dialect: Dialect, to: torch.Tensor, image: torch.Tensor, windows: Windows) -> Launch:
    """Fills (POINTS, channels, batch · tiles) of the image."""
    loads = [
        f"const value_t t{i}{j} = row{i} == row{i}_inside && column{j} == column{j}_inside"
        f" ? (value_t)load_image(from + row{i}_inside * image_columns + column{j}_inside) : (value_t)0;"
        for i in range(_TILE)
        for j in range(_TILE)
    ]
    places = [
        f"const index_t {name}{d} = tile_{name} * {_RESULTS} - padding_{name} + {d}, "
        f"{name}{d}_inside = max((index_t)0, min({name}{d}, image_{name}s - 1));"
        for name in ("row", "column")
        for d in range(_TILE)
    ]
    body = f"""
  {_TILE_OF_ITEM}
  const index_t from = (n * channels + channel) * image_rows * image_columns;
  {" ".join(places)}
  {" ".join(loads)}
{_both_ways(_TILE, lambda a, b, c, d: [f"{a} - {c}", f"{b} + {c}", f"{c} - {b}", f"{b} - {d}"])}
  {_store("to")}
"""
    integers, items = _each_tile(image, windows)
    integers |= {"image_rows": windows.image[0], "image_columns": windows.image[1]}
    integers |= {"padding_row": windows.padding[0], "padding_column": windows.padding[1]}
    return LaunchSpec(
        "winograd_image",
        dialect,
        outputs={"to": to},
        inputs={"image": image},
        integers=integers,
        value=value_dtype(image.dtype),
        body=body,
        items=items,
    ).launch()


def transform_results(
    dialect: Dialect, out: torch.Tensor, sums: torch.Tensor, windows: Windows, bias: torch.Tensor | None = None
) -> Launch:
    """Fills results, of which there are as many as windows have places, from (POINTS, channels, batch · tiles)."""
    loads = [
        f"const value_t t{i}{j} = load_sums({i * _TILE + j} * items + item);"
        for i in range(_TILE)
        for j in range(_TILE)
    ]
    stores = [
        f"if (row + {i} < places_rows && column + {j} < places_columns)"
        f" store_out(to + {i} * places_columns + {j}, {'' if bias is None else 'added + '}s{i}{j});"
        for i in range(_RESULTS)
        for j in range(_RESULTS)
    ]
    body = f"""
  {_TILE_OF_ITEM}
  const index_t row = tile_row * {_RESULTS}, column = tile_column * {_RESULTS};
  const index_t to = ((n * channels + channel) * places_rows + row) * places_columns + column;
  {"" if bias is None else "const value_t added = (value_t)load_bias(channel);"}
  {" ".join(loads)}
{_both_ways(_TILE, lambda a, b, c, d: [f"({a} + {b}) + {c}", f"({b} - {c}) - {d}"])}
  {" ".join(stores)}
"""
    integers, items = _each_tile(out, windows)
    integers |= {"places_rows": windows.places[0], "places_columns": windows.places[1]}
    return LaunchSpec(
        "winograd_results",
        dialect,
        outputs={"out": out},
        inputs={"sums": sums, **({} if bias is None else {"bias": bias})},
        integers=integers,
        value=value_dtype(out.dtype),
        body=body,
        items=items,
    ).launch()


_TILE_OF_ITEM = split(
    "item", ["channels", "batch", "tile_rows", "tile_columns"], ["channel", "n", "tile_row", "tile_column"]
)


def _each_tile(images: torch.Tensor, windows: Windows) -> tuple[dict[str, int], int]:
    """The integers of _TILE_OF_ITEM, which declares where a work item is, and how many work items there are."""
    batch, channels = images.shape[:2]
    rows, columns = tiles(windows)
    integers = {"channels": channels, "batch": batch, "tile_rows": rows, "tile_columns": columns}
    return integers, channels * batch * rows * columns


def _both_ways(size: int, transform: Callable[..., list[str]]) -> str:
    """Statements that declare sIJ, the transform of the columns and then of the rows of tIJ, of `size` each way."""
    lines, made = [], 0
    for j in range(size):
        columns = transform(*(f"t{i}{j}" for i in range(size)))
        made = len(columns)
        lines.append(" ".join(f"const value_t u{i}{j} = {text};" for i, text in enumerate(columns)))
    for i in range(made):
        rows = transform(*(f"u{i}{j}" for j in range(size)))
        lines.append(" ".join(f"const value_t s{i}{j} = {text};" for j, text in enumerate(rows)))
    return "\n".join(f"  {line}" for line in lines)


def _store(name: str) -> str:
    """Statements that store each point, which are as far apart as there are work items."""
    return " ".join(
        f"store_{name}({i * _TILE + j} * items + item, s{i}{j});" for i in range(_TILE) for j in range(_TILE)
    )
