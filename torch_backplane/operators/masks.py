"""Selection by masks: masked_select, masked_scatter, masked_fill, and masks as indices of tensors.

The number of selected elements is in device memory. Planners that need it wait for it, and run at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import compact
from torch_backplane.operators.nonzero import Selection, sizes
from torch_backplane.planning import (
    Call,
    Number,
    Refused,
    as_bits,
    check_number,
    check_same_dtype,
    contiguous_result,
    each_once,
    error_words,
    operator,
    part,
    plan_pointwise,
    run_pointwise,
    run_template,
    runtime,
    same_storage,
)
from torch_backplane.planning.call import as_meta, shares_memory

MASKS = (torch.bool, torch.uint8)
Indices = Sequence[torch.Tensor | None]


def expands(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of `shape` broadcasts to `wanted`."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """`as_bits` for kernels that move elements unchanged. complex128 stays complex128."""
    return tensor if tensor.dtype == torch.complex128 else as_bits(tensor)


@operator("masked_select", dtypes="any")
def masked_select(call: Call, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise Refused("mask is not bool")
    check_same_dtype(call, self.dtype)
    runtime.check_broadcast([mask, self])
    call.check_apart()
    shape = runtime.broadcast_shapes(self.shape, mask.shape)
    return select(call, self.expand(shape), mask.expand(shape))


def select(call: Call, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of self where the mask, which has self's shape, is not zero."""
    size, selection = 0, None
    if self.numel():
        selection = Selection(mask)
        (size,) = sizes([selection])
    (out,) = call.outputs(like=[torch.empty(size, dtype=self.dtype, device="meta")])
    if size and selection is not None:
        with contiguous_result(out) as result:
            write_selected(_bits(result), _bits(self.contiguous()), selection.mask, selection.starts)
    return out


@part("(Tensor(a!) out, Tensor source, Tensor mask, Tensor starts) -> ()", dtypes="any")
def write_selected(
    call: Call, out: torch.Tensor, source: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor
) -> None:
    run_template(compact.select, out.device, out, source, mask, starts, name="masked_select")


