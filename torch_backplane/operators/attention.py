"""Scaled dot product attention in one pass, with backward, where csrc/aten/attention.cpp chooses it: by kernels, or
where the host sees the device's memory by the CPU's own.

Elsewhere PyTorch composes it of products and a softmax, which keep a number for each query and each key.
"""

from __future__ import annotations

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.attention import (
    Dropout,
    attention,
    attention_gradient,
)
from torch_backplane.kernels.templates.attention_bias import attention_bias_gradient, bias_gradient_parts
from torch_backplane.kernels.templates.random import WORDS_PER_CALL
from torch_backplane.operators.linear_algebra import host_refuses
from torch_backplane.planning import (
    Call,
    call_on_cpu,
    dialect_of,
    operator,
    random_numbers,
    run_template,
)


def _scores_like(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


@operator("backplane::attention", variants=False, passed_through=["scale", "kept"])
def one_pass(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    kept: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The result, for each query the logarithm of what its softmax was divided by, and with dropout what it drew from.

    Args:
        kept: with dropout, the chance of a weight to be kept.
    """
    shape = (*query.shape[:3], value.shape[3])
    out = torch.empty_like(query) if shape == tuple(query.shape) else query.new_empty(shape)
    logarithm = query.new_empty(query.shape[:3], dtype=value_dtype(query.dtype))
    if host_refuses(query) is None:
        given, results = (query, key, value, bias, is_causal, scale), {"out": out, "logarithm": logarithm}
        call_on_cpu(torch.ops.backplane.host_attention.default, *given, **results)
        return out, logarithm, None
    dropout = None
    if kept is not None:
        dropout = Dropout(kept, query.new_empty(2, dtype=torch.int64), random_numbers(WORDS_PER_CALL))
    arguments = (out, logarithm, query, key, value, _scores_like(bias, query, key), is_causal, scale, dropout)
    run_template(attention, query.device, *arguments, name="attention")
    return out, logarithm, None if dropout is None else dropout.state


@operator("backplane::attention_backward", variants=False, passed_through=["scale", "kept"])
def one_pass_backward(
    call: Call,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    logarithm: torch.Tensor,
    is_causal: bool,
    scale: float,
    kept: float | None,
    state: torch.Tensor | None,
    wanted: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of query, key, value and bias, those that are wanted."""
    if host_refuses(query) is None:
        query_grad, key_grad, value_grad = (
            one.new_empty(one.shape[0], one.shape[2], one.shape[1], one.shape[3]).transpose(1, 2)
            for one in (query, key, value)
        )  # in memory as PyTorch has them
        given = (grad, query, key, value, bias, out, logarithm, is_causal, scale)
        results = {"of_query": query_grad, "of_key": key_grad, "of_value": value_grad}
        call_on_cpu(torch.ops.backplane.host_attention_backward.default, *given, **results)
        return query_grad, key_grad, value_grad, None
    like_scores = _scores_like(bias, query, key)
    dropout = None if kept is None or state is None else Dropout(kept, state)

    def compute(of: str, result: torch.Tensor, inner: torch.Tensor | None) -> None:
        arguments = (result, of, grad, query, key, value, like_scores, logarithm, inner, is_causal, scale, dropout)
        run_template(attention_gradient, query.device, *arguments, name="attention_backward")

    if out.dtype == logarithm.dtype:
        inner = (grad * out).sum(-1)
    else:  # the result was rounded, and where gradients all but cancel that would be what is left
        inner = torch.empty_like(logarithm)
        compute("inner", inner.unsqueeze(-1), None)
    gradients = [
        torch.empty_like(one) if wants else None for one, wants in zip((query, key, value), wanted, strict=False)
    ]
    for of, gradient in zip(("query", "key", "value"), gradients, strict=True):
        if gradient is not None:
            compute(of, gradient, inner)
    if not wanted[3] or bias is None or like_scores is None:
        return *gradients, None
    bias_gradient = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    result = bias_gradient.reshape([1] * (4 - bias.dim()) + list(bias.shape))
    parts = bias_gradient_parts(dialect_of(query.device), query, key, result.shape)
    summands = result.unsqueeze(0) if parts == 1 else logarithm.new_empty([parts, *result.shape])
    arguments = (summands, grad, query, key, value, like_scores, logarithm, inner, is_causal, scale, dropout)
    run_template(attention_bias_gradient, query.device, *arguments, name="attention_backward")
    if parts > 1:
        result.copy_(summands.sum(0))
    return *gradients, bias_gradient
