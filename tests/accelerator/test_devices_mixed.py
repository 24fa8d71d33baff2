"""Calls with tensors on different devices: PyTorch's error, and the combinations that are allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_backplane import _C, drivers

SAME = "Expected all tensors to be on the same device, but (found at least two devices, |got )"

BINARY: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": torch.add,
    "mul": lambda a, b: a * b,
    "in-place": lambda a, b: a.add_(b),
    "out": lambda a, b: torch.add(a, a, out=b),
    "matmul": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "linear": torch.nn.functional.linear,
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "cross_entropy": lambda a, b: torch.nn.functional.cross_entropy(a, b),
    "gather": lambda a, b: a.gather(0, b.long()),
    "index_select": lambda a, b: a.index_select(0, b[0].long()),
    "scatter": lambda a, b: a.scatter(0, torch.zeros_like(a, dtype=torch.int64), b),
    "embedding": lambda a, b: torch.nn.functional.embedding(b.long(), a),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "equal": torch.equal,
    "einsum": lambda a, b: torch.einsum("ij,jk", a, b),
    "conv": lambda a, b: torch.nn.functional.conv1d(a.unsqueeze(0), b.unsqueeze(2)),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("other", ["bp:1", "cpu"])
def test_two_devices_are_refused(name: str, other: str) -> None:
    a, b = torch.ones(3, 3, device="bp:0"), torch.ones(3, 3, device=other)
    for first, second in ((a, b), (b, a)):
        with pytest.raises(RuntimeError, match=SAME) as refusal:
            BINARY[name](first, second)
        assert "bp:0" in str(refusal.value)
        assert other in str(refusal.value)
    assert torch.equal(a, torch.ones(3, 3, device="bp:0"))


INDEXING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "get": lambda a, i: a[i],
    "set": lambda a, i: a.__setitem__(i, 1.0),
    "index_put": lambda a, i: a.index_put((i,), a[0, 0]),
    "index_put_": lambda a, i: a.index_put_((i,), a[0, 0].clone(), accumulate=True),
}


@pytest.mark.parametrize("name", INDEXING)
@pytest.mark.parametrize("kind", ["numbers", "mask"])
@pytest.mark.parametrize(("indexed", "index"), [("cpu", "bp:0"), ("bp:0", "bp:1"), ("bp:1", "bp:0")])
def test_indices_on_another_device_raise_pytorchs_error(indexed: str, index: str, kind: str, name: str) -> None:
    a = torch.zeros(3, 3, device=indexed)
    i = torch.tensor([0, 1]) if kind == "numbers" else torch.tensor([True, False, True])
    message = rf"indices should be either on cpu or on the same device as the indexed tensor \({indexed}\)"
    with pytest.raises(RuntimeError, match=message):
        INDEXING[name](a, i.to(index))
    INDEXING[name](a, i.to(indexed))
    INDEXING[name](a, i)


def test_zero_dim_cpu_tensors_are_accepted() -> None:
    x, two = torch.ones(3, device="bp"), torch.tensor(2.0)
    for result in (
        x * two,
        two * x,
        torch.where(x > two, x, two),
        torch.maximum(x, two),
        x.clone().add_(two),
        torch.add(x, two),
    ):
        assert result.device.type == "bp"
    assert (x * two).tolist() == [2, 2, 2]
    assert torch.pow(two, x).tolist() == [2, 2, 2]
    assert x.masked_fill(x > 0, two).tolist() == [2, 2, 2]
    assert x.fill_(two).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: x.masked_fill(x > 1, number),
        lambda x, number: x.clone().masked_fill_(x > 1, number),
        lambda x, number: x.int().masked_fill(x > 1, number),
        lambda x, number: torch.copysign(x, number),
        lambda x, number: torch.nextafter(x, number),
        lambda x, number: x.index_fill(0, torch.tensor([0, 2], device=x.device), number),
        lambda x, number: x.index_select(0, number.long()),
        lambda x, number: x.equal(number),
    ],
)
def test_zero_dim_cpu_tensors_are_accepted_by_other_operators(function: Callable[[Tensor, Tensor], Any]) -> None:
    x = torch.arange(3.0)
    for number in (torch.tensor(2.0), torch.tensor(1.0)):  # a plan recorded for the first must not keep its value
        expected, result = function(x, number), function(x.to("bp"), number)
        if isinstance(result, Tensor):
            assert result.device.type == "bp"
            torch.testing.assert_close(result.cpu(), expected)
        else:
            assert result == expected


def test_zero_dim_tensors_on_another_bp_device_are_refused() -> None:
    with pytest.raises(RuntimeError, match=SAME):
        torch.ones(3, device="bp:0") * torch.tensor(2.0, device="bp:1")
    with pytest.raises(RuntimeError, match=SAME):
        torch.ones(3, device="bp:0").add_(torch.tensor(2.0, device="bp:1"))


def test_zero_dim_bp_tensors_with_cpu_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match=SAME):
        torch.ones(3) * torch.tensor(2.0, device="bp")
    with pytest.raises(RuntimeError, match=SAME):
        torch.ones(3).add_(torch.tensor(2.0, device="bp"))


def test_indices_can_be_on_the_cpu() -> None:
    x = torch.arange(6.0, device="bp").view(3, 2)
    assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]
    assert x[torch.tensor([True, False, True])].tolist() == [[0, 1], [4, 5]]
    x[torch.tensor([0])] = torch.zeros(2, device="bp")
    assert x[0].tolist() == [0, 0]
    x[torch.tensor([1])] = torch.tensor(7.0)  # a zero-dim value can be on the CPU, too
    assert x[1].tolist() == [7, 7]
    x.index_put_((torch.tensor([2]),), torch.ones(2, device="bp"), accumulate=True)
    assert x[2].tolist() == [5, 6]


@pytest.mark.parametrize("function", [torch.ops.aten.index, torch.ops.aten._unsafe_index])
@pytest.mark.parametrize("device", ["cpu", "bp"])
def test_zero_dim_indices_on_the_cpu(function: Callable[..., Tensor], device: str) -> None:
    x = torch.arange(6.0).view(3, 2)
    for row in (2, 0, -2):
        index, other = torch.tensor(row), torch.tensor([1, 0])
        assert torch.equal(function(x.to("bp"), [index]).cpu(), x[row])
        assert torch.equal(function(x.to("bp"), [index, other.to(device)]).cpu(), x[row][other])
        expected = x.index_put([index], torch.tensor(7.0), accumulate=True)
        assert torch.equal(x.to("bp").index_put([index], torch.tensor(7.0), accumulate=True).cpu(), expected)


def test_zero_dim_indices_on_the_cpu_run_on_the_device() -> None:
    x, index = torch.arange(6.0, device="bp").view(3, 2), torch.tensor(1)
    if not drivers.device(0).properties.dialect:
        pytest.skip("the devices have no dialect")
    _C.reset_fallback_counts()
    torch.ops.aten.index(x, [index])
    x.index_put_([index], torch.tensor(7.0), accumulate=True)
    assert not _C.fallback_counts()


def test_bp_indices_into_zero_dim_cpu_tensors_are_refused() -> None:
    number, mask = torch.tensor(1.0), torch.tensor(True, device="bp")
    for call in (lambda: torch.ops.aten.index(number, [mask]), lambda: number.index_put([mask], torch.tensor(2.0))):
        with pytest.raises(RuntimeError, match=r"on the same device as the indexed tensor \(cpu\)"):
            call()


def test_indices_on_another_bp_device_are_refused() -> None:
    x = torch.arange(6.0, device="bp:0")
    index = torch.tensor([0], device="bp:1")
    with pytest.raises(RuntimeError, match="indices should be either on|" + SAME):
        x[index]
    with pytest.raises(RuntimeError, match="indices should be either on|" + SAME):
        x[index] = 1
    with pytest.raises(RuntimeError, match="indices should be either on|" + SAME):
        torch.arange(3.0)[index]


def test_cpu_values_of_an_index_assignment_are_refused() -> None:
    x = torch.arange(6.0, device="bp")
    with pytest.raises(RuntimeError, match=SAME):
        x[torch.tensor([0, 1], device="bp")] = torch.zeros(2)


@pytest.mark.parametrize("other", ["bp:1", "cpu"])
def test_modules_on_another_device_than_their_input(other: str) -> None:
    for module, shape in [
        (torch.nn.Linear(4, 4), (2, 4)),
        (torch.nn.Conv2d(4, 4, 3), (1, 4, 5, 5)),
        (torch.nn.LSTM(4, 4), (3, 1, 4)),
        (torch.nn.BatchNorm1d(4), (3, 4)),
        (torch.nn.LayerNorm(4), (3, 4)),
    ]:
        with pytest.raises(RuntimeError, match="same device"):
            module.to("bp:0")(torch.ones(shape, device=other))


def test_data_parallel_is_refused_only_on_bp() -> None:
    linear = torch.nn.Linear(2, 2)
    for module, options in (
        (copy.deepcopy(linear).to("bp:0"), {}),
        (copy.deepcopy(linear).to("bp:0"), {"device_ids": [0, 1]}),
        (linear, {"device_ids": ["bp:0"]}),
        (linear, {"output_device": torch.device("bp:1")}),
        (torch.nn.BatchNorm1d(2, affine=False).to("bp:1"), {}),
    ):
        refused = pytest.raises(NotImplementedError, match=r"not supported on bp.*DistributedDataParallel")
        with refused:
            torch.nn.DataParallel(module, **options)
        with refused:
            torch.nn.parallel.data_parallel(module, torch.ones(1, 2), **options)
    x = torch.randn(3, 2)
    assert torch.equal(torch.nn.DataParallel(linear)(x), linear(x))


def test_results_are_on_the_device_of_the_arguments() -> None:
    x = torch.ones(3, device="bp:2")
    assert torch.bp.current_device() == 0
    for result in (x + 1, x.sum(), x.nonzero(), torch.zeros_like(x), torch.rand_like(x), x.sort().indices, x.clone()):
        assert result.device == torch.device("bp:2")
    assert torch.arange(3, device="bp:3").device == torch.device("bp:3")


def test_device_index_out_of_range() -> None:
    with pytest.raises(RuntimeError, match="bp:9"):
        torch.zeros(1, device="bp:9")
    with pytest.raises(RuntimeError, match="bp:9"):
        torch.zeros(1).to("bp:9")
    with pytest.raises(RuntimeError, match="bp:9"):
        torch.zeros(1, device="bp").to("bp:9")
