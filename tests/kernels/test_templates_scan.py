"""Compares the scan templates with PyTorch on the CPU, for all forms and targets, and compiles them as CUDA C++."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_runners import opencl
from template_runners import check_cuda, run
from template_runners import dialect as dialect_of

from torch_backplane.kernels import OpenCLC
from torch_backplane.kernels.templates import scan
from torch_backplane.kernels.templates.scan import Form

ITEMS = [Form(1, 1), Form(1, 1, 3), Form(1, 16, 2)]
TEAMS = [Form(64, 1), Form(64, 1, 4), Form(16, 4, 3), Form(4, 2, 7)]
SHAPES = [((1,), 0), ((5000,), 0), ((7, 100), 1), ((20, 37), 0), ((3, 70, 5), 1), ((2, 300, 33), 1), ((3, 4, 257), -1)]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

forms = pytest.mark.parametrize("form", [None, *ITEMS, *TEAMS], ids=str)
# (whether work items run in lockstep, form)
targets = pytest.mark.parametrize(
    ("simt", "form"), [(False, None), *((False, form) for form in ITEMS), (True, None), *((True, f) for f in TEAMS)]
)


def dialect(simt: bool = True, **figures: object) -> OpenCLC:
    return dialect_of("gpu" if simt else "cpu", **figures)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    if dtype.is_floating_point:
        return (torch.rand(shape) * 2 - 0.5).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -3, 4, shape).to(dtype)


@targets
def test_sums(form: Form | None, simt: bool) -> None:
    for shape, dim in SHAPES:
        x = values(shape, torch.float32)
        out = torch.empty_like(x)
        run(scan.accumulate(dialect(simt), out, x, dim, "cumsum", form))
        torch.testing.assert_close(out, x.double().cumsum(dim).float(), rtol=2e-7, atol=1e-37)  # rounded once


@forms
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extrema_with_ties_and_nan(name: str, form: Form | None) -> None:
    for shape, dim in SHAPES:
        x = values(shape, torch.int64).float()
        x.view(-1)[x.numel() // 2 :: 97] = math.nan
        x.view(-1)[x.numel() // 3 :: 41] = -math.inf
        best, places = torch.empty_like(x), torch.empty(shape, dtype=torch.int64)
        run(scan.extremum(dialect(), best, places, x, dim, name, form))
        expected = getattr(torch, name)(x, dim)
        torch.testing.assert_close(best, expected.values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, expected.indices)


@targets
@pytest.mark.parametrize("name", ["cumprod", "logcumsumexp"])
def test_other_accumulations(name: str, form: Form | None, simt: bool) -> None:
    x = 1 + values((2, 700), torch.float32) / 30
    if name == "logcumsumexp":
        x = x * 100
        x[0, 100:200], x[0, 0], x[1, 500], x[1, 600] = -math.inf, -math.inf, math.inf, math.nan
    out = torch.empty_like(x)
    run(scan.accumulate(dialect(simt), out, x, 1, name, form))
    expected = getattr(torch, name)(x.double(), 1).float()
    torch.testing.assert_close(out, expected, rtol=3e-7, atol=0, equal_nan=True)


@forms
@pytest.mark.parametrize("name", ["cumsum", "cumprod"])
def test_special_values_do_not_affect_earlier_results(name: str, form: Form | None) -> None:
    for special in (math.inf, -math.inf, math.nan, 0.0):
        x = 1 + values((3, 600), torch.float32) / 30
        x[0, 300], x[1, 0], x[2, 599] = special, special, special
        out = torch.empty_like(x)
        run(scan.accumulate(dialect(), out, x, 1, name, form))
        expected = getattr(torch, name)(x.double(), 1).float()
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=0, equal_nan=True)


@forms
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8], ids=str)
def test_integers_wrap(dtype: torch.dtype, form: Form | None) -> None:
    x = values((3, 500), dtype) * 37 + (2**40 if dtype == torch.int64 else 0)
    out = torch.empty_like(x)
    for name in ("cumsum", "cumprod"):
        run(scan.accumulate(dialect(), out, x, 1, name, form))
        assert torch.equal(out, getattr(torch, name)(x, 1, dtype=dtype))


@forms
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_dtypes_in_place(dtype: torch.dtype, form: Form | None) -> None:
    if dtype == torch.float64 and not opencl()[2]:
        pytest.skip("the device has no float64")
    x = values((2, 400, 3), dtype)
    expected = x.double().cumsum(1).to(dtype)
    run(scan.accumulate(dialect(), x, x, 1, "cumsum", form))
    torch.testing.assert_close(x, expected)


@forms
def test_complex_products(form: Form | None) -> None:
    x = torch.polar(1 + values((2, 300), torch.float32) / 100, values((2, 300), torch.float32))
    out = torch.empty_like(x)
    run(scan.complex_products(dialect(), out, x, 1, form))
    torch.testing.assert_close(out, x.to(torch.complex128).cumprod(1).to(x.dtype))


@pytest.mark.parametrize("compute_units", [1, 16, 100])
@pytest.mark.parametrize("simt", [True, False], ids=["lockstep", "threads"])
def test_few_long_lines_are_split_among_compute_units(simt: bool, compute_units: int) -> None:
    target = dialect(simt, compute_units=compute_units)
    for shape, dim in (((1 << 20,), 0), ((4, 1 << 18), 1), ((1 << 17, 8), 0), ((1 << 14, 64), 0)):
        x = torch.empty(shape)
        made = scan.accumulate(target, torch.empty_like(x), x, dim, "cumsum")
        if simt:
            groups = made[-1].global_size // made[-1].group_size
            assert groups >= min(8 * compute_units, x.numel() // 4096), (shape, made[-1])
            assert len(made) == 3
        elif compute_units >= 4:
            assert 1.1 * made[-1].global_size >= min(compute_units, x.numel() // 4096), (shape, made[-1])


def test_many_lines_use_one_launch() -> None:
    for shape, dim in (((5000, 100), 1), ((100, 20000), 0), ((9,), 0)):
        x = torch.empty(shape)
        assert len(scan.accumulate(dialect(compute_units=4), torch.empty_like(x), x, dim, "cumsum")) == 1


def test_small_local_memory_reduces_the_team_size() -> None:
    x = values((2, 500), torch.float32)
    for local_memory in (0, 100, 1000, 5000):
        target = dialect(local_memory=local_memory)
        out = torch.empty_like(x)
        run(scan.accumulate(target, out, x, 1, "cumsum"))
        torch.testing.assert_close(out, x.cumsum(1))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("form", [None, Form(64, 1, 4), Form(1, 1, 4)], ids=str)
def test_cuda_compiles(dtype: torch.dtype, form: Form | None) -> None:
    x, places = values((3, 400), torch.float32).to(dtype), torch.empty(3, 400, dtype=torch.int64)
    check_cuda(scan.extremum, x, places, x, 1, "cummax", form)
    if dtype != torch.bool:
        check_cuda(scan.accumulate, x, x, 1, "cumsum", form)
    if dtype.is_floating_point:
        check_cuda(scan.accumulate, x, x, 1, "logcumsumexp", form)
        check_cuda(scan.accumulate, x, x, 1, "cumprod", form)
    if dtype == torch.float32:
        check_cuda(scan.complex_products, x.to(torch.complex64), x.to(torch.complex64), 1, form)
