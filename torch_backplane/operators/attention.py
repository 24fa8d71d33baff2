"""Scaled dot product attention in one pass, and its gradients, for calls that csrc/aten/attention.cpp selects.

On devices whose work items run in lockstep, a library of the driver or generated kernels compute it. On CPUs whose
memory the host can access, PyTorch's CPU flash kernel does; the kernels work there too, and are slower. PyTorch
composes other calls of matrix products and a softmax, which store a number for each pair of query and key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from torch_backplane import tuning
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.reductions import summation
from torch_backplane.kernels.templates.attention import (
    AttentionParams,
    Dropout,
    Saved,
    attention,
    attention_gradient,
)
from torch_backplane.kernels.templates.attention_bias import attention_bias_gradient, bias_gradient_parts
from torch_backplane.kernels.templates.random import WORDS_PER_CALL
from torch_backplane.operators import library_attention
from torch_backplane.operators.library_attention import Attended
from torch_backplane.operators.linear_algebra import all_aligned, host_refuses
from torch_backplane.planning import (
    Call,
    Candidate,
    Candidates,
    call_on_cpu,
    costs,
    dialect_of,
    operator,
    random_numbers,
    run_reduction,
    run_template,
    try_library,
)
from torch_backplane.planning.launch import traced


def _host_refuses(query: torch.Tensor, call: Attended) -> str | None:
    if call.lacks is not None:
        return call.lacks
    if query.shape[1] != call.operand("key").shape[1] or query.shape[3] != call.operand("value").shape[3]:
        return "needs as many heads of keys as of queries, and as many columns of values"
    return host_refuses(query)


candidates = Candidates(
    "attention",
    Candidate("host", _host_refuses, cost=lambda query, call: costs.on_host("attention", torch.float32)),
    Candidate(
        "driver",
        library_attention.why_not,
        cost=library_attention.cost,
        workspace=lambda form, query, call: library_attention.workspace(query, call),
    ),
    Candidate("generated", lambda query, call: None),
)


def _operands(operands: tuning.Operands) -> tuple[list[torch.Tensor], torch.Tensor | None, bool, float]:
    """([query, key, value], bias, is_causal, scale)."""
    given = [operands.given(name) for name in ("query", "key", "value")]
    return given, operands.tensor("bias"), operands.flag("causal"), given[0].shape[3] ** -0.5


@tuning.trial("Attention")
def _trial(operands: tuning.Operands) -> Callable[[], tuple[torch.Tensor, ...]]:
    given, *how = _operands(operands)
    return lambda: torch.ops.backplane.attention(*given, *how, None)[:2]


@tuning.trial("AttentionBackward")
def _trial_backward(operands: tuning.Operands) -> Callable[[], tuple[torch.Tensor, ...]]:
    given, bias, causal, scale = _operands(operands)
    out, logarithm, _ = torch.ops.backplane.attention(*given, bias, causal, scale, None)
    saved = (torch.ones_like(out), *given, bias, out, logarithm, causal, scale, None, None, [True, True, True, False])
    return lambda: torch.ops.backplane.attention_backward(*saved)[:3]


def _choose(operator: str, call: Attended) -> str:
    """The library that computes the call: "host", "driver" or "generated"."""
    query, key, value = (call.operand(name) for name in ("query", "key", "value"))
    problem = partial(
        tuning.Problem.of, operator, query.dtype, query=query, key=key, value=value, bias=call.bias, causal=call.causal
    )
    return candidates.choose(query, call, problem=problem)


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
    """The result, the logsumexp of the scores of each query, and with dropout the random state (seed, offset).

    Args:
        kept: The probability that dropout keeps a weight. None without dropout.
    """
    shape = (*query.shape[:3], value.shape[3])
    out = torch.empty_like(query) if shape == tuple(query.shape) else query.new_empty(shape)
    logarithm = query.new_empty(query.shape[:3], dtype=value_dtype(query.dtype))
    tensors = {"query": query, "key": key, "value": value, "out": out}
    described = Attended(tensors, bias, is_causal, None if kept is None else "computes no dropout")
    library = _choose("Attention", described)
    if library == "driver" and try_library(partial(library_attention.compute, described, logarithm, scale)):
        return out, logarithm, None
    if library == "host":
        given, results = (query, key, value, bias, is_causal, scale), {"out": out, "logarithm": logarithm}
        call_on_cpu(torch.ops.backplane.host_attention.default, *given, **results)
        return out, logarithm, None
    dropout = None
    if kept is not None:
        dropout = Dropout(kept, query.new_empty(2, dtype=torch.int64), random_numbers(WORDS_PER_CALL))
    aligned = all_aligned(query, key, value)
    params = AttentionParams(_scores_like(bias, query, key), is_causal, scale, dropout, aligned)
    run_template(attention, query.device, out, logarithm, query, key, value, params, name="attention")
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
    """The gradients of query, key, value and bias that `wanted` selects."""
    gradients = [
        torch.empty_like(one) if wants else None for one, wants in zip((query, key, value), wanted, strict=False)
    ]
    tensors = {"query": query, "key": key, "value": value, "out": out, "grad": grad}
    results = dict(zip(("query_grad", "key_grad", "value_grad"), gradients, strict=True))
    lacks = "computes no dropout" if kept is not None else "computes no gradient of the mask" if wanted[3] else None
    described = Attended(tensors | results, bias, is_causal, lacks)
    library = _choose("AttentionBackward", described)
    compute_gradients = partial(library_attention.compute_gradients, described, logarithm, scale)
    if library == "driver" and try_library(compute_gradients):
        return *gradients, None
    if library == "host":
        pairs = zip(gradients, (query, key, value), strict=True)
        found = [torch.empty_like(one) if made is None else made for made, one in pairs]
        given = (grad, query, key, value, bias, out, logarithm, is_causal, scale)
        written = dict(zip(("of_query", "of_key", "of_value"), found, strict=True))
        call_on_cpu(torch.ops.backplane.host_attention_backward.default, *given, **written)
        return *found, None
    like_scores = _scores_like(bias, query, key)
    dropout = None if kept is None or state is None else Dropout(kept, state)
    params = AttentionParams(like_scores, is_causal, scale, dropout, all_aligned(query, key, value, grad))
    inner = torch.empty_like(logarithm)
    saved = Saved(query, key, value, logarithm, inner)

    def compute(of: str, result: torch.Tensor, saved: Saved) -> None:
        run_template(attention_gradient, query.device, result, of, grad, saved, params, name="attention_backward")

    if out.dtype == logarithm.dtype:
        definition = traced(("products", out.dtype), lambda: summation(out.dtype, lambda a, b, _: a * b))
        run_reduction(definition, [inner], [grad, out], [3], key=("products", out.dtype), name="sum_of_products")
    else:  # `out` was rounded: where gradients nearly cancel, mostly the rounding error would remain
        compute("inner", inner.unsqueeze(-1), saved._replace(inner=None))
    for of, gradient in zip(("query", "key", "value"), gradients, strict=True):
        if gradient is not None:
            compute(of, gradient, saved)
    if not wanted[3] or bias is None or like_scores is None:
        return *gradients, None
    bias_gradient = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    result = bias_gradient.reshape([1] * (4 - bias.dim()) + list(bias.shape))
    parts = bias_gradient_parts(dialect_of(query.device), query, key, result.shape)
    summands = result.unsqueeze(0) if parts == 1 else logarithm.new_empty([parts, *result.shape])
    run_template(attention_bias_gradient, query.device, summands, grad, saved, params, name="attention_backward")
    if parts > 1:
        result.copy_(summands.sum(0))
    return *gradients, bias_gradient
