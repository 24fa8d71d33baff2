"""im2col and col2im (`F.unfold` and `F.fold`), and the gradient of `Tensor.unfold`."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees
from torch.nn import functional as F


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


# The gradient of Tensor.unfold


@pytest.mark.parametrize(("dim", "size", "step"), [(0, 3, 1), (1, 2, 3), (-1, 3, 2), (1, 7, 1), (0, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_unfold_backward(dtype: torch.dtype, dim: int, size: int, step: int) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        result = x.unfold(dim, size, step)
        weights = torch.arange(result.numel(), device=x.device).view(result.shape).remainder(7)
        return torch.autograd.grad((result * weights).sum().abs(), x)[0]

    agrees(gradient, numbers((5, 7, 4), dtype))
    agrees(gradient, numbers((5, 7, 4), dtype).transpose(0, 1).contiguous().transpose(0, 1))


def test_unfold_backward_of_zero_dimensional_tensor() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.unfold(0, 1, 1).sum() * 3, x)[0]

    agrees(gradient, torch.tensor(2.0))


# F.unfold and F.fold


PATCHES = [
    {"kernel_size": 3},
    {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (1, 2), "stride": (2, 1)},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (4, 5), "padding": 3, "stride": 4},
]


@pytest.mark.parametrize("options", PATCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64], ids=str)
def test_unfold_and_fold(options: dict[str, int], dtype: torch.dtype) -> None:
    for shape in ((2, 3, 8, 9), (3, 8, 9)):
        x = numbers(shape, dtype)
        agrees(lambda x: F.unfold(x, **options), x)
        agrees(lambda x: F.unfold(x.transpose(-1, -2), **options), x)
        tolerances = {"rtol": 4e-3, "atol": 4e-2} if dtype == torch.float16 else {}
        agrees(lambda x: F.fold(F.unfold(x, **options), (8, 9), **options), x, **tolerances)
        agrees(lambda y: F.fold(y.mT.contiguous().mT, (8, 9), **options), F.unfold(x, **options), **tolerances)
    agrees(lambda x: F.unfold(x, **options), numbers((0, 3, 8, 9), dtype))
    agrees(lambda x: F.unfold(x, **options), numbers((2, 3, 8, 9)) > 0)


def test_gradients_of_unfold_and_fold() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        columns = F.unfold(x, 3, padding=1, stride=2)
        folded = F.fold(columns.square(), (8, 9), 3, padding=1, stride=2)
        return torch.autograd.grad((folded * folded.detach()).sum() + columns.sum(), x)[0]

    agrees(gradient, numbers((2, 3, 8, 9)))


def test_invalid_sizes_are_errors() -> None:
    x = torch.zeros(2, 3, 4, 4, device=DEVICE)
    with pytest.raises(RuntimeError, match="array of sliding blocks"):
        F.unfold(x, 9)
    with pytest.raises(RuntimeError, match="divisible by the product of kernel_size"):
        F.fold(torch.zeros(1, 7, 9, device=DEVICE), (4, 4), 2)
