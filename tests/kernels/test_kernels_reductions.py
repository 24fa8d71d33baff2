"""Compares reduction kernels with PyTorch on the CPU: runs OpenCL C and compiles CUDA C++ of the same definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runners import compile_cuda, opencl
from template_runners import run_reduction as run_for

from torch_backplane.kernels import CudaCpp, OpenCLC, Reduction, Target, functions, reduction, reduction_geometry
from torch_backplane.kernels.templates.reduce import Options

F32, I64 = torch.float32, torch.int64
INF = math.inf


def added(dtype, finish=lambda s, n: s):
    return Reduction([dtype], [0], lambda x, i: x, lambda a, b: a + b, finish)


def run_reduction(*args, **kwargs):
    run_for(Target(float64=opencl()[2], compute_units=4), *args, **kwargs)


SUM, COUNT = added(F32), added(I64)
MEAN = added(F32, lambda s, n: s / n.to(F32))
PRODUCT = Reduction([F32], [1.0], lambda x, i: x, lambda a, b: a * b, lambda s, n: s)
AMAX = Reduction([F32], [-INF], lambda x, i: x, functions.maximum, lambda s, n: s)
ANY = Reduction([torch.bool], [False], lambda x, i: x.to(torch.bool), lambda a, b: a | b, lambda s, n: s)


def _later(a, i, b, j):
    """Returns the argmax of two (value, position) pairs: NaN before numbers, greater values, lower positions."""
    nan_a, nan_b = functions.isnan(a), functions.isnan(b)
    wins = (nan_b & ~nan_a) | (~nan_a & (b > a))
    same = (nan_a & nan_b) | (a == b)
    b_taken = wins | (same & (j < i))
    return functions.where(b_taken, b, a), functions.where(b_taken, j, i)


ARGMAX = Reduction([F32, I64], [-INF, 2**63 - 1], lambda x, i: (x, i), _later, lambda a, i, n: (a, i))


def _merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    """Chan's formula: combines the means and sums of squared differences of two sets."""
    n = n_a + n_b
    share = functions.where(n == 0.0, 0.0, n_b / n)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


VAR_MEAN = Reduction(
    [F32] * 3,
    [0.0] * 3,
    lambda x, i: (x, 0.0, 1.0),
    _merge,
    lambda mean, m2, n, count: (m2 / (n - 1.0), mean),
)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_dynamic_shape_strides_and_dims(data, shape):
    order = data.draw(st.permutations(range(len(shape))))
    a = torch.randint(-9, 9, [shape[d] * 2 for d in order]).permute([order.index(d) for d in range(len(shape))])
    a = a[tuple(slice(None, size) if data.draw(st.booleans()) else slice(None, None, 2) for size in shape)]
    dims = data.draw(st.lists(st.sampled_from(range(-len(shape), len(shape))), min_size=1, unique=True))
    dims = list({dim % len(shape) for dim in dims})
    expected = a.sum(dims)
    out = torch.empty_like(expected)
    run_reduction(COUNT, [a], dims, [out])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool], ids=str)
def test_mean_computed_in_float32(dtype):
    a = (torch.rand(5, 300) * 9).to(dtype)
    out = torch.empty(5, dtype=dtype if dtype.is_floating_point else F32)
    run_reduction(MEAN, [a], [1], [out], compute=F32)
    torch.testing.assert_close(out, a.float().mean(1).to(out.dtype))


def test_reductions_of_no_elements():
    a, out = torch.empty(2, 0), torch.empty(2)
    for definition, expected in ((SUM, 0.0), (PRODUCT, 1.0), (MEAN, math.nan), (AMAX, -INF)):
        run_reduction(definition, [a], [1], [out])
        torch.testing.assert_close(out, torch.full((2,), expected), equal_nan=True)
    empty = torch.empty(0)
    run_reduction(SUM, [torch.empty(0, 3)], [1], [empty])  # no results


def test_no_reduced_dimensions_and_zero_dimensional_inputs():
    a, out = torch.randn(4, 3), torch.empty(4, 3)
    run_reduction(SUM, [a], [], [out])
    assert torch.equal(out, a)
    number, out = torch.tensor(3.0), torch.empty(())
    run_reduction(SUM, [number], [], [out])
    assert out.item() == 3


def test_amax_propagates_nan_and_any_is_true_for_nan():
    a = torch.randn(4, 129)
    a[1, 100] = math.nan
    a[2] = -INF
    out, found = torch.empty(4), torch.empty(4, dtype=torch.bool)
    run_reduction(AMAX, [a], [1], [out])
    torch.testing.assert_close(out, a.amax(1), equal_nan=True, rtol=0, atol=0)
    a = torch.zeros(4, 129)
    a[1, 100], a[2, 0], a[3, 128] = math.nan, -0.0, 1e-45
    run_reduction(ANY, [a], [1], [found])
    assert found.tolist() == a.bool().any(1).tolist() == [False, True, False, True]


