"""hash_tensor: of a whole tensor, along a dimension, and of empty tensors."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, need, refused_alike

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_hashes(dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        need(torch.float64)  # the hash is computed from float64 bits
    agrees(lambda x: (torch.hash_tensor(x), torch.hash_tensor(x, 1)), numbers(3, 4, 5, dtype=dtype))
    agrees(lambda x: torch.hash_tensor(x, 0, keepdim=True), numbers(3, 70, dtype=dtype).t())
    agrees(torch.hash_tensor, numbers(dtype=dtype))
    agrees(lambda x: torch.hash_tensor(x, 1), torch.zeros(0, 3, dtype=dtype))


def test_out_variant_and_errors() -> None:
    need(torch.float64)
    agrees(lambda x, out: torch.hash_tensor(x, 1, out=out), numbers(3, 4), torch.zeros(3, dtype=torch.uint64))
    refused_alike(lambda x: torch.hash_tensor(x, mode=1), numbers(3))
    refused_alike(lambda x: torch.hash_tensor(x, 0), torch.zeros(0, 3))
