"""Maximum and average pooling of 1 to 3 dimensions, forward and backward.

Images have the shape (planes, *sizes) and are contiguous. A backward work item handles one element of the image and
gathers from every window that covers it, so no atomic additions are needed. CPUs have separate kernels
(`cpu/pooling_rows.py`).
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.cpu import pooling_rows
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates import pooling_words as words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec
from torch_backplane.kernels.templates.unfold import Windows


def max_pool(
    dialect: Dialect, out: torch.Tensor, indices: torch.Tensor, image: torch.Tensor, windows: Windows
) -> Launch:
    """Computes the maximum of each window, or its last NaN if it has one, and the element's index in the plane."""
    rank, outputs = windows.rank, {"out": out, "indices": indices}
    if not dialect.target.simt:
        return pooling_rows.max_pool(dialect, outputs, image, windows)
    loops = f"{words.loops(rank)} {words.covered(rank)} if (!({words.inside(rank)})) continue;"
    body = f"""
  {words.places(rank, "out", "places")}
  {_greatest(out.dtype, loops, words.element(rank), rank)}
"""
    return _launch("max_pool", dialect, outputs, {"image": image}, windows, body)


def adaptive_max_pool(dialect: Dialect, out: torch.Tensor, indices: torch.Tensor, image: torch.Tensor) -> Launch:
    """Like `max_pool`, with windows that divide the image into out's sizes, as in `adaptive_avg_pool`."""
    rank = out.dim() - 1
    loops = " ".join(f"for (index_t i{d} = begin{d}; i{d} < end{d}; ++i{d}) {{" for d in range(rank))
    body = f"""
  {words.places(rank, "out", "places")}
  {" ".join(_adaptive(d) for d in range(rank))}
  {_greatest(out.dtype, loops, words.element(rank), rank)}
"""
    windows, outputs = _adaptive_windows(image, out), {"out": out, "indices": indices}
    return _launch("adaptive_max_pool", dialect, outputs, {"image": image}, windows, body)


def fractional_max_pool(
    dialect: Dialect,
    out: torch.Tensor,
    indices: torch.Tensor,
    image: torch.Tensor,
    samples: torch.Tensor,
    windows: Windows,
) -> Launch:
    """Like `max_pool`, with windows at pseudorandom distances.

    Args:
        samples: numbers from 0 to 1 that determine the distances, of shape (planes, dimensions). With two dimensions,
            the number of the last dimension comes first.
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
  {words.places(rank, "out", "places")}
  {" ".join(starts)}
  {_greatest(out.dtype, loops, words.element(rank), rank)}
"""
    outputs, inputs = {"out": out, "indices": indices}, {"image": image, "samples": samples}
    return _launch("fractional_max_pool", dialect, outputs, inputs, windows, body)


def _greatest(dtype: torch.dtype, loops: str, element: str, rank: int) -> str:
    """Returns statements that store the maximum, or the last NaN, of the elements that `loops` visit, and its index."""
    taken = "value > best || value != value" if facts(dtype).category == "float" else "value > best"
    return f"""value_t best = 0; index_t place = -1;
  {loops}
    const index_t at = {element};
    const value_t value = load_image({words.plane_at(rank, "image")} + at);
    if (place < 0 || ({taken})) {{ best = value; place = at; }}
  {"}" * rank}
  store_out(item, best);
  indices[item] = place;"""


def max_pool_backward(
    dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor, windows: Windows
) -> Launch:
    """Computes the gradient of each image element: the sum of the gradients of all windows whose index it is."""
    rank = windows.rank
    inputs = {"grad": grad, "indices": indices}
    if pooling_rows.has_planes(dialect.target, image_grad):
        return pooling_rows.max_pool_backward(dialect, image_grad, grad, indices, windows)
    body = f"""
  {words.places(rank, "i", "image", "i")}
  const index_t element = {words.element(rank)};
  SUM(sum);
  {words.covering_loops(rank)}
    const index_t at = {words.plane_at(rank, "places")} + {words.place(rank)};
    if (indices[at] == element) ADD(sum, load_grad(at))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    return _launch("max_pool_backward", dialect, {"image_grad": image_grad}, inputs, windows, body)


def avg_pool(
    dialect: Dialect, out: torch.Tensor, image: torch.Tensor, windows: Windows, count_padding: bool, divisor: int | None
) -> Launch:
    """Computes the mean of each window: its sum divided by `divisor` or by the number of its elements.

    Args:
        count_padding: whether elements in the padding count.
    """
    rank = windows.rank
    body = f"""
  {words.places(rank, "out", "places")}
  SUM(sum);
  {words.loops(rank)}
    {words.covered(rank)}
    if ({words.inside(rank)})
      ADD(sum, load_image({words.plane_at(rank, "image")} + {words.element(rank)}))
  {"}" * rank}
  {words.count(rank, count_padding, divisor)}
  store_out(item, TOTAL(sum) / (value_t)count);
