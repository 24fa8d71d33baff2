"""The fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer in inference, composed of other operators.

Attention is the fused operator, unless csrc/aten/attention.cpp does not select it, or the caller needs the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from torch_backplane import _C
from torch_backplane.planning import Call, Refused, operator


class _Projections(NamedTuple):
    """The stacked weights (3 * embed_dim, embed_dim) of query, key and value, and the weights of the result."""

    qkv_weight: torch.Tensor
    qkv_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


class _Norm(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, heads: int, by: _Projections
) -> None:
    """Refuses arguments for which the CPU kernel raises an error or reads out of bounds."""
    is_right = (
        query.dim() == 3
        and query.shape == key.shape == value.shape
        and query.shape[2] == embed_dim
        and heads > 0
        and embed_dim % heads == 0
        and by.qkv_weight.shape == (3 * embed_dim, embed_dim)
        and by.qkv_bias.shape == (3 * embed_dim,)
        and by.weight.shape == (embed_dim, embed_dim)
        and by.bias.shape == (embed_dim,)
        and len({one.dtype for one in (query, key, value, *by)}) == 1
        and query.is_floating_point()
    )
    if not is_right:
        raise Refused("sizes or dtypes do not match")


def _left_out(mask: torch.Tensor | None, mask_type: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """A bool mask (true: left out) that broadcasts to the scores (batch, heads, queries, keys).

    Args:
        mask_type: The dimensions of `mask`. 0: (queries, keys); 1: (batch, keys); 2: those of the scores.
        like: (batch, queries, embed_dim).
    """
    if mask is None:
        return None
    batch, length, _ = like.shape
    accepted = {0: (length, length), 1: (batch, length)}.get(mask_type) if mask_type is not None else ()
    if accepted is not None and mask.shape != accepted:
        raise Refused("mask has another shape")
    if accepted is None and (mask.dim() != 4 or mask_type != 2):
        raise Refused("mask has another shape or type")
    mask = mask.to(torch.bool)  # as in PyTorch, numbers other than 0 are left out
    return mask.view(batch, 1, 1, length) if mask_type == 1 else mask


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    by: _Projections,
    left_out: torch.Tensor | None,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The projected result (batch, queries, embed_dim), and if needed the weights (batch, heads, queries, keys)."""
    batch, length, width = query.shape
    if query is key and key is value:
        projected = F.linear(query, by.qkv_weight, by.qkv_bias).chunk(3, dim=-1)
    else:
        parts = zip((query, key, value), by.qkv_weight.chunk(3), by.qkv_bias.chunk(3), strict=True)
        projected = tuple(F.linear(*part) for part in parts)
    q, k, v = (one.view(batch, length, heads, width // heads).transpose(1, 2) for one in projected)
    scale, weights = int(width // heads) ** -0.5, None
    bias = None if left_out is None else q.new_zeros(left_out.shape).masked_fill(left_out, -torch.inf)
    if need_weights or _C.why_attention_is_composed(q, k, v, bias, 0.0, False):
        # bmm and not matmul: the order in which the latter frees its copies differs between traces and calls.
        q, k, v = (one.reshape(batch * heads, length, width // heads) for one in (q, k, v))
        scores = torch.bmm(q * scale, k.transpose(1, 2)).view(batch, heads, length, length)
        scores = scores if bias is None else scores + bias
        weights = scores.softmax(-1)
        if not need_weights:  # a row of which all keys are left out is 0
            weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
        found = torch.bmm(weights.view(batch * heads, length, length), v).view(batch, heads, length, width // heads)
    else:
        found = torch.ops.backplane.attention(q, k, v, bias, False, scale, None)[0]
    out = F.linear(found.transpose(1, 2).reshape(batch, length, width), by.weight, by.bias)
    return out, weights if need_weights else None


@operator("_native_multi_head_attention", variants=False)
def _native_multi_head_attention(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
    mask_type: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result (batch, length, embed_dim), and with `need_weights` the weights (batch, heads, length, length) or
    their mean over heads. A row whose keys are all masked is 0 without weights, and NaN with them.
    """
    by = _Projections(qkv_weight, qkv_bias, proj_weight, proj_bias)
    _check(query, key, value, embed_dim, num_head, by)
    left_out = _left_out(mask, mask_type, query)
    out, weights = _attention(query, key, value, num_head, by, left_out, need_weights)
    return out, weights.mean(1) if weights is not None and average_attn_weights else weights


@operator("_transformer_encoder_layer_fwd", variants=False)
def _transformer_encoder_layer_fwd(
    call: Call,
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None,
    mask_type: int | None,
) -> torch.Tensor:
    by = _Projections(qkv_weight, qkv_bias, proj_weight, proj_bias)
    _check(src, src, src, embed_dim, num_heads, by)
    left_out = _left_out(mask, mask_type, src)
    norms = _Norm(norm_weight_1, norm_bias_1, eps), _Norm(norm_weight_2, norm_bias_2, eps)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return _attention(x, x, x, num_heads, by, left_out, need_weights=False)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    x = src
    for part, norm in zip((attend, feed_forward), norms, strict=True):
        x = x + part(norm(x)) if norm_first else norm(x + part(x))
    return x
