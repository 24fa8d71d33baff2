"""Resampling of images to another size, forward and backward: nearest, linear and cubic, in 1 to 3 dimensions.

All filters are separable: along a dimension, element `o` of the result is a weighted sum of TAPS elements of the image
around position (o + before) * scale - after. A backward work item handles elements of the image, and gathers from all
elements of the result to which they contribute, so no atomic additions are needed. Tensors have the shape
(planes, *sizes) and are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, named, split
from torch_backplane.kernels.templates.unfold import linear

# Group size, and elements of a row and rows per work item, on CPUs.
_SMALL_GROUP, _RUN, _ROWS = 8, 64, 8
_KEPT = 8  # weights per image element that a work item keeps, on CPUs


class _Filter(NamedTuple):
    """An interpolation filter.

    Args:
        taps: number of image elements per result element and dimension.
        text: statements that set at[TAPS] and weight[TAPS] for position `source` in the image.
        reach: element i can contribute if i + reach[0] <= source < i + reach[1].
    """

    taps: int
    text: str
    reach: tuple[int, int]


_FILTERS: Mapping[str, _Filter] = {
    "nearest": _Filter(1, "at[0] = min((index_t)floor(source), image - 1); weight[0] = 1;", (0, 1)),
    "linear": _Filter(
        2,
        "const value_t from = fmax(source, (value_t)0); at[0] = min((index_t)from, image - 1);"
        " at[1] = min(at[0] + 1, image - 1); weight[1] = fmin(fmax(from - (value_t)at[0], (value_t)0), (value_t)1);"
        " weight[0] = 1 - weight[1];",
        (-1, 1),
    ),
    # Keys's cubic convolution with a = -0.75. The factored polynomials have no cancellation.
    "cubic": _Filter(
        4,
        """const index_t base = min((index_t)floor(source), image - 1);
  const value_t t = fmin(fmax(source - (value_t)base, (value_t)0), (value_t)1);
  const value_t s = 1 - t;
  for (int k = 0; k < 4; ++k) at[k] = min(max(base - 1 + k, (index_t)0), image - 1);
  weight[0] = (value_t)-0.75 * t * s * s; weight[3] = (value_t)-0.75 * s * t * t;
  weight[1] = s * (1 + t - (value_t)1.25 * t * t); weight[2] = t * (1 + s - (value_t)1.25 * s * s);""",
        (-2, 2),
    ),
}


@dataclass(frozen=True)
class Resampling:
    """Parameters of resampling.

    Args:
        filter: "nearest", "linear" or "cubic".
        before, after: see the module docstring; 0 or 0.5.
        scales: image elements per result element, for each dimension.
    """

    filter: str
    before: float
    after: float
    scales: tuple[float, ...]


def resample(dialect: Dialect, out: torch.Tensor, image: torch.Tensor, how: Resampling) -> Launch:
    """Resamples image to out.

    A work item handles a run of elements in some rows of the result, and computes their taps along the row only once.
    """
    last = len(how.scales) - 1
    outer = [f"o{d}" for d in range(last)]
    loops = " ".join(
        f"for (int k{d} = 0; k{d} < TAPS; ++k{d}) {{ "
        f"const value_t heavy{d} = weight{d}[k{d}]{f' * heavy{d - 1}' if d else ''};"
        for d in range(last)
    )
    row = linear(["plane", *(f"at{d}[k{d}]" for d in range(last))], [f"image{d}" for d in range(last)])
    run, rows = _run(dialect), dialect.target.run(_ROWS)
    heavy = f"heavy{last - 1} * " if last else ""
    body = f"""
  {split("item", ["blocks", "runs"], ["block", "run_number"])}
  const index_t begin = run_number * {run};
  const int size = (int)min((index_t){run}, out{last} - begin);
  index_t ats[TAPS][{run}]; value_t weights[TAPS][{run}];
  for (int i = 0; i < size; ++i) {{
    {_taps(last)} taps(begin + i, scale{last}, image{last}, at{last}, weight{last});
    for (int k = 0; k < TAPS; ++k) {{ ats[k][i] = at{last}[k]; weights[k][i] = weight{last}[k]; }}
  }}
  for (index_t row = block * {rows}; row < min(rows, (block + 1) * {rows}); ++row) {{
    {split("row", ["planes", *(f"out{d}" for d in range(last))], ["plane", *outer])}
    {" ".join(f"{_taps(d)} taps(o{d}, scale{d}, image{d}, at{d}, weight{d});" for d in range(last))}
    value_t sums[{run}];
    for (int i = 0; i < size; ++i) sums[i] = 0;
    {loops}
      const index_t from = ({row}) * image{last};
      for (int k = 0; k < TAPS; ++k)
        for (int i = 0; i < size; ++i) sums[i] += {heavy}weights[k][i] * load_image(from + ats[k][i]);
    {"}" * last}
    for (int i = 0; i < size; ++i) store_out(row * out{last} + begin + i, sums[i]);
  }}