"""
    name = f"avg_pool{_suffix(count_padding, divisor)}"
    return _launch(name, dialect, {"out": out}, {"image": image}, windows, body, divisor)


def avg_pool_backward(
    dialect: Dialect,
    image_grad: torch.Tensor,
    grad: torch.Tensor,
    windows: Windows,
    count_padding: bool,
    divisor: int | None,
) -> Launch:
    """Computes the gradient of each image element: the sum of its shares in the gradients of windows that cover it."""
    rank = windows.rank
    name = f"avg_pool_backward{_suffix(count_padding, divisor)}"
    if pooling_rows.has_planes(dialect.target, image_grad):
        count = words.count(rank, count_padding, divisor)
        return pooling_rows.avg_pool_backward(dialect, name, image_grad, grad, windows, count, divisor)
    body = f"""
  {words.places(rank, "i", "image", "i")}
  SUM(sum);
  {words.covering_loops(rank)}
    {words.count(rank, count_padding, divisor)}
    ADD(sum, load_grad({words.plane_at(rank, "places")} + {words.place(rank)}) / (value_t)count)
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    return _launch(name, dialect, {"image_grad": image_grad}, {"grad": grad}, windows, body, divisor)


def adaptive_avg_pool(dialect: Dialect, out: torch.Tensor, image: torch.Tensor) -> Launch:
    """Computes means of windows that divide the image into out's sizes.

    Window o covers the elements from floor(o * in / out) to ceil((o + 1) * in / out), exclusive.
    """
    rank = out.dim() - 1
    loops = " ".join(f"for (index_t i{d} = begin{d}; i{d} < end{d}; ++i{d}) {{" for d in range(rank))
    body = f"""
  {words.places(rank, "out", "places")}
  {" ".join(_adaptive(d) for d in range(rank))}
  SUM(sum);
  {loops}
    ADD(sum, load_image({words.plane_at(rank, "image")} + {words.element(rank)}))
  {"}" * rank}
  store_out(item, TOTAL(sum) / (value_t)({" * ".join(f"(end{d} - begin{d})" for d in range(rank))}));
"""
    windows = _adaptive_windows(image, out)
    return _launch("adaptive_avg_pool", dialect, {"out": out}, {"image": image}, windows, body)


def adaptive_avg_pool_backward(dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor) -> Launch:
    """Computes the gradient of each image element: the sum of its shares in the gradients of windows that cover it."""
    rank = grad.dim() - 1
    body = f"""
  {words.places(rank, "i", "image", "i")}
  SUM(sum);
  {_adaptive_covering_loops(rank)}
    ADD(sum, load_grad({words.plane_at(rank, "places")} + {words.place(rank)})
      / (value_t)({" * ".join(f"(end{d} - begin{d})" for d in range(rank))}))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    windows = _adaptive_windows(image_grad, grad)
    outputs, inputs = {"image_grad": image_grad}, {"grad": grad}
    return _launch("adaptive_avg_pool_backward", dialect, outputs, inputs, windows, body)


def adaptive_max_pool_backward(
    dialect: Dialect, image_grad: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor
) -> Launch:
    """Computes the gradient of each image element: the sum of the gradients of all windows whose index it is."""
    rank = grad.dim() - 1
    body = f"""
  {words.places(rank, "i", "image", "i")}
  const index_t element = {words.element(rank)};
  SUM(sum);
  {_adaptive_covering_loops(rank)}
    const index_t at = {words.plane_at(rank, "places")} + {words.place(rank)};
    if (indices[at] == element) ADD(sum, load_grad(at))
  {"}" * rank}
  store_image_grad(item, TOTAL(sum));
"""
    windows, inputs = _adaptive_windows(image_grad, grad), {"grad": grad, "indices": indices}
    return _launch("adaptive_max_pool_backward", dialect, {"image_grad": image_grad}, inputs, windows, body)


def _adaptive_covering_loops(rank: int) -> str:
    """Returns loops over the windows o that cover element i."""
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


def _suffix(count_padding: bool, divisor: int | None) -> str:
    return "_over" if divisor is not None else "" if count_padding else "_inside"


def _launch(
    name: str,
    dialect: Dialect,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    windows: Windows,
    body: str,
    divisor: int | None = None,
) -> Launch:
    result = next(iter(outputs.values()))
    integers = {"planes": result.shape[0], **windows.integers()}
    if divisor is not None:
        integers["divisor"] = divisor
    return LaunchSpec(
        f"{name}{windows.rank}",
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers=integers,
        value=value_dtype(result.dtype),
        body=body,
        items=result.numel(),
    ).launch()
