"""Compares attention by matrix instructions (tensor cores), and its gradients, with PyTorch on the CPU.

The kernel interpreter runs the CUDA C++ text, with the registers of each work item as the PTX ISA describes them, and
reports races between work items.
"""

from __future__ import annotations

import pytest
import torch
from template_runners import interpret, machine_code
from test_templates_matrix import HALVES, dialect, listing
from torch.nn import functional as F

from torch_backplane.kernels import OpenCLC, Target
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.templates.attention import AttentionParams, Dropout, Saved, attention, attention_gradient
from torch_backplane.kernels.templates.attention_bias import attention_bias_gradient
from torch_backplane.kernels.templates.flex_attention import (
    BlockMask,
    Operands,
    Results,
    Scores,
    flex_attention,
    flex_attention_gradient,
)
from torch_backplane.kernels.templates.source import Launch
from torch_backplane.ptxas import sass

halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


def made(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "") -> torch.Tensor:
    if layout == "heads last":  # as projections of a model give them
        batch, heads, rows, columns = shape
        return torch.randn(batch, rows, heads, columns).to(dtype).transpose(1, 2)
    if layout == "columns":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).mT
    if layout == "gaps":
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    return torch.randn(shape).to(dtype)


def uses_matrices(launch: Launch) -> bool:
    return "multiply_fragments(&" in launch.kernel.text


def close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    scale = right.square().mean().sqrt().item()
    torch.testing.assert_close(found.double(), right, rtol=0, atol=24 * ROUNDING[dtype] * scale)


