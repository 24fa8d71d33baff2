"""Sorting, and operators that sort: topk, kthvalue and medians. PyTorch composes argsort and msort of these."""

from __future__ import annotations

import torch

from torch_backplane.kernels.cpu.keep_runs import keep_runs, kept_runs, suits_keeping
from torch_backplane.kernels.templates.radix import radix_sort, select, suits_selection, suits_sorting
from torch_backplane.kernels.templates.sort import (
    first_runs,
    merge_runs,
    merged_runs,
    sort_runs,
    take_sorted,
)
from torch_backplane.planning import (
    Call,
    Refused,
    RunOnCPU,
    check_apart,
    dialect_of,
    each_once,
    operator,
    run_template,
    same_storage,
)

_LONGEST_ROW = 2**31 - 1

Pair = tuple[torch.Tensor, torch.Tensor]


def _sort(outputs: Pair, self: torch.Tensor, dim: int, k: int, *, descending: bool = False, first: int = 0) -> Pair:
    """Writes values and indices of the elements `first` to k - 1 in sorted order along `dim`, and returns `outputs`.

    The order is stable, and NaN is the greatest value.
    """
    if self.dim() == 0:
        _sort((outputs[0].view(1), outputs[1].view(1)), self.view(1), 0, 1)
        return outputs
    moved, places = self.movedim(dim, -1), [out.movedim(dim, -1) for out in outputs]
    size, count = moved.shape[-1], k - first
    if size > _LONGEST_ROW:
        raise RunOnCPU("rows of 2^31 elements or more")
    if outputs[0].numel() == 0:
        return outputs
    rows = moved.contiguous().view(-1, size)
    # The last launch reads rows again, so results must not share their memory.
    results = [
        place if place.is_contiguous() and not same_storage(place, rows) else torch.empty_like(place).contiguous()
        for place in places
    ]
    flat = [result.view(-1, count) for result in results]
    _sort_rows(flat, rows, k, first, descending)
    for place, result in zip(places, results, strict=True):
        if place is not result:
            place.copy_(result)
    return outputs


def _sort_rows(results: list[torch.Tensor], rows: torch.Tensor, k: int, first: int, descending: bool) -> None:
    """`_sort` of each row of a matrix. All tensors are contiguous."""
    device, size = rows.device, rows.shape[1]
    target = dialect_of(device).target
    if suits_sorting(target, size, k):
        run_template(radix_sort, device, *results, rows, first, descending, name="sort")
    elif suits_selection(target, size, k) and not suits_keeping(target, size, k):
        values, indices = results
        some, places = rows.new_empty(len(rows), k), rows.new_empty(len(rows), k, dtype=torch.int64)
        run_template(select, device, some, places, rows, descending, name="select")
        order = torch.empty_like(indices)
        _sort_rows([values, order], some, k, first, descending)
        torch.gather(places, 1, order, out=indices)
    else:
        if suits_keeping(target, size, k):
            runs, chunk = kept_runs(target, rows, k)
            run_template(keep_runs, device, runs, rows, chunk, descending, name="sort")
        else:
            runs = first_runs(rows, k)
            run_template(sort_runs, device, runs, rows, descending, name="sort")
        while runs.count > 1:
            merged = merged_runs(rows, runs, k)
            run_template(merge_runs, device, merged, runs, name="sort")
            runs = merged
        run_template(take_sorted, device, *results, rows, runs, first, name="sort")


def _size(self: torch.Tensor, dim: int) -> int:
    """The number of elements along dim. Refuses an invalid dim: the CPU kernel raises the error."""
    rank = max(self.dim(), 1)
    if not -rank <= dim < rank:
        raise Refused("dim is out of range")
    return self.size(dim) if self.dim() else 1


def _with_dim(outputs: list[torch.Tensor], self: torch.Tensor, dim: int) -> Pair:
    """The results of a reduction, with `dim` kept as a dimension of size 1."""
    values, indices = (out if out.dim() == self.dim() else out.unsqueeze(dim) for out in outputs)
    return values, indices


@operator("sort.stable")
def sort(call: Call, self: torch.Tensor, stable: bool | None, dim: int, descending: bool) -> Pair:
    size = _size(self, dim)
    values, indices = call.outputs()
    return _sort((values, indices), self, dim, size, descending=descending)


@operator("topk")
def topk(call: Call, self: torch.Tensor, k: int, dim: int, largest: bool, in_order: bool) -> Pair:
    """Of equal elements, selects the first ones. The results are always sorted."""
    if not 0 <= k <= _size(self, dim):
        raise Refused("k is out of range")
    values, indices = call.outputs()
    return _sort((values, indices), self, dim, k, descending=largest)


@operator("kthvalue")
def kthvalue(call: Call, self: torch.Tensor, k: int, dim: int, keepdim: bool) -> Pair:
    """Of equal elements, selects the one at position k of a stable sort."""
    if not 1 <= k <= _size(self, dim):
        raise Refused("k is out of range")
    for given in call.written:
        check_apart(each_once(given), [self])  # an expanded result is not refused here: it can be resized
    values, indices = call.outputs()
    _sort(_with_dim([values, indices], self, dim), self, dim, k, first=k - 1 if self.dim() else 0)
    return values, indices


def _median(self: torch.Tensor, dim: int, skip_nan: bool) -> Pair:
    """(values, indices), with `dim` of size 1. Without `skip_nan`, the first NaN of a row is its median."""
    size = _size(self, dim)
    if self.numel() == 0 or size == 0:
        raise Refused("a median of no elements")
    middle = (size + 1) // 2
    if not self.is_floating_point() or self.dim() == 0:
        shape = [1 if d == dim % self.dim() else n for d, n in enumerate(self.shape)] if self.dim() else []
        outputs = self.new_empty(shape), self.new_empty(shape, dtype=torch.int64)
        return _sort(outputs, self, dim, middle, first=middle - 1)
    outputs = torch.empty_like(self), torch.empty_like(self, dtype=torch.int64)
    values, indices = _sort(outputs, self, dim, size)
    numbers = (values == values).sum(dim, keepdim=True)
    if skip_nan:
        at = (numbers - 1).clamp(min=0).div(2, rounding_mode="floor")
    else:
        at = torch.where(numbers == size, middle - 1, numbers)
    return values.gather(dim, at), indices.gather(dim, at)


@operator("median.dim", "nanmedian.dim")
def median(call: Call, self: torch.Tensor, dim: int, keepdim: bool) -> Pair:
    _size(self, dim)
    dtypes = (self.dtype, torch.int64)
    if any(given.dtype != dtype for given, dtype in zip(call.written, dtypes, strict=False)):
        raise Refused("out has another dtype")
    # PyTorch's meta function is not used, because it refuses calls that are not deterministic on CUDA.
    like = torch.empty(self.shape, device="meta").sum(dim, keepdim=keepdim)
    values, indices = call.outputs(like=[torch.empty_like(like, dtype=dtype) for dtype in dtypes])
    found = _median(self, dim, "nanmedian" in call.name)
    for out, result in zip(_with_dim([values, indices], self, dim), found, strict=True):
        out.copy_(result)
    return values, indices


@operator("median", "nanmedian", variants=False)
def median_of_all(call: Call, self: torch.Tensor) -> torch.Tensor:
    return _median(self.reshape(-1), 0, "nanmedian" in call.name)[0].view(())
