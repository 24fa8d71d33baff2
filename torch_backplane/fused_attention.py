"""Fused attention for jagged nested tensors and under `torch.vmap`.

PyTorch's composite attention of jagged tensors uses strided nested tensors, which bp does not support.
csrc/aten/attention.cpp selects the fused operator for jagged tensors instead; it computes one sequence at a time. Under
`torch.vmap`, the mapped dimension is merged into the batch dimension.
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
    torch.library.register_vmap(_NAME, _map)
    torch.library.register_vmap(f"{_NAME}_backward", _map_backward)


def _sequences(jagged: NestedTensor) -> list[torch.Tensor]:
    """The sequences, each as (1, heads, length, columns). Synchronizes with the device to read the lengths.

    Raises:
        NotImplementedError: `jagged` is not (batch, heads, length, columns) without gaps between sequences.
    """
    if (jagged.dim(), jagged._ragged_idx, jagged._lengths) != (4, 2, None):
        raise NotImplementedError("jagged attention on bp expects (batch, heads, jagged length, columns) without gaps")
    lengths = jagged.offsets().diff().tolist()
    return list(jagged._values.unsqueeze(0).split(lengths, dim=2))


def _joined(parts: Sequence[torch.Tensor], like: NestedTensor) -> torch.Tensor:
    """Joins sequences to a jagged tensor, stored as (length, heads, columns) like PyTorch's results."""
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


def _joins_batch(info: Any, tensor: torch.Tensor, dim: int | None, dims: int = 4) -> torch.Tensor:
    """Merges the mapped dimension into the first of the tensor's `dims` dimensions."""
    moved = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    moved = moved.reshape(moved.shape[0], *[1] * (dims + 1 - moved.dim()), *moved.shape[1:])
    return moved.expand(info.batch_size, *moved.shape[1:]).flatten(0, 1)


def _apart(info: Any, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.unflatten(0, (info.batch_size, -1))


def _whole_batch(info: Any, bias: torch.Tensor | None, bias_dim: int | None, batch: int) -> torch.Tensor | None:
    """The bias, if any, for a batch into which the mapped dimension was merged."""
    if bias is None:
        return None
    if bias_dim is None:
        return bias if bias.dim() < 4 or bias.shape[0] == 1 else bias.repeat(info.batch_size, 1, 1, 1)
    bias = bias.movedim(bias_dim, 0)
    bias = bias.reshape(bias.shape[0], *[1] * (5 - bias.dim()), *bias.shape[1:])
    return bias.expand(-1, batch // info.batch_size, *bias.shape[2:]).flatten(0, 1)


def _check_is_ours(tensor: torch.Tensor) -> None:
    """Raises PyTorch's error for tensors of other devices, for which there is no batching rule."""
    if tensor.device.type != "bp":
        raise RuntimeError(f"Batching rule not implemented for {_NAME}. We could not generate a fallback.")


def _map(info: Any, in_dims: Any, *args: Any, **options: Any) -> Any:
    _check_is_ours(args[0])
    joined = [_joins_batch(info, one, dim) for one, dim in zip(args[:3], in_dims[:3], strict=True)]
    bias = args[3] if len(args) > 3 else None
    dropout = args[4] if len(args) > 4 else 0.0
    if dropout > 0 and info.randomness != "different":
        raise RuntimeError("attention with dropout under vmap on bp needs randomness='different'")
    bias = _whole_batch(info, bias, in_dims[3] if len(in_dims) > 3 else None, joined[0].shape[0])
    found = _forward(*joined, bias, *args[4:], **options)
    parts = _apart(info, found[0]), _apart(info, found[1])
    return (*parts, *found[2:]), (0, 0, *[None] * 7)


def _map_backward(info: Any, in_dims: Any, *args: Any, **options: Any) -> Any:
    grad, query, key, value, bias, wanted, out, logarithm, *rest = args
    _check_is_ours(query)
    tensors, dims = (grad, query, key, value, out), (*in_dims[:4], in_dims[6])
    grad, query, key, value, out = (_joins_batch(info, one, dim) for one, dim in zip(tensors, dims, strict=True))
    logarithm = _joins_batch(info, logarithm, in_dims[7], dims=3)
    if wanted[3]:
        raise RuntimeError("attention under vmap on bp does not support a gradient of the mask")
    bias = _whole_batch(info, bias, in_dims[4], query.shape[0])
    found = _backward(grad, query, key, value, bias, wanted, out, logarithm, *rest, **options)
    return (*(_apart(info, one) for one in found[:3]), None), (0, 0, 0, None)
