"""Maximum and average pooling of 1 to 3 dimensions, forward and backward.

Images are (planes, *sizes), contiguous. Backwards go over the elements of the image and gather from every window that
covers them, so nothing is added to concurrently. Where work items are threads and planes many, each has those of one
plane instead.
"""

from __future__ import annotations

import math

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.layouts import NARROW_LIMIT
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.source import Launch, make_launch, split
from torch_backplane.kernels.templates.spelling import mixing, vector_load
from torch_backplane.kernels.templates.unfold import Windows, linear

# Where items are threads: neighbouring places that are computed together, and rows of places of a group.
_RUNS, _ROWS = (8, 4), 8


def max_pool(
    dialect: Dialect, out: torch.Tensor, indices: torch.Tensor, image: torch.Tensor, windows: Windows
) -> Launch:
    """The greatest element of each window, the last NaN if there is one; and its place in the plane."""
    rank, outputs = windows.rank, {"out": out, "indices": indices}
    if not dialect.target.simt:
        return _max_pool_by_rows(dialect, outputs, image, windows)
    loops = f"{_loops(rank)} {_covered(rank)} if (!({_inside(rank)})) continue;"
    body = f"""
  {_places(rank, "out", "places")}
  {_greatest(out.dtype, loops, _element(rank), rank)}
"""
    return _launch("max_pool", dialect, outputs, {"image": image}, windows, body, out)


def _max_pool_by_rows(
    dialect: Dialect, outputs: dict[str, torch.Tensor], image: torch.Tensor, windows: Windows
) -> Launch:
    """A thread has a row of places. Of floating-point numbers, runs of places whose windows are inside of the image are
    computed as vectors, the last run again with some of the one before; others are computed one by one.
    """
    out = outputs["out"]
    value, last, step = value_dtype(out.dtype), windows.rank - 1, windows.stride[-1]
    is_float = facts(value).category == "float"
    kind, number = dialect.type(value), "long" if facts(value).bits == 64 else "int"
    runs = _RUNS if is_float and dialect.vectors and math.prod(windows.image) <= NARROW_LIMIT else ()

    def computed(count: int, at: str) -> str:
        """Statements for the places from `at` on."""
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
      {_loops(last)} {_covered(last)} {f"if (!({_inside(last)})) continue;" if last else ""}
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
  const index_t plane_at = {_plane_at(windows.rank, "image")}, first = item * places{last};
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
    return make_launch(
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
    )


def _apart(dialect: Dialect, dtype: torch.dtype, at: str, step: int, count: int) -> str:
    """So many elements of the image from `at` on, which lie STEP apart. Neighbours, and every second one, are read as
    vectors: to gather numbers takes ten times as long.
    """
    if count == 1 or step > 2 or dtype == torch.float16:
        elements = ", ".join(f"(value_t)load_image({at} + {lane} * STEP)" for lane in range(count))
        return f"({dialect.type(value_dtype(dtype))}{count if count > 1 else ''})({elements})"
    first = vector_load(dialect, f"image + {at}", dtype, count)
    if step == 1:
        return first
    # The second vector ends with the last element that is wanted: what follows may be nobody's memory.
    second = vector_load(dialect, f"image + {at} + {count - 1}", dtype, count)
    half = count // 2
    numbers = [2 * lane for lane in range(half)] + [count + 2 * lane + 1 for lane in range(half)]
    return f"mix{count}({first}, {second}, {', '.join(map(str, numbers))})"


def adaptive_max_pool(dialect: Dialect, out: torch.Tensor, indices: torch.Tensor, image: torch.Tensor) -> Launch:
    """The same of windows that divide the image into out's sizes, as `adaptive_avg_pool` has them."""
    rank = out.dim() - 1
    loops = " ".join(f"for (index_t i{d} = begin{d}; i{d} < end{d}; ++i{d}) {{" for d in range(rank))
    body = f"""
  {_places(rank, "out", "places")}
  {" ".join(_adaptive(d) for d in range(rank))}
  {_greatest(out.dtype, loops, _element(rank), rank)}
"""
    windows, outputs = _adaptive_windows(image, out), {"out": out, "indices": indices}
    return _launch("adaptive_max_pool", dialect, outputs, {"image": image}, windows, body, out)


