"""put_, index_reduce."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees

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


def test_put_adds_what_meets() -> None:
    agrees(lambda x, i, s: x.put_(i, s, accumulate=True), numbers((9,)), torch.arange(60) % 4, numbers((60,)))


def test_put_refuses() -> None:
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
