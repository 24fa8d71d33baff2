"""torchvision's operators on bp: fallbacks with gradients, and their autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_backplane import _C

torchvision = pytest.importorskip("torchvision")
if not torchvision.extension._has_ops():
    pytest.skip("this torchvision was built for another torch", allow_module_level=True)
ops = torchvision.ops


def boxes(count: int, size: float = 20.0) -> Tensor:
    corners = torch.rand(count, 4) * size
    corners[:, 2:] = corners[:, :2] + torch.rand(count, 2) * size * 0.7 + 0.5
    return corners


def regions(count: int) -> Tensor:
    return torch.cat([torch.randint(0, 2, (count, 1)).float(), boxes(count)], 1)


def features(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 8, 24, 24, dtype=dtype)


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "roi_align": (lambda x, r: ops.roi_align(x, r, (5, 3)), lambda: (features(), regions(7))),
    "roi_align, no regions": (lambda x, r: ops.roi_align(x, r, 4), lambda: (features(), torch.zeros(0, 5))),
    "roi_align, strided": (lambda x, r: ops.roi_align(x.mT[:, ::2], r, 4), lambda: (features(), regions(3))),
    "roi_align, float64": (
        lambda x, r: ops.roi_align(x, r, 4),
        lambda: (features(torch.float64), regions(3).double()),
    ),
    "roi_pool": (lambda x, r: ops.roi_pool(x, r, (5, 3)), lambda: (features(), regions(7))),
    "ps_roi_align": (lambda x, r: ops.ps_roi_align(x, r, 2), lambda: (features(), regions(7))),
    "ps_roi_pool": (lambda x, r: ops.ps_roi_pool(x, r, 2), lambda: (features(), regions(7))),
    "deform_conv2d": (
        lambda x, offset, weight, bias, mask: ops.deform_conv2d(x, offset, weight, bias, mask=mask),
        lambda: (features(), *map(torch.randn, ((2, 18, 22, 22), (4, 8, 3, 3), 4)), torch.rand(2, 9, 22, 22)),
    ),
    "complete_box_iou": (ops.complete_box_iou, lambda: (boxes(30), boxes(12))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(name: str) -> None:
    function, make = CALLS[name]
    given = make()
    on_cpu = [tensor.clone().requires_grad_() for tensor in given]
    on_bp = [tensor.to("bp").requires_grad_() for tensor in given]
    expected, found = function(*on_cpu), function(*on_bp)
    assert found.device.type == "bp"
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    weights = torch.rand(expected.shape, dtype=expected.dtype)
    (expected * weights).sum().backward()
    (found * weights.to("bp")).sum().backward()
    for one, other in zip(on_bp, on_cpu, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])  # CUDA has float16, the CPU does not
def test_nms(dtype: torch.dtype) -> None:
    given, scores = boxes(200, 100.0).to(dtype), torch.rand(200).to(dtype)
    _C.reset_fallback_counts()
    kept = ops.nms(given.to("bp"), scores.to("bp"), 0.4)
    assert _C.fallback_counts()["torchvision::nms"] == 1
    wide = (given, scores) if dtype == torch.float64 else (given.float(), scores.float())
    assert kept.cpu().equal(ops.nms(*wide, 0.4))
    with pytest.raises(RuntimeError, match="same number of elements in dimension 0"):
        ops.nms(given.to("bp"), scores[:3].to("bp"), 0.4)
    with pytest.raises(RuntimeError, match="at least two devices, bp:0 and cpu"):
        ops.nms(given.to("bp"), scores, 0.4)
    assert ops.nms(given.to("bp"), scores.to("bp"), 0.4).cpu().equal(kept.cpu())


def autocast(function: Callable[..., Any], *given: Any) -> Any:
    with torch.autocast("bp", torch.bfloat16):
        return function(*given)


def test_autocast() -> None:
    import torch_backplane.integrations.torchvision

    x, r = features(torch.bfloat16), regions(7)
    found = autocast(lambda x, r: ops.roi_align(x, r, 3), x.to("bp"), r.to("bp"))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu(), ops.roi_align(x.float(), r, 3).bfloat16(), rtol=2e-2, atol=2e-2)
    b, s = boxes(50).bfloat16(), torch.rand(50).bfloat16()
    assert autocast(ops.nms, b.to("bp"), s.to("bp"), 0.4).cpu().equal(ops.nms(b.float(), s.float(), 0.4))
    torch_backplane.integrations.torchvision.enable()  # twice: no effect
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    target = {"boxes": torch.tensor([[3.0, 3.0, 30.0, 30.0]], device="bp"), "labels": torch.tensor([1], device="bp")}
    losses = autocast(model.to("bp"), [torch.rand(3, 64, 64, device="bp")], [target])
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())


def test_ops_lists_the_operators() -> None:
    from torch_backplane.conformance import coverage

    found = {operator.name: operator.source for operator in coverage.operators_of(["torchvision"])}
    assert found["torchvision::nms"] == found["torchvision::_roi_align_backward"] == "fallback"
    assert found["torchvision::_cuda_version"] == "decomposition"