def fractional_max_pool(
    dialect: Dialect,
    out: torch.Tensor,
    indices: torch.Tensor,
    image: torch.Tensor,
    samples: torch.Tensor,
    windows: Windows,
) -> Launch:
    """The same of windows whose distances are drawn: `samples` has a number from 0 to 1 for each plane and dimension;
    of two dimensions, the last one's comes first.
    """
    rank = windows.rank
    starts = [
        f"""const value_t sample{d} = load_samples(plane * {rank} + {1 - d if rank == 2 else d});
  const value_t step{d} = places{d} > 1 ? (value_t)(image{d} - window{d}) / (value_t)(places{d} - 1) : 0;
  const index_t begin{d} = o{d} == places{d} - 1 ? image{d} - window{d}
    : (index_t)(((value_t)o{d} + sample{d}) * step{d}) - (index_t)(sample{d} * step{d});"""
        for d in range(rank)
    ]
    loops = " ".join(f"for (index_t i{d} = begin{d}; i{d} < begin{d} + window{d}; ++i{d}) {{" for d in range(rank))
    body = f"""
  {_places(rank, "out", "places")}
  {" ".join(starts)}
  {_greatest(out.dtype, loops, _element(rank), rank)}
"""
    outputs, inputs = {"out": out, "indices": indices}, {"image": image, "samples": samples}
    return _launch("fractional_max_pool", dialect, outputs, inputs, windows, body, out)


def _greatest(dtype: torch.dtype, loops: str, element: str, rank: int) -> str:
    """Statements that store the greatest element, or the last NaN, of those that the loops go over, and its place."""
    taken = "value > best || value != value" if facts(dtype).category == "float" else "value > best"
    return f"""value_t best = 0; index_t place = -1;
  {loops}
    const index_t at = {element};
    const value_t value = load_image({_plane_at(rank, "image")} + at);
    if (place < 0 || ({taken})) {{ best = value; place = at; }}
  {"}" * rank}
  store_out(item, best);
  indices[item] = place;"""


def max_pool_backward(
    dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor, windows: Windows
) -> Launch:
    """The gradient of each element of the image: the sum of those of the windows whose index it is."""
    rank = windows.rank
    inputs = {"grad": grad, "indices": indices}
    if _is_for_planes(dialect.target, image_grad):
        body = f"""
  {_PLANE}
  for (index_t at = item * count_of_places; at < (item + 1) * count_of_places; ++at) {{
    const int64 element = indices[at];
    if (element >= 0 && element < elements) image_grad[begin + (index_t)element] += load_grad(at);
  }}"""
        return _launch_for_planes("max_pool_backward", dialect, image_grad, inputs, windows, body)
    body = f"""
  {_places(rank, "i", "image", "i")}
  const index_t element = {_element(rank)};
  SUM(sum);
  {_covering_loops(rank)}
    const index_t at = {_plane_at(rank, "places")} + {_place(rank)};
    if (indices[at] == element) ADD(sum, load_grad(at))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    return _launch("max_pool_backward", dialect, {"image_grad": image_grad}, inputs, windows, body, image_grad)


def avg_pool(
    dialect: Dialect, out: torch.Tensor, image: torch.Tensor, windows: Windows, count_padding: bool, divisor: int | None
) -> Launch:
    """The mean of each window: its sum over `divisor`, or the number of its elements, also those in the padding."""
    rank = windows.rank
    body = f"""
  {_places(rank, "out", "places")}
  SUM(sum);
  {_loops(rank)}
    {_covered(rank)}
    if ({_inside(rank)})
      ADD(sum, load_image({_plane_at(rank, "image")} + {_element(rank)}))
  {"}" * rank}
  {_count(rank, count_padding, divisor)}
  store_out(item, TOTAL(sum) / (value_t)count);
