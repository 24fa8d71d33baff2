"""3 × 3 convolutions with stride 1 by Winograd's minimal filtering F(2 × 2, 3 × 3).

The window and each 4 × 4 tile of the image are transformed to 16 numbers each. A 2 × 2 tile of results then takes 16
products instead of 36. Over all positions and channels, these are 16 matrix products, one for each number. Images have
the shape (batch, channels, rows, columns) and are contiguous. For the transforms see Lavin and Gray, "Fast Algorithms
for Convolutional Neural Networks", 2015 (arXiv:1509.09308), section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split
from torch_backplane.kernels.templates.unfold import Windows

POINTS = 16  # numbers in a transformed window or image tile
WINDOW, _RESULTS, _TILE = 3, 2, 4  # sides of a window, of a tile of results, and of a tile of the image


def takes(window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether these windows are supported. `stride` and `dilation` can have one number for all dimensions."""
    return len(window) == 2 and set(window) == {WINDOW} and {*stride, *dilation} == {1}


def tiles(windows: Windows) -> tuple[int, int]:
    """Returns the number of result tiles along rows and columns."""
    rows, columns = windows.places
    return -(-rows // _RESULTS), -(-columns // _RESULTS)


def transform_weight(
    dialect: Dialect, to: torch.Tensor, weight: torch.Tensor, groups: int, of_image: bool = False
) -> Launch:
    """Transforms the weight.

    Args:
        to: output of shape (POINTS, groups, rows, depth). Rows are the channels of the results; sums are over depth.
        of_image: transform for the gradient of the image: windows are rotated by 180°, and rows are the image's
            channels.
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
    """Transforms the image into `to`, of shape (POINTS, channels, batch · tiles)."""
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
    """Transforms `sums` of shape (POINTS, channels, batch · tiles) to the results `out` at all window positions."""
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
    """Returns the integers that _TILE_OF_ITEM uses to declare a work item's tile, and the number of work items."""
    batch, channels = images.shape[:2]
    rows, columns = tiles(windows)
    integers = {"channels": channels, "batch": batch, "tile_rows": rows, "tile_columns": columns}
    return integers, channels * batch * rows * columns


def _both_ways(size: int, transform: Callable[..., list[str]]) -> str:
    """Returns statements that transform the columns and then the rows of the `size` × `size` numbers tIJ to sIJ."""
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
    """Returns statements that store the POINTS numbers of a work item, `items` elements apart."""
    return " ".join(
        f"store_{name}({i * _TILE + j} * items + item, s{i}{j});" for i in range(_TILE) for j in range(_TILE)
    )
