"""Convolutions where the host can access device memory: oneDNN runs in stream order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE
from test_host_work import needs_sight

from torch_backplane import plans, preferences
from torch_backplane.planning.costs import host_is_slow

# (operator, weight shape, settings) for images with 4 channels.
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "plain": (F.conv2d, (8, 4, 3, 3), {"padding": 1}),
    "groups": (F.conv2d, (8, 2, 3, 2), {"groups": 2, "stride": 2, "dilation": (1, 2)}),
    "depthwise": (F.conv2d, (8, 1, 3, 3), {"groups": 4}),
    "1 × 1": (F.conv2d, (8, 4, 1, 1), {}),
    "transposed": (F.conv_transpose2d, (4, 8, 3, 3), {"stride": 2, "output_padding": 1}),
    "lines": (F.conv1d, (8, 4, 3), {"padding": 2}),
    "volumes": (F.conv3d, (8, 4, 2, 3, 2), {"stride": (1, 2, 1)}),
}


def results(name: str, given: list[torch.Tensor], wanted: str, device: str) -> list[torch.Tensor]:
    """The convolution, and gradients of the operands whose first letters are in `wanted`: image, weight, bias."""
    function, _, settings = CASES[name]
    image, weight, bias = (
        tensor.to(device).requires_grad_(letter in wanted) for tensor, letter in zip(given, "iwb", strict=True)
    )
    out = function(image, weight, bias, **settings)
    leaves = [tensor for tensor in (image, weight, bias) if tensor.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if leaves else ())]


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
@preferences.preferring("convolutions", "host")
def test_results_gradients_and_their_layouts_are_the_cpus(name: str, dtype: torch.dtype) -> None:
    needs_sight()
    if host_is_slow(dtype):
        pytest.skip(f"this host has no instructions for {dtype}, so kernels compute it")
    _, weight_shape, _ = CASES[name]
    plans.set_mode("check")
    for size, wanted in ((6, "iwb"), (9, "wb"), (7, "i"), (6, "w"), (8, ""), (7, "b"), (9, "iwb")):
        for last in (False, True):
            rank = len(weight_shape) - 2
            given = [torch.randn(2, 4, *[size] * rank), torch.randn(weight_shape) / 4, torch.randn(8)]
            given = [tensor.to(dtype) for tensor in given]
            if last and rank > 1:
                channels_last = torch.channels_last if rank == 2 else torch.channels_last_3d
                given[0] = given[0].contiguous(memory_format=channels_last)
            of_cpu = results(name, given, wanted, "cpu")
            for ours, expected in zip(results(name, given, wanted, DEVICE), of_cpu, strict=True):
                torch.testing.assert_close(ours.cpu(), expected)
                assert strides(ours) == strides(expected)


@preferences.preferring("convolutions", "host")
def test_host_computes_convolutions_without_unfold() -> None:
    needs_sight()
    image = torch.randn(2, 4, 9, 9, device=DEVICE)
    weight, grad = torch.randn(8, 4, 3, 3, device=DEVICE), torch.randn(2, 8, 7, 7, device=DEVICE)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    backward = torch.ops.aten.convolution_backward
    plan_text = str(plans.explain(lambda: F.conv2d(image, weight)))
    plan_text += str(plans.explain(lambda: backward(grad, image, weight, [8], *settings, [False, True, True])))
    assert "on the host aten::convolution.out" in plan_text
    assert "on the host backplane::host_convolution_backward" in plan_text
    assert "unfold" not in plan_text


def test_dtypes_without_fast_cpu_kernels_run_on_the_device() -> None:
    image, weight = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    for dtype in (torch.float16, torch.float64):
        if dtype in torch.bp.get_device_properties(DEVICE).dtypes:
            given = image.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE)
            assert "on the host" not in str(plans.explain(lambda given=given: F.conv2d(*given)))


def test_valid_calls_work_after_a_rejected_call() -> None:
    image, weight = torch.randn(2, 4, 9, 9, device=DEVICE), torch.randn(8, 4, 3, 3, device=DEVICE)
    expected = F.conv2d(image.cpu(), weight.cpu())
    for _ in range(2):
        torch.testing.assert_close(F.conv2d(image, weight).cpu(), expected)
        with pytest.raises(RuntimeError, match="expected input"):
            F.conv2d(image[:, :3], weight)