"""
    name = f"avg_pool{_suffix(count_padding, divisor)}"
    return _launch(name, dialect, {"out": out}, {"image": image}, windows, body, out, divisor)


def avg_pool_backward(
    dialect: Dialect,
    image_grad: torch.Tensor,
    grad: torch.Tensor,
    windows: Windows,
    count_padding: bool,
    divisor: int | None,
) -> Launch:
    """The gradient of each element of the image: its share of that of every window that covers it."""
    rank = windows.rank
    name = f"avg_pool_backward{_suffix(count_padding, divisor)}"
    if _is_for_planes(dialect.target, image_grad):
        places = " ".join(f"for (index_t o{d} = 0; o{d} < places{d}; ++o{d}) {{" for d in range(rank))
        body = f"""
  {_PLANE}
  index_t at = item * count_of_places;
  {places}
    {_count(rank, count_padding, divisor)}
    const value_t share = load_grad(at++) / (value_t)count;
    {_loops(rank)}
      {_covered(rank)}
      if ({_inside(rank)}) image_grad[begin + {_element(rank)}] += share;
    {"}" * rank}
  {"}" * rank}"""
        return _launch_for_planes(name, dialect, image_grad, {"grad": grad}, windows, body, divisor)
    body = f"""
  {_places(rank, "i", "image", "i")}
  SUM(sum);
  {_covering_loops(rank)}
    {_count(rank, count_padding, divisor)}
    ADD(sum, load_grad({_plane_at(rank, "places")} + {_place(rank)}) / (value_t)count)
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    return _launch(name, dialect, {"image_grad": image_grad}, {"grad": grad}, windows, body, image_grad, divisor)


def adaptive_avg_pool(dialect: Dialect, out: torch.Tensor, image: torch.Tensor) -> Launch:
    """Means of windows that divide the image into out's sizes: from floor(o * in / out) to ceil((o + 1) * in / out)."""
    rank = out.dim() - 1
    loops = " ".join(f"for (index_t i{d} = begin{d}; i{d} < end{d}; ++i{d}) {{" for d in range(rank))
    body = f"""
  {_places(rank, "out", "places")}
  {" ".join(_adaptive(d) for d in range(rank))}
  SUM(sum);
  {loops}
    ADD(sum, load_image({_plane_at(rank, "image")} + {_element(rank)}))
  {"}" * rank}
  store_out(item, TOTAL(sum) / (value_t)({" * ".join(f"(end{d} - begin{d})" for d in range(rank))}));
"""
    windows = _adaptive_windows(image, out)
    return _launch("adaptive_avg_pool", dialect, {"out": out}, {"image": image}, windows, body, out)


def adaptive_avg_pool_backward(dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor) -> Launch:
    """The gradient of each element of the image: its share of that of every window that it is in."""
    rank = grad.dim() - 1
    body = f"""
  {_places(rank, "i", "image", "i")}
  SUM(sum);
  {_adaptive_covering_loops(rank)}
    ADD(sum, load_grad({_plane_at(rank, "places")} + {_place(rank)})
      / (value_t)({" * ".join(f"(end{d} - begin{d})" for d in range(rank))}))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    windows = _adaptive_windows(image_grad, grad)
    outputs, inputs = {"image_grad": image_grad}, {"grad": grad}
    return _launch("adaptive_avg_pool_backward", dialect, outputs, inputs, windows, body, image_grad)


def adaptive_max_pool_backward(
    dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor
) -> Launch:
    """The gradient of each element of the image: the sum of those of the windows whose index it is."""
    rank = grad.dim() - 1
    body = f"""
  {_places(rank, "i", "image", "i")}
  const index_t element = {_element(rank)};
  SUM(sum);
  {_adaptive_covering_loops(rank)}
    const index_t at = {_plane_at(rank, "places")} + {_place(rank)};
    if (indices[at] == element) ADD(sum, load_grad(at))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    windows, inputs = _adaptive_windows(image_grad, grad), {"grad": grad, "indices": indices}
    return _launch("adaptive_max_pool_backward", dialect, {"image_grad": image_grad}, inputs, windows, body, image_grad)


def _adaptive_covering_loops(rank: int) -> str:
    """Loops over the windows o that the element i is in."""
    return " ".join(
        f"for (index_t o{d} = i{d} * places{d} / image{d}; o{d} < min(places{d}, "
        f"((i{d} + 1) * places{d} + image{d} - 1) / image{d}); ++o{d}) {{ {_adaptive(d)} "
        f"if (i{d} < begin{d} || i{d} >= end{d}) continue;"
        for d in range(rank)
    )