"""
    integers, items = _blocks(dialect, out)
    spec = LaunchSpec(
        "resample",
        dialect,
        outputs={"out": out},
        inputs={"image": image},
        integers=integers,
        value=_computed_in(image.dtype),
        body=body,
        items=items,
    )
    return _launch(spec, image, out, how)


def resample_backward(dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, how: Resampling) -> Launch:
    """Computes the gradient of the image from that of the result.

    A work item handles a run of elements in some rows of the image. It computes the weights along the row only once,
    for up to _KEPT result elements per image element.
    """
    last = len(how.scales) - 1
    outer = [f"i{d}" for d in range(last)]
    ranges = " ".join(
        f"const index_t first{d} = first_place(i{d}, scale{d}, image{d}, out{d}), "
        f"last{d} = last_place(i{d}, scale{d}, image{d}, out{d});"
        for d in range(last)
    )
    loops = " ".join(
        f"for (index_t o{d} = first{d}; o{d} < last{d}; ++o{d}) {{ "
        f"const value_t heavy{d} = weight_of(i{d}, o{d}, scale{d}, image{d}){f' * heavy{d - 1}' if d else ''}; "
        f"if (heavy{d} == 0) continue;"
        for d in range(last)
    )
    row = linear(["plane", *(f"o{d}" for d in range(last))], [f"out{d}" for d in range(last)])
    run, rows = _run(dialect), dialect.target.run(_ROWS)
    heavy = f"heavy{last - 1} * " if last else ""
    found = f"weight_of(begin + i, firsts[i] + k, scale{last}, image{last})"
    body = f"""
  {split("item", ["blocks", "runs"], ["block", "run_number"])}
  const index_t begin = run_number * {run};
  const int size = (int)min((index_t){run}, image{last} - begin);
  index_t firsts[{run}], counts[{run}], most = 0;
  value_t weights[KEPT + 1][{run}];
  for (int i = 0; i < size; ++i) {{
    firsts[i] = first_place(begin + i, scale{last}, image{last}, out{last});
    counts[i] = last_place(begin + i, scale{last}, image{last}, out{last}) - firsts[i];
    most = max(most, counts[i]);
    for (index_t k = 0; k < min(counts[i], (index_t)KEPT); ++k) weights[k][i] = {found};
  }}
  for (index_t row = block * {rows}; row < min(rows, (block + 1) * {rows}); ++row) {{
    {split("row", ["planes", *(f"image{d}" for d in range(last))], ["plane", *outer])}
    {ranges}
    value_t sums[{run}], lost[{run}];
    for (int i = 0; i < size; ++i) {{ sums[i] = 0; lost[i] = 0; }}
    {loops}
      const index_t from = ({row}) * out{last};
      for (index_t k = 0; k < most; ++k)
        for (int i = 0; i < size; ++i) {{
          if (k < counts[i]) {{
            const value_t weight = k < KEPT ? weights[k][i] : {found};
            if (weight != 0) ADD_AS(value_t, sums[i], lost[i], {heavy}weight * load_grad(from + firsts[i] + k))
          }}
        }}
    {"}" * last}
    for (int i = 0; i < size; ++i)
      store_image_grad(row * image{last} + begin + i, (lost[i] == lost[i] ? sums[i] + lost[i] : sums[i]));
  }}
