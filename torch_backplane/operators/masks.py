"""What a mask selects: nonzero, masked_select, masked_scatter, and masks as indices of tensors.

The size of most results is in memory. So their planners wait for one number, and run at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import compact
from torch_backplane.kernels.templates.source import named, split
from torch_backplane.planning import (
    Call,
    Number,
    RunOnCPU,
    as_bits,
    contiguous_result,
    dialect_of,
    each_once,
    error_words,
    operator,
    run_kernel,
    run_pointwise,
    run_template,
    same_storage,
    socket,
)

MASKS = (torch.bool, torch.uint8)
Indices = Sequence[torch.Tensor | None]


def expands(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a tensor of `shape` broadcasts to `wanted`."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in pairs)


class Selection:
    """The elements of a tensor that are not zero, counted, in memory."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask.contiguous()
        self.starts = torch.empty(
            compact.block_count(dialect_of(mask.device), mask) + 1, dtype=torch.int64, device=mask.device
        )
        run_template(compact.count, mask.device, self.starts, self.mask, name="nonzero")
        run_template(compact.sum_up, mask.device, self.starts, name="nonzero")

    @property
    def count(self) -> torch.Tensor:
        """How many there are, on the device."""
        return self.starts[-1]

    def positions(self, size: int) -> torch.Tensor:
        """The places of the first `size` of them, counted through all dimensions, int64."""
        out = torch.empty(size, dtype=torch.int64, device=self.mask.device)
        if size:
            run_template(compact.positions, out.device, out, self.mask, self.starts, name="nonzero")
        return out

    def coordinates(self, out: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """out[i] = the coordinates of the i-th one, `fill` if there is none. out: (any size, dimensions), int64."""
        if out.numel() == 0:
            return out
        shape = self.mask.shape
        names = [f"c{d}" for d in range(len(shape))]
        stores = " ".join(
            f"store_out(item * out_step + {d} * out_column, there ? {name} : fill);" for d, name in enumerate(names)
        )
        run_kernel(
            "nonzero",
            f"""
  const bool there = item < load_total(0);
  const index_t at = there ? load_positions(item) : 0;
  {split("at", [f"size{d}" for d in range(len(shape))], names)}
  {stores}
""",
            items=out.shape[0],
            outputs={"out": out},
            inputs={"positions": self.positions(out.shape[0]), "total": self.starts[-1:]},
            # The number of elements tells how wide positions are.
            integers={
                "elements": self.mask.numel(),
                "out_step": out.stride(0),
                "out_column": out.stride(1),
                **named("size", shape),
            },
            numbers={"fill": (torch.int64, fill)},
            value=torch.int64,
            strided={"out"},
        )
        return out


def sizes(selections: Sequence[Selection]) -> list[int]:
    """How many elements each of them has, on the host: the one time that a call waits."""
    if len(selections) == 1:
        return [int(selections[0].count.item())]
    return torch.stack([one.count for one in selections]).tolist()


@operator("nonzero", dtypes="complex")
def nonzero(call: Call, self: torch.Tensor) -> torch.Tensor:
    check_same_dtype(call, torch.int64)
    call.check_apart()
    size, selection = 0, None
    if self.numel():
        selection = Selection(self)
        (size,) = sizes([selection])
    # Its columns are contiguous, as PyTorch makes them.
    like = torch.empty(self.dim(), size, dtype=torch.int64, device="meta").t()
    (out,) = call.outputs(like=[like])
    return out if selection is None else selection.coordinates(out)


@operator("nonzero_static", dtypes="complex")
def nonzero_static(call: Call, self: torch.Tensor, size: int, fill_value: int) -> torch.Tensor:
    check_same_dtype(call, torch.int64)
    if size < 0:
        raise RunOnCPU("a negative size")
    # PyTorch's meta kernel has other strides than its CPU kernel.
    (out,) = call.outputs(like=[torch.empty(size, self.dim(), dtype=torch.int64, device="meta")])
    call.check_apart()
    return Selection(self).coordinates(out, fill_value) if out.numel() else out


def check_same_dtype(call: Call, dtype: torch.dtype) -> None:
    """Leaves to the CPU, for PyTorch's error, a tensor for the result that has another dtype."""
    if any(given.dtype != dtype for given in call.written):
        raise RunOnCPU("a result of another dtype")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """For kernels that move elements as they are; complex128 are moved as such."""
    return tensor if tensor.dtype == torch.complex128 else as_bits(tensor)


@operator("masked_select", dtypes="any")
def masked_select(call: Call, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise RunOnCPU("a mask that is not of bools")
    check_same_dtype(call, self.dtype)
    socket.check_broadcast([mask, self])
    call.check_apart()
    shape = socket.broadcast_shapes(self.shape, mask.shape)
    return select(call, self.expand(shape), mask.expand(shape))


def select(call: Call, self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements of self where the mask, of the same shape, is not zero."""
    size, selection = 0, None
    if self.numel():
        selection = Selection(mask)
        (size,) = sizes([selection])
    (out,) = call.outputs(like=[torch.empty(size, dtype=self.dtype, device="meta")])
    if size and selection is not None:
        with contiguous_result(out) as result:
            arguments = (_bits(result), _bits(self.contiguous()), selection.mask, selection.starts)
            run_template(compact.select, out.device, *arguments, name="masked_select")
    return out


@operator("masked_scatter_", variants=False, dtypes="any")
def masked_scatter_(call: Call, self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool or source.dtype != self.dtype:
        raise RunOnCPU("a mask that is not of bools, or two dtypes")
    if not expands(mask.shape, self.shape):
        raise RunOnCPU("a mask that does not broadcast to the tensor")
    socket.check_overlaps([self], [])
    if self.numel() == 0:
        return self
    selection = Selection(mask.expand(self.shape))
    source = source.clone() if same_storage(self, source) else source
    # Not a `contiguous_result`: what the mask leaves is kept.
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


# Masks as indices


def has_masks(indices: Indices) -> bool:
    return any(index is not None and index.dtype in MASKS for index in indices)


def check_masks(self: torch.Tensor, indices: Indices) -> None:
    """Leaves to the CPU, for PyTorch's errors, masks that do not have the sizes of the dimensions they stand for."""
    dim = 0
    for index in indices:
        if index is None or index.dtype not in MASKS:
            dim += 1
            continue
        if index.dim() == 0 or index.device != self.device or self.shape[dim : dim + index.dim()] != index.shape:
            raise RunOnCPU("a mask of other sizes, or on another device")
        if index.dtype == torch.uint8:
            # Where PyTorch's word of warning comes from.
            torch.ops.aten.index.Tensor(torch.empty(0), [torch.empty(0, dtype=torch.uint8)])
        dim += index.dim()
    if dim > self.dim():
        raise RunOnCPU("too many indices")


def positions_of_masks(self: torch.Tensor, indices: Indices) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(tensor, indices) without masks that stand for `self[indices]`.

    A mask of several dimensions has an index for each of them, or one for all where they are one dimension of the
    tensor that is returned, a view of `self`.
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
    """A view of self in which the dimensions from `dim` on are one; None where strides do not allow it."""
    shape = self.shape
    merged = [*shape[:dim], shape[dim : dim + count].numel(), *shape[dim + count :]]
    try:
        return self.view(merged)
    except RuntimeError:
        return None


def only_mask(self: torch.Tensor, indices: Indices) -> torch.Tensor | None:
    """The mask, of as many dimensions as self, that says the same as `indices`; None where there are others, too."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in MASKS:
        return None
    ((dim, mask),) = given
    return mask.view([*[1] * dim, *mask.shape, *[1] * (self.dim() - dim - mask.dim())])


def of_expanded(
    self: torch.Tensor, mask: torch.Tensor, name: str = "masked_fill_"
) -> tuple[torch.Tensor, torch.Tensor]:
    """What to fill in place, and where, instead of an expanded tensor: an element in memory that the mask has several
    times is filled if any of these is set."""
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
    """PyTorch's word of warning, where an operator writes in place to an expanded tensor."""
    expanded, nowhere, zero = torch.empty(1).expand(2), torch.zeros(2, dtype=torch.bool), torch.zeros(())
    if name == "masked_fill_":
        expanded.masked_fill_(nowhere, zero)
    elif name == "index_put_":
        expanded.index_put_((nowhere,), zero)
    else:
        expanded.index_fill_(0, torch.empty(0, dtype=torch.int64), zero)


def fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    """Writes one value, a tensor of one element or a `Number`, to where the mask is not zero."""
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
