"""Attention of jagged nested tensors against PyTorch's on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


def jagged(lengths: tuple[int, ...], heads: int, columns: int, device: str) -> tuple[Tensor, list[Tensor]]:
    """(batch, heads, length, columns), not contiguous, and the leaves that it is made of."""
    torch.manual_seed(sum(lengths))
    leaves = [torch.randn(length, heads * columns).to(device).requires_grad_() for length in lengths]
    made = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
    return made.unflatten(-1, [heads, columns]).transpose(1, 2), leaves


def attend(device: str, lengths: tuple[int, ...], heads: int, columns: int) -> list[Tensor]:
    x, leaves = jagged(lengths, heads, columns, device)
    out = F.scaled_dot_product_attention(x, x * 2, x * 3)
    assert out.device.type == device
    assert out.transpose(1, 2).is_contiguous()
    (out * 2).transpose(1, 2).values().square().sum().backward()
    return [one.detach().cpu() for one in (*out.unbind(), *(leaf.grad for leaf in leaves if leaf.grad is not None))]


def test_results_and_gradients_agree_with_the_cpu() -> None:
    for lengths, heads, columns in (((3, 5), 2, 8), ((9, 1, 4), 1, 16), ((3, 5), 2, 8), ((2, 2, 2, 7), 3, 4)):
        found, expected = (attend(device, lengths, heads, columns) for device in ("bp", "cpu"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_masks_have_pytorchs_error() -> None:
    x, _ = jagged((3, 5), 2, 8, "bp")
    mask = torch.zeros(1, device="bp")
    with pytest.raises(ValueError, match="Masks are not yet supported"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    attend("bp", (3, 5), 2, 8)


def test_jagged_tensors_of_other_devices_go_to_pytorch() -> None:
    x, _ = jagged((3, 5), 2, 8, "cpu")
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(x, x, x)
    attend("cpu", (3, 5), 2, 8)