def computed(given: list[torch.Tensor], params: AttentionParams, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result and all gradients, by matrix instructions."""
    query, key, value = given
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype)
    logarithm = torch.empty(query.shape[:3])
    (launch,) = attention(dialect(1), out, logarithm, query, key, value, params)
    assert uses_matrices(launch)
    interpret(launch)
    inner = torch.empty_like(logarithm)
    found = {"result": out}
    saved = Saved(query, key, value, logarithm, inner)
    results = {"inner": inner[..., None]} | {
        name: torch.empty_like(one) for name, one in zip(("query", "key", "value"), given, strict=True)
    }
    for of, result in results.items():
        launch = attention_gradient(
            dialect(1), result, of, grad, saved._replace(inner=None) if of == "inner" else saved, params
        )
        assert uses_matrices(launch)
        interpret(launch)
        found[of] = result
    if params.bias is not None:
        result = torch.empty(1, *params.bias.shape, dtype=query.dtype)
        launch = attention_bias_gradient(dialect(1), result, grad, saved, params)
        assert uses_matrices(launch)
        interpret(launch)
        found["bias"] = result[0]
    return found


def expected(given: list[torch.Tensor], params: AttentionParams, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    inputs = [one.double().requires_grad_() for one in given]
    query, key, value = inputs
    bias = None if params.bias is None else params.bias.double().requires_grad_()
    out = F.scaled_dot_product_attention(
        query, key, value, bias, is_causal=params.causal, scale=params.scale, enable_gqa=True
    )
    wanted = dict(zip(("query", "key", "value"), inputs, strict=True)) | ({} if bias is None else {"bias": bias})
    gradients = torch.autograd.grad(out, list(wanted.values()), grad.double())
    return {"result": out.detach(), **dict(zip(wanted, gradients, strict=True))}


CASES = [  # (heads, fewer heads, queries, keys, depth, columns, layout)
    (2, 2, 64, 64, 64, 64, ""),
    (4, 2, 70, 130, 24, 40, ""),
    (2, 1, 40, 200, 128, 128, "heads last"),
    (2, 2, 129, 65, 72, 150, ""),
    (2, 2, 65, 67, 33, 17, ""),
    (2, 2, 70, 90, 16, 24, "columns"),
    (2, 2, 70, 90, 16, 24, "gaps"),
]


@halves
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_results_and_gradients(case: tuple, causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, fewer, queries, keys, depth, columns, layout = case
    given = [
        made((2, heads, queries, depth), dtype, layout),
        made((2, fewer, keys, depth), dtype, layout),
        made((2, fewer, keys, columns), dtype, layout),
    ]
    grad = made((2, heads, queries, columns), dtype, layout)
    for aligned in (False, True) if not causal else (True,):
        params = AttentionParams(None, causal, depth**-0.5, None, aligned)
        found, right = computed(given, params, grad), expected(given, params, grad)
        for name, one in right.items():
            close(found[name], one, dtype)


@halves
def test_bias_and_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [made((2, 2, 70, 32), dtype), made((2, 1, 90, 32), dtype), made((2, 1, 90, 24), dtype)]
    bias, grad = made((2, 2, 70, 90), dtype), made((2, 2, 70, 24), dtype)
    bias[..., ::3] = -torch.inf
    params = AttentionParams(bias, False, 0.2, None, True)
    found, right = computed(given, params, grad), expected(given, params, grad)
    for name, one in right.items():
        close(found[name], one, dtype)


@halves
def test_gradients_of_equal_values_are_exactly_zero(dtype: torch.dtype) -> None:
    """If all values are equal, the result does not depend on the scores."""
    torch.manual_seed(0)
    given = [made((1, 2, 50, 24), dtype), made((1, 2, 70, 24), dtype)]
    given.append((torch.full((1, 2, 70, 24), 9984.0) * torch.randn(1, 2, 1, 24).sign()).to(dtype))
    found = computed(given, AttentionParams(None, False, 0.2, None, True), made((1, 2, 50, 24), dtype))
    assert not found["query"].any()
    assert not found["key"].any()


@halves
def test_dropout(dtype: torch.dtype) -> None:
    """The identity as values shows the weights, which are 0 or raised. The gradient of the values has the same ones."""
    torch.manual_seed(0)
    query, key = made((1, 1, 70, 16), dtype), made((1, 1, 64, 16), dtype)
    value, state = torch.eye(64).to(dtype).view(1, 1, 64, 64), torch.empty(2, dtype=torch.int64)
    out, logarithm = torch.empty(1, 1, 70, 64, dtype=dtype), torch.empty(1, 1, 70)
    params = AttentionParams(None, False, 0.25, Dropout(0.75, state, (7, 4)), True)
    (launch,) = attention(dialect(1), out, logarithm, query, key, value, params)
    assert uses_matrices(launch)
    interpret(launch)
    weights = (query.double() @ key.double().mT * 0.25).softmax(-1)
    kept = out != 0
    assert 0.7 < kept.double().mean() < 0.8
    close(out, weights * kept / 0.75, dtype)
    again = params._replace(dropout=Dropout(0.75, state))
    grad, found = torch.eye(70).to(dtype)[None, None, :, :64].contiguous(), torch.empty_like(value)
    launch = attention_gradient(dialect(1), found, "value", grad, Saved(query, key, value, logarithm, None), again)
    interpret(launch)
    close(found, (weights * kept / 0.75)[..., :64, :].mT, dtype)


@halves
def test_parts_of_the_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (made((1, 1, rows, 32), dtype) for rows in (40, 900, 900))
    out, logarithm = torch.empty_like(query), torch.empty(1, 1, 40)
    launches = attention(dialect(16), out, logarithm, query, key, value, AttentionParams(None, False, 0.2, None, True))
    assert [(one.kernel.name, uses_matrices(one)) for one in launches] == [
        ("bp_attention_parts", True), ("bp_attention_merged", False)
    ]  # fmt: skip
    interpret(launches)
    right = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=0.2)
    close(out, right, dtype)


@halves
def test_modified_scores(dtype: torch.dtype) -> None:
    """Scores are doubled, and a window of keys is attended to, in the blocks that the mask lists."""
    torch.manual_seed(0)
    query, key, value, grad = (made((1, 2, 256, 32), dtype) for _ in range(4))
    window = (torch.arange(256)[:, None] - torch.arange(256)).abs() < 100
    counts = torch.tensor([2, 2], dtype=torch.int32).expand(1, 2, 2)
    indices = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32).expand(1, 2, 2, 2)
    blocks = BlockMask(counts, indices, None, None, 128, 128)
    doubled, inside = "score = score * 2;", "attends = query_at - key_at < 100 && key_at - query_at < 100;"
    scores = Scores(0.2, doubled, inside, "", (), {}, {}, None, "slope = slope * 2;", True)
    out, logarithm, maximum = torch.empty_like(query), torch.empty(1, 2, 256), torch.empty(1, 2, 256)
    results = Results(out, logarithm, maximum)
    (launch,) = flex_attention(dialect(1), results, Operands(query, key, value), blocks, scores)
    assert uses_matrices(launch)
    interpret(launch)
    inputs = [one.double().requires_grad_() for one in (query, key, value)]
    right = F.scaled_dot_product_attention(*inputs, window, scale=0.4)
    close(out, right.detach(), dtype)
    gradients = torch.autograd.grad(right, inputs, grad.double())
    inner = (grad.double() * right.detach()).sum(-1).float()
    for of, exact in zip(("query", "key", "value"), gradients, strict=True):
        found = torch.empty_like(query)
        saved = Saved(query, key, value, logarithm, inner)
        launch = flex_attention_gradient(dialect(1), found, of, grad, saved, blocks, scores)
        assert uses_matrices(launch)
        interpret(launch)
        close(found, exact, dtype)


def test_where_matrix_instructions_are_not_used() -> None:
    def uses(made_dialect: Dialect, dtype: torch.dtype = torch.float16, rows: int = 70) -> bool:
        query, key, value = (torch.empty(1, 1, length, 16, dtype=dtype) for length in (rows, 70, 70))
        out, logarithm = torch.empty_like(query), torch.empty(1, 1, rows)
        params = AttentionParams(None, False, 1.0, None, True)
        return uses_matrices(attention(made_dialect, out, logarithm, query, key, value, params)[0])

    assert uses(dialect())
    assert uses(dialect(), torch.bfloat16)
    assert not uses(dialect(), torch.float32)
    assert not uses(dialect(), rows=32)  # a smaller tile has room
    assert not uses(dialect(local_memory=40 << 10))
    assert not uses(dialect(subgroup_size=64))
    assert not uses(dialect(matrix_dtypes=frozenset({torch.bfloat16})))
    assert not uses(OpenCLC(Target.of_kind("gpu")))


def test_operands_are_copied_by_16_bytes_where_that_is_possible() -> None:
    def copies(key: torch.Tensor, aligned: bool = True) -> int:
        query = torch.empty(1, 2, 70, key.shape[3], dtype=torch.float16)
        value, logarithm = torch.empty(1, 2, key.shape[2], 16, dtype=torch.float16), torch.empty(1, 2, 70)
        out, params = torch.empty(1, 2, 70, 16, dtype=torch.float16), AttentionParams(None, False, 1.0, None, aligned)
        (launch,) = attention(dialect(1), out, logarithm, query, key, value, params)
        return launch.kernel.text.count("copy_16_bytes(&")

    def full(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16)

    assert copies(full(1, 2, 90, 16)) == 3
    assert copies(full(1, 2, 90, 16), aligned=False) == 0
    assert copies(full(1, 90, 2, 16).transpose(1, 2)) == 3
    assert copies(full(1, 2, 16, 90).mT) == 2
    assert copies(full(1, 2, 90, 20)) == 1  # neither rows of the query nor of the key
    assert copies(full(1, 2, 90, 20)[..., :16]) == 2
    assert copies(full(1, 1, 90, 16).expand(1, 2, 90, 16)) == 3


@pytest.mark.parametrize("depth", [64, 128])
@halves
def test_machine_code(dtype: torch.dtype, depth: int) -> None:
    """Instructions of tensor cores, and no spilled registers (`machine_code` raises for these)."""
    query, key, value, grad = (torch.empty(2, 2, 128, depth, dtype=dtype) for _ in range(4))
    rows, state = torch.empty(2, 2, 128), torch.empty(2, dtype=torch.int64)
    params = AttentionParams(None, True, 0.125, Dropout(0.5, state, (1, 4)), True)
    launches = attention(dialect(1), torch.empty_like(query), rows, query, key, value, params)
    again = params._replace(dropout=Dropout(0.5, state))
    for of in ("query", "key", "value", "inner"):
        saved = Saved(query, key, value, rows, None if of == "inner" else rows)
        out = rows[..., None] if of == "inner" else query
        launches.append(attention_gradient(dialect(1), out, of, grad, saved, again))
    for launch in launches:
        machine_code(launch.kernel.text, launch.kernel.name, launch.group_size)
        found = listing(launch, "sm_90")
        assert found.count("HMMA.16816.F32") >= 8
        assert "LDGSTS.E.BYPASS.128" in found
        assert sass.meant(launch.kernel.text) == {sass.LOADS, sass.PRODUCTS, sass.FRAGMENTS}
        assert not sass.lacking(sass.meant(launch.kernel.text), found)
