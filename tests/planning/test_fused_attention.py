"""Attention of jagged nested tensors and under torch.vmap, compared with the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F


def jagged(lengths: tuple[int, ...], heads: int, columns: int, device: str) -> tuple[Tensor, list[Tensor]]:
    """Returns a non-contiguous jagged tensor (batch, heads, length, columns), and its leaves."""
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


def test_masks_raise_pytorchs_error() -> None:
    x, _ = jagged((3, 5), 2, 8, "bp")
    mask = torch.zeros(1, device="bp")
    with pytest.raises(ValueError, match="Masks are not yet supported"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    attend("bp", (3, 5), 2, 8)


def test_jagged_tensors_of_other_devices_use_pytorch() -> None:
    x, _ = jagged((3, 5), 2, 8, "cpu")
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable(x, x, x)
    attend("cpu", (3, 5), 2, 8)


def mapped(device: str, queries: int, columns: int) -> list[Tensor]:
    """Attention under vmap: some operands mapped, other dimensions, masks, gradients inside and outside."""
    torch.manual_seed(queries)
    q, k, v = (torch.randn(3, 2, 4, queries, columns).to(device) for _ in range(3))
    mask, masks = torch.randn(queries, queries).to(device), torch.randn(3, 2, 1, queries, queries).to(device)
    attend = F.scaled_dot_product_attention

    def total(*operands: Tensor) -> Tensor:
        return attend(*operands).sin().sum()

    found = [
        vmap(attend)(q, k, v),
        vmap(attend, in_dims=(0, None, 0))(q, k[0], v),
        vmap(attend, in_dims=(1, 1, 1), out_dims=1)(q, k, v),
        vmap(attend, in_dims=(0, 0, 0, None))(q, k, v, mask),
        vmap(attend)(q, k, v, masks),
        vmap(vmap(attend))(*(one.expand(2, *one.shape) for one in (q, k, v))),
        vmap(grad(total))(q, k, v),
        vmap(grad(total, argnums=2), in_dims=(0, 0, 0, None))(q, k, v, mask),
        grad(lambda q: vmap(attend)(q, k, v).sin().sum())(q),
    ]
    assert all(one.device.type == device for one in found)
    return [one.cpu() for one in found]


def test_mapped_attention_agrees_with_the_cpu() -> None:
    for queries, columns in ((9, 16), (5, 8), (9, 16)):
        found, expected = (mapped(device, queries, columns) for device in ("bp", "cpu"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
