"""torch.compile on tensors of bp that are indexed by tensors on the CPU, as CUDA tensors can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_backplane
from torch_backplane import _C, drivers

needs_kernels = pytest.mark.skipif(not drivers.device(0).properties.dialect, reason="the devices have no dialect")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    _C.reset_fallback_counts()


def read(x: Tensor, values: Tensor, indices: Sequence[Any]) -> Tensor:
    return x[tuple(indices)] * 2


def write(x: Tensor, values: Tensor, indices: Sequence[Any]) -> Tensor:
    x = x + 1
    x[tuple(indices)] = values
    return x


def write_in_place(x: Tensor, values: Tensor, indices: Sequence[Any]) -> Tensor:
    x.index_put_(indices, values)
    return x.clone()


def add(x: Tensor, values: Tensor, indices: Sequence[Any]) -> Tensor:
    return (x * 2).index_put(indices, values, accumulate=True)


INDICES: dict[str, Sequence[Tensor]] = {
    "vector": [torch.tensor([1, 2])],
    "int32": [torch.tensor([2, 0], dtype=torch.int32)],
    "negative": [torch.tensor([-1, -4])],
    "two": [torch.tensor([[1], [3]]), torch.tensor([0, -5])],
    "numbers": [torch.tensor(1), torch.tensor(-2)],
    "number and vector": [torch.tensor(3), torch.tensor([1, 4])],
    "repeated": [torch.tensor([1, 1, 1])],
    "mask": [torch.tensor([True, False, True, True])],
    "mask of two dimensions": [torch.ones(4, 5, dtype=torch.bool).triu(1)],
    "mask and vector": [torch.tensor([True, False, False, True]), torch.tensor([1, 4])],
}


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("function", [read, write, write_in_place, add])
def test_results_equal_the_cpu(function: Callable[..., Tensor], kind: str) -> None:
    x, values, indices = torch.randn(4, 5, 6), torch.randn(6), INDICES[kind]
    if function is not add and kind == "repeated":
        values = torch.tensor(3.0)  # which of several values is written is not defined
    compiled = torch.compile(function)
    for _ in range(2):
        expected = function(x.clone(), values, indices)
        torch.testing.assert_close(compiled(x.to("bp"), values.to("bp"), indices).cpu(), expected)
    if drivers.device(0).properties.dialect:
        assert not _C.fallback_counts()


def test_one_index_on_each_device() -> None:
    x, rows, columns = torch.randn(4, 5), torch.tensor([3, 0]), torch.tensor([1, 2])
    compiled = torch.compile(lambda x, rows, columns: x[rows, columns] + 1)
    torch.testing.assert_close(compiled(x.to("bp"), rows.to("bp"), columns).cpu(), x[rows, columns] + 1)


def relative(table: Tensor, length: int) -> Tensor:
    """Relative positions, as attention has them, with indices that are made on the CPU."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :] + length - 1
    return table[distance.long()].square()


@pytest.mark.parametrize("dynamic", [False, True])
def test_indices_that_the_graph_makes(dynamic: bool) -> None:
    compiled = torch.compile(relative, dynamic=dynamic)
    for length in (4, 7):
        table = torch.randn(2 * length - 1, 3, requires_grad=True)
        on_bp = table.detach().to("bp").requires_grad_()
        for _ in range(2):
            expected, found = relative(table, length), compiled(on_bp, length)
            torch.testing.assert_close(found.cpu(), expected)
            (gradient,) = torch.autograd.grad(found.sum(), on_bp)
            torch.testing.assert_close(gradient.cpu(), *torch.autograd.grad(expected.sum(), table))


@needs_kernels
def test_a_graph_that_makes_its_indices_is_replayed() -> None:
    compiled, table = torch.compile(relative), torch.randn(7, 3, device="bp")
    compiled(table, 4)
    before = torch_backplane.plans.stats()["backplane::compiled_graph"]["replays"]
    compiled(table, 4)
    assert torch_backplane.plans.stats()["backplane::compiled_graph"]["replays"] == before + 1


def test_random_indices_are_those_of_the_cpu() -> None:
    x = torch.randn(50, 3)

    def shuffled(x: Tensor) -> Tensor:
        return x[torch.randperm(50).flip(0) - torch.arange(50)] * 2

    torch.manual_seed(3)
    expected = shuffled(x)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(shuffled)(x.to("bp")).cpu(), expected)


@pytest.mark.parametrize("index", [torch.tensor([9]), torch.tensor([0, -5])])
def test_indices_out_of_range(index: Tensor) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        torch.compile(lambda x, index: x[index] + 1)(torch.randn(4, device="bp"), index).cpu()
