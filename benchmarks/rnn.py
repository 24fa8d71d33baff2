"""Compares recurrent layers with PyTorch's on the CPU, forward only and with gradients.

    python benchmarks/rnn.py --driver opencl
    python benchmarks/rnn.py --driver opencl --generated      # generated kernels only
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import interleaving
import torch
from torch import nn

# (time, batch, features, hidden, layers, bidirectional)
SHAPES = ((24, 16, 32, 64, 2, True), (64, 32, 128, 128, 1, False), (100, 8, 256, 512, 1, False))


def make(
    kind: str, shape: tuple[int, int, int, int, int, bool], training: bool, device: torch.device
) -> interleaving.Body:
    time, batch, features, hidden, layers, both = shape
    module = getattr(nn, kind)(features, hidden, layers, bidirectional=both).to(device)
    x = torch.randn(time, batch, features).to(device)

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad()
        module(x)[0].sum().backward()

    return train if training else forward


def rows() -> list[interleaving.Row]:
    """Compares recurrent layers on a device and on the CPU."""

    def found() -> Iterator[interleaving.Row]:
        for kind in ("LSTM", "GRU", "RNN"):
            for shape in SHAPES:
                time, batch, features, hidden, layers, both = shape
                sizes = f"{time} × {batch} × {features} to {hidden}"
                layer_title = f"{kind}, {sizes}, {layers} layers{' in both directions' if both else ''}"
                for training in (False, True):
                    title = f"{layer_title}{', with gradients' if training else ''}"
                    yield interleaving.Row(title, partial(make, kind, shape, training))

    return list(found())


if __name__ == "__main__":
    interleaving.main(rows)