def test_argmax_returns_the_first_of_equal_elements():
    a = torch.randint(0, 4, (6, 9, 50)).float().transpose(0, 2)  # 50 × 9 × 6, innermost stride not 1
    a[3, 4, 5] = a[2, 8, 1] = math.nan
    for dims, tensor in (([0, 1, 2], a), ([1], a), ([1, 2], a)):
        kept = [size for dim, size in enumerate(a.shape) if dim not in dims]
        values, positions = torch.empty(kept), torch.empty(kept, dtype=I64)
        run_reduction(ARGMAX, [tensor], dims, [values, positions])
        flat = a.permute([d for d in range(3) if d not in dims] + dims).flatten(len(kept))
        expected = flat.argmax(-1)
        assert torch.equal(positions, expected)
        torch.testing.assert_close(values, flat.gather(-1, expected[..., None])[..., 0], equal_nan=True)


def test_long_sum_is_accurate():
    torch.manual_seed(0)
    a, out = torch.rand(2_000_000), torch.empty(())
    run_reduction(SUM, [a], [0], [out])
    torch.testing.assert_close(out.double(), a.double().sum(), rtol=1.2e-7, atol=0)  # two units in the last place


def test_variance_far_from_zero():
    torch.manual_seed(0)
    a = torch.randn(3, 5000) + 1e4
    var, mean = torch.empty(3), torch.empty(3)
    run_reduction(VAR_MEAN, [a], [1], [var, mean])
    torch.testing.assert_close(var, a.double().var(1).float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(mean, a.double().mean(1).float())


def test_dot_product_of_two_inputs():
    a, b = torch.randint(-9, 9, (7, 200)).float(), torch.randint(-9, 9, (200, 7)).float().T
    out = torch.empty(7)
    dot = Reduction([F32], [0.0], lambda x, y, i: x * y, lambda a, b: a + b, lambda s, n: s)
    run_reduction(dot, [a, b], [1], [out])
    assert torch.equal(out, (a * b).sum(1))


def made(dialect, sizes, strides, definition=SUM, outputs=(F32,), **options):
    """Returns the first kernel for an input of these sizes and strides, reduced over its second dimension."""
    given = torch.empty_strided(sizes, strides, device="meta")
    results = [torch.empty(sizes[0], dtype=dtype, device="meta") for dtype in outputs]
    where = reduction_geometry(sizes, [1], [(1,)] * len(results), [strides])
    return reduction(dialect, "r", definition, results, [given], where, Options(**options))[0].kernel


def test_text_is_independent_of_sizes_and_large_tensors_use_64_bit_indices():
    texts = [made(OpenCLC(), *one).text for one in (((3, 4), (4, 1)), ((5, 7), (1, 5)), ((3, 4), (2**31, 1)))]
    assert texts[0] == texts[1]
    assert ["typedef long index_t" in text for text in texts] == [False, False, True]


@pytest.mark.parametrize("sizes", [(3, 4), (40, 3), (2, 2**16), (2**31, 2)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_cuda_text_compiles(sizes, transposed):
    strides = (1, sizes[0]) if transposed else (sizes[1], 1)
    definitions = [(SUM, [F32]), (MEAN, [torch.float16]), (ANY, [torch.bool])]
    definitions += [(ARGMAX, [F32, I64]), (VAR_MEAN, [F32] * 2)]
    for definition, outputs in definitions:
        kernel = made(CudaCpp(), sizes, strides, definition, outputs)
        assert ".entry bp_r" in compile_cuda(kernel.text, CudaCpp().compile_options)


def test_invalid_arguments_raise_errors():
    with pytest.raises(TypeError, match="finish returned 1 values, and 2 are needed"):
        made(OpenCLC(), (3, 4), (4, 1), outputs=[F32, F32])
    with pytest.raises(ValueError, match="1 numbers of identity for 2 dtypes"):
        Reduction([F32, F32], [0.0], lambda x, i: x, lambda a, b: a, lambda s, n: s)
    with pytest.raises(TypeError, match=r"cannot be a constant of torch\.int64"):
        Reduction([I64], [0.5], lambda x, i: x, lambda a, b: a, lambda s, n: s)
    with pytest.raises(IndexError, match="dimension 2 is out of range for 2 dimensions"):
        reduction_geometry((3, 4), [2], [(1,)], [(4, 1)])
