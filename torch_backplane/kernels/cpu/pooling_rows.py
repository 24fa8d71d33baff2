"""Pooling on CPUs: a work item is a thread and computes a row of places, or all windows of a plane.

Places are the elements of the pooled result. Images are (planes, *sizes), contiguous, as in `templates/pooling.py`.
"""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.layouts import NARROW_LIMIT
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates import pooling_words as words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec, split
from torch_backplane.kernels.templates.spelling import mixing, vector_load
from torch_backplane.kernels.templates.unfold import Windows, linear

# Numbers of neighbouring places that are computed as one vector; rows of places per group.
_RUNS, _ROWS = (8, 4), 8


def max_pool(
    dialect: Dialect, outputs: dict[str, torch.Tensor], image: torch.Tensor, windows: Windows
) -> Launch:
    """Max pooling with a row of places per work item.

    For floating-point dtypes, runs of places whose windows are inside the image are computed as vectors; the last run
    overlaps the one before. Other places are computed one by one.
    """
    out = outputs["out"]
    value, last, step = value_dtype(out.dtype), windows.rank - 1, windows.stride[-1]
    is_float = facts(value).category == "float"
    kind, number = dialect.type(value), "long" if facts(value).bits == 64 else "int"
    runs = _RUNS if is_float and dialect.vectors and math.prod(windows.image) <= NARROW_LIMIT else ()

    def computed(count: int, at: str) -> str:
        """Statements that compute the `count` places from `at` on."""
        wide = str(count) if count > 1 else ""
        place = f"{number}{wide}" if wide else "index_t"
        elements = _apart(dialect, out.dtype, "plane_at + from", step, count)
        at_out, lanes = f"first + {at}", [f".s{lane:x}" for lane in range(count)] if wide else [""]
        if wide and out.dtype == value:
            stores = f"vstore{wide}(best, 0, out + {at_out});"
        else:
            stores = " ".join(f"store_out({at_out} + {i}, best{one});" for i, one in enumerate(lanes))
        if wide:
            stores += f" vstore{wide}(convert_long{wide}(place), 0, indices + {at_out});"
        else:
            stores += f" indices[{at_out}] = place;"
        numbers = ", ".join(f"from + {lane} * STEP" for lane in range(count))
        inside = "" if wide else f"if (from < row || from >= row + image{last}) continue;"
        nan = " || value != value" if is_float else ""
        row = linear([f"i{d}" for d in range(last)], [f"image{d}" for d in range(1, last)])
        return f"""{kind}{wide} best = 0; {place} place = -1;
      {words.loops(last)} {words.covered(last)} {f"if (!({words.inside(last)})) continue;" if last else ""}
        const index_t row = ({row}) * image{last};
        for (index_t k = 0; k < window{last}; ++k) {{
          const index_t from = row + {at} * STEP - padding{last} + k * dilation{last};
          {inside}
          const {kind}{wide} value = {elements};
          const {number}{wide} taken = place < 0 || value > best{nan};
          best = taken ? value : best;
          place = taken ? ({place})({numbers}) : place;
        }}
      {"}" * last}
      {stores}"""

    def computed_together(run: int) -> str:
        return f"""const index_t begin = min(o, inside_to - {run});
      {computed(run, "begin")}
      o = begin + {run};
      continue;"""

    body = f"""
  {split("item", ["planes", *(f"places{d}" for d in range(last))], ["plane", *(f"o{d}" for d in range(last))])}
  const index_t plane_at = {words.plane_at(windows.rank, "image")}, first = item * places{last};
  const index_t reach = image{last} + padding{last} - (window{last} - 1) * dilation{last};
  const index_t inside_from = (padding{last} + STEP - 1) / STEP;
  const index_t inside_to = reach <= 0 ? 0 : min(places{last}, (reach + STEP - 1) / STEP);
  const index_t side_by_side = max(inside_to - inside_from, (index_t)0);
  for (index_t o = 0; o < places{last};) {{
    const index_t could = o >= inside_from && o < inside_to ? side_by_side : 0;
    {" ".join(f"if (could >= {run}) {{ {computed_together(run)} }}" for run in runs)}
    {computed(1, "o")}
    ++o;
  }}
"""
    bits = facts(value).bits
    return LaunchSpec(
        f"max_pool{windows.rank}_rows",
        dialect,
        outputs=outputs,
        inputs={"image": image},
        integers={"planes": out.shape[0], **windows.integers()},
        constants={"STEP": step if step in (1, 2) else f"stride{last}"},
        value=value,
        body=body,
        functions="".join(mixing(f"mix{run}", run, bits) for run in runs) if step == 2 else "",
        items=math.prod(out.shape[:-1]),
        group_size=dialect.target.small_group(_ROWS),
    ).launch()