@operator("masked_scatter_", variants=False, dtypes="any")
def masked_scatter_(call: Call, self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool or source.dtype != self.dtype:
        raise Refused("mask is not bool, or source has another dtype than self")
    if not expands(mask.shape, self.shape):
        raise Refused("mask does not broadcast to self")
    runtime.check_overlaps([self], [])
    if self.numel() == 0:
        return self
    selection = Selection(mask.expand(self.shape))
    source = source.clone() if same_storage(self, source) else source
    # Not a `contiguous_result`, because elements outside the mask keep their values.
    result = self.contiguous()
    run_template(
        compact.scatter,
        self.device,
        _bits(result),
        selection.mask,
        _bits(source.contiguous()),
        selection.starts,
        error_words(self.device),
        name="masked_scatter",
    )
    return self if result is self else self.copy_(result)


def choose_value(a: Expression, mask: Expression, value: Expression) -> Expression:
    return f.where(mask.to(torch.bool), value, a)


@operator("masked_fill.Scalar", "masked_fill.Tensor", dtypes="complex")
def masked_fill(call: Call, self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """The meta kernel of the Tensor overload rejects a value in a CPU tensor, so the Scalar overload's is used."""
    check_masked_fill(call, self, mask, value)
    check_number(value, self.dtype)
    if isinstance(value, torch.Tensor):
        if call.is_in_place and shares_memory(self, [value]):
            value = value.clone()
        if call.is_in_place and self.numel() and each_once(self) is not self:
            once, mask = of_expanded(self, mask)
            once.masked_fill_(mask, value)
            return self
    result = torch.ops.aten.masked_fill.Scalar(as_meta(self), as_meta(mask), 0)  # `fitting` checks the actual number
    if isinstance(value, torch.Tensor):
        if not call.is_in_place:
            call.outputs(like=[result], elementwise=True)
        return plan_pointwise("masked_fill.Tensor", choose_value, call, (self, mask, value))
    (out,) = call.outputs(like=(result,), expanded=call.is_in_place)
    if call.is_in_place and self.numel():
        self, mask = of_expanded(self, mask)
        out = self
    dtype = value_dtype(self.dtype)
    run_pointwise(
        choose_value,
        [out],
        [self, mask],
        [(value.fitting(self.dtype), dtype)],
        compute=[dtype, torch.bool],
        key="masked_fill",
        name="masked_fill",
    )
    return call.outputs()[0]


def check_masked_fill(call: Call, self: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    """Raises the errors of PyTorch's CPU kernels, in the same order."""
    if not call.is_in_place:
        runtime.check_broadcast([mask, self])
    dims = value.dim() if isinstance(value, torch.Tensor) else 0
    if dims > 0 or mask.dtype != torch.bool:
        nothing = torch.empty(0)
        nothing.masked_fill_(torch.empty(0, dtype=mask.dtype), torch.empty([1] * dims))
    runtime.check_broadcast([self, mask])


# Masks as indices


def has_masks(indices: Indices) -> bool:
    return any(index is not None and index.dtype in MASKS for index in indices)


def check_masks(self: torch.Tensor, indices: Indices) -> None:
    """Refuses masks whose shape differs from that of the dimensions they index: the CPU kernel raises the error."""
    dim = 0
    for index in indices:
        if index is None or index.dtype not in MASKS:
            dim += 1
            continue
        if index.dim() == 0 or index.device != self.device or self.shape[dim : dim + index.dim()] != index.shape:
            raise Refused("a mask is on another device or does not match the dimensions that it indexes")
        if index.dtype == torch.uint8:
            # Raises PyTorch's warning about uint8 masks.
            torch.ops.aten.index.Tensor(torch.empty(0), [torch.empty(0, dtype=torch.uint8)])
        dim += index.dim()
    if dim > self.dim():
        raise Refused("too many indices")


def positions_of_masks(self: torch.Tensor, indices: Indices) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(tensor, indices) without masks that select the same elements as `self[indices]`. The tensor is a view of `self`.

    A mask of several dimensions becomes one index if these dimensions can be merged in the view, otherwise one index
    for each dimension.
    """
    counted = [Selection(index) for index in indices if index is not None and index.dtype in MASKS]
    found = iter(zip(counted, sizes(counted), strict=True))
    view, replaced = self, []
    for index in indices:
        if index is None or index.dtype not in MASKS:
            replaced.append(index)
            continue
        selection, size = next(found)
        merged = _merged(view, len(replaced), index.dim())
        if merged is not None:
            view = merged
            replaced.append(selection.positions(size))
        else:
            columns = torch.empty(index.dim(), size, dtype=torch.int64, device=index.device)
            replaced += selection.coordinates(columns.t()).unbind(1)
    return view, replaced


def _merged(self: torch.Tensor, dim: int, count: int) -> torch.Tensor | None:
    """A view of self in which `count` dimensions from `dim` on are merged; None if strides do not allow it."""
    shape = self.shape
    merged = [*shape[:dim], shape[dim : dim + count].numel(), *shape[dim + count :]]
    try:
        return self.view(merged)
    except RuntimeError:
        return None


def only_mask(self: torch.Tensor, indices: Indices) -> torch.Tensor | None:
    """The mask that is equivalent to `indices`, with dimensions appended so that it broadcasts to self. None if indices
    are more than one mask.

    The mask has the same strides as in PyTorch, whose checks of overlap compare them if mask and self are one tensor.
    """
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in MASKS:
        return None
    ((dim, mask),) = given
    for _ in range(self.dim() - dim - mask.dim()):
        mask = mask.unsqueeze(-1)
    return mask


def of_expanded(
    self: torch.Tensor, mask: torch.Tensor, name: str = "masked_fill_"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor and the mask to use instead of an expanded tensor: each element in memory is filled if any element of
    the mask for it is set."""
    once = each_once(self)
    if once is self:
        return self, mask
    warn_of_expanded(name)
    mask = mask.expand(self.shape)
    for dim, (size, whole) in enumerate(zip(once.shape, self.shape, strict=True)):
        if size != whole:
            mask = mask.any(dim, keepdim=True)
    return once, mask


def warn_of_expanded(name: str) -> None:
    """Issues PyTorch's warning about operators that write in place to an expanded tensor."""
    example = "tensor[indices] = tensor" if name == "index_put_" else "tensor[mask] = scalar"
    runtime.warn(
        f"Use of {name} on expanded tensors is deprecated. Please clone() the tensor before performing this operation. "
        f"This also applies to advanced indexing e.g. {example}"
    )


def fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """Writes one value, a one-element tensor or a `Number`, where the mask is not zero."""
    given, dtype = self, value_dtype(self.dtype)
    self, mask = of_expanded(self, mask, "index_put_")
    inputs, numbers = [self, mask], []
    if isinstance(value, Number):
        numbers.append((value, dtype))
    else:
        inputs.append((value.clone() if same_storage(self, value) else value).view(()))
    run_pointwise(
        lambda x, chosen, number: f.where(chosen.to(torch.bool), number, x),
        [self],
        inputs,
        numbers,
        compute=[dtype, mask.dtype, dtype][: len(inputs)],
        key="masked_fill_index_put",
        name="index_put_",
    )
    return given
