"""put_, index_reduce, and in-place operators whose operands overlap the written tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, plans_from_the_start
from plain_arguments import outcome

from torch_backplane import plans

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


# put_


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_put(dtype: torch.dtype, accumulate: bool) -> None:
    x, source = numbers((4, 5), dtype), numbers((2, 3), dtype)
    index = torch.tensor([[1, -1, 7], [0, 19, 3]])
    agrees(lambda x, i, s: x.put_(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x.put(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x.t().put_(i, s, accumulate), x, index, source)
    agrees(lambda x, i, s: x[:, ::2].put_(i % 8, s.t(), accumulate), x, index.abs(), source)
    agrees(lambda x, i, s: x.put_(i[:, :0], s[:, :0], accumulate), x, index, source)
    agrees(lambda x, i, s: x[0, 0].put_(i[0, 0] * 0, s[0, 0], accumulate), x, index, source)


def test_put_accumulates_duplicate_indices() -> None:
    agrees(lambda x, i, s: x.put_(i, s, accumulate=True), numbers((9,)), torch.arange(60) % 4, numbers((60,)))


def test_put_rejects_invalid_indices() -> None:
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(IndexError, match="same number of elements"):
        x.put_(torch.tensor([1], device=DEVICE), torch.ones(2, device=DEVICE))
    x.put_(torch.tensor([3], device=DEVICE), torch.ones(1, device=DEVICE))
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        torch.accelerator.synchronize(DEVICE)


def test_gradients_of_put() -> None:
    def gradients(x: torch.Tensor, s: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, s = x.detach().requires_grad_(), s.detach().requires_grad_()
        result = x.put(i, s) * x.detach() + x.put(i, s, accumulate=True)
        return torch.autograd.grad((result * result).sum(), (x, s))

    agrees(gradients, numbers((3, 4)), numbers((2, 2)), torch.tensor([[0, 5], [11, 7]]))


# index_reduce


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_index_reduce(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    x, index = numbers((5, 6), dtype), torch.tensor([3, 0, 3, 1, 0, 3, 3])
    options = {"include_self": include_self}
    for dim, source in ((0, numbers((7, 6), dtype)), (1, numbers((5, 7), dtype)), (-1, numbers((7, 5), dtype).t())):
        agrees(lambda x, i, s, dim=dim: x.index_reduce(dim, i, s, reduce, **options), x, index, source)
        agrees(lambda x, i, s, dim=dim: x.index_reduce(dim, i.int(), s, reduce, **options), x, index, source)
        agrees(lambda x, i, s, dim=dim: x.index_reduce_(dim, i, s, reduce, **options), x, index, source)
    agrees(lambda x, i, s: x.index_reduce(0, i[:0], s[:0], reduce, **options), x, index, numbers((7, 6), dtype))


def overlaps(device: str, length: int) -> dict[str, Callable[[], object]]:
    """Calls that write to a tensor whose memory also holds an index, a mask or the values."""
    numbers = torch.zeros(length + 1, dtype=torch.int64, device=device)
    mask = torch.ones(length, dtype=torch.bool, device=device)
    other = torch.zeros(length, dtype=torch.bool, device=device)
    x, shifted = numbers[:-1], numbers[1:]
    calls: dict[str, Callable[[], object]] = {
        "bools by themselves": lambda: mask.__setitem__(mask, other),
        "bools of themselves": lambda: mask.__setitem__(other, mask),
        "bools by a view": lambda: mask.__setitem__(mask[:], other),
        "filled by a mask that is it": lambda: mask.__setitem__(mask, False),
        "filled by an index that is it": lambda: x.__setitem__(x, 0),
    }
    for name, index in (("itself", x), ("a view", x[:]), ("a part", shifted), ("a copy", x.clone())):
        calls |= {
            f"index_put_ by {name}": lambda index=index: x.index_put_((index,), x.clone()),
            f"index_put_ of {name}": lambda index=index: x.index_put_((x.clone(),), index),
            f"accumulated of {name}": lambda index=index: x.index_put_((x.clone(),), index, accumulate=True),
            f"index_add_ by {name}": lambda index=index: x.index_add_(0, index, x.clone()),
            f"index_add_ of {name}": lambda index=index: x.index_add_(0, x.clone(), index),
            f"index_copy_ by {name}": lambda index=index: x.index_copy_(0, index, x.clone()),
            f"index_copy_ of {name}": lambda index=index: x.index_copy_(0, x.clone(), index),
            f"index_reduce_ by {name}": lambda index=index: x.index_reduce_(0, index, x.clone(), "amax"),
            f"index_reduce_ of {name}": lambda index=index: x.index_reduce_(0, x.clone(), index, "amax"),
            f"index_fill_ by {name}": lambda index=index: x.index_fill_(0, index, 0),
            f"scatter_ by {name}": lambda index=index: x.scatter_(0, index, x.clone()),
            f"scatter_add_ of {name}": lambda index=index: x.scatter_add_(0, x.clone(), index),
            f"put_ by {name}": lambda index=index: x.put_(index, x.clone()),
            f"put_ of {name}": lambda index=index: x.put_(x.clone(), index),
        }
    return calls


@pytest.mark.parametrize("length", [0, 1, 4])
def test_overlapping_operands_are_rejected_as_on_the_cpu(length: int) -> None:
    for _ in range(2):
        ours, refused = overlaps(DEVICE, length), 0
        for name, call in overlaps("cpu", length).items():
            expected, found = outcome(call, []), outcome(ours[name], [])
            refused += bool(expected[0])
            assert found == expected, name
        assert refused >= 10


# In-place calls whose number is an element of the tensor itself.
WITH_ITS_OWN: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "index_fill_ of no dimensions": lambda x, i: x[0].index_fill_(0, i[:1] * 0, x[0]),
    "index_fill_": lambda x, i: x.index_fill_(0, i, x[1]),
    "fill_": lambda x, i: x.fill_(x[1]),
    "fill_ of no dimensions": lambda x, i: x[1].fill_(x[1]),
    "masked_fill_": lambda x, i: x.masked_fill_(x > 0, x[1]),
    "a mask": lambda x, i: x.__setitem__(x > 0, x[1]),
    "indices": lambda x, i: x.__setitem__(i, x[1]),
    "a slice": lambda x, i: x.__setitem__(slice(0, 2), x[1]),
    "index_put_": lambda x, i: x.index_put_((i,), x[1]),
    "put_": lambda x, i: x.put_(i[:1], x[1:2]),
    "scatter_": lambda x, i: x.scatter_(0, i[:1], x[1:2]),
    "index_add_": lambda x, i: x.index_add_(0, i[:1], x[1:2]),
    "mul_": lambda x, i: x.mul_(x[1]),
    "copy_": lambda x, i: x.copy_(x[1]),
    "_foreach_mul_": lambda x, i: torch._foreach_mul_([x], x[1]),
}


@pytest.mark.parametrize("name", WITH_ITS_OWN)
def test_number_that_is_an_element_of_the_written_tensor(name: str) -> None:
    """It is accepted or rejected as on the CPU."""

    def after(device: str, *indices: int) -> list[float] | str:
        x = torch.tensor([1.0, 2.0, -3.0, 4.0], device=device)
        try:
            WITH_ITS_OWN[name](x, torch.tensor(indices, device=device))
        except RuntimeError as error:
            return str(error)
        return x.tolist()

    for indices in ((0, 2), (1, 3), (0, 1)):
        assert after(DEVICE, *indices) == after("cpu", *indices), indices


ROWS, PLACES = torch.tensor([2, -1, 0, 2]), torch.tensor([[1], [3]])
MASK = torch.tensor([True, False, True, False, True])
# Indices of the CPU are copied to the device, as on CUDA.
BY_CPU_INDICES: dict[str, Callable[[torch.Tensor], object]] = {
    "rows": lambda x: x[ROWS],
    "int32": lambda x: x[ROWS.int()],
    "strided": lambda x: x[ROWS[::2]],
    "several": lambda x: x[:, PLACES, ROWS[:2]],
    "apart": lambda x: x[ROWS[:2], :, ROWS[:2]],
    "with one of the device": lambda x: x[ROWS, :, x[:4, 0, 0].long() % 3],
    "no elements": lambda x: x[ROWS[:0]],
    "mask": lambda x: x[MASK],
    "mask and positions": lambda x: x[MASK, :, ROWS[:3]],
    "take": lambda x: x[torch.tensor(1)],
    "assigned number": lambda x: x.__setitem__(ROWS, 7.0),
    "assigned": lambda x: x.__setitem__((slice(None), PLACES), x[:, PLACES] * 2),
    "assigned by a mask": lambda x: x.__setitem__(MASK, -1.0),
    "index_put": lambda x: x.index_put((ROWS,), x[:4], accumulate=True),
    "index_put_": lambda x: x.index_put_((ROWS, torch.tensor([1])), x[:4, 0].clone(), accumulate=True),
    "_unsafe_index": lambda x: torch.ops.aten._unsafe_index(x, [ROWS]),
}


@pytest.mark.parametrize("name", BY_CPU_INDICES)
def test_indices_on_the_cpu(name: str) -> None:
    agrees(BY_CPU_INDICES[name], torch.arange(60.0).reshape(5, 4, 3))


def test_calls_with_indices_on_the_cpu_are_replayed() -> None:
    x = torch.arange(20.0).reshape(5, 4)
    given = x.to(DEVICE)
    with plans_from_the_start():
        for first in range(4):
            index = torch.tensor([first, 4 - first])
            assert torch.equal(given[index].cpu(), x[index])
            assert torch.equal(given[index.to(DEVICE)].cpu(), x[index])
        assert plans.stats()["aten::index.Tensor"]["planner_calls"] <= 2


def test_invalid_indices_on_the_cpu() -> None:
    x = torch.ones(3, 2, device=DEVICE)
    for index in (torch.tensor([3]), torch.tensor([0.5]), torch.ones(2, dtype=torch.bool), torch.tensor([-4, 0])):
        with pytest.raises(IndexError):
            x.cpu()[index]
        with pytest.raises(IndexError):  # noqa: PT012 - kernels report indices later
            x[index]
            torch.bp.synchronize()
        assert torch.equal(x[torch.tensor([0])].cpu(), torch.ones(1, 2))


def test_gradients_of_indices_on_the_cpu() -> None:
    agrees(lambda x: torch.autograd.grad(x.requires_grad_()[ROWS].square().sum(), x), torch.randn(5, 3))
