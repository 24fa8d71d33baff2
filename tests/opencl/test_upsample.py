"""interpolate: all modes, upsampling and downsampling, fractional scale factors, and gradients."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, need
from torch.nn import functional as F

SIZES = {1: (11,), 2: (7, 10), 3: (4, 5, 6)}
MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "trilinear": (3,),
    "bicubic": (2,),
}
CASES = [(mode, rank) for mode, ranks in MODES.items() for rank in ranks]
# For float32: both sides round the positions in the image.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def image(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(2, 3, *SIZES[rank]).to(dtype)


def with_gradient(x: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    result = F.interpolate(x, **options)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result).to(x.device)
    return result.detach(), torch.autograd.grad((result * weights).sum(), x)[0]


@pytest.mark.parametrize(("mode", "rank"), CASES)
@pytest.mark.parametrize("factor", [2, 1, 2.6, 0.4, 0.5])
def test_factors(mode: str, rank: int, factor: float) -> None:
    agrees(lambda x: with_gradient(x, scale_factor=factor, mode=mode), image(rank), **CLOSE)


@pytest.mark.parametrize(("mode", "rank"), CASES)
@pytest.mark.parametrize("size", [1, 3, 17])
def test_sizes(mode: str, rank: int, size: int) -> None:
    agrees(lambda x: with_gradient(x, size=size, mode=mode), image(rank), **CLOSE)


@pytest.mark.parametrize(("mode", "rank"), [case for case in CASES if "nearest" not in case[0]])
@pytest.mark.parametrize("size", [1, 3, 17])
def test_align_corners(mode: str, rank: int, size: int) -> None:
    agrees(lambda x: with_gradient(x, size=size, mode=mode, align_corners=True), image(rank), **CLOSE)


@pytest.mark.parametrize(("mode", "rank"), CASES)
def test_float64(mode: str, rank: int) -> None:
    need(torch.float64)
    agrees(lambda x: with_gradient(x, scale_factor=1.7, mode=mode), image(rank, torch.float64))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(mode: str, dtype: torch.dtype) -> None:
    agrees(lambda x: F.interpolate(x, scale_factor=2, mode=mode), image(2, dtype))


def test_uint8_and_strides() -> None:
    agrees(lambda x: F.interpolate(x, size=(5, 20)), torch.arange(2 * 3 * 7 * 10, dtype=torch.uint8).view(2, 3, 7, 10))
    agrees(lambda x: F.interpolate(x.mT, size=(5, 20), mode="bilinear"), image(2), **CLOSE)
    agrees(
        lambda x: F.interpolate(x.contiguous(memory_format=torch.channels_last), scale_factor=2, mode="bilinear"),
        image(2),
        **CLOSE,
    )
    agrees(
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear", recompute_scale_factor=True), image(2), **CLOSE
    )
