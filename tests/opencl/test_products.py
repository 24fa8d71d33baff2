"""Matrix products with an activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import agrees, refused_alike


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_with_an_activation(dtype: torch.dtype, use_gelu: bool) -> None:
    def run(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch._addmm_activation(*tensors, use_gelu=use_gelu, **given)

    a, b = numbers(4, 3, dtype=dtype), numbers(3, 5, dtype=dtype)
    agrees(run, numbers(5, dtype=dtype), a, b)
    turned = numbers(3, 4, dtype=dtype)
    agrees(lambda c, x, y: run(c, x.t(), y, beta=0.5, alpha=2), numbers(4, 5, dtype=dtype), turned, b)
    agrees(lambda c, x, y, out: run(c, x, y, out=out), numbers(5, dtype=dtype), a, b, torch.zeros(4, 5, dtype=dtype))
    agrees(run, numbers(5, dtype=dtype), a[:0], b)
    refused_alike(run, numbers(5, dtype=dtype), a, a)
