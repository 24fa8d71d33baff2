"""Convolutions on SIMT targets: implicit matrix products, which read the image itself, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE, need, peak_memory
from targets import target

from torch_backplane import plans, preferences

# The operator, shapes of image and weight, and settings. Tests also use larger images.
CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (F.conv2d, (2, 6, 9, 11), (7, 6, 3, 3), {"padding": 1}),
    "strides": (F.conv2d, (2, 4, 12, 9), (8, 4, 3, 2), {"stride": (2, 1), "padding": (0, 1), "dilation": 2}),
    "1 × 1": (F.conv2d, (3, 8, 5, 5), (9, 8, 1, 1), {}),
    "groups": (F.conv2d, (2, 12, 7, 7), (18, 4, 3, 3), {"groups": 3}),
    "depthwise": (F.conv2d, (2, 6, 12, 10), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
    "one image of many channels": (F.conv2d, (1, 300, 4, 4), (20, 300, 3, 3), {"padding": 1}),
    "lines": (F.conv1d, (2, 5, 300), (6, 5, 7), {"padding": 3}),
    "volumes": (F.conv3d, (1, 3, 6, 5, 7), (5, 3, 2, 3, 3), {"padding": (1, 0, 1)}),
    "transposed": (F.conv_transpose2d, (2, 6, 7, 8), (6, 5, 3, 3), {"padding": 1}),
    "transposed, apart": (
        F.conv_transpose2d,
        (2, 6, 5, 6),
        (6, 2, 3, 2),
        {"stride": 2, "output_padding": 1, "groups": 2},
    ),
    "transposed lines": (F.conv_transpose1d, (2, 6, 90), (6, 5, 4), {"dilation": 2}),
}
TOLERANCES = {torch.float32: (2e-6, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


def results(name: str, tensors: list[torch.Tensor], grad: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Returns the convolution and its gradients."""
    function, _, _, settings = CASES[name]
    image, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
    out = function(image, weight, bias, **settings)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    given = grad.to(tensors[0].dtype).to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, (image, weight, bias), given)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_float64(name: str, dtype: torch.dtype) -> None:
    """Runs several image sizes, so that the dynamic-shape plan is checked, and channels-last images."""
    need(dtype)
    _, image, weight, settings = CASES[name]
    channels = weight[1] * settings.get("groups", 1) if "transposed" in name else weight[0]
    relative, absolute = TOLERANCES[dtype]
    with target("gpu", compute_units=8):
        plans.set_mode("check")
        for more in (0, 1, 3):
            shapes = ((*image[:2], *(size + more for size in image[2:])), weight, (channels,))
            tensors = [(torch.randn(shape) / 4).to(dtype) for shape in shapes]
            if more == 3 and len(image) == 4:
                tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
            exact = results(name, [tensor.double() for tensor in tensors])
            found = results(name, [tensor.to(DEVICE) for tensor in tensors])
            for one, expected in zip(found, exact, strict=True):
                scale = float(expected.abs().max())
                torch.testing.assert_close(one.cpu().double(), expected, rtol=relative, atol=absolute * max(1.0, scale))


def test_patches_are_not_allocated() -> None:
    image, weight = torch.randn(4, 32, 40, 40, device=DEVICE), torch.randn(32, 32, 3, 3, device=DEVICE)
    with target("gpu", compute_units=8), preferences.preferring("convolutions", "generated"):
        out = F.conv2d(image, weight, padding=1)
        assert peak_memory(F.conv2d, image, weight, None, 1, 1) < 1.1 * out.nbytes