def _apart(dialect: Dialect, dtype: torch.dtype, at: str, step: int, count: int) -> str:
    """The text of `count` elements of the image from `at` on, STEP apart.

    With a step of 1 or 2 they are loaded as vectors, because gathering elements takes ten times as long.
    """
    if count == 1 or step > 2 or dtype == torch.float16:
        elements = ", ".join(f"(value_t)load_image({at} + {lane} * STEP)" for lane in range(count))
        return f"({dialect.type(value_dtype(dtype))}{count if count > 1 else ''})({elements})"
    first = vector_load(dialect, f"image + {at}", dtype, count)
    if step == 1:
        return first
    # The second vector ends with the last element that is needed, because memory after it can be out of bounds.
    second = vector_load(dialect, f"image + {at} + {count - 1}", dtype, count)
    half = count // 2
    numbers = [2 * lane for lane in range(half)] + [count + 2 * lane + 1 for lane in range(half)]
    return f"mix{count}({first}, {second}, {', '.join(map(str, numbers))})"


# The start of a work item that accumulates into a whole plane, in the order of windows.
_PLANE = """const index_t begin = item * elements;
  for (index_t i = begin; i < begin + elements; ++i) image_grad[i] = 0;"""


def has_planes(target: Target, image_grad: torch.Tensor) -> bool:
    """Whether a work item computes all windows of a plane.

    This needs threads, enough planes, and a dtype in which gradients can be accumulated: float32 or float64.
    """
    exact = image_grad.dtype in (torch.float32, torch.float64)
    return exact and not target.simt and image_grad.shape[0] >= target.enough_groups


def max_pool_backward(
    dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor, windows: Windows
) -> Launch:
    """As in `templates/pooling.py`, for targets and gradients that satisfy `has_planes`."""
    body = f"""
  {_PLANE}
  for (index_t at = item * count_of_places; at < (item + 1) * count_of_places; ++at) {{
    const int64 element = indices[at];
    if (element >= 0 && element < elements) image_grad[begin + (index_t)element] += load_grad(at);
  }}"""
    inputs = {"grad": grad, "indices": indices}
    return _launch_for_planes("max_pool_backward", dialect, image_grad, inputs, windows, body)


def avg_pool_backward(
    dialect: Dialect,
    name: str,
    image_grad: torch.Tensor,
    grad: torch.Tensor,
    windows: Windows,
    count: str,
    divisor: int | None,
) -> Launch:
    """As `max_pool_backward`, for average pooling. `count`: statements that declare the divisor of window o."""
    rank = windows.rank
    places = " ".join(f"for (index_t o{d} = 0; o{d} < places{d}; ++o{d}) {{" for d in range(rank))
    body = f"""
  {_PLANE}
  index_t at = item * count_of_places;
  {places}
    {count}
    const value_t share = load_grad(at++) / (value_t)count;
    {words.loops(rank)}
      {words.covered(rank)}
      if ({words.inside(rank)}) image_grad[begin + {words.element(rank)}] += share;
    {"}" * rank}
  {"}" * rank}"""
    return _launch_for_planes(name, dialect, image_grad, {"grad": grad}, windows, body, divisor)


def _launch_for_planes(
    name: str,
    dialect: Dialect,
    image_grad: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    windows: Windows,
    body: str,
    divisor: int | None = None,
) -> Launch:
    counts = {"elements": math.prod(image_grad.shape[1:]), "count_of_places": math.prod(inputs["grad"].shape[1:])}
    integers = {**counts, **windows.integers()}
    if divisor is not None:
        integers["divisor"] = divisor
    return LaunchSpec(
        f"{name}{windows.rank}_of_planes",
        dialect,
        outputs={"image_grad": image_grad},
        inputs=inputs,
        integers=integers,
        value=value_dtype(image_grad.dtype),
        types={"int64": torch.int64},
        body=body,
        items=image_grad.shape[0],
        group_size=1,
    ).launch()
