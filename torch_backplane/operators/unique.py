"""unique and unique_consecutive: elements are sorted, compared with the previous one, and compacted."""

from __future__ import annotations

import torch

from torch_backplane.operators.nonzero import Selection, sizes
from torch_backplane.planning import Call, Refused, RunOnCPU, operator

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _runs(starts: torch.Tensor, inverse: bool, counts: bool) -> Results:
    """(start of each run, run of each element, length of each run). Results that are not requested are empty.

    Args:
        starts: Bools: whether an element is the first of a run.
    """
    selection = Selection(starts)
    positions = selection.positions(sizes([selection])[0] if starts.numel() else 0)
    nothing = positions.new_empty(0)
    runs = starts.cumsum(0) - 1 if inverse else nothing
    lengths = torch.cat([positions[1:], positions.new_full((1,), len(starts))]) - positions if counts else nothing
    return positions, runs, lengths


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Whether an element (or row) differs from the previous one. True for the first."""
    changes = torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    differ = values[1:] != values[:-1]
    changes[1:] = differ if values.dim() == 1 else differ.any(1)
    return changes


def _unique(values: torch.Tensor, ranks: torch.Tensor, inverse: bool, counts: bool) -> Results:
    """(position of the first of each group of equal elements or rows, inverse, counts), in the order of `ranks`, which
    are equal for equal elements.
    """
    ordered, order = ranks.sort(stable=True)
    ordered = ordered if ranks is values else values.index_select(0, order)
    positions, runs, lengths = _runs(_changes(ordered), inverse, counts)
    if inverse:
        runs = torch.empty_like(runs).index_copy_(0, order, runs)
    return order.index_select(0, positions), runs, lengths


@operator("_unique2", variants=False)
def unique(call: Call, self: torch.Tensor, ordered: bool, inverse: bool, counts: bool) -> Results:
    """The result is always sorted."""
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


# Slices along a dimension. As in PyTorch, all results are computed, even if they are not requested.


def _no_slices(self: torch.Tensor, dim: int) -> Results | None:
    """The results if there are no slices, else None. Refuses bad arguments: the CPU kernel raises the error."""
    if not -self.dim() <= dim < self.dim() or (self.numel() == 0 and (self.shape[dim] or self.shape.count(0) > 1)):
        raise Refused("dim is out of range, or slices are empty")
    if self.numel():
        return None
    nothing = torch.empty(0, dtype=torch.int64, device=self.device)
    return torch.empty_like(self), nothing, torch.empty_like(nothing)


def _rows(self: torch.Tensor, dim: int) -> torch.Tensor:
    """A matrix with a row for each slice along dim."""
    return self.movedim(dim, 0).reshape(self.shape[dim], -1)


def _slices(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The slices `index` along dim, each of them contiguous as in PyTorch."""
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
        raise RunOnCPU("NaN, which has no order: the result depends on PyTorch's sorting algorithm")
    rows = _rows(self, dim)
    firsts, places, lengths = _unique(rows, _ranks(rows), inverse=True, counts=True)
    return _slices(self, dim, firsts), places, lengths


def _ranks(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row, in the lexicographic order of the rows, and equal for equal rows.

    Each element is replaced by its rank in its column. Then pairs of adjacent columns are combined to one, until one
    column is left.
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
