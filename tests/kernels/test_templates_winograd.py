"""Compares the steps of Winograd's convolution with PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates import winograd
from torch_backplane.kernels.templates.source import Launch
from torch_backplane.kernels.templates.unfold import Windows

# batch, input channels, output channels, groups, sizes, padding
CASES = {
    "plain": (2, 3, 5, 1, (9, 11), (1, 1)),
    "even sizes": (1, 4, 4, 1, (8, 6), (1, 1)),
    "groups": (3, 6, 9, 3, (7, 6), (0, 1)),
    "depthwise": (2, 4, 8, 4, (5, 5), (1, 0)),
    "one place": (2, 3, 2, 1, (3, 3), (0, 0)),
    "smaller than a tile": (1, 2, 3, 1, (1, 2), (1, 1)),
    "more padding than a window": (1, 2, 3, 1, (2, 3), (4, 3)),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def made(case: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, Windows]:
    batch, channels, wanted, groups, sizes, padding = CASES[case]
    image, weight = random((batch, channels, *sizes), dtype), random((wanted, channels // groups, 3, 3), dtype)
    places = tuple(size + 2 * pad - 2 for size, pad in zip(sizes, padding, strict=True))
    return image, weight, random((wanted,), dtype), groups, Windows(sizes, places, (3, 3), (1, 1), padding, (1, 1))


def exactly(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int, w: Windows):
    wide = [None if one is None else one.double() for one in (image, weight, bias)]
    return torch.nn.functional.conv2d(*wide, 1, w.padding, 1, groups)


def steps(
    of_device,
    out: torch.Tensor,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: int,
    w: Windows,
    of_image: bool = False,
) -> Iterator[Launch]:
    """Yields the launches. Before the third one, computes the matrix product of the first two launches' results."""
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    rows, depth = out.shape[1] // groups, image.shape[1] // groups
    columns = out.shape[0] * math.prod(winograd.tiles(w))
    weights = torch.empty(winograd.POINTS * groups, rows, depth, dtype=dtype)
    transformed = torch.empty(winograd.POINTS * groups, depth, columns, dtype=dtype)
    yield winograd.transform_weight(of_device, weights, weight, groups, of_image)
    yield winograd.transform_image(of_device, transformed, image, w)
    yield winograd.transform_results(of_device, out, torch.bmm(weights, transformed), w, bias)


def close(found: torch.Tensor, exact: torch.Tensor, depth: int) -> bool:
    """The tolerance is relative to the typical size of a sum of `depth` products."""
    return bool((found - exact).norm() <= TOLERANCE[found.dtype] * math.sqrt(depth * exact.numel()))


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_results_match_float64(case: str, dtype: torch.dtype, processor: str) -> None:
    image, weight, bias, groups, w = made(case, dtype)
    exact = exactly(image, weight, bias, groups, w)
    out = torch.full(exact.shape, 9.0, dtype=dtype)
    for launch in steps(dialect(processor), out, image, weight, bias, groups, w):
        run(launch)
    assert close(out, exact, 9 * weight.shape[1])


@processors
@pytest.mark.parametrize("case", CASES)
def test_image_gradients_match_float64(case: str, processor: str) -> None:
    image, weight, _, groups, w = made(case, torch.float32)
    image = image.double().requires_grad_()
    exact = exactly(image, weight, None, groups, w)
    grad = random(exact.shape, torch.float32)
    (expected,) = torch.autograd.grad(exact, image, grad.double())
    out = torch.full(expected.shape, 9.0)
    for launch in steps(dialect(processor), out, grad, weight, None, groups, w.transposed(), of_image=True):
        run(launch)
    assert close(out, expected, 9 * weight.shape[0] // groups)


@pytest.mark.parametrize(
    ("window", "stride", "dilation", "taken"),
    [
        ((3, 3), (1, 1), (1, 1), True),
        ((3, 3), (1,), (1,), True),
        ((3, 3), (1, 2), (1, 1), False),
        ((3, 3), (1, 1), (2, 1), False),
        ((3, 1), (1, 1), (1, 1), False),
        ((5, 5), (1, 1), (1, 1), False),
        ((3,), (1,), (1,), False),
        ((3, 3, 3), (1, 1, 1), (1, 1, 1), False),
    ],
)
def test_supported_windows(window, stride, dilation, taken: bool) -> None:
    assert winograd.takes(window, stride, dilation) == taken


def test_infinity_does_not_spread_beyond_its_tiles() -> None:
    image, weight, _, groups, w = made("plain", torch.float32)
    image[0, 0, 4, 4] = torch.inf  # in the windows of results 3 to 5, which are in the tiles that begin at 2 and 4
    out = torch.full((2, 5, 9, 11), 9.0)
    for launch in steps(dialect("cpu"), out, image, weight, None, groups, w):
        run(launch)
    finite = out.isfinite()
    assert not finite[0, :, 3:6, 3:6].any()
    finite[0, :, 2:6, 2:6] = True
    assert finite.all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_image", [False, True])
def test_cuda_compiles(dtype: torch.dtype, of_image: bool) -> None:
    image, weight, bias, groups, w = made("groups", dtype)
    exact = exactly(image, weight, bias, groups, w)
    out = torch.empty(exact.shape, dtype=dtype)
    if of_image:
        check_cuda(
            lambda of_device: [*steps(of_device, image, out, weight, None, groups, w.transposed(), of_image=True)]
        )
    else:
        check_cuda(lambda of_device: [*steps(of_device, out, image, weight, bias, groups, w)])
