"""Winograd convolutions, a candidate that tuning can choose, called through the operators."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import DEVICE
from targets import target

from torch_backplane import plans, preferences
from torch_backplane.operators import convolution
from torch_backplane.tuning import choosing

BACKWARD = torch.ops.aten.convolution_backward.default


def both(tensors: list[torch.Tensor], settings: tuple[Any, ...], mask: list[bool]) -> list[torch.Tensor]:
    """The convolution, and the gradients for an output gradient of twice the result."""
    image, weight, bias = tensors
    out = torch.ops.aten.convolution(image, weight, bias, *settings)
    grads = BACKWARD(out * 2, image, weight, [bias.numel()], *settings, mask)
    return [out, *(one for one in grads if one is not None)]


def close(found: list[torch.Tensor], given: list[torch.Tensor], settings: tuple[Any, ...], mask: list[bool]) -> None:
    exact = both([one.double() for one in given], settings, mask)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[given[0].dtype]
    for one, expected in zip(found, exact, strict=True):
        assert one.dtype == given[0].dtype
        assert (one.cpu() - expected).norm() <= tolerance * expected.norm()


def layer(
    batch: int, channels: int, wanted: int, sizes: tuple[int, int], dtype: torch.dtype, groups: int, transposed: bool
) -> list[torch.Tensor]:
    first, second = (wanted, channels) if transposed else (channels, wanted)
    image = torch.randn(batch, first, *sizes).to(dtype)
    return [image, torch.randn(wanted, channels // groups, 3, 3).to(dtype), torch.randn(second).to(dtype)]


forced = choosing.forcing("convolutions", "generated/winograd")  # decorates tests


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@forced
def test_results_and_gradients(dtype: torch.dtype, transposed: bool, kind: str) -> None:
    with target(kind):
        plans.set_mode("check")
        mask = [True, True, True]
        for batch, channels, wanted, sizes, padding, groups in (
            (2, 4, 8, (9, 9), [1, 1], 1),
            (1, 6, 4, (7, 10), [0, 0], 2),
            (3, 4, 8, (5, 6), [2, 1], 1),
            (2, 4, 8, (9, 9), [1, 1], 1),  # the first shape, with other values
            (2, 4, 4, (3, 3), [0, 0], 4),
            (4, 4, 8, (12, 8), [1, 1], 1),
        ):
            settings = ([1, 1], padding, [1, 1], transposed, [0, 0], groups)
            given = layer(batch, channels, wanted, sizes, dtype, groups, transposed)
            close(both([one.to(DEVICE) for one in given], settings, mask), given, settings, mask)


@forced
def test_layouts_and_images_without_elements() -> None:
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    given = layer(2, 4, 8, (9, 6), torch.float32, 1, False)
    image, weight, bias = (one.to(DEVICE) for one in given)
    expected = torch.ops.aten.convolution(*given, *settings)
    for one in (image.contiguous(memory_format=torch.channels_last), image.mT.contiguous().mT, image.flip(0).flip(0)):
        out = torch.ops.aten.convolution(one, weight, bias, *settings)
        torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
        assert out.is_contiguous(memory_format=torch.channels_last) == one.is_contiguous(
            memory_format=torch.channels_last
        )
    assert torch.ops.aten.convolution(image[:0], weight, bias, *settings).shape == (0, 8, 9, 6)


@forced
def test_large_batches_are_computed_in_parts() -> None:
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    given = layer(5, 4, 8, (9, 10), torch.float32, 1, False)
    with mock.patch.object(convolution, "_MAX_PATCHES", 16 * 12 * 25 * 4 * 2):  # enough for two images
        image, weight, bias = (one.to(DEVICE) for one in given)
        plan_text = str(plans.explain(lambda: torch.ops.aten.convolution(image, weight, bias, *settings)))
        assert plan_text.count("launch bp_winograd_image") == 3
        found = both([image, weight, bias], settings, [True, True, True])
    close(found, given, settings, [True, True, True])


@pytest.mark.parametrize("mode", ["check", "1"])
@forced
def test_unsupported_windows_use_other_candidates(mode: str) -> None:
    plans.set_mode(mode)

    def computed(image: torch.Tensor, weight: torch.Tensor, stride: int) -> torch.Tensor:
        return torch.ops.aten.convolution(image, weight, None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1)

    for window, stride in ((3, 2), (3, 1), (1, 1), (3, 1), (5, 1)):
        image, weight = torch.randn(2, 4, 9, 9), torch.randn(8, 4, window, window)
        given = (image.to(DEVICE), weight.to(DEVICE), stride)
        torch.testing.assert_close(computed(*given).cpu(), computed(image, weight, stride), atol=1e-5, rtol=1e-5)
        assert ("winograd" in str(plans.explain(partial(computed, *given)))) == (window == 3 and stride == 1)


def test_winograd_is_not_chosen_without_tuning() -> None:
    image, weight = torch.randn(2, 4, 9, 9, device=DEVICE), torch.randn(8, 4, 3, 3, device=DEVICE)
    with preferences.preferring("convolutions", "generated"):
        assert "winograd" not in str(plans.explain(lambda: torch.nn.functional.conv2d(image, weight)))
