"""scatter_reduce in all its forms, and gradients of embeddings by how often each row is used."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import agrees
from torch.nn import functional as F


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter_reduce(reduce: str, include_self: bool, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(1)
    self, source = (torch.randn(9, 9).mul(9).to(dtype) for _ in range(2))
    index = torch.randint(9, (7, 8))
    options = {"include_self": include_self}
    agrees(lambda x, i, s: x.scatter_reduce(dim, i, s, reduce, **options), self, index, source)
    agrees(lambda x, i, s: x.scatter_reduce_(dim, i, s, reduce, **options), self, index, source)


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
def test_infinities_and_nan(reduce: str) -> None:
    source = torch.tensor([math.inf, 1.0, -math.inf, math.nan, 2.0, -math.inf])
    index = torch.tensor([0, 0, 1, 2, 2, 3])
    agrees(
        lambda i, s: torch.zeros(5, device=s.device).scatter_reduce(0, i, s, reduce, include_self=False), index, source
    )


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_gradients_by_frequency(padding: int | None) -> None:
    torch.manual_seed(2)

    def gradient(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        table = table.detach().requires_grad_()
        result = F.embedding(index, table, padding_idx=padding, scale_grad_by_freq=True)
        return torch.autograd.grad((result * result.detach()).sum(), table)[0]

    agrees(gradient, torch.randn(9, 33), torch.randint(9, (4, 7)))
