"""scatter_reduce in all its forms."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import agrees


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
