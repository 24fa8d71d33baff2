"""Fused attention: compares results and gradients with float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from agreement import DEVICE, peak_memory
from targets import launch, target
from torch.nn import functional as F

from torch_backplane import planning, plans
from torch_backplane.compile.flex_operator import Statements
from torch_backplane.planning import host_sees_memory

MATH, ONE_PASS = 0, 4  # values of at::SDPBackend; 4 is `overrideable`
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
    """Returns query, key, value, mask and a gradient of the result."""

    def made(heads: int, length: int, depth: int) -> torch.Tensor:
        sizes = (shape.batch, length, heads, depth) if transposed else (shape.batch, heads, length, depth)
        x = torch.randn(sizes).to(dtype)
        return x.transpose(1, 2) if transposed else x

    query = made(shape.heads, shape.queries, shape.depth)
    key, value = made(shape.shared, shape.keys, shape.depth), made(shape.shared, shape.keys, shape.columns)
    mask = None
    if bias == "bool":
        mask = torch.rand(shape.queries, shape.keys) > 0.3
        mask[0] = False  # the first row is fully masked
    elif bias:
        mask = torch.randn(shape.batch, 1, shape.queries, shape.keys).to(dtype)
        mask[..., ::3] = -torch.inf
    return query, key, value, mask, torch.randn(shape.batch, shape.heads, shape.queries, shape.columns).to(dtype)


def attended(given: Any, device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Returns the result and the gradients of query, key and value, converted to float64 on the CPU."""
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


def matrix_figures() -> dict[str, Any]:
    """Returns the figures with which kernels use the device's matrix instructions, if it has any."""
    own = planning.dialect_of(torch.device(DEVICE)).target
    names = ("matrix_dtypes", "subgroup_size", "subgroup_shuffles")
    return {name: getattr(own, name) for name in names} if own.matrix_dtypes else {}


@contextmanager
def kernels(**figures: int) -> Iterator[None]:
    """Computes attention with kernels for a GPU with these figures, also if its driver has a library."""
    figures = figures if "max_group_size" in figures else matrix_figures() | figures
    prefer = torch.backends.bp.preferred_attention_library  # type: ignore[attr-defined]
    before = prefer()
    prefer("generated")
    try:
        with target("gpu", **figures):
            yield
    finally:
        prefer(before)


# The target's figures determine tile sizes. SMALL is less than one tile, LARGE has several of each kind.
SMALL, LARGE = Shape(1, 2, 2, 5, 7, 8, 8), Shape(2, 4, 2, 70, 130, 24, 40)
FEW_ITEMS, LITTLE_MEMORY = {"max_group_size": 64}, {"local_memory": 8 << 10}

@pytest.mark.parametrize(
    ("shape", "causal", "figures"),
    [
        (SMALL, True, {}),
        (LARGE, False, {}),
        (LARGE, True, {}),
        (SMALL, False, FEW_ITEMS),
        (LARGE, True, FEW_ITEMS),
        (LARGE, True, LITTLE_MEMORY),
    ],
)
def test_results_and_gradients(shape: Shape, causal: bool, figures: dict[str, int]) -> None:
    with kernels(**figures):
        assert_right(operands(shape), is_causal=causal)
        assert plans.stats()["backplane::attention_backward"]["planner_calls"] == 1


