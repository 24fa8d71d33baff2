"""Matrix products with activations, of int8, with factors that the dtype cannot represent, and with long sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, on_device, refused_alike
from targets import target

from torch_backplane import plans, preferences
from torch_backplane.conformance.numbers import compare, overloads


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_products_with_an_activation(dtype: torch.dtype, use_gelu: bool) -> None:
    def run(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch._addmm_activation(*tensors, use_gelu=use_gelu, **given)

    a, b = numbers(4, 3, dtype=dtype), numbers(3, 5, dtype=dtype)
    agrees(run, numbers(5, dtype=dtype), a, b)
    transposed = numbers(3, 4, dtype=dtype)
    agrees(lambda c, x, y: run(c, x.t(), y, beta=0.5, alpha=2), numbers(4, 5, dtype=dtype), transposed, b)
    agrees(lambda c, x, y, out: run(c, x, y, out=out), numbers(5, dtype=dtype), a, b, torch.zeros(4, 5, dtype=dtype))
    agrees(run, numbers(5, dtype=dtype), a[:0], b)
    refused_alike(run, numbers(5, dtype=dtype), a, a)


def whole(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


def left_dtypes() -> list[torch.dtype]:
    """The dtypes of the first operand of `_int_mm`. The second is int8."""
    try:
        torch._int_mm(whole(2, 2, dtype=torch.uint8), whole(2, 2))
    except RuntimeError:
        return [torch.int8]  # torch 2.11
    return [torch.int8, torch.uint8]


@pytest.mark.parametrize("way", ["as it is", "generated", "a GPU's"])
def test_int8_products(way: str) -> None:
    """The reference is an int64 product: the CPU's `_int_mm` is wrong for some strides of single rows and columns."""
    dtypes = left_dtypes()

    def check(a: torch.Tensor, b: torch.Tensor) -> None:
        expected = (a.long() @ b.long()).int()
        left, right = on_device([a, b])
        for _ in range(2):
            found = torch._int_mm(left, right)
            assert found.dtype == torch.int32
            assert torch.equal(found.cpu(), expected), (a.shape, a.stride(), b.stride())
            out = torch.full(expected.shape, 5, dtype=torch.int32, device=DEVICE)
            assert torch._int_mm(left, right, out=out) is out
            assert torch.equal(out.cpu(), expected)

    def check_all() -> None:
        for rows, depth, columns in ((5, 7, 3), (17, 32, 24), (1, 64, 8), (33, 600, 40), (9, 40, 1), (17, 32, 24)):
            for dtype in dtypes:
                a, b = whole(rows, depth, dtype=dtype), whole(depth, columns)
                check(a, b)
                check(a, b.t().contiguous().t())
                check(a.t().contiguous().t(), b)
                check(whole(rows, 2 * depth, dtype=dtype)[:, ::2], whole(2 * depth, columns)[::2])
                check(whole(1, 1, dtype=dtype).expand(rows, depth), b)
            check(a[:0], b)
            check(a[:, :0], b[:0])
            given = torch.ones(rows, columns, dtype=torch.int32)
            refused_alike(lambda a, b, out: torch._int_mm(a, b, out=out), a, b, given[:0])
            refused_alike(lambda a, b, out: torch._int_mm(a, b, out=out), a, b, given.float())
            refused_alike(torch._int_mm, a, b.float())
            refused_alike(torch._int_mm, a, b.byte())
            if torch.uint8 not in dtypes:
                refused_alike(torch._int_mm, a.byte(), b)
            refused_alike(torch._int_mm, a[None], b)
            refused_alike(torch._int_mm, a, b[:-1])
        assert "launch bp_matmul" in plans.explain(torch._int_mm, *on_device([a, b])) or way == "as it is"

    with preferences.preferring("products", "generated" if way == "generated" else "default"):
        if way == "a GPU's":
            with target("gpu"):
                check_all()
        else:
            check_all()


