"""Gradients of embeddings, with indices in a column and scaled by the frequency of rows; norms of rows; bags."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, had, on_device, refused_alike
from torch.nn import functional as F


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_of_a_column_of_indices(by_frequency: bool) -> None:
    def gradient(w: torch.Tensor, x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        found = F.embedding(x[:, 0], w, padding_idx=2, scale_grad_by_freq=by_frequency)
        return torch.autograd.grad(found, w, cotangent)[0]

    agrees(gradient, numbers((5, 3)), torch.tensor([[1, 4], [0, 3], [1, 2], [2, 0]]), numbers((3, 4)).t())


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_gradients_by_frequency(padding: int | None) -> None:
    torch.manual_seed(2)

    def gradient(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        table = table.detach().requires_grad_()
        result = F.embedding(index, table, padding_idx=padding, scale_grad_by_freq=True)
        return torch.autograd.grad((result * result.detach()).sum(), table)[0]

    agrees(gradient, torch.randn(9, 33), torch.randint(9, (4, 7)))


@pytest.mark.parametrize("norm", [1.0, 2.0, 2.5, float("inf")])
def test_norms_of_rows(norm: float) -> None:
    for index in (torch.tensor([[1, 3], [3, 5]]), torch.tensor([2, 2], dtype=torch.int32), torch.empty(0).long()):
        for dtype in had((torch.float32, torch.float64, torch.bfloat16)):
            agrees(lambda w, i: torch.embedding_renorm_(w, i, 1.5, norm), numbers((6, 4), dtype), index)
    agrees(lambda w, i: torch.embedding_renorm_(w.t(), i, 1.5, norm), numbers((4, 6)), torch.tensor([0, 5]))


def test_norms_of_rows_refuse_invalid_arguments() -> None:
    def run(w: torch.Tensor, index: torch.Tensor) -> None:
        torch.embedding_renorm_(w, index, 1.5, 2.0)
        torch.accelerator.synchronize()

    refused_alike(run, numbers((6,)), torch.tensor([1]))
    refused_alike(run, numbers((6, 4)), torch.tensor([1.0]))
    with pytest.raises(IndexError):
        run(*on_device((numbers((6, 4)), torch.tensor([1, 6]))))


STARTS = [0, 0, 4, 9, 9, 15]


def bags(index: torch.Tensor, *end: int) -> torch.Tensor:
    return torch.tensor([*STARTS, *end], dtype=index.dtype, device=index.device)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("end", [[], [17]], ids=["no end", "end"])
def test_embedding_bags(mode: str, padding: int | None, end: list[int]) -> None:
    options = {"mode": mode, "padding_idx": padding, "include_last_offset": bool(end)}

    def run(w: torch.Tensor, index: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offsets = bags(index, *end)
        with torch.no_grad():
            without_gradient = F.embedding_bag(index, w, offsets, **options)
        w = w.detach().requires_grad_()
        found = F.embedding_bag(index, w, offsets, **options)
        return without_gradient, found, torch.autograd.grad(found, w, cotangent)[0]

    index = torch.tensor([1, 2, 9, 2, 0, 0, 5, 1, 2, 2, 2, 7, 3, 3, 1, 0, 4])
    for dtype in had((torch.float32, torch.float16, torch.float64)):
        tolerance = 1e-2 if dtype == torch.float16 else 1e-5
        for integer in (torch.int64, torch.int32):
            arguments = numbers((10, 5), dtype), index.to(integer), numbers((6, 5), dtype)
            agrees(run, *arguments, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_elements_after_the_last_bag_count_nowhere(mode: str) -> None:
    """Compared with a call without them, because the CPU kernel adds their gradients to the last bag's."""

    def run(w: torch.Tensor, index: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = w.detach().requires_grad_()
        found = F.embedding_bag(index, w, bags(index, 16), mode=mode, include_last_offset=True)
        return found, torch.autograd.grad(found, w, cotangent)[0]

    index = torch.tensor([1, 2, 9, 2, 0, 0, 5, 1, 2, 2, 2, 7, 3, 3, 1, 0, 4])
    w, cotangent = numbers((10, 5)), numbers((6, 5))
    found = [one.cpu() for one in run(*on_device((w, index, cotangent)))]
    torch.testing.assert_close(found, list(run(w, index[:16], cotangent)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bags_with_factors(padding: int | None) -> None:
    def run(w: torch.Tensor, index: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, factors = w.detach().requires_grad_(), others[0].detach().requires_grad_()
        found = F.embedding_bag(index, w, bags(index), mode="sum", per_sample_weights=factors, padding_idx=padding)
        return found, *torch.autograd.grad(found, (w, factors), others[1])

    index = torch.tensor([1, 2, 9, 2, 0, 0, 5, 1, 2, 2, 2, 7, 3, 3, 1, 0, 4])
    agrees(run, numbers((10, 5)), index, numbers((17,)), numbers((6, 5)), rtol=1e-5, atol=1e-5)


def test_gradients_of_embedding_bags_by_frequency() -> None:
    """Compared with an embedding, because the CPU kernel divides by the frequencies of other indices."""
    index = torch.tensor([1, 2, 9, 2, 0, 0, 5, 1, 2, 2, 2, 7, 3, 3, 1, 0, 4])
    w, cotangent = numbers((10, 5)).requires_grad_(), numbers((6, 5))
    bag_of = torch.searchsorted(bags(index), torch.arange(17), right=True) - 1
    rows = F.embedding(index, w, scale_grad_by_freq=True)
    (expected,) = torch.autograd.grad(torch.zeros(6, 5).index_add(0, bag_of, rows), w, cotangent)
    there, where, grad = on_device((w.detach(), index, cotangent))
    there.requires_grad_()
    found = F.embedding_bag(where, there, bags(where), mode="sum", scale_grad_by_freq=True)
    torch.testing.assert_close(torch.autograd.grad(found, there, grad)[0].cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("index", "offsets", "message"),
    [
        ([1, 10], [0], "embedding_bag: index 10 is out of bounds for dimension with size 10"),
        ([-1, 1], [0], "embedding_bag: index -1 is out of bounds"),
        ([1, 2], [1], "offsets of embedding_bag: index 1 is out of bounds for dimension with size 1"),
        ([1, 2], [0, 3], "offsets of embedding_bag: index 3 is out of bounds for dimension with size 3"),
    ],
)
def test_embedding_bags_refuse_invalid_indices(index: list[int], offsets: list[int], message: str) -> None:
    def run(w: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> None:
        F.embedding_bag(index, w, offsets)
        torch.accelerator.synchronize()

    arguments = numbers((10, 5)), torch.tensor(index), torch.tensor(offsets)
    with pytest.raises(RuntimeError):
        run(*arguments)
    with pytest.raises(RuntimeError, match=message):
        run(*on_device(arguments))