@pytest.mark.parametrize("bias", ["bool", "float"])
@pytest.mark.parametrize("transposed", [False, True])
def test_masks_and_layouts(bias: str, transposed: bool) -> None:
    with kernels():
        for columns in (200, 8):
            assert_right(operands(Shape(2, 4, 1, 33, 65, 8, columns), bias, transposed=transposed))
        assert "backplane::attention" in plans.stats()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    with kernels():
        assert_right(operands(Shape(1, 2, 1, 40, 50, 16, 16), "float", dtype), dtype, scale=0.3)
        assert "backplane::attention" in plans.stats()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision_with_one_dominant_weight(dtype: torch.dtype) -> None:
    """Score gradients almost cancel there, and the log-sum-exp from which weights are recomputed is several hundred, so
    that its rounding error is large."""
    query, key, value = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 20, 8), 30 * torch.randn(1, 1, 20, 8)
    query[..., 0], key[..., 0] = 16 + torch.rand(64), 17.25
    key[..., 0, 0] = 18
    given = [one.to(dtype) for one in (query, key, value)]
    given += [None, torch.randn(1, 1, 64, 8).to(dtype)]
    with kernels():
        found = attended(given, DEVICE, dtype, scale=1.0)
    right = attended(given, "cpu", torch.float64, scale=1.0)
    for ours, theirs in zip(found, right, strict=True):
        errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert errors.median() < 0.02


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision_with_equal_values(dtype: torch.dtype, causal: bool) -> None:
    """If all values are equal, the result does not depend on the scores: gradients of query and key are exactly 0."""
    query, key = (torch.randn(2, 4, 50, 24) for _ in range(2))
    value = torch.full((2, 4, 50, 24), 9984.0) * torch.randn(2, 4, 1, 24).sign()
    given = [*(one.to(dtype) for one in (query, key[:, ::2], value[:, ::2])), None, torch.randn(2, 4, 50, 24).to(dtype)]
    with kernels():
        found = attended(given, DEVICE, dtype, is_causal=causal)
    assert not found[1].any()
    assert not found[2].any()


def test_dynamic_shape() -> None:
    chance = random.Random(0)
    with kernels():
        for _ in range(12):
            lengths = (chance.randint(8, 90) for _ in range(2))
            shape = Shape(chance.randint(1, 3), 2, 2, *lengths, *[chance.choice((8, 24))] * 2)
            assert_right(operands(shape), scale=chance.random())
        (counts,) = (one for name, one in plans.stats().items() if name == "backplane::attention")
        assert counts["dynamic_shape_classes"] == counts["classes"]
        assert counts["dynamic_shape_replays"] > 4


def test_nonfinite_inputs() -> None:
    query, key, value, _, _ = operands(Shape(1, 1, 1, 9, 70, 8, 8))
    query[..., 1, 0], key[..., 66, 1], value[..., 5, 2] = torch.nan, torch.inf, torch.inf
    with kernels():
        ours = F.scaled_dot_product_attention(query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)).cpu()
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(query, key, value), equal_nan=True, rtol=1e-4, atol=1e-5
    )