"""
    integers, items = _blocks(dialect, image_grad)
    spec = LaunchSpec(
        "resample_backward",
        dialect,
        outputs={"image_grad": image_grad},
        inputs={"grad": grad},
        integers=integers,
        value=_computed_in(image_grad.dtype),
        body=body,
        items=items,
    )
    return _launch(spec, image_grad, grad, how)


# An image element can contribute to the result elements from first_place to last_place - 1, which include a margin of
# one for rounding. Positions outside the image count as its first or last element.
_FUNCTIONS = """
FUNCTION void taps(const index_t o, const value_t scale, const index_t image, index_t* at, value_t* weight) {{
  const value_t source = ((value_t)o + BEFORE) * scale - AFTER;
  {text}
}}
FUNCTION value_t weight_of(const index_t i, const index_t o, const value_t scale, const index_t image) {{
  index_t at[TAPS]; value_t weight[TAPS], sum = 0;
  taps(o, scale, image, at, weight);
  for (int k = 0; k < TAPS; ++k) sum += at[k] == i ? weight[k] : 0;
  return sum;
}}
FUNCTION index_t first_place(const index_t i, const value_t scale, const index_t image, const index_t out) {{
  if (i == 0 || scale == 0) return 0;
  const value_t place = floor(((value_t)(i + ({least})) + AFTER) / scale - BEFORE) - 1;
  return (index_t)fmin(fmax(place, (value_t)0), (value_t)out);
}}
FUNCTION index_t last_place(const index_t i, const value_t scale, const index_t image, const index_t out) {{
  if (i == image - 1 || scale == 0) return out;
  const value_t place = ceil(((value_t)(i + ({most})) + AFTER) / scale - BEFORE) + 2;
  return (index_t)fmin(fmax(place, (value_t)0), (value_t)out);
}}
"""


def _taps(d: int) -> str:
    return f"index_t at{d}[TAPS]; value_t weight{d}[TAPS];"


def _blocks(dialect: Dialect, written: torch.Tensor) -> tuple[dict[str, int], int]:
    """Returns the integers for work items that handle a run of elements in a block of rows, and their number."""
    rows = math.prod(written.shape[:-1])
    blocks, runs = -(-rows // dialect.target.run(_ROWS)), -(-written.shape[-1] // _run(dialect))
    return {"blocks": blocks, "runs": runs, "rows": rows}, blocks * runs


def _run(dialect: Dialect) -> int:
    return dialect.target.run(_RUN)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the compute dtype: float32 for integers."""
    return value_dtype(dtype) if facts(dtype).category == "float" else torch.float32


def _launch(spec: LaunchSpec, image: torch.Tensor, out: torch.Tensor, how: Resampling) -> Launch:
    """Adds the parts that both directions share to `spec`, and returns the launch."""
    target = spec.dialect.target
    taps, text, (least, most) = _FILTERS[how.filter]
    sizes = {"planes": image.shape[0], **named("image", image.shape[1:]), **named("out", out.shape[1:])}
    return replace(
        spec,
        name=f"{spec.name}_{how.filter}{len(how.scales)}" + ("_centred" if how.before else ""),
        integers={**spec.integers, **sizes},
        numbers={f"scale{d}": (spec.value, scale) for d, scale in enumerate(how.scales)},
        constants={
            "TAPS": taps,
            "KEPT": 0 if target.simt else _KEPT,
            "BEFORE": f"(value_t){how.before}",
            "AFTER": f"(value_t){how.after}",
        },
        functions=_FUNCTIONS.format(text=text, least=least, most=most),
        group_size=target.small_group(_SMALL_GROUP),
    ).launch()
