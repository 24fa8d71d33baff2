"""Attention in one pass, where work items run in lockstep: results and gradients beside float64's on the CPU."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from agreement import DEVICE
from targets import target
from torch.nn import functional as F

from torch_backplane import plans

MATH, ONE_PASS = 0, 4  # of at::SDPBackend; the latter is «overrideable»
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class Shape(NamedTuple):
    batch: int
    heads: int
    shared: int  # heads of keys and values
    queries: int
    keys: int
    depth: int
    columns: int


def operands(shape: Shape, bias: str = "", dtype: torch.dtype = torch.float32, transposed: bool = False) -> Any:
    """query, key, value, mask and a gradient of the result."""

    def made(heads: int, length: int, depth: int) -> torch.Tensor:
        sizes = (shape.batch, length, heads, depth) if transposed else (shape.batch, heads, length, depth)
        x = torch.randn(sizes).to(dtype)
        return x.transpose(1, 2) if transposed else x

    query = made(shape.heads, shape.queries, shape.depth)
    key, value = made(shape.shared, shape.keys, shape.depth), made(shape.shared, shape.keys, shape.columns)
    mask = None
    if bias == "bool":
        mask = torch.rand(shape.queries, shape.keys) > 0.3
        mask[0] = False  # nothing is left of the first row
    elif bias:
        mask = torch.randn(shape.batch, 1, shape.queries, shape.keys).to(dtype)
        mask[..., ::3] = -torch.inf
    return query, key, value, mask, torch.randn(shape.batch, shape.heads, shape.queries, shape.columns).to(dtype)


def attended(given: Any, device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """The result, and the gradients of query, key and value, in float64 on the CPU."""
    *tensors, mask, grad = given
    inputs = [one.to(device, dtype).detach().requires_grad_() for one in tensors]
    if mask is not None:
        mask = mask.to(device, mask.dtype if mask.dtype == torch.bool else dtype)
    shares = inputs[0].shape[1] != inputs[1].shape[1]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=shares, **options)
    found = [out, *torch.autograd.grad(out, inputs, grad.to(device, dtype))]
    return [one.detach().cpu().double() for one in found]


def assert_right(given: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    found, right = attended(given, DEVICE, dtype, **options), attended(given, "cpu", torch.float64, **options)
    for name, ours, theirs in zip(("result", "query", "key", "value"), found, right, strict=True):
        scale = theirs.square().mean().sqrt().item() or 1.0
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=TOLERANCES[dtype] * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def chosen(*tensors: torch.Tensor, **options: Any) -> int:
    return torch.ops.aten._fused_sdp_choice(*tensors, **options)


@pytest.mark.parametrize("figures", [{}, {"max_group_size": 64}, {"local_memory": 8 << 10}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 5, 7, 8, 8), Shape(2, 4, 2, 70, 130, 24, 40)])
def test_results_and_gradients(shape: Shape, causal: bool, figures: dict[str, int]) -> None:
    with target("gpu", **figures):
        assert_right(operands(shape), is_causal=causal)
        assert plans.stats()["backplane::attention_backward"]["planner_calls"] == 1


@pytest.mark.parametrize("bias", ["bool", "float"])
@pytest.mark.parametrize("transposed", [False, True])
def test_masks_and_layouts(bias: str, transposed: bool) -> None:
    with target("gpu"):
        for columns in (200, 8):
            assert_right(operands(Shape(2, 4, 1, 33, 65, 8, columns), bias, transposed=transposed))
        assert "backplane::attention" in plans.stats()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    with target("gpu"):
        assert_right(operands(Shape(1, 2, 1, 40, 50, 16, 16), "float", dtype), dtype, scale=0.3)
        assert "backplane::attention" in plans.stats()


def test_any_shape() -> None:
    chance = random.Random(0)
    with target("gpu"):
        for _ in range(12):
            shape = Shape(
                chance.randint(1, 3), 2, 2, *(chance.randint(1, 90) for _ in range(2)), *[chance.choice((8, 24))] * 2
            )
            assert_right(operands(shape), scale=chance.random())
        (counts,) = (one for name, one in plans.stats().items() if name == "backplane::attention")
        assert counts["any_shape_classes"] == counts["classes"]
        assert counts["any_shape_replays"] > 4


def test_numbers_that_are_not_finite() -> None:
    query, key, value, _, _ = operands(Shape(1, 1, 1, 4, 70, 8, 8))
    query[..., 1, 0], key[..., 66, 1], value[..., 5, 2] = torch.nan, torch.inf, torch.inf
    with target("gpu"):
        ours = F.scaled_dot_product_attention(query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)).cpu()
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(query, key, value), equal_nan=True, rtol=1e-4, atol=1e-5
    )


def test_memory_grows_with_the_length() -> None:
    def peak(length: int) -> int:
        given = [torch.randn(1, 2, length, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        torch.bp.reset_peak_memory_stats()
        before = torch.bp.memory_allocated()
        F.scaled_dot_product_attention(*given, is_causal=True).sum().backward()
        return torch.bp.max_memory_allocated() - before

    with target("gpu"):
        peak(64)  # what is kept from then on
        short, long = peak(256), peak(1024)
    assert long <= 5 * short
    assert long < 2 * 1024 * 1024 * 4  # a number for each query and key


def test_what_it_is_not_for_is_composed() -> None:
    x = torch.randn(2, 2, 6, 8, device=DEVICE)
    mask = torch.randn(6, 6, device=DEVICE)
    with target("gpu"):
        assert chosen(x, x, x) == ONE_PASS
        assert chosen(x, x, x, mask) == ONE_PASS
        assert chosen(x, x, x, dropout_p=0.5) == MATH
        assert chosen(x, x, x, mask.clone().requires_grad_()) == MATH
        assert chosen(x[0], x[0], x[0]) == MATH
        assert chosen(x, x[:, :1], x[:, :1]) == MATH  # heads are not shared unless it is asked for
        assert chosen(x, x[:, :1], x[:, :1], enable_gqa=True) == ONE_PASS
        assert chosen(x[:, :, :0], x, x) == MATH
        torch.testing.assert_close(
            F.scaled_dot_product_attention(x[0], x[0], x[0]).cpu(), F.scaled_dot_product_attention(*[x[0].cpu()] * 3)
        )
        past_the_choice = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
        for given, dropout in (((x, x, x), 0.5), ((x[0], x[0], x[0]), 0.0)):
            with pytest.raises(RuntimeError, match=f"and no dropout; got sizes .* and dropout_p={dropout:g}"):
                past_the_choice(*given, dropout_p=dropout)
    with target("gpu", local_memory=2 << 10):
        assert chosen(x, x, x) == MATH
    assert chosen(x, x, x) == MATH  # where a work item is a thread's