def test_memory_grows_linearly_with_the_length() -> None:
    def peak(length: int) -> int:
        given = [torch.randn(1, 2, length, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        return peak_memory(lambda: F.scaled_dot_product_attention(*given, is_causal=True).sum().backward())

    with kernels():
        peak(64)  # allocates what stays allocated
        short, long = peak(256), peak(1024)
    assert long <= 5 * short
    assert long < 2 * 1024 * 1024 * 4  # one float32 per head, query and key


def test_unsupported_calls_are_composed() -> None:
    x = torch.randn(2, 2, 6, 8, device=DEVICE)
    mask = torch.randn(6, 6, device=DEVICE)
    with target("gpu"):
        assert chosen(x, x, x) == ONE_PASS
        assert chosen(x, x, x, mask) == ONE_PASS
        assert chosen(x, x, x, dropout_p=0.5) == ONE_PASS
        assert chosen(x, x, x, mask.clone().requires_grad_()) == ONE_PASS
        assert chosen(x, x, x, mask.expand(3, 2, 6, 6)) == MATH  # the mask's batch size differs
        assert chosen(x, x, x, mask.expand(1, 1, 1, 6, 6)) == MATH
        assert chosen(x[0], x[0], x[0]) == MATH
        assert chosen(x, x[:, :1], x[:, :1]) == MATH  # heads are shared only with enable_gqa
        assert chosen(x, x[:, :1], x[:, :1], enable_gqa=True) == ONE_PASS
        assert chosen(x[:, :, :0], x, x) == MATH
        torch.testing.assert_close(
            F.scaled_dot_product_attention(x[0], x[0], x[0]).cpu(), F.scaled_dot_product_attention(*[x[0].cpu()] * 3)
        )
        past_the_choice = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
        for given, dropout in (((x, x, x), -0.5), ((x[0], x[0], x[0]), 0.0)):
            with pytest.raises(RuntimeError, match=f"between 0 and 1, but got sizes .* and dropout_p={dropout:g}"):
                past_the_choice(*given, dropout_p=dropout)
    with target("gpu", local_memory=2 << 10):
        assert chosen(x, x, x) == MATH
    # On CPUs, PyTorch's kernel computes what it supports, if the host can access the memory.
    on_host = ONE_PASS if host_sees_memory(x.device) else MATH
    with target("cpu"):
        assert chosen(x, x, x) == on_host
        assert chosen(x, x, x, mask) == on_host
        assert chosen(x, x, x, dropout_p=0.5) == MATH
        assert chosen(x, x, x, mask.clone().requires_grad_()) == MATH
        assert chosen(x, x[:, :1], x[:, :1], enable_gqa=True) == MATH
        assert chosen(x[0], x[0], x[0]) == MATH


# --- dropout


def drawn(given: Any, p: float, seed: int, **options: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Runs `attended` with dropout from a seed. Also returns the factors that dropout applied to the weights.

    With the same seed and an identity matrix as values, attention returns the weights themselves. The identity is split
    into parts with as many columns as the values, so that the same kernels run.
    """
    query, key, value, mask, _ = given
    torch.manual_seed(seed)
    found = attended(given, DEVICE, query.dtype, dropout_p=p, **options)
    keys, columns = key.shape[2], value.shape[3]
    identity = F.pad(torch.eye(keys, dtype=key.dtype), (0, -keys % columns))
    there = [one.to(DEVICE) for one in (query, key)]
    mask = None if mask is None else mask.to(DEVICE)
    options["enable_gqa"] = query.shape[1] != key.shape[1]

    def weights(p: float) -> torch.Tensor:
        parts = []
        for part in identity.split(columns, 1):
            values = part.expand(*key.shape[:2], keys, columns).contiguous().to(DEVICE)
            torch.manual_seed(seed)
            parts.append(F.scaled_dot_product_attention(*there, values, attn_mask=mask, dropout_p=p, **options).cpu())
        return torch.cat(parts, -1)[..., :keys].double()

    dropped, whole = weights(p), weights(0.0)
    factors = torch.where(whole > 0, (dropped / whole.clamp_min(1e-300)), 0.0)
    assert ((factors - 1 / (1 - p)).abs() < 2e-2).logical_or(factors == 0).all()
    return found, (factors > 0) / (1 - p)


def explicit(given: Any, factors: torch.Tensor, is_causal: bool = False) -> list[torch.Tensor]:
    """Computes the same from basic operators, in float64 on the CPU."""
    *tensors, mask, grad = given
    inputs = [one.double().detach().requires_grad_() for one in tensors]
    query, key, value = inputs
    times = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(times, 1).mT / query.shape[3] ** 0.5
    if is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    out = (weights * factors) @ value.repeat_interleave(times, 1)
    return [one.detach() for one in (out, *torch.autograd.grad(out, inputs, grad.double()))]


@pytest.mark.parametrize(
    ("shape", "bias", "causal", "figures"),
    [
        (SMALL, "", False, {}),
        (Shape(2, 4, 2, 70, 133, 24, 40), "", True, {}),
        (Shape(2, 4, 2, 70, 133, 24, 40), "", True, LITTLE_MEMORY),
        (Shape(2, 4, 1, 33, 65, 8, 200), "float", False, FEW_ITEMS),
        (Shape(2, 2, 2, 70, 33, 8, 8), "bool", False, FEW_ITEMS),
        (Shape(2, 2, 2, 70, 33, 8, 8), "bool", False, LITTLE_MEMORY),
    ],
)
def test_dropout_and_its_gradients(shape: Shape, bias: str, causal: bool, figures: dict[str, int]) -> None:
    given = operands(shape, bias)
    if bias == "bool":
        given[3][0, 0] = True  # the dropout factors of a fully masked row cannot be recovered
    with target("gpu", **figures):
        found, factors = drawn(given, 0.3, 7, is_causal=causal)
        assert "backplane::attention_backward" in plans.stats()
    seen = (shape.keys * shape.queries) ** 0.5
    assert 0.0 < (factors > 0).double().mean() < 0.7 + 3 / seen
    for name, ours, theirs in zip(
        ("result", "query", "key", "value"), found, explicit(given, factors, causal), strict=True
    ):
        scale = theirs.square().mean().sqrt().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dropout_of_other_dtypes(dtype: torch.dtype) -> None:
    given = operands(Shape(1, 2, 1, 40, 50, 16, 16), "float", dtype)
    with target("gpu"):
        found, factors = drawn(given, 0.5, 3)
    for ours, theirs in zip(found, explicit(given, factors), strict=True):
        scale = theirs.square().mean().sqrt().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_unbiased_and_uncorrelated(p: float) -> None:
    """The rate of kept weights is right along all dimensions, and neighbours are uncorrelated, within five standard
    deviations."""
    given = operands(Shape(2, 3, 3, 90, 150, 8, 8))
    with target("gpu"):
        _, factors = drawn(given, p, 11)
    kept = (factors > 0).double()
    variance = p * (1 - p)
    for dims in ([0, 1, 2, 3], [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]):
        shares = kept.mean(dims)
        assert (shares - (1 - p)).abs().max() <= 5 * (variance * shares.numel() / kept.numel()) ** 0.5
    centred = kept - (1 - p)
    for step, dim in ((1, 3), (4, 3), (16, 3), (1, 2), (1, 1), (1, 0)):
        other = centred.roll(step, dim)
        assert abs((centred * other).mean()) <= 5 * variance / kept.numel() ** 0.5


def test_mean_with_dropout_equals_the_result_without_dropout() -> None:
    query, key, value, _, _ = (None if one is None else one.to(DEVICE) for one in operands(Shape(1, 1, 1, 6, 20, 8, 4)))
    count, p = 400, 0.4
    many = [one.expand(count, *one.shape[1:]) for one in (query, key, value)]
    with target("gpu"):
        found = F.scaled_dot_product_attention(*many, dropout_p=p).cpu().double()
        right = F.scaled_dot_product_attention(query, key, value).cpu().double()[0]
    deviation = found.std(0) / count**0.5
    assert ((found.mean(0) - right).abs() <= 5 * deviation).all()
    assert found.std(0).min() > 0.01


def test_dropout_changes_per_call_and_repeats_with_the_seed() -> None:
    def draw() -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return [one.detach().cpu() for one in (out, *torch.autograd.grad(out.sum(), x))]

    x = torch.randn(2, 2, 40, 8, device=DEVICE, requires_grad=True)
    with target("gpu"):
        torch.manual_seed(5)
        first, second, third = draw(), draw(), draw()
        after = torch.rand(4, device=DEVICE)
        counts = plans.stats()["backplane::attention"]
        assert (counts["planner_calls"], counts["replays"]) == (1, 2)
        torch.manual_seed(5)
        again = [draw() for _ in range(3)]
        assert torch.equal(torch.rand(4, device=DEVICE).cpu(), after.cpu())
        state = torch.bp.get_rng_state()
        draw()
        assert not torch.equal(torch.bp.get_rng_state(), state)
        F.scaled_dot_product_attention(x, x, x)
        later = torch.bp.get_rng_state()
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
        assert torch.equal(torch.bp.get_rng_state(), later)
    for ours, same in zip((first, second, third), again, strict=True):
        assert all(map(torch.equal, ours, same))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(second[0], third[0])


def test_dropout_probability_at_and_beyond_its_limits() -> None:
    given = operands(Shape(1, 2, 2, 33, 20, 8, 8))
    with target("gpu"):
        nothing = attended(given, DEVICE, torch.float32, dropout_p=1.0)
        assert all((one == 0).all() for one in nothing)
        everything = attended(given, DEVICE, torch.float32, dropout_p=0.0)
        assert all(map(torch.equal, everything, attended(given, DEVICE, torch.float32)))
        for p in (-0.5, 1.5, torch.nan):
            with pytest.raises(RuntimeError):
                attended(given, "cpu", torch.float32, dropout_p=p)
            with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
                attended(given, DEVICE, torch.float32, dropout_p=p)
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):  # composed
        attended(given, DEVICE, torch.float32, dropout_p=-0.5)


def test_plans_are_reused_for_other_dropout_probabilities_and_shapes() -> None:
    with target("gpu"):
        for number, length in enumerate((20, 20, 35, 35, 70, 90)):
            given = operands(Shape(1, 2, 2, length, length + 3, 8, 8))
            p = 0.2 + number / 10
            found, factors = drawn(given, p, number)
            for ours, theirs in zip(found, explicit(given, factors), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5 * theirs.square().mean().sqrt().item())
        counts = plans.stats()["backplane::attention_backward"]
        assert counts["planner_calls"] < 6
        assert counts["dynamic_shape_replays"] > 0


def test_dropout_keeps_no_mask() -> None:
    def peak(length: int) -> int:
        given = [torch.randn(1, 2, length, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        attention = F.scaled_dot_product_attention
        return peak_memory(lambda: attention(*given, is_causal=True, dropout_p=0.2).sum().backward())

    with target("gpu"):
        peak(64)  # allocates what stays allocated
        assert peak(1024) <= 5 * peak(256)


# --- the gradient of the mask


def with_mask_gradient(given: Any, device: str, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Returns the gradients of query, key, value and mask, converted to float64 on the CPU."""
    *tensors, grad = given
    inputs = [one.to(device, dtype).detach().requires_grad_() for one in tensors]
    shares = inputs[0].shape[1] != inputs[1].shape[1]
    out = F.scaled_dot_product_attention(*inputs[:3], attn_mask=inputs[3], enable_gqa=shares, **options)
    return [one.cpu().double() for one in torch.autograd.grad(out, inputs, grad.to(device, dtype))]


def assert_mask_gradient(sizes: tuple[int, ...], shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    query, key, value, _, grad = operands(shape, dtype=dtype)
    mask = torch.randn(sizes).to(dtype)
    if mask.numel() > 4:
        mask[..., ::3] = -torch.inf if mask.shape[-1] > 1 else 1
    given = (query, key, value, mask, grad)
    found, right = with_mask_gradient(given, DEVICE, dtype), with_mask_gradient(given, "cpu", torch.float64)
    assert found[3].shape == mask.shape
    for name, ours, theirs in zip(("query", "key", "value", "mask"), found, right, strict=True):
        # The score gradients of a row sum to 0. If the mask's gradient is such a sum, only rounding errors are left.
        least = 1.0 if name == "mask" and sizes[-1:] in ((), (1,)) else 0.0
        scale = max(theirs.square().mean().sqrt().item(), least)
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=TOLERANCES[dtype] * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


MASKS = [
    (2, 4, 70, 133),
    (70, 133),
    (2, 1, 70, 133),
    (4, 1, 133),
    (1, 4, 70, 1),
    (133,),
    (2, 1, 1, 133),
    (1, 1),
    (),
    (2, 4, 1, 1),
]


@pytest.mark.parametrize("sizes", MASKS, ids=str)
@pytest.mark.parametrize("units", [1, 16])
def test_gradient_of_the_mask(sizes: tuple[int, ...], units: int) -> None:
    """Masks broadcast in any dimension. On a device with more compute units, sums are divided into parts."""
    with target("gpu", max_group_size=64, compute_units=units):
        assert_mask_gradient(sizes, Shape(2, 4, 2, 70, 133, 24, 8))
        assert plans.stats()["backplane::attention_backward"]["planner_calls"] == 1


@pytest.mark.parametrize("sizes", MASKS, ids=str)
@pytest.mark.parametrize("units", [1, 16])
def test_sums_of_score_gradients(sizes: tuple[int, ...], units: int) -> None:
    """Passes a forward result of zeros to the backward, so that the score gradients of a row do not sum to 0."""
    shape = Shape(2, 4, 2, 70, 133, 24, 8)
    query, key, value, _, grad = operands(shape)
    mask = torch.randn(sizes)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT * 0.2 + mask.double()
    right = torch.softmax(scores, -1) * (grad.double() @ value.double().repeat_interleave(2, 1).mT)
    operands_there = [one.to(DEVICE) for one in (grad, query, key, value, mask, torch.zeros_like(grad))]
    with target("gpu", max_group_size=64, compute_units=units):
        logarithm = torch.logsumexp(scores, -1).float().to(DEVICE)
        options = (False, 0.2, None, None, [False, False, False, True])
        *others, found = torch.ops.backplane.attention_backward(*operands_there, logarithm, *options)
    assert others == [None] * 3
    right = right.sum_to_size(sizes)
    torch.testing.assert_close(found.cpu().double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradient_of_masks_of_other_dtypes(dtype: torch.dtype) -> None:
    with target("gpu"):
        for sizes in ((40, 50), (2, 1, 1, 50)):
            assert_mask_gradient(sizes, Shape(2, 2, 1, 40, 50, 16, 16), dtype)
        assert "backplane::attention_backward" in plans.stats()


def test_gradient_of_a_float32_mask_with_float16_operands() -> None:
    query, key, value, _, grad = operands(Shape(2, 2, 2, 40, 50, 16, 16), dtype=torch.float16)
    mask = torch.randn(40, 50).requires_grad_()

    def gradient(device: str) -> torch.Tensor:
        there = [one.to(device) for one in (query, key, value)]
        out = F.scaled_dot_product_attention(*there, attn_mask=mask.to(device))
        (found,) = torch.autograd.grad(out, mask, grad.to(device))
        return found

    with target("gpu"):
        assert_close = torch.testing.assert_close
        assert_close(gradient(DEVICE), gradient("cpu"), rtol=0, atol=2e-2)
        assert "backplane::attention_backward" in plans.stats()


def test_gradient_of_the_mask_alone_with_dropout() -> None:
    query, key, value, _, grad = operands(Shape(2, 2, 2, 40, 50, 16, 16))
    mask = torch.randn(1, 2, 40, 50)
    with target("gpu"):
        _, factors = drawn((query, key, value, mask.expand(2, 2, 40, 50).contiguous(), grad), 0.4, 9)
        there = [one.to(DEVICE) for one in (query, key, value, mask)]
        there[3].requires_grad_()
        torch.manual_seed(9)
        out = F.scaled_dot_product_attention(*there[:3], attn_mask=there[3], dropout_p=0.4)
        (ours,) = torch.autograd.grad(out, there[3], grad.to(DEVICE))
        text = plans.explain(
            lambda: torch.autograd.grad(
                F.scaled_dot_product_attention(*there[:3], attn_mask=there[3], dropout_p=0.4), there[3], grad.to(DEVICE)
            )
        )
    right = mask.double().requires_grad_()
    scores = query.double() @ key.double().mT / 4 + right
    ((torch.softmax(scores, -1) * factors) @ value.double()).backward(grad.double())
    torch.testing.assert_close(ours.cpu().double(), right.grad, rtol=1e-4, atol=1e-5)
    assert "attention_key_gradient" not in text


def test_gradient_of_the_mask_is_deterministic() -> None:
    query, key, value, _, grad = operands(Shape(2, 4, 2, 70, 133, 24, 8))
    mask = torch.randn(133)
    torch.use_deterministic_algorithms(True)
    try:
        with target("gpu"):
            found = [with_mask_gradient((query, key, value, mask, grad), DEVICE, torch.float32) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_gradient_of_the_mask_does_not_allocate_scores() -> None:
    def peak(length: int) -> int:
        given = [torch.randn(1, 2, length, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
        mask = torch.zeros(length, device=DEVICE, requires_grad=True)
        return peak_memory(lambda: F.scaled_dot_product_attention(*given, attn_mask=mask).sum().backward())

    with target("gpu"):
        peak(64)  # allocates what stays allocated
        assert peak(1024) <= 5 * peak(256)


# --- keys divided among groups, for few queries


@contextmanager
def divided(units: int, **figures: Any) -> Iterator[list[str]]:
    """Generates kernels for a GPU with `units` compute units. Yields the names of the kernels that are launched."""
    names: list[str] = []
    compiled = launch.compiled

    def noted(index: int, kernel: Any, name: str) -> Any:
        names.append(kernel.name.removeprefix("bp_"))
        return compiled(index, kernel, name)

    with kernels(compute_units=units, **figures):
        launch.compiled = noted
        try:
            yield names
        finally:
            launch.compiled = compiled


@pytest.mark.parametrize("units", [2, 16])
@pytest.mark.parametrize(
    ("shape", "bias", "causal"),
    [
        (Shape(1, 2, 2, 1, 300, 24, 24), "", False),
        (Shape(2, 4, 1, 3, 517, 8, 150), "float", False),
        (Shape(1, 2, 2, 2, 260, 8, 8), "bool", False),
        (Shape(1, 1, 1, 200, 300, 8, 8), "", True),
        (Shape(1, 1, 1, 150, 150, 8, 8), "", True),
    ],
)
def test_divided_keys(shape: Shape, bias: str, causal: bool, units: int) -> None:
    with divided(units) as names:
        assert_right(operands(shape, bias), is_causal=causal)
    assert names.count("attention_parts") == names.count("attention_merged") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_divided_keys_of_other_dtypes(dtype: torch.dtype) -> None:
    with divided(16) as names:
        assert_right(operands(Shape(1, 2, 1, 2, 260, 16, 16), "float", dtype), dtype, scale=0.3)
    assert "attention_merged" in names


def test_when_keys_are_divided() -> None:
    for shape, units, expected in (
        (Shape(1, 2, 2, 1, 100, 8, 8), 64, False),  # few keys
        (Shape(1, 2, 2, 1, 300, 8, 8), 64, True),
        (Shape(8, 4, 4, 1, 300, 8, 8), 2, False),  # groups enough
        (Shape(1, 1, 1, 70, 300, 8, 8), 64, True),
    ):
        query, key, value, _, _ = (None if one is None else one.to(DEVICE) for one in operands(shape))
        with divided(units) as names:
            F.scaled_dot_product_attention(query, key, value)
        assert ("attention_merged" in names) == expected, (shape, units)


def test_divided_keys_with_fully_masked_parts() -> None:
    """Some parts are fully masked, and so is one row."""
    query, key, value, _, grad = operands(Shape(1, 2, 2, 2, 300, 8, 8))
    mask = torch.zeros(2, 300, dtype=torch.bool)
    mask[1, 70:75] = True
    with divided(16) as names:
        assert_right((query, key, value, mask, grad))
    assert "attention_merged" in names


def test_divided_keys_with_nonfinite_inputs() -> None:
    query, key, value, _, _ = operands(Shape(1, 1, 1, 4, 300, 8, 8))
    query[..., 1, 0], key[..., 66, 1], value[..., 5, 2] = torch.nan, torch.inf, torch.inf
    with divided(16) as names:
        ours = F.scaled_dot_product_attention(query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)).cpu()
    torch.testing.assert_close(
        ours, F.scaled_dot_product_attention(query, key, value), equal_nan=True, rtol=1e-4, atol=1e-5
    )
    assert "attention_merged" in names


@pytest.mark.parametrize("listed", [1, 3, 5])
def test_divided_blocks_of_keys(listed: int) -> None:
    """flex_attention's kernel: work groups share the blocks of keys that a block mask lists."""
    query, key, value = torch.randn(1, 4, 3, 24), torch.randn(1, 2, 300, 24), torch.randn(1, 2, 300, 40)
    indices = torch.tensor([9, 2, 5, 7, 0, 0, 0, 0, 0, 0], dtype=torch.int32).reshape(1, 1, 1, 10)
    count = torch.full((1, 1, 1), listed // 2, dtype=torch.int32)
    full, full_count = torch.tensor([3, 8, 1], dtype=torch.int32).reshape(1, 1, 1, 3), listed - count
    text = Statements(
        modify="score = score * factors[in_head];", mask="attends = key_at % 3 != query_at;", functions="", dtypes=[],
        inputs=["factors"], numbers=[], reports_errors=False,
    ).as_text()  # fmt: skip
    factors = torch.rand(4)
    blocks = [one.to(DEVICE) for one in (count, indices, full_count, full)]
    given = (*(one.to(DEVICE) for one in (query, key, value)), blocks, [factors.to(DEVICE)], [])
    with divided(16) as names:
        found = torch.ops.backplane.flex_attention(*given, (480, 120, 40, 1), (128, 32), 0.25, True, text)
    assert names == ["flex_attention_parts", "attention_merged"]
    allowed = torch.zeros(3, 300, dtype=torch.bool)
    for block in indices.flatten()[: listed // 2].tolist():
        places = torch.arange(block * 32, min(300, block * 32 + 32))
        allowed[:, places] = places % 3 != torch.arange(3)[:, None]
    for block in full.flatten()[: listed - listed // 2].tolist():
        allowed[:, block * 32 : block * 32 + 32] = True
    scores = query @ key.repeat_interleave(2, 1).mT * 0.25 * factors[:, None, None]
    scores = scores.masked_fill(~allowed, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    in_base_2 = [one / math.log(2) for one in (scores.logsumexp(-1), scores.amax(-1))]
    torch.testing.assert_close([one.cpu() for one in found], [expected, *in_base_2], rtol=1e-4, atol=1e-5)


def test_dropout_does_not_depend_on_the_division_of_keys() -> None:
    given = operands(Shape(3, 4, 4, 3, 300, 8, 8))
    found = []
    for units in (1, 2, 16):
        with divided(units) as names:
            torch.manual_seed(3)
            found.append(attended(given, DEVICE, torch.float32, dropout_p=0.3))
        assert ("attention_merged" in names) == (units > 1)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_decoding_with_a_growing_number_of_keys() -> None:
    """Most lengths reuse a plan."""
    query, keys, values, _, _ = operands(Shape(1, 2, 2, 1, 340, 8, 8))
    with divided(16) as names:
        for length in range(300, 340, 2):
            key, value = keys[:, :, :length].contiguous(), values[:, :, :length].contiguous()
            ours = F.scaled_dot_product_attention(query.to(DEVICE), key.to(DEVICE), value.to(DEVICE)).cpu()
            torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value), rtol=1e-4, atol=1e-5)
        counts = plans.stats()["backplane::attention"]
        assert counts["planner_calls"] <= 6
        assert counts["dynamic_shape_replays"] >= 14
    assert "attention_merged" in names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_fast_path_does_not_overflow(dtype: torch.dtype) -> None:
    """The products of these queries and keys exceed the range of float16."""
    attention = torch.nn.MultiheadAttention(64, 1, batch_first=True, device="bp", dtype=dtype).eval()
    with torch.no_grad():
        attention.in_proj_weight.fill_(0.5)
    x = torch.full((1, 4, 64), 3.5, device="bp", dtype=dtype)
    slow = attention(x, x, x, need_weights=False)[0]
    with torch.no_grad():
        fast = attention(x, x, x, need_weights=False)[0]
    assert slow.isfinite().all()
    torch.testing.assert_close(fast, slow.detach(), rtol=2e-2, atol=1e-2)
