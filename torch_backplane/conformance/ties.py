"""Operators that may return any of several equal elements. Indices that differ from the CPU's are accepted then."""

from __future__ import annotations

from typing import Any

import torch

# For each operator, the position of `dim` among the arguments after the input; None: the dimension is always 0.
_DIM = {"sort": 0, "argsort": 0, "topk": 1, "kthvalue": 1, "msort": None}

REASON = "PyTorch does not specify which of several equal elements is found"


def has_ties(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the choice among equal elements is unspecified for this call. It is specified for a stable sort."""
    return operator in _DIM and not kwargs.get("stable")


def values_and_places(
    operator: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any, actual: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (values, the indices found for them), on the CPU; None if the operator returns no indices."""
    if operator == "msort":
        return None
    if operator == "argsort":
        return first.detach().gather(_dim(operator, first, args, kwargs), expected) if first.dim() else first, actual
    return actual


def are_places(operator: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether the indices of ``result``, (values, indices) on the CPU, point to its values and are distinct."""
    values, indices = (leaf.detach() for leaf in result)
    dim = _dim(operator, first, args, kwargs)
    if first.dim() == 0:
        return bool(torch.equal(indices, torch.zeros_like(indices)))
    if values.dim() < first.dim():
        values, indices = values.unsqueeze(dim), indices.unsqueeze(dim)
    size = first.shape[dim]
    if not bool(((indices >= 0) & (indices < size)).all()):
        return False
    found = first.detach().gather(dim, indices)
    nan = (found != found) & (values != values)
    in_order = indices.sort(dim).values
    twice = in_order.diff(dim=dim) == 0
    return bool(((found == values) | nan).all()) and not bool(twice.any())


def same_gradients(
    operator: str,
    first: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: torch.Tensor,
    actual: torch.Tensor,
) -> bool:
    """Whether two gradients of ``first`` on the CPU are equal up to permutations among equal elements."""
    dim = _dim(operator, first, args, kwargs)
    if first.dim() == 0 or expected.shape != actual.shape:
        return False

    def arranged(gradient: torch.Tensor) -> torch.Tensor:
        order = gradient.sort(dim=dim, stable=True).indices
        order = order.gather(dim, first.detach().gather(dim, order).sort(dim=dim, stable=True).indices)
        return gradient.gather(dim, order)

    return torch.allclose(arranged(actual), arranged(expected), rtol=0, atol=0, equal_nan=True)


def _dim(operator: str, first: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    place = _DIM[operator]
    if place is None:
        return 0
    return int(kwargs.get("dim", args[place] if len(args) > place else -1))
