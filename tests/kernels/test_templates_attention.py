"""Compiles the one-pass attention templates as CUDA C++. tests/opencl/test_attention.py tests their results."""

from __future__ import annotations

import pytest
import torch
from kernel_runners import compile_cuda
from template_runners import check_cuda

from torch_backplane.kernels import CudaCpp, Target
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.attention import AttentionParams, Dropout, Saved, attention, attention_gradient
from torch_backplane.kernels.templates.attention_bias import attention_bias_gradient
from torch_backplane.kernels.templates.errors import Report
from torch_backplane.kernels.templates.flex_attention import (
    BlockMask,
    Operands,
    Results,
    Scores,
    flex_attention,
    flex_attention_gradient,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("causal", "biased", "drops"), [(False, True, False), (True, False, False), (False, True, True)]
)
def test_attention_compiles_as_cuda(dtype: torch.dtype, causal: bool, biased: bool, drops: bool) -> None:
    query, grad, out = (torch.empty(2, 4, 70, 24, dtype=dtype) for _ in range(3))
    key, value = (torch.empty(2, 2, 90, 24, dtype=dtype) for _ in range(2))
    bias = torch.empty(70, 90, dtype=dtype).expand(2, 4, 70, 90) if biased else None
    logarithm = torch.empty(2, 4, 70, dtype=value_dtype(dtype))
    state = torch.empty(2, dtype=torch.int64)
    dropout, again = (Dropout(0.5, state, (1, 4)), Dropout(0.5, state)) if drops else (None, None)
    check_cuda(attention, out, logarithm, query, key, value, AttentionParams(bias, causal, 0.5, dropout))
    for of, result in {"query": query, "key": key, "value": value, "inner": logarithm[..., None]}.items():
        saved = Saved(query, key, value, logarithm, None if of == "inner" else logarithm)
        check_cuda(attention_gradient, result, of, grad, saved, AttentionParams(bias, causal, 0.5, again))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_attention_with_split_keys_compiles_as_cuda(dtype: torch.dtype) -> None:
    query, out = (torch.empty(1, 1, 1, 24, dtype=dtype) for _ in range(2))
    key, value = (torch.empty(1, 1, 900, 24, dtype=dtype) for _ in range(2))
    logarithm = torch.empty(1, 1, 1, dtype=value_dtype(dtype))
    dialect = CudaCpp(Target(compute_units=16))
    launches = attention(dialect, out, logarithm, query, key, value, AttentionParams(None, False, 0.5))
    assert [one.kernel.name for one in launches] == ["bp_attention_parts", "bp_attention_merged"]
    for one in launches:
        compile_cuda(one.kernel.text, CudaCpp().compile_options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 70, 90), (1, 1, 1, 90), (2, 4, 70, 1), (1, 1, 1, 1)], ids=str)
def test_bias_gradients_compile_as_cuda(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    query, grad = (torch.empty(2, 4, 70, 24, dtype=dtype) for _ in range(2))
    key, value = (torch.empty(2, 2, 90, 24, dtype=dtype) for _ in range(2))
    bias, rows = torch.empty(sizes, dtype=dtype).expand(2, 4, 70, 90), torch.empty(2, 4, 70, dtype=value_dtype(dtype))
    dropout = Dropout(0.5, torch.empty(2, dtype=torch.int64)) if sizes[0] == 2 else None
    for parts, out in ((1, dtype), (3, rows.dtype)):
        summands = torch.empty(parts, *sizes, dtype=out)
        saved, params = Saved(query, key, value, rows, rows), AttentionParams(bias, False, 0.5, dropout)
        check_cuda(attention_bias_gradient, summands, grad, saved, params)


def modified_scores() -> Scores:
    return Scores(
        0.5,
        "score = score + table[or_first(checked_index(errors, error_operator, key_at - query_at, sizes))];",
        "attends = in_batch + in_head + key_at <= query_at;",
        "",
        (torch.int64,),
        {"table": torch.empty(9)},
        {"sizes": (torch.int64, 9)},
        Report(torch.empty(4, dtype=torch.int32), "flex_attention"),
        "slope = slope * (score + table[0]);",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_modified_scores_compile_as_cuda(dtype: torch.dtype, rows: int) -> None:
    query, out = (torch.empty(1, 2, rows, 24, dtype=dtype) for _ in range(2))
    key, value = (torch.empty(1, 1, 900, 24, dtype=dtype) for _ in range(2))
    rows_of = torch.empty(1, 2, rows)
    counts = torch.empty(1, 2, -(-rows // 128), dtype=torch.int32)
    indices = torch.empty(*counts.shape, 8, dtype=torch.int32)
    dialect = CudaCpp(Target(compute_units=16))
    for full, maximum in ((counts, rows_of), (None, None)):
        blocks = BlockMask(counts, indices, full, None if full is None else indices, 128, 128)
        results = Results(out, rows_of, maximum)
        launches = flex_attention(dialect, results, Operands(query, key, value), blocks, modified_scores())
        names = ["bp_flex_attention_parts", "bp_attention_merged"]
        assert [one.kernel.name for one in launches] == names
        for one in launches:
            compile_cuda(one.kernel.text, CudaCpp().compile_options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_modified_scores_compile_as_cuda(dtype: torch.dtype) -> None:
    query, grad = torch.empty(1, 2, 70, 24, dtype=dtype), torch.empty(1, 2, 70, 40, dtype=dtype)
    key, value = torch.empty(1, 1, 900, 24, dtype=dtype), torch.empty(1, 1, 900, 40, dtype=dtype)
    saved = Saved(query, key, value, torch.empty(1, 2, 70), torch.empty(1, 2, 70, dtype=value_dtype(dtype)))
    for of, out, blocks in (("query", query, (1, 8)), ("key", key, (8, 1)), ("value", value, (8, 1))):
        counts, indices = (torch.empty(1, 2, *shape, dtype=torch.int32) for shape in (blocks[:1], blocks))
        for full in (counts, None):
            mask = BlockMask(counts, indices, full, None if full is None else indices, 128, 128)
            check_cuda(flex_attention_gradient, out, of, grad, saved, mask, modified_scores())
