"""im2col and col2im: patches of images as columns of a matrix, which turn a convolution into a matrix product.

An image has the shape (batch, channels, *sizes) and is contiguous. A column corresponds to a window position. Its rows
are the elements that the window covers there: (channel, *position in the window).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, named, split

_SMALL_GROUP = 8
_RUN = 64  # elements of a row for each work item


@dataclass(frozen=True)
class Windows:
    """Windows over an image; all members have one number per spatial dimension.

    Args:
        image: sizes of the image.
        places: number of window positions.
        window, stride, padding, dilation: as in a convolution.
    """

    image: tuple[int, ...]
    places: tuple[int, ...]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.image)

    @property
    def trivial(self) -> bool:
        """Whether the columns equal the image."""
        return all(w == s == 1 and p == 0 for w, s, p in zip(self.window, self.stride, self.padding, strict=True))

    def transposed(self) -> Windows:
        """Returns the windows of the convolution that computes the image's gradient. Requires stride 1."""
        reach = zip(self.window, self.dilation, self.padding, strict=True)
        padding = tuple((size - 1) * apart - pad for size, apart, pad in reach)
        return Windows(self.places, self.image, self.window, self.stride, padding, self.dilation)

    def integers(self) -> dict[str, int]:
        return {
            name: value
            for prefix in ("image", "places", "window", "stride", "padding", "dilation")
            for name, value in named(prefix, getattr(self, prefix)).items()
        }


def unfold(dialect: Dialect, columns: torch.Tensor, image: torch.Tensor, windows: Windows) -> Launch:
    """Copies the patches of the image to columns, of shape (n, row, column) and last stride 1; 0 in the padding."""
    rank, last = windows.rank, windows.rank - 1
    batch, channels = image.shape[:2]
    run = dialect.target.run(_RUN)
    runs = -(-windows.places[-1] // run)
    items = batch * channels * math.prod(windows.window) * math.prod(windows.places[:-1]) * runs
    sizes = ["batch", "channels", *(f"window{d}" for d in range(rank)), *(f"places{d}" for d in range(last)), "runs"]
    names = ["n", "channel", *(f"k{d}" for d in range(rank)), *(f"o{d}" for d in range(last)), "run"]
    outside = "".join(f" || i{d} < 0 || i{d} >= image{d}" for d in range(last))
    image_row = linear(
        ["n", "channel", *(f"i{d}" for d in range(last))], ["channels", *(f"image{d}" for d in range(last))]
    )
    body = f"""
  {split("item", sizes, names)}
  {" ".join(f"const index_t i{d} = o{d} * stride{d} - padding{d} + k{d} * dilation{d};" for d in range(last))}
  const index_t row = {linear(["channel", *names[2 : 2 + rank]], [f"window{d}" for d in range(rank)])};
  const index_t to = n * columns_batch + row * columns_row
    + ({linear([f"o{d}" for d in range(last)], [f"places{d}" for d in range(1, last)])}) * places{last};
  const index_t from = ({image_row}) * image{last};
  const bool outside = false{outside};
  for (index_t o = run * {run}; o < min(run * {run} + {run}, places{last}); ++o) {{
    const index_t i = o * stride{last} - padding{last} + k{last} * dilation{last};
    columns[to + o] = outside || i < 0 || i >= image{last} ? 0 : image[from + i];
  }}
"""
    integers = {"batch": batch, "channels": channels, "runs": runs}
    integers |= {"columns_batch": columns.stride(0), "columns_row": columns.stride(1), **windows.integers()}
    return LaunchSpec(
        f"unfold{rank}",
        dialect,
        outputs={"columns": columns},
        inputs={"image": image},
        integers=integers,
        value=value_dtype(image.dtype),
        body=body,
        items=items,
        group_size=dialect.target.small_group(_SMALL_GROUP),
        strided=_rows_apart(columns),
    ).launch()


def fold(
    dialect: Dialect, image: torch.Tensor, columns: torch.Tensor, windows: Windows, bias: torch.Tensor | None = None
) -> Launch:
    """Computes image[n, channel, …] = bias[channel] + the sum of the elements of columns for that image element."""
    rank = windows.rank
    batch, channels = image.shape[:2]
    loops = []
    for d in range(rank):
        loops.append(
            f"for (index_t k{d} = 0; k{d} < window{d}; ++k{d}) {{ "
            f"const index_t from{d} = i{d} + padding{d} - k{d} * dilation{d}; "
            f"const index_t o{d} = from{d} / stride{d}; "
            f"if (from{d} < 0 || from{d} % stride{d} != 0 || o{d} >= places{d}) continue;"
        )
    row = linear(["channel", *(f"k{d}" for d in range(rank))], [f"window{d}" for d in range(rank)])
    column = linear([f"o{d}" for d in range(rank)], [f"places{d}" for d in range(1, rank)])
    names = ["n", "channel", *(f"i{d}" for d in range(rank))]
    body = f"""
  {split("item", ["batch", "channels", *(f"image{d}" for d in range(rank))], names)}
  SUM(sum);
  {"" if bias is None else "ADD(sum, load_bias(channel))"}
  {" ".join(loops)}
    ADD(sum, load_columns(n * columns_batch + ({row}) * columns_row + {column}))
  {"}" * rank}
  store_image(item, TOTAL(sum));
"""
    integers = {"batch": batch, "channels": channels}
    integers |= {"columns_batch": columns.stride(0), "columns_row": columns.stride(1), **windows.integers()}
    return LaunchSpec(
        f"fold{rank}",
        dialect,
        outputs={"image": image},
        inputs={"columns": columns, **({} if bias is None else {"bias": bias})},
        integers=integers,
        value=value_dtype(image.dtype),
        body=body,
        items=image.numel(),
        strided=_rows_apart(columns),
    ).launch()


def _rows_apart(columns: torch.Tensor) -> set[str]:
    """Returns `LaunchSpec.strided`: the text handles the first two strides of columns and assumes 1 for the last."""
    return {"columns"} if columns.shape[-1] <= 1 or columns.stride(-1) == 1 else set()


def linear(coordinates: Sequence[str], sizes: Sequence[str]) -> str:
    """Returns the linear index of `coordinates`, ((a * B + b) * C + c), for `sizes` (B, C) without the first."""
    if not coordinates:
        return "0"
    text = coordinates[0]
    for coordinate, size in zip(coordinates[1:], sizes, strict=True):
        text = f"({text}) * {size} + {coordinate}"
    return text
