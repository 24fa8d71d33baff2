"""PyTorch's operator database through torch.compile: results equal those of eager PyTorch on the same device.

Forward and backward, with static and with dynamic shapes. `make test` runs some operators with one dtype,
`make test-compile` runs all of them.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.filterwarnings("ignore")

# Operators whose results are random or not initialized, and CUDA's jiterator.
LEFT_OUT = {
    "bernoulli", "cauchy", "empty", "empty_like", "empty_permuted", "empty_strided", "exponential", "geometric",
    "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
    "jiterator_binary_return_by_ref", "jiterator_unary", "log_normal", "multinomial", "new_empty",
    "new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward", "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention", "normal", "pca_lowrank", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "svd_lowrank", "uniform",
}  # fmt: skip

_SAVED_STATISTICS = "in evaluation, bp saves no statistics, as the CPU; PyTorch's decomposition is CUDA's"
_NOT_ROUNDED = "Inductor does not round quotients to bfloat16 before they become integers, on every device"
# By operator, or by operator and dtype.
FAILS = {
    "nn.functional.avg_pool2d": "Inductor's backward refuses a padding of one number, on every device",
    "native_batch_norm": _SAVED_STATISTICS,
    "_native_batch_norm_legit": _SAVED_STATISTICS,
    "div.trunc_rounding-bfloat16": _NOT_ROUNDED,
    "fmod-bfloat16": _NOT_ROUNDED,
    "linalg.matrix_norm-bfloat16": "the gradient compares sums that are not rounded to bfloat16 with the greatest one,"
    " which is rounded, on every device",
    "erfinv-bfloat16": "eager PyTorch rounds the parts of the gradient to bfloat16, Inductor does not, on every device",
}
_UNKNOWN_SIZE = "Inductor's lowering of adaptive pooling raises «TypeError: cannot determine truth value of Relational»"
# Operators that are only compiled for static shapes, because dynamic ones fail in PyTorch, on every device.
STATIC = {
    "_unsafe_masked_index-int64": "with a symbolic value, Inductor raises «NotImplementedError: argument of type»",
    "constant_pad_nd-int64": "with a symbolic value, Inductor raises «TypeError: Cannot convert symbols to int»",
    "cov": "PyTorch's cov with weights reads the sizes as integers",
    "max_pool2d_with_indices_backward": "the operator refuses symbolic numbers in place of lists",
    "nn.functional.adaptive_avg_pool2d": _UNKNOWN_SIZE,
    "nn.functional.conv2d": "with a stride, the backward pass raises «ValueRangeError: Invalid ranges [0:-1]»",
    "nn.functional.interpolate.area": _UNKNOWN_SIZE,
}
# With one dtype in `make test`.
QUICK = {
    "add", "addmm", "amax", "cat", "cumsum", "gather", "index_put", "linalg.inv", "logsumexp", "nn.functional.conv2d",
    "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.interpolate", "scatter_add", "sort", "where",
}  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bfloat16)
# (relative, absolute). Floating-point results of integers have those of float32.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.int64: (1e-4, 1e-5)}


def _name(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def _case(op: Any, dtype: torch.dtype) -> str:
    return f"{_name(op)}-{str(dtype).removeprefix('torch.')}"


def _cases() -> list[Any]:
    cases = []
    for op in op_db:
        for dtype in DTYPES:
            if op.name in LEFT_OUT or dtype not in op.supported_dtypes("cuda"):
                continue
            is_quick = op.name in QUICK and dtype == torch.float32 and not op.variant_test_name
            marks = [] if is_quick else [pytest.mark.slow]
            if reason := FAILS.get(_name(op)) or FAILS.get(_case(op, dtype)):
                marks.append(pytest.mark.xfail(reason=reason, strict=True))
            cases.append(pytest.param(op, dtype, id=_case(op, dtype), marks=marks))
    return cases


def _on_bp(values: Any) -> Any:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("bp").requires_grad_(value.requires_grad)
        return "bp" if value in ("cpu", torch.device("cpu")) else value

    return tree_map(move, values)


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]


def _with_gradients(function: Any, arguments: Any, named: Any) -> Any:
    """The results, and the gradients of their sum."""
    results = function(*arguments, **named)
    inputs = _differentiable([arguments, named])
    outputs = [one for one in _differentiable(results) if one.is_floating_point()]
    gradients = torch.autograd.grad([one.sum() for one in outputs], inputs, allow_unused=True) if outputs else ()
    return tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, results), gradients


@pytest.mark.parametrize(("op", "dtype"), _cases())
def test_compiled_operators_equal_eager_ones(op: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # for the numbers of the samples
    trains = dtype.is_floating_point and op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=trains))
    picked = samples[:1] + random.Random(0).sample(samples[1:], min(1, len(samples) - 1))
    relative, absolute = TOLERANCES[dtype]
    compared = 0
    is_static = not STATIC.keys().isdisjoint((_name(op), _case(op, dtype)))
    for sample, dynamic in itertools.product(picked, (False,) if is_static else (False, True)):
        torch._dynamo.reset()
        given = (sample.input, *sample.args), sample.kwargs

        def call(*arguments: Any, **named: Any) -> Any:
            return op.op(*arguments, **named)

        try:
            expected = _with_gradients(op.op, *_on_bp(given))
        except (NotImplementedError, RuntimeError):  # eager PyTorch on bp does not support this sample
            continue
        found = _with_gradients(torch.compile(call, dynamic=dynamic), *_on_bp(given))
        torch.testing.assert_close(found, expected, rtol=relative, atol=absolute, equal_nan=True)
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(one, torch.Tensor) and not (one.is_floating_point() or one.is_complex()):
                assert torch.equal(one, other)
        compared += 1
    if not compared:
        pytest.skip("eager PyTorch on bp supports no sample")
