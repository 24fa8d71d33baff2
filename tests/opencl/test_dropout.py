"""Dropout on a device that runs kernels: one launch draws, scales and writes the mask."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, plans_from_the_start
from torch.nn import functional as F

from torch_backplane import _C, plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [3, 64, 100_003])
def test_kept_elements_are_scaled(dtype: torch.dtype, count: int) -> None:
    x = (torch.rand(count) + 1).to(dtype).to(DEVICE)
    for _ in range(3):
        out, mask = torch.native_dropout(x, 0.25, True)
        kept = mask.cpu()
        assert mask.dtype == torch.bool
        expected = torch.where(kept, x.cpu() / 0.75, 0)
        torch.testing.assert_close(out.cpu(), expected)
        # Within five standard deviations.
        assert abs(kept.float().mean() - 0.75) <= 5 * (0.25 * 0.75 / count) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_reproducible_and_its_gradient_uses_the_mask(p: float) -> None:
    x = torch.randn(50, 70, device=DEVICE, requires_grad=True)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        out = F.dropout(x, p, training=True)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return out.detach().cpu(), grad.cpu()

    torch.manual_seed(5)
    first, grad = draw()
    other, _ = draw()
    torch.manual_seed(5)
    again, grad_again = draw()
    assert torch.equal(first, again)
    assert torch.equal(grad, grad_again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first, x.detach().cpu() * grad)
    torch.testing.assert_close(grad[grad != 0], torch.full((int((grad != 0).sum()),), 1 / (1 - p)))


@plans_from_the_start()
def test_dropout_is_one_launch_and_is_replayed() -> None:
    x = torch.randn(64, device=DEVICE)
    _C.reset_fallback_counts()
    first, second = F.dropout(x), F.dropout(x)
    assert not torch.equal(first.cpu(), second.cpu())
    assert plans.stats()["aten::native_dropout"]["replays"] == 1
    assert plans.explain(F.dropout, x).count("launch") == 1
    assert not _C.fallback_counts()


@pytest.mark.parametrize("view", ["transposed", "channels last", "every second", "expanded"])
def test_strides(view: str) -> None:
    x = {
        "transposed": torch.ones(30, 20, device=DEVICE).t(),
        "channels last": torch.ones(2, 8, 9, 10, device=DEVICE).contiguous(memory_format=torch.channels_last),
        "every second": torch.ones(40, 20, device=DEVICE)[:, ::2],
        "expanded": torch.ones(20, device=DEVICE).expand(30, 20),
    }[view]
    out, mask = torch.native_dropout(x, 0.5, True)
    assert torch.equal(out.cpu(), mask.cpu() * 2.0)
    assert 0 < mask.sum().item() < mask.numel()
    if view in ("transposed", "channels last"):
        assert out.stride() == mask.stride() == x.stride()


def test_probability_at_and_beyond_its_limits() -> None:
    x = torch.randn(9, device=DEVICE)
    out, mask = torch.native_dropout(x, 1.0, True)
    assert not out.cpu().any()
    assert not mask.cpu().any()
    for p, train in ((0.0, True), (0.5, False)):
        out, mask = torch.native_dropout(x, p, train)
        assert torch.equal(out.cpu(), x.cpu())
        assert mask.cpu().all()
    with pytest.raises(RuntimeError, match=r"between 0 and 1, but got 1\.5"):
        torch.native_dropout(x, 1.5, True)


def test_complex_numbers() -> None:
    x = torch.ones(200, dtype=torch.complex64)
    torch.manual_seed(3)
    first, mask = torch.native_dropout(x.to(DEVICE), 0.5, True)
    torch.manual_seed(3)
    again, _ = torch.native_dropout(x.to(DEVICE), 0.5, True)
    assert torch.equal(first.cpu(), again.cpu())
    assert torch.equal(first.cpu(), x * mask.cpu() * 2.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_are_refused_as_on_the_cpu(dtype: torch.dtype) -> None:
    for device in ("cpu", DEVICE):
        with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type"):
            torch.native_dropout(torch.ones(200, dtype=dtype, device=device), 0.5, True)


def test_backward_accepts_only_bool_masks() -> None:
    """As on CUDA: the values of other masks would be read as 0 or 1."""
    grad, mask = torch.ones(3, device=DEVICE), torch.tensor([1, 0, 2], device=DEVICE)
    backward = torch.ops.aten.native_dropout_backward
    for dtype in (torch.bool, torch.float32, torch.bool, torch.int64, torch.uint8):
        if dtype == torch.bool:
            assert backward(grad, mask.to(dtype), 2.5).tolist() == [2.5, 0.0, 2.5]
        else:
            with pytest.raises(RuntimeError, match=f"Mask should be Bool Scalar Type, and got {dtype}"):
                backward(grad, mask.to(dtype), 2.5)
