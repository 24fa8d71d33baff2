"""Compares attention of 128 to 8,192 keys with PyTorch's on the CPU, forward only and with gradients.

    python benchmarks/attention.py --driver opencl
    python benchmarks/attention.py --driver opencl --generated --match ' 512'
"""

from __future__ import annotations

from functools import partial

import interleaving
import torch
from torch.nn.functional import scaled_dot_product_attention

LENGTHS = (128, 512, 2048, 8192)
DTYPES = (torch.float32, torch.bfloat16)
NUMBERS = 1 << 20  # elements of each operand, which has at least one head


def make(length: int, dtype: torch.dtype, causal: bool, training: bool, device: torch.device) -> interleaving.Body:
    heads = max(1, NUMBERS // (64 * length))
    leaves = [torch.randn(1, heads, length, 64).to(dtype).to(device).requires_grad_(training) for _ in range(3)]
    query, key, value = leaves

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    return (lambda: torch.autograd.grad(forward().sum(), leaves)) if training else forward


def rows() -> list[interleaving.Row]:
    """Compares attention on a device and on the CPU."""
    return [
        interleaving.Row(
            f"{length} queries and keys, {str(dtype).removeprefix('torch.')}{', causal' if causal else ''}"
            f"{', with gradients' if training else ''}",
            partial(make, length, dtype, causal, training),
        )
        for length in LENGTHS
        for dtype in DTYPES
        for causal in (False, True)
        for training in (False, True)
        if length < max(LENGTHS) or causal
    ]


if __name__ == "__main__":
    interleaving.main(rows)
