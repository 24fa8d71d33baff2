"""Compares convolutions and their gradients, computed without stored patches, with PyTorch in float64."""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import check_cuda, dialect, random, run

from torch_backplane.kernels import OpenCLC
from torch_backplane.kernels.templates.convolution import forward, gathered, of_image, of_weight
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.kernels.templates.unfold import Windows

# batch, input channels, output channels, groups, sizes, window, stride, padding, dilation
CASES = {
    "plain": (2, 3, 5, 1, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "strides and dilation": (2, 4, 70, 1, (13, 17), (3, 2), (2, 3), (2, 0), (2, 3)),
    "groups": (3, 12, 15, 3, (8, 6), (2, 3), (1, 2), (0, 1), (1, 1)),
    "depthwise": (2, 6, 12, 6, (10, 9), (3, 3), (1, 1), (1, 1), (1, 1)),
    "lines": (2, 5, 20, 1, (40,), (7,), (2,), (3,), (1,)),
    "volumes": (1, 3, 8, 1, (6, 5, 7), (2, 3, 2), (1, 2, 1), (1, 0, 1), (2, 1, 1)),
    "many channels, few places": (1, 200, 9, 1, (3, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    "a window as large as the image": (2, 70, 6, 2, (4, 5), (4, 5), (1, 1), (0, 0), (1, 1)),
    "few rows, a long sum": (1, 300, 2, 1, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    "many places": (2, 3, 6, 1, (50, 60), (3, 3), (1, 1), (2, 2), (2, 2)),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def made(case: str, dtype: torch.dtype):
    batch, channels, wanted, groups, sizes, *numbers = CASES[case]
    window, stride, padding, dilation = numbers
    image, weight = random((batch, channels, *sizes), dtype), random((wanted, channels // groups, *window), dtype)
    places = tuple(
        (size + 2 * pad - (wide - 1) * apart - 1) // step + 1
        for size, wide, step, pad, apart in zip(sizes, *numbers, strict=True)
    )
    return image, weight, groups, Windows(sizes, places, window, stride, padding, dilation)


def exactly(image, weight, bias, groups, w):
    convolution = getattr(torch.nn.functional, f"conv{w.rank}d")
    return convolution(image.double(), weight.double(), bias, w.stride, w.padding, w.dilation, groups)


def by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.view(values.shape[0], groups, values.shape[1] // groups, -1).permute(1, 2, 0, 3)


def close(found: torch.Tensor, exact: torch.Tensor, depth: int) -> bool:
    """The tolerance is relative to the typical size of a sum of `depth` products."""
    return bool((found - exact).norm() <= TOLERANCE[found.dtype] * math.sqrt(depth * exact.numel()))


def calls(case: str, dtype: torch.dtype, of_device: OpenCLC):
    """Yields the arguments of `gathered` and the expected result: forward, gradients of the weight and of the image."""
    image, weight, groups, w = made(case, dtype)
    bias = random((weight.shape[0],), dtype)
    wide = [one.double().requires_grad_() for one in (image, weight)]
    exact = exactly(*wide, bias.double(), groups, w)
    grad = random(exact.shape, dtype)
    of = torch.autograd.grad(exact, wide, grad.double())
    values, image_grad, weight_grad = (torch.full(t.shape, 9.0).to(dtype) for t in (exact, image, weight))
    results = weight_grad.view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    sums = forward(values, image, weight, groups, w)
    yield (by_group(values, groups), (weight, image), sums, bias), by_group(exact, groups)
    yield (results, (grad, image), of_weight(weight_grad, grad, image, groups, w)), of[1].view(results.shape)
    if all(step == 1 for step in w.stride):
        spread = of_image(image_grad, grad, weight, groups, w)
        yield (by_group(image_grad, groups), (weight, grad), spread), by_group(of[0], groups)


@pytest.mark.parametrize("units", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_convolutions_match_float64(case, dtype, units):
    of_device = dialect("gpu", compute_units=units)
    for arguments, exact in calls(case, dtype, of_device):
        run(gathered(of_device, *arguments))
        assert close(arguments[0], exact, arguments[2].k.count)


def test_choice_of_the_kernel_form():
    def names(case: str) -> list[str]:
        of_device = dialect("gpu", compute_units=64)
        return [
            gathered(of_device, *arguments)[0].kernel.name for arguments, _ in calls(case, torch.float32, of_device)
        ]

    assert names("depthwise") == ["bp_convolution2_alone"] * 3
    assert names("many places") == ["bp_convolution2", "bp_convolution2_parts", "bp_convolution2_alone"]
    assert names("many channels, few places")[0] == "bp_convolution2_parts"
    assert names("few rows, a long sum")[0] == "bp_convolution2_parts"
    assert names("volumes")[0] == "bp_convolution3"


def test_infinity_and_nan_propagate_as_in_pytorch():
    image, weight, groups, w = made("plain", torch.float32)
    image[0, 0, 0, 0], weight[0, 0, 0, 0] = torch.inf, torch.nan
    exact = exactly(image, weight, None, groups, w)
    values = torch.empty_like(exact, dtype=torch.float32)
    sums = forward(values, image, weight, groups, w)
    run(gathered(dialect("gpu"), by_group(values, groups), (weight, image), sums))
    assert torch.equal(values.isinf(), exact.isinf())
    assert torch.equal(values.isnan(), exact.isnan())


def with_epilogue(case: str, dtype: torch.dtype, last: bool):
    """The arguments of `gathered` with an epilogue, its output, and the expected output: twice the results.

    The results have no memory. Their channels come last if `last`.
    """
    image, weight, groups, w = made(case, dtype)
    bias = random((weight.shape[0],), dtype)
    exact = exactly(image, weight.double(), bias.double(), groups, w)
    stored = torch.full(exact.shape, 9.0).to(dtype)
    if last:
        stored = stored.movedim(1, -1).contiguous().movedim(-1, 1)
    epilogue = Operations(
        "store_twice(place, product * 2);", True, torch.int32, "", frozenset(), {}, {"twice": stored}, {}
    )
    values = torch.empty_strided(stored.shape, stored.stride(), dtype=dtype, device="meta")
    sums = forward(values, image, weight, groups, w)
    arguments = (by_group(values, groups), (weight, image), sums, bias, None, epilogue)
    return arguments, stored, exact * 2


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_epilogues_use_places_in_memory(case, dtype, last):
    arguments, stored, expected = with_epilogue(case, dtype, last)
    run(gathered(dialect("gpu", compute_units=64), *arguments))
    assert close(stored / 2, expected / 2, arguments[2].k.count)


@pytest.mark.parametrize("case", ["plain", "depthwise", "many channels, few places"])
def test_epilogues_compile_for_cuda(case):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check_cuda(gathered, *with_epilogue(case, dtype, True)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["plain", "depthwise", "lines", "volumes", "many channels, few places"])
def test_cuda_compiles(case, dtype):
    for arguments, _ in calls(case, dtype, dialect("gpu")):
        check_cuda(gathered, *arguments)
