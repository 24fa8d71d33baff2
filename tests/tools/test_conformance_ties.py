"""Tests the comparison of sorts and selections: only the choice among equal elements can differ from the CPU's."""

from __future__ import annotations

import pytest
import torch

from torch_backplane.conformance import ties

ROWS = torch.tensor([[3, 1, 3, 2], [0, 0, 0, 5]])


@pytest.mark.parametrize(
    ("indices", "right"),
    [
        ([[0, 2], [3, 0]], True),
        ([[2, 0], [3, 2]], True),
        ([[0, 0], [3, 1]], False),  # the same element twice
        ([[0, 3], [3, 1]], False),  # an element 2 for the value 3
        ([[0, 4], [3, 1]], False),  # out of bounds
        ([[0, -2], [3, 1]], False),
    ],
)
def test_indices_of_topk(indices: list[list[int]], right: bool) -> None:
    result = (torch.tensor([[3, 3], [5, 0]]), torch.tensor(indices))
    assert ties.are_places("topk", ROWS, (2,), {}, result) is right
    assert ties.are_places("topk", ROWS.T, (2, 0), {}, tuple(leaf.T for leaf in result)) is right
    assert ties.are_places("topk", ROWS.T, (2,), {"dim": 0}, tuple(leaf.T for leaf in result)) is right


@pytest.mark.parametrize(("indices", "right"), [([2, 1], True), ([0, 2], True), ([1, 1], False)])
def test_indices_of_kthvalue(indices: list[int], right: bool) -> None:
    values, found = torch.tensor([3, 0]), torch.tensor(indices)
    assert ties.are_places("kthvalue", ROWS, (3,), {}, (values, found)) is right
    assert ties.are_places("kthvalue", ROWS, (3, 1, True), {}, (values[:, None], found[:, None])) is right


def test_indices_of_nan() -> None:
    nan = float("nan")
    row = torch.tensor([nan, 1.0, nan])
    assert ties.are_places("sort", row, (), {}, (torch.tensor([1.0, nan, nan]), torch.tensor([1, 2, 0])))
    assert not ties.are_places("sort", row, (), {}, (torch.tensor([1.0, nan, nan]), torch.tensor([0, 1, 2])))


def test_index_of_a_zero_dimensional_tensor() -> None:
    assert ties.are_places("topk", torch.tensor(5), (1,), {}, (torch.tensor(5), torch.tensor(0)))
    assert not ties.are_places("topk", torch.tensor(5), (1,), {}, (torch.tensor(5), torch.tensor(1)))


def test_indices_of_argsort() -> None:
    """argsort returns only indices, so the values at the CPU's indices are the reference."""
    expected = torch.tensor([[1, 3, 0, 2], [0, 1, 2, 3]])
    for places, right in (([[1, 3, 2, 0], [2, 0, 1, 3]], True), ([[1, 0, 3, 2], [0, 1, 2, 3]], False)):
        given = ties.values_and_places("argsort", ROWS, (), {}, expected, torch.tensor(places))
        assert given is not None
        assert ties.are_places("argsort", ROWS, (), {}, given) is right
    assert ties.values_and_places("msort", ROWS, (), {}, ROWS, ROWS) is None


def test_operators_with_unspecified_order_of_equal_elements() -> None:
    for name in ("sort", "argsort", "msort"):
        assert ties.has_ties(name, (), {})
    assert ties.has_ties("sort", (), {"stable": False})
    assert not ties.has_ties("sort", (), {"stable": True})
    assert not ties.has_ties("argmax", (), {})


@pytest.mark.parametrize(
    ("gradient", "same"),
    [
        ([[0.5, 0, 0.25, 0], [0, 1, 0, 2]], True),
        ([[0.25, 0, 0.5, 0], [1, 0, 0, 2]], True),  # permuted among equal elements
        ([[0.5, 0.25, 0, 0], [0, 1, 0, 2]], False),  # at an unequal element
        ([[0.5, 0, 0.5, 0], [0, 1, 0, 2]], False),  # another value
    ],
)
def test_gradients_are_equal_up_to_permutation(gradient: list[list[float]], same: bool) -> None:
    expected = torch.tensor([[0.5, 0, 0.25, 0], [0, 1, 0, 2]])
    first = ROWS.float()
    assert ties.same_gradients("topk", first, (2,), {}, expected, torch.tensor(gradient)) is same
    assert ties.same_gradients("topk", first.T, (2, 0), {}, expected.T, torch.tensor(gradient).T) is same
    # msort always sorts along the first dimension.
    assert ties.same_gradients("msort", first.T, (), {}, expected.T, torch.tensor(gradient).T) is same
