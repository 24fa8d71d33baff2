"""Compares the matrix product template with PyTorch on the CPU, for all forms, layouts and dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.kernels.templates.matmul import ProductParams, matmul

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def laid_out(shape, layout, dtype):
    if layout == "row":
        return random(shape, dtype)
    if layout == "column":
        return random((*shape[:-2], shape[-1], shape[-2]), dtype).mT
    return random((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")], ids=str)
def test_products_match_pytorch(processor, dtype, layouts):
    for batch, rows, depth, columns in ((1, 70, 67, 65), (3, 9, 33, 20), (2, 1, 5, 1), (1, 3, 0, 4)):
        a, b = laid_out((batch, rows, depth), layouts[0], dtype), laid_out((batch, depth, columns), layouts[1], dtype)
        out = torch.full((batch, rows, columns), 9).to(dtype)
        run(matmul(dialect(processor), out, a, b))
        torch.testing.assert_close(out, torch.bmm(a, b), rtol=None, atol=None)


@processors
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_in_place_products_with_factors_and_transposed_results(processor, dtype):
    a, b = random((30, 40), dtype), random((40, 50), dtype)
    out = random((50, 30), dtype).t()
    expected = torch.addmm(out, a, b, alpha=2, beta=3)
    run(matmul(dialect(processor), out, a, b, out, (2, 3)))
    torch.testing.assert_close(out, expected)
    bias = random((50,), dtype).expand(30, 50)
    run(matmul(dialect(processor), out, a, b, bias, (-1, 1)))
    torch.testing.assert_close(out, torch.addmm(bias, a, b, alpha=-1))
    run(matmul(dialect(processor), out, a, b))
    torch.testing.assert_close(out, a @ b)


@processors
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")], ids=str)
def test_long_sums_are_accurate(processor, layouts):
    """A single chain of additions would have a relative error of 1.2e-6, and a vectorized chain one of 0.6e-6."""
    torch.manual_seed(0)
    a, b = laid_out((20, 5000), layouts[0], torch.float32), laid_out((5000, 20), layouts[1], torch.float32)
    out, exact = torch.empty(20, 20), a.double() @ b.double()
    run(matmul(dialect(processor), out, a, b))
    assert (out - exact).norm() / exact.norm() < 2.5e-7


@processors
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 5, 7])
def test_short_sums_are_rounded_once(processor, layouts, depth):
    """Sums terms that nearly cancel. Rounding each term would give errors thousands of times larger than the result."""
    torch.manual_seed(depth)
    a, b = laid_out((19, depth), layouts[0], torch.float32), laid_out((depth, 21), layouts[1], torch.float32)
    a.mul_(1000), b.mul_(1000)
    if depth > 1:
        a[:, 1] = -a[:, 0] * (1 + 2**-20)
        b[1] = b[0] * (1 + 2**-19)
    out, exact = torch.empty(19, 21), a.double() @ b.double()
    run(matmul(dialect(processor), out, a, b))
    torch.testing.assert_close(out.double(), exact, rtol=2**-23, atol=1e-4)
    assert depth == 1 or not torch.allclose((a @ b).double(), exact, rtol=2**-23, atol=1e-4)
    last, factor = torch.randn(19, 21), 2.5
    run(matmul(dialect(processor), out, a, b, last, (factor, 3)))
    torch.testing.assert_close(out.double(), 3 * last.double() + factor * exact, rtol=2**-21, atol=1e-3)


@processors
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_short_sums_propagate_infinity_and_nan(processor, dtype):
    largest = torch.finfo(dtype).max
    a = torch.tensor([[1, 1], [math.inf, 1], [math.nan, 1], [largest, largest], [largest, -largest]], dtype=dtype)
    b = torch.tensor([[1, -1, 2, math.inf], [1, 1, 2, 1]], dtype=dtype)
    out = torch.empty(5, 4, dtype=dtype)
    run(matmul(dialect(processor), out, a, b))
    expected = a @ b
    # Products that overflow with different signs: infinity if the second one is not rounded, else NaN. CPUs differ.
    assert not out[4, 2].isfinite()
    assert not expected[4, 2].isfinite()
    expected[4, 2] = out[4, 2]
    torch.testing.assert_close(out, expected, equal_nan=True)


LAYOUTS = [("row", "row"), ("column", "row"), ("row", "column"), ("gaps", "gaps")]


def divided(a, b, c=None, alpha=1, beta=1, *, out=None, units=64):
    """Computes the product for a device with `units` compute units, and checks that work groups share each sum."""
    out = torch.full((*a.shape[:-1], b.shape[-1]), 9).to(a.dtype) if out is None else out
    made = matmul(dialect("gpu", compute_units=units), out, a, b, c, (alpha, beta))
    assert len(made) > 1
    assert made[0].global_size // made[0].group_size > 4
    run(made)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_long_sums_of_few_results_are_split(dtype, layouts):
    for batch, rows, depth, columns in ((1, 70, 1000, 65), (3, 9, 2051, 20), (1, 1, 700, 1), (2, 2, 5003, 3)):
        a, b = laid_out((batch, rows, depth), layouts[0], dtype), laid_out((batch, depth, columns), layouts[1], dtype)
        found = divided(a, b)
        if dtype.is_floating_point:
            exact = a.double() @ b.double()
            expected = max(2e-7, torch.finfo(dtype).eps * 0.5) * math.sqrt(exact.numel() * depth)
            assert (found - exact).norm() < expected * (1 + 3 / math.sqrt(exact.numel()))  # few numbers scatter more
        else:
            assert torch.equal(found, torch.bmm(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64], ids=str)
def test_split_sums_apply_bias_and_factors(dtype):
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    a, b = random((30, 3000), dtype), random((3000, 50), dtype)
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-3} if dtype.is_floating_point else {"rtol": 0, "atol": 0}
    for bias in (
        random((50,), dtype).expand(30, 50),
        random((30, 1), dtype).expand(30, 50),
        random((50, 30), dtype).t(),
    ):
        expected = (-1 * bias.to(wide) + 2 * (a.to(wide) @ b.to(wide))).to(dtype)
        torch.testing.assert_close(divided(a, b, bias, 2, -1), expected, **close)
    out = random((50, 30), dtype).t()  # in-place, transposed
    expected = (3 * out.to(wide) + a.to(wide) @ b.to(wide)).to(dtype)
    torch.testing.assert_close(divided(a, b, out, 1, 3, out=out), expected, **close)
    transposed = torch.empty(50, 30, dtype=dtype).t()
    torch.testing.assert_close(divided(a, b, out=transposed), (a.to(wide) @ b.to(wide)).to(dtype), **close)


def test_partial_sums_keep_their_rounding_errors():
    """If the partial sums were rounded to float32, the result would be 0: 10⁸ + 1 rounds to 10⁸."""
    a = torch.zeros(1, 4096)
    a[0, 0], a[0, 64], a[0, 4000] = 1e8, 1, -1e8
    assert divided(a, torch.ones(4096, 1)).item() == 1


def test_split_sums_propagate_infinity_and_nan():
    a = torch.ones(6, 4096)
    a[0, 7], a[1, 4000], a[2, 3], a[3, 5], a[3, 4090], a[4, :2] = (
        math.nan,
        math.inf,
        -math.inf,
        math.inf,
        -math.inf,
        3e38,
    )
    a[4, 2048:2050] = -3e38
    b = torch.ones(4096, 5)
    expected = torch.tensor([math.nan, math.inf, -math.inf, math.nan, math.nan, 4096])
    torch.testing.assert_close(divided(a, b), expected[:, None].expand(6, 5), equal_nan=True, rtol=1e-6, atol=0)


def test_split_sums_are_deterministic():
    a, b = random((40, 20_000), torch.float32), random((20_000, 40), torch.float32)
    assert torch.equal(divided(a, b), divided(a, b))
    made = matmul(dialect("gpu", compute_units=64), torch.empty(40, 40), a, b)
    assert [one.kernel.name for one in made] == ["bp_matmul_parts", "bp_matmul_sum_chunks", "bp_matmul_sum"]


def test_short_sums_and_many_results_are_not_split():
    of_device = dialect("gpu", compute_units=64)
    for rows, depth, columns in ((64, 255, 64), (1024, 512, 1024), (2048, 2048, 2048), (64, 0, 64)):
        a, b = torch.empty(1, 1).expand(rows, depth), torch.empty(1, 1).expand(depth, columns)
        assert len(matmul(of_device, torch.empty(1, 1).expand(rows, columns), a, b)) == 1


def operand(name, stored, formula):
    """An operand without memory, and the prologue that computes its elements from those of a tensor."""
    statements = f"operand = {formula.format(f'(value_t)load_{name}_stored(place)')};"
    inputs = {f"{name}_stored": stored}
    prologue = Operations(statements, True, torch.int32, "", frozenset(), inputs, {}, {})
    return torch.empty_strided(stored.shape, stored.stride(), device="meta"), prologue


def with_prologues(out, a, b):
    """The launches of exp(a) @ (b * 0.5)."""
    (a, of_a), (b, of_b) = operand("a", a, "exp({})"), operand("b", b, "{} * 0.5f")
    return matmul(dialect("gpu", compute_units=64), out, a, b, params=ProductParams(prologues={"a": of_a, "b": of_b}))


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_prologues_compute_operands(dtype, stored, layout):
    """Tiles have zeros beyond the operands: exp(0) would count there."""
    for batch, rows, depth, columns, split in ((2, 33, 67, 65, 1), (1, 9, 5, 20, 1), (1, 70, 5003, 3, 2)):
        a = laid_out((batch, rows, depth), layout, torch.float32)
        b = (laid_out((batch, depth, columns), layout, torch.float32) * 9).to(stored)
        out = torch.full((batch, columns, rows), 9).to(dtype).mT
        made = with_prologues(out, a, b)
        assert len(made) >= split
        run(made)
        expected = (a.double().exp() @ (b.double() * 0.5)).to(dtype)
        torch.testing.assert_close(out, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_numbers_of_prologues_stay_in_their_rows():
    a, b = torch.zeros(9, 13), torch.ones(13, 20)
    a[4, 7], a[6, 0], b[2, 3] = math.nan, math.inf, -math.inf
    out = torch.empty(9, 20)
    run(with_prologues(out, a, b))
    torch.testing.assert_close(out, a.exp() @ (b * 0.5), equal_nan=True)


def test_kernels_for_processors_take_no_prologues():
    a, (b, prologue) = torch.ones(4, 4), operand("b", torch.ones(4, 4), "{}")
    with pytest.raises(ValueError, match="no tiled form"):
        matmul(dialect("cpu"), a, a, b, params=ProductParams(prologues={"b": prologue}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_compiles(dtype):
    a, b = random((70, 67), dtype), random((67, 65), dtype)
    check_cuda(matmul, a @ b, a, b, a @ b)
    a, b = random((9, 9000), dtype), random((9000, 9), dtype)
    check_cuda(matmul, a @ b, a, b, a @ b)


def test_prologues_compile_for_cuda():
    for rows, depth, columns in ((70, 67, 65), (9, 9000, 9)):
        weights = torch.ones(depth, columns, dtype=torch.int8)
        b, prologue = operand("b", weights, "{} * 0.5f")
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            a = random((rows, depth), dtype)
            check_cuda(matmul, a @ weights.to(dtype), a, b, params=ProductParams(prologues={"b": prologue}))
