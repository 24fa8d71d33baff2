"""Attention of jagged nested tensors on bp: the fused attention of each sequence by itself.

PyTorch composes attention of jagged tensors of strided nested ones, which bp does not have. csrc/aten/attention.cpp
chooses the fused operator for them instead; `install` says what that is for `NestedTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor

_NAME = "aten::_scaled_dot_product_fused_attention_overrideable"
_forward = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
_backward = torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default


def install() -> None:
    for name, rule in ((_NAME, _attend), (f"{_NAME}_backward", _attend_backward)):
        torch.library.register_torch_dispatch(name, NestedTensor, rule)


def _sequences(jagged: NestedTensor) -> list[torch.Tensor]:
    """Each as (1, heads, length, columns). Waits for the lengths.

    Raises:
        NotImplementedError: it is no jagged tensor (batch, heads, length, columns) without gaps between sequences.
    """
    if (jagged.dim(), jagged._ragged_idx, jagged._lengths) != (4, 2, None):
        raise NotImplementedError("jagged attention on bp takes (batch, heads, length, columns) without gaps")
    lengths = jagged.offsets().diff().tolist()
    return list(jagged._values.unsqueeze(0).split(lengths, dim=2))


def _joined(parts: Sequence[torch.Tensor], like: NestedTensor) -> torch.Tensor:
    """The jagged tensor of these sequences, whose memory is (length, heads, columns), as that of PyTorch's results."""
    values = torch.cat([one[0].transpose(0, 1) for one in parts])
    return torch.nested.nested_tensor_from_jagged(values, like.offsets()).transpose(1, 2)


def _attend(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    query, key, value, _, dropout, is_causal = (*args, *(None, 0.0, False)[len(args) - 3 :])[:6]
    if query.device.type != "bp":
        return cls.__torch_dispatch__(func, types, args, kwargs)
    parts = zip(*map(_sequences, (query, key, value)), strict=True)
    found = [_forward(*part, None, dropout, is_causal, **(kwargs or {})) for part in parts]
    out, logarithm = _joined([one[0] for one in found], query), torch.cat([one[1] for one in found], 2)
    states = torch.stack([one[6] for one in found])
    return out, logarithm, None, None, query.shape[2], key.shape[2], states, found[0][7], None


def _attend_backward(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    grad, query, key, value, _, wanted, out, logarithm, _, _, _, _, dropout, is_causal, states, offset = args
    if query.device.type != "bp":
        return cls.__torch_dispatch__(func, types, args, kwargs)
    grads, queries, keys, values, outs = map(_sequences, (grad, query, key, value, out))
    logarithms = [one.contiguous() for one in logarithm.split([one.shape[2] for one in queries], 2)]
    found = [
        _backward(*part[:4], None, [*wanted[:3], False], *part[4:6], None, None, part[1].shape[2], part[2].shape[2],
                  dropout, is_causal, part[6], offset, **(kwargs or {}))
        for part in zip(grads, queries, keys, values, outs, logarithms, states, strict=True)
    ]  # fmt: skip
    gradients = zip(*(one[:3] for one in found), strict=True)
    given = zip(gradients, (query, key, value), wanted[:3], strict=True)
    return *(_joined(parts, like) if needed else None for parts, like, needed in given), None