NUMBERS = (2, -0.5, 2.7, 300, 40_000, 2**31, 1e10, 1e39, math.nan, math.inf, 1 + 0j, 0.5j, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["addmm", "addmm.out", "addmv_", "baddbmm", "addbmm_"])
def test_factors_that_the_dtype_cannot_represent(name: str, dtype: torch.dtype) -> None:
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    outcome = compare(overload, DEVICE, [dtype], NUMBERS)
    assert outcome.calls == 2 * len(NUMBERS)
    assert not [one for one in outcome.findings if one.kind != "words"]


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda a, b: a @ b,
    "transposed": lambda a, b: (b.t() @ a.t()).t(),
    "gaps": lambda a, b: a[:, ::2] @ b[::2],
    "batches": lambda a, b: a.view(2, -1, a.shape[1]) @ b,
    "addmm": lambda a, b: torch.addmm(b[0], a, b, beta=-0.5, alpha=2),
    "addmm, by columns": lambda a, b: torch.addmm(a[:, :1], a, b, beta=2),
    "in place": lambda a, b: (a @ b).addmm_(a, b, beta=3),
    "activation": lambda a, b: torch._addmm_activation(b[0], a, b),
    "matrix and vector": lambda a, b: a @ b[:, 0],
    "transposed matrix and vector": lambda a, b: b.t() @ a[0],
    "matrix and one number of a vector": lambda a, b: b.t() @ a[0, :1].expand(b.shape[0]),
    "vector and matrix": lambda a, b: a[0] @ b,
    "addmv": lambda a, b: torch.addmv(a[:, 1], a, b[:, 0], beta=-2, alpha=0.5),
    "addmv, transposed": lambda a, b: torch.addmv(a.t()[:, 0], a.t(), b[: a.shape[0], 0], beta=0, alpha=3),
    "rows of batches": lambda a, b: a.view(2, -1, a.shape[1])[:, :1] @ b.expand(2, *b.shape),
    "nothing to add up": lambda a, b: a[:, :0] @ b[:0],
    "no numbers of a vector": lambda a, b: a[:, :0] @ b[:0, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_long_sums_on_gpu_targets(name: str, dtype: torch.dtype) -> None:
    """Uses several shapes of one class, so that check mode also checks dynamic-shape plans."""
    is_float = dtype.is_floating_point
    if not is_float and name in ("addmm", "activation", "addmv"):
        pytest.skip("the call has fractional factors or an activation")
    wide = torch.float64 if is_float else dtype
    close = {"rtol": torch.finfo(dtype).eps * 2, "atol": 2e-4} if is_float else {}
    with target("gpu", compute_units=32):
        plans.set_mode("check")
        for rows, depth, columns in ((6, 1100, 40), (70, 2050, 9), (4, 3001, 70), (8, 130, 11), (2, 5000, 1)):
            a = (numbers(rows, depth, dtype=dtype) / 8).to(dtype)
            b = (numbers(depth, columns, dtype=dtype) / 8).to(dtype)
            found = CALLS[name](a.to(DEVICE), b.to(DEVICE)).cpu()
            torch.testing.assert_close(found, CALLS[name](a.to(wide), b.to(wide)).to(dtype), **close)


def test_matrix_vector_products_with_nan_infinity_and_cancellation() -> None:
    a = torch.zeros(6, 3000)
    a[0, 7], a[1, 2900], a[2, 5], a[2, 2999], a[3, :2], a[4, 3] = (
        math.nan,
        math.inf,
        math.inf,
        -math.inf,
        3e38,
        -math.inf,
    )
    a[5, 0], a[5, 1], a[5, 2990] = 1e8, 1, -1e8
    with target("gpu", compute_units=32):
        for matrix in (a, a.t().contiguous().t()):
            found = (matrix.to(DEVICE) @ torch.ones(3000, device=DEVICE)).cpu()
            expected = torch.tensor([math.nan, math.inf, math.nan, math.inf, -math.inf, 1])
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