def _adaptive_windows(image: torch.Tensor, out: torch.Tensor) -> Windows:
    ones = (1,) * (image.dim() - 1)
    return Windows(tuple(image.shape[1:]), tuple(out.shape[1:]), ones, ones, ones, ones)


def _adaptive(d: int) -> str:
    return (
        f"const index_t begin{d} = o{d} * image{d} / places{d}, "
        f"end{d} = ((o{d} + 1) * image{d} + places{d} - 1) / places{d};"
    )


def _places(rank: int, name: str, sizes: str, letter: str = "o") -> str:
    """Statements that declare `plane` and the coordinates of the work item's element."""
    return split(
        "item", ["planes", *(f"{sizes}{d}" for d in range(rank))], ["plane", *(f"{letter}{d}" for d in range(rank))]
    )


def _plane_at(rank: int, sizes: str) -> str:
    return " * ".join(["plane", *(f"{sizes}{d}" for d in range(rank))])


def _element(rank: int) -> str:
    return linear([f"i{d}" for d in range(rank)], [f"image{d}" for d in range(1, rank)])


def _place(rank: int) -> str:
    return linear([f"o{d}" for d in range(rank)], [f"places{d}" for d in range(1, rank)])


def _loops(rank: int) -> str:
    return " ".join(f"for (index_t k{d} = 0; k{d} < window{d}; ++k{d}) {{" for d in range(rank))


def _covered(rank: int) -> str:
    """Statements that declare where in the image the element k of window o is."""
    return " ".join(f"const index_t i{d} = o{d} * stride{d} - padding{d} + k{d} * dilation{d};" for d in range(rank))


def _inside(rank: int) -> str:
    return " && ".join(f"i{d} >= 0 && i{d} < image{d}" for d in range(rank))


def _covering_loops(rank: int) -> str:
    """Loops over the windows o that cover the element i."""
    return " ".join(
        f"const index_t least{d} = i{d} + padding{d} - (window{d} - 1) * dilation{d}; "
        f"const index_t first{d} = least{d} <= 0 ? 0 : (least{d} + stride{d} - 1) / stride{d}, "
        f"last{d} = min((i{d} + padding{d}) / stride{d}, places{d} - 1); "
        f"for (index_t o{d} = first{d}; o{d} <= last{d}; ++o{d}) {{ "
        f"if (dilation{d} != 1 && (i{d} + padding{d} - o{d} * stride{d}) % dilation{d} != 0) continue;"
        for d in range(rank)
    )


def _count(rank: int, count_padding: bool, divisor: int | None) -> str:
    """Statements that declare by what the sum of window o is divided. Elements beyond the padding never count."""
    if divisor is not None:
        return "const index_t count = divisor;"
    lines = []
    for d in range(rank):
        begin = f"o{d} * stride{d} - padding{d}"
        if count_padding:
            lines.append(f"const index_t covered{d} = min({begin} + window{d}, image{d} + padding{d}) - ({begin});")
        else:
            lines.append(f"const index_t covered{d} = min({begin} + window{d}, image{d}) - max({begin}, (index_t)0);")
    return " ".join([*lines, f"const index_t count = {' * '.join(f'covered{d}' for d in range(rank))};"])


def _suffix(count_padding: bool, divisor: int | None) -> str:
    return "_over" if divisor is not None else "" if count_padding else "_inside"


# For a work item that adds to a whole plane, in the order of windows.
_PLANE = """const index_t begin = item * elements;
  for (index_t i = begin; i < begin + elements; ++i) image_grad[i] = 0;"""


def _is_for_planes(target: Target, image_grad: torch.Tensor) -> bool:
    """Whether an item has a plane's windows: items are threads, there are enough, and sums need no more bits."""
    exact = image_grad.dtype in (torch.float32, torch.float64)
    return exact and not target.simt and image_grad.shape[0] >= target.enough_groups


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
    return make_launch(
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
    )


def _launch(
    name: str,
    dialect: Dialect,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    windows: Windows,
    body: str,
    result: torch.Tensor,
    divisor: int | None = None,
) -> Launch:
    integers = {"planes": result.shape[0], **windows.integers()}
    if divisor is not None:
        integers["divisor"] = divisor
    return make_launch(
        f"{name}{windows.rank}",
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers=integers,
        value=value_dtype(result.dtype),
        body=body,
        items=result.numel(),
    )
