"""Sliding windows: patches of images as columns of a matrix (im2col), their sums (col2im), and unfold's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import rows_and_columns
from torch_backplane.kernels.templates.unfold import Windows, fold, unfold
from torch_backplane.planning import Call, Refused, contiguous_result, operator, run_kernel, run_template


def _windows(
    sizes: Sequence[int], window: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Windows:
    """The windows and their number of positions. Refuses invalid windows: the CPU kernel raises the error."""
    given = (window, dilation, padding, stride)
    if any(len(one) != 2 for one in given) or min(*window, *dilation, *stride) <= 0 or min(padding) < 0:
        raise Refused("kernel_size, dilation, padding or stride is invalid")
    places = tuple(
        (size + 2 * pad - (wide - 1) * apart - 1) // step + 1
        for size, wide, apart, pad, step in zip(sizes, *given, strict=True)
    )
    if min(places) < 1 or min(sizes) < 1:
        raise Refused("the image is smaller than the window")
    return Windows(tuple(sizes), places, tuple(window), tuple(stride), tuple(padding), tuple(dilation))


def _check(self: torch.Tensor, dims: int, takes_bool: bool = False) -> None:
    takes = self.is_floating_point() or self.is_complex() or (takes_bool and self.dtype == torch.bool)
    if self.dim() not in (dims - 1, dims) or not takes:
        raise Refused("wrong number of dimensions, or an unsupported dtype")
    if 0 in self.shape[-dims + 1 :]:
        raise Refused("a dimension other than the batch has size 0")


def _batch(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The tensor with `dims` dimensions. Real and imaginary parts become separate images of the batch."""
    tensor = parts_first(tensor)
    return tensor.reshape(-1, *tensor.shape[-dims + 1 :])


def parts_first(tensor: torch.Tensor) -> torch.Tensor:
    """Complex tensors with their two parts in a new first dimension; real tensors unchanged."""
    return torch.view_as_real(tensor).movedim(-1, 0) if tensor.is_complex() else tensor


@contextmanager
def contiguous_parts(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """A contiguous tensor for the results in the layout of `parts_first`; afterwards they are copied to `out`."""
    if out.is_complex():
        parts = torch.empty((2, *out.shape), dtype=out.dtype.to_real(), device=out.device)
        yield parts
        parts_first(out).copy_(parts)
    else:
        with contiguous_result(out) as result:
            yield result


@operator("im2col", dtypes="complex")
def im2col(
    call: Call,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    _check(self, 4, takes_bool=True)
    windows = _windows(self.shape[-2:], kernel_size, dilation, padding, stride)
    shape = [*self.shape[:-3], self.shape[-3] * math.prod(kernel_size), math.prod(windows.places)]
    (out,) = call.outputs(like=[torch.empty(shape, dtype=self.dtype, device="meta")])
    if out.numel() == 0:
        return out
    with contiguous_parts(out) as columns:
        run_template(unfold, out.device, _batch(columns, 3), _batch(self, 4).contiguous(), windows, name="im2col")
    return out


@operator("col2im", dtypes="complex")
def col2im(
    call: Call,
    self: torch.Tensor,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    _check(self, 3)
    if len(output_size) != 2:
        raise Refused("output_size does not have two elements")
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    channels, left = divmod(self.shape[-2], math.prod(kernel_size))
    if left or self.shape[-1] != math.prod(windows.places):
        raise Refused("the columns do not match the windows")
    shape = [*self.shape[:-2], channels, *output_size]
    (out,) = call.outputs(like=[torch.empty(shape, dtype=self.dtype, device="meta")])
    if out.numel() == 0:
        return out
    with contiguous_parts(out) as images:
        run_template(fold, out.device, _batch(images, 4), _batch(self, 3).contiguous(), windows, name="col2im")
    return out


@operator("unfold_backward", dtypes="complex")
def unfold_backward(
    call: Call, grad: torch.Tensor, input_sizes: list[int], dim: int, size: int, step: int
) -> torch.Tensor:
    """The gradient of an element is the sum of its gradients in all windows that contain it."""
    rank = max(1, len(input_sizes))
    if not -rank <= dim < rank or size < 0 or step <= 0:
        raise Refused("dim, size or step is out of range")
    wanted = [*input_sizes, size]
    if input_sizes:
        wanted[dim % rank] = (input_sizes[dim] - size) // step + 1
    torch._check(tuple(grad.shape) == tuple(wanted), lambda: f"expected a gradient of {wanted}, but got {grad.shape}")
    (out,) = call.outputs()
    if out.numel() == 0:
        return out
    _, length, inner = rows_and_columns(input_sizes, dim)
    with contiguous_parts(out) as result:
        run_kernel(
            "unfold_backward",
            """
  const index_t column = item % inner, at = item / inner % length, row = item / inner / length;
  const index_t first = at < size ? 0 : (at - size) / step + 1, last = min(at / step + 1, windows);
  SUM(sum);
  for (index_t i = first; i < last; ++i) {
    const index_t window = (row * windows + i) * inner + column;
    ADD(sum, load_grad(window * size + at - i * step))
  }
  store_out(item, TOTAL(sum));
""",
            items=result.numel(),
            outputs={"out": result},
            inputs={"grad": parts_first(grad).contiguous()},
            integers={
                "inner": inner,
                "length": length,
                "size": size,
                "step": step,
                "windows": grad.shape[dim % len(input_sizes)] if input_sizes else 1,
            },
            value=value_dtype(result.dtype),
        )
    return out
