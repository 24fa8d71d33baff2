"""Gradients of embeddings, with indices in a column and scaled by the frequency of rows; norms of rows."""

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
