"""RMS norm and its derivatives, for which PyTorch has no CPU kernel."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm


def derivatives(x: torch.Tensor, weight: torch.Tensor | None, shape: list[int]) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight) if tensor is not None]
    result = rms_norm(leaves[0], shape, leaves[1] if weight is not None else None, 1e-3)
    first = torch.autograd.grad(result.pow(3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in first), leaves)
    once = torch.autograd.grad(rms_norm(*leaves[:1], shape, *leaves[1:], eps=1e-3).pow(3).sum(), leaves)
    return [result.detach(), *(grad.detach() for grad in first), *second, *once]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [[6], [5, 6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_derivatives(dtype: torch.dtype, shape: list[int], weighted: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 5, 6, dtype=dtype), torch.randn(shape, dtype=dtype) if weighted else None
    expected = derivatives(x.double(), None if weight is None else weight.double(), shape)
    found = derivatives(x.to("bp"), None if weight is None else weight.to("bp"), shape)
    tolerance = 2e-5 if dtype == torch.float32 else 0.06
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        scale = other.abs().max().item()
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("wanted", [0, 1], ids=["input", "weight"])
def test_only_the_gradient_that_is_needed(wanted: int) -> None:
    def leaves(device: str) -> list[torch.Tensor]:
        tensors = [x.to(device, copy=True), weight.to(device, copy=True)]
        tensors[wanted].requires_grad_()
        rms_norm(tensors[0], (4,), tensors[1]).pow(3).sum().backward()
        return tensors

    x, weight = torch.randn(3, 4), torch.randn(4)
    expected, found = leaves("cpu"), leaves("bp")
    torch.testing.assert_close(found[wanted].grad.cpu(), expected[wanted].grad)
    assert found[1 - wanted].grad is None
