"""Sorted, compared with the one before, and compacted: unique and unique_consecutive."""

from __future__ import annotations

import torch

from torch_backplane.operators.nonzero import Selection, sizes
from torch_backplane.planning import Call, Refused, RunOnCPU, operator

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _runs(starts: torch.Tensor, inverse: bool, counts: bool) -> Results:
    """(where runs begin, the run that each element is in, lengths of the runs), of elements of which `starts`, bool,
    says whether they are the first of a run. Empty tensors in the places of results that are not asked for.
    """
    selection = Selection(starts)
    positions = selection.positions(sizes([selection])[0] if starts.numel() else 0)
    nothing = positions.new_empty(0)
    runs = starts.cumsum(0) - 1 if inverse else nothing
    lengths = torch.cat([positions[1:], positions.new_full((1,), len(starts))]) - positions if counts else nothing
    return positions, runs, lengths


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Whether an element, or a row, is another one than that before it; so is the first."""
    changes = torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    differ = values[1:] != values[:-1]
    changes[1:] = differ if values.dim() == 1 else differ.any(1)
    return changes


def _unique(values: torch.Tensor, ranks: torch.Tensor, inverse: bool, counts: bool) -> Results:
    """(where the first of each of the different elements, or rows, is, inverse, counts), in the order of `ranks`, which
    are the same for equal ones.
    """
    ordered, order = ranks.sort(stable=True)
    ordered = ordered if ranks is values else values.index_select(0, order)
    positions, runs, lengths = _runs(_changes(ordered), inverse, counts)
    if inverse:
        runs = torch.empty_like(runs).index_copy_(0, order, runs)
    return order.index_select(0, positions), runs, lengths


@operator("_unique2", variants=False)
def unique(call: Call, self: torch.Tensor, ordered: bool, inverse: bool, counts: bool) -> Results:
    """In order, also where any order would do."""
    flat = self.reshape(-1)
    firsts, places, lengths = _unique(flat, flat, inverse, counts)
    return flat.index_select(0, firsts), places.view(self.shape) if inverse else places, lengths


@operator("_unique", variants=False)
def unique_without_counts(
    call: Call, self: torch.Tensor, ordered: bool, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    values, places, _ = unique(call, self, ordered, inverse, counts=False)
    return values, places


@operator("unique_consecutive", variants=False)
def unique_consecutive(call: Call, self: torch.Tensor, inverse: bool, counts: bool, dim: int | None) -> Results:
    if dim is not None and not (dim == 0 and self.dim() == 1):
        return unique_dim_consecutive(call, self, dim, inverse, counts)
    flat = self.reshape(-1)
    positions, runs, lengths = _runs(_changes(flat), inverse, counts)
    return flat.index_select(0, positions), runs.view(self.shape) if inverse else runs, lengths


# Slices along a dimension. What is not asked for is made, too, as PyTorch does.


def _no_slices(self: torch.Tensor, dim: int) -> Results | None:
    """The results where there are no slices, and None where there are some; PyTorch's errors are left to the CPU."""
    if not -self.dim() <= dim < self.dim() or (self.numel() == 0 and (self.shape[dim] or self.shape.count(0) > 1)):
        raise Refused("no such dimension, or slices without elements")
    if self.numel():
        return None
    nothing = torch.empty(0, dtype=torch.int64, device=self.device)
    return torch.empty_like(self), nothing, torch.empty_like(nothing)


def _rows(self: torch.Tensor, dim: int) -> torch.Tensor:
    """A row for each slice along dim."""
    return self.movedim(dim, 0).reshape(self.shape[dim], -1)


def _slices(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The slices `index` along dim, each of them contiguous, as PyTorch makes them."""
    return self.movedim(dim, 0).index_select(0, index).movedim(0, dim)


@operator("unique_dim_consecutive", variants=False)
def unique_dim_consecutive(call: Call, self: torch.Tensor, dim: int, inverse: bool, counts: bool) -> Results:
    nothing = _no_slices(self, dim)
    if nothing is not None:
        return nothing
    positions, runs, lengths = _runs(_changes(_rows(self, dim)), inverse=True, counts=True)
    return _slices(self, dim, positions), runs, lengths


@operator("unique_dim", variants=False)
def unique_dim(call: Call, self: torch.Tensor, dim: int, ordered: bool, inverse: bool, counts: bool) -> Results:
    nothing = _no_slices(self, dim)
    if nothing is not None:
        return nothing
    if self.is_floating_point() and bool(self.isnan().any()):
        raise RunOnCPU("NaN, which is in no order with others: PyTorch's way to sort decides where it goes")
    rows = _rows(self, dim)
    firsts, places, lengths = _unique(rows, _ranks(rows), inverse=True, counts=True)
    return _slices(self, dim, firsts), places, lengths


def _ranks(rows: torch.Tensor) -> torch.Tensor:
    """Numbers in the order of the rows, equal for equal rows.

    Each column's elements become their places in its order; then two neighbours become one column, until one is left.
    """
    count = rows.shape[0]
    while True:
        ordered, order = rows.sort(dim=0, stable=True)
        steps = torch.zeros_like(order)
        steps[1:] = ordered[1:] != ordered[:-1]
        ranks = torch.empty_like(order).scatter_(0, order, steps.cumsum(0))
        if ranks.shape[1] == 1:
            return ranks.view(count)
        pairs = ranks.shape[1] // 2
        rows = ranks[:, 0 : 2 * pairs : 2] * count + ranks[:, 1 : 2 * pairs : 2]
        if ranks.shape[1] % 2:
            rows = torch.cat([rows, ranks[:, -1:]], dim=1)
