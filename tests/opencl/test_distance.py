"""Distances between rows: all norms, batches, equal rows, NaN, empty tensors; and their gradients."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees, had, on_device

ORDERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, torch.inf]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", ORDERS)
def test_cdist(p: float, dtype: torch.dtype) -> None:
    def run(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        result = torch.cdist(a, b, p)
        return [result.detach(), *torch.autograd.grad((result * result.detach().cos()).sum(), [a, b])]

    a, b = numbers(2, 3, 4, dtype=dtype), numbers(2, 5, 4, dtype=dtype)
    b[1, 2] = a[1, 0]  # a distance of zero
    b[0, 1, 2] = a[0, 1, 2]  # one difference of zero
    # Where derivatives are large, the CPU's float32 gradients differ this much from its float64 gradients.
    close = {"rtol": 1e-4, "atol": 1e-4 if p == 0.5 and dtype == torch.float32 else 1e-5}
    found = [tensor.cpu().double() for tensor in run(*on_device((a, b)))]
    torch.testing.assert_close(found, run(a.double(), b.double()), rtol=1e-5, atol=2e-5)
    agrees(run, a, b, **close)
    agrees(run, a[0], b, **close)
    agrees(run, a[:, None], b[:1], **close)
    agrees(lambda a, b: run(a.mT, b), numbers(4, 3, dtype=dtype), b[0], **close)
    agrees(lambda a, b: torch.cdist(a, b, p), numbers(0, 4, dtype=dtype), b[0])
    agrees(lambda a, b: torch.cdist(a, b, p), numbers(3, 0, dtype=dtype), numbers(5, 0, dtype=dtype))
    for shape, other in (((3, 4), (0, 4)), ((0, 4), (3, 4)), ((1, 3, 4), (0, 5, 4)), ((2, 3, 0), (5, 0))):
        agrees(run, numbers(*shape, dtype=dtype), numbers(*other, dtype=dtype))
    point = numbers(5, dtype=dtype).to(DEVICE)
    with pytest.raises(RuntimeError, match="only supports at least 2D tensors, not of"):
        torch.ops.aten._cdist_backward(point, point, point, p, point)


@pytest.mark.parametrize("p", ORDERS)
def test_pdist(p: float) -> None:
    def run(a: torch.Tensor) -> list[torch.Tensor]:
        a = a.detach().requires_grad_()
        result = torch.nn.functional.pdist(a, p)
        return [result.detach(), *torch.autograd.grad((result * result.detach().cos()).sum(), a)]

    for dtype in had((torch.float64, torch.float32)):
        a = numbers(6, 4, dtype=dtype)
        a[3] = a[1]
        agrees(run, a, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}))
    agrees(lambda a: torch.nn.functional.pdist(a, p), numbers(1, 4))
    agrees(lambda a: torch.nn.functional.pdist(a, p), numbers(4, 0))


def test_distances_between_near_rows_are_accurate() -> None:
    a = 1000.0 + numbers(40, 3) * 1e-3
    mode = "donot_use_mm_for_euclid_dist"
    expected = torch.cdist(a.double(), a.double(), compute_mode=mode)
    found = torch.cdist(a.to(DEVICE), a.to(DEVICE), compute_mode=mode)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, torch.inf])
def test_nan_gives_a_distance_of_nan(p: float) -> None:
    """Also for the norm of order infinity, where PyTorch's CPU kernel may lose the NaN."""
    a, b = numbers(3, 4), numbers(5, 4)
    a[1, 2] = torch.nan
    found, expected = torch.cdist(a.to(DEVICE), b.to(DEVICE), p).cpu(), torch.cdist(a, b, p)
    expected[1] = torch.nan
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_other_dtypes_are_refused_as_pytorch_does() -> None:
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        torch.cdist(numbers(3, 4).bfloat16().to(DEVICE), numbers(3, 4).bfloat16().to(DEVICE))


@pytest.mark.parametrize("p", [0.5, 1.5, 2.0, 3.0])
def test_gradients_for_nonfinite_and_equal_values(p: float) -> None:
    """Gradients are NaN wherever a distance or a cotangent is NaN, even if the difference is 0."""

    def gradient(x: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        distances = torch.cdist(x, x.detach().clone(), p, "donot_use_mm_for_euclid_dist")
        return torch.autograd.grad(distances, x, cotangent)[0]

    special = torch.tensor([[torch.inf, 1, 2], [0, 1, 5], [torch.nan, 1, 2], [1, 1, 2]])
    for x in (special, torch.tensor([[1.0, 1, 2], [1, 1, 2], [0, 5, 2], [1, 5, 2]])):
        for cotangent in (torch.ones(4, 4), torch.randn(4, 4), special.repeat(1, 2)[:, :4]):
            agrees(gradient, x, cotangent)
