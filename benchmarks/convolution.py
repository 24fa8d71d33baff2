"""Compares the convolutions of a ResNet-50 on images of 224 × 224 with PyTorch's on the CPU, forward and backward.

    python benchmarks/convolution.py --driver opencl
    python benchmarks/convolution.py --driver opencl --match 'forward'
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import interleaving
import torch

BATCH = 2


class Layer(NamedTuple):
    """A convolution: (channels, channels of the result, side of the image, side of the window, stride)."""

    channels: int
    results: int
    side: int
    window: int
    stride: int


# He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, 2015, table 1; strides in the 3 × 3 convolutions.
LAYERS = [
    Layer(3, 64, 224, 7, 2),
    *(
        layer
        for width, side, before in ((64, 56, 64), (128, 28, 256), (256, 14, 512), (512, 7, 1024))
        for layer in (
            Layer(before, width, side if width == 64 else 2 * side, 1, 1),
            Layer(width, width, side if width == 64 else 2 * side, 3, 1 if width == 64 else 2),
            Layer(width, 4 * width, side, 1, 1),
            Layer(4 * width, width, side, 1, 1),
            Layer(width, width, side, 3, 1),
        )
    ),
]
DIRECTIONS = ("forward", "gradient of the image", "gradient of the weight")


def make(layer: Layer, direction: str, device: torch.device) -> interleaving.Body:
    padding = layer.window // 2
    image = torch.randn(BATCH, layer.channels, layer.side, layer.side).to(device)
    weight = torch.randn(layer.results, layer.channels, layer.window, layer.window).to(device)
    if direction == "forward":
        return lambda: torch.nn.functional.conv2d(image, weight, stride=layer.stride, padding=padding)
    out = torch.nn.functional.conv2d(image, weight, stride=layer.stride, padding=padding)
    wanted = [direction == one for one in DIRECTIONS[1:]] + [False]
    settings = ([layer.stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, wanted)
    grad = torch.randn_like(out)
    return lambda: torch.ops.aten.convolution_backward(grad, image, weight, None, *settings)


def rows() -> list[interleaving.Row]:
    """Compares convolutions on a device and on the CPU."""
    return [
        interleaving.Row(
            f"{layer.channels} to {layer.results}, {layer.window} × {layer.window} of {layer.side}, "
            f"stride {layer.stride}, {direction}",
            partial(make, layer, direction),
        )
        for layer in LAYERS
        for direction in DIRECTIONS
    ]


if __name__ == "__main__":
    interleaving.main(rows)
