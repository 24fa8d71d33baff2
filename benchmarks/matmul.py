"""Compares matrix products of several sizes, dtypes, layouts and batches with PyTorch's on the CPU.

    python benchmarks/matmul.py --driver opencl
    python benchmarks/matmul.py --driver opencl --generated --match 'float32'
    python benchmarks/matmul.py --driver opencl --library --match 'float32'  # compares with CLBlast
"""

from __future__ import annotations

from functools import partial

import interleaving
import torch

SIZES = (64, 256, 1024, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {"a @ b": (False, False), "a @ bᵀ": (False, True), "aᵀ @ b": (True, False)}
BATCHES = ((8, 128), (64, 64))


def make(
    size: int, batch: int | None, dtype: torch.dtype, transposed: tuple[bool, bool], device: torch.device
) -> interleaving.Body:
    shape = (size, size) if batch is None else (batch, size, size)
    a, b = (torch.randn(shape).to(dtype).to(device) for _ in range(2))
    a, b = (one.mT if turn else one for one, turn in zip((a, b), transposed, strict=True))
    out = torch.empty(shape, dtype=dtype, device=device)
    return lambda: torch.matmul(a, b, out=out)


def linear(size: int, dtype: torch.dtype, device: torch.device) -> interleaving.Body:
    x, weight = (torch.randn(size, size).to(dtype).to(device) for _ in range(2))
    bias = torch.randn(size).to(dtype).to(device)
    return lambda: torch.nn.functional.linear(x, weight, bias)


def rows() -> list[interleaving.Row]:
    """Compares matrix products on a device and on the CPU."""
    found = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for size in SIZES:
            # A CPU without instructions for half precision takes minutes for the largest product.
            if size > 1024 and dtype != torch.float32:
                continue
            layouts = LAYOUTS.items() if size in (256, 1024) else list(LAYOUTS.items())[:1]
            for layout, transposed in layouts:
                found.append(
                    interleaving.Row(f"{layout}, {size}, {name}", partial(make, size, None, dtype, transposed))
                )
            found.append(interleaving.Row(f"linear, {size}, {name}", partial(linear, size, dtype)))
        for batch, size in BATCHES:
            title = f"{batch} products of {size}, {name}"
            found.append(interleaving.Row(title, partial(make, size, batch, dtype, (False, False))))
    return found


if __name__ == "__main__":
    interleaving.main(rows)
