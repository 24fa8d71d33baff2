"""Products under max-autotune on GPUs: elementwise operators on operands, in the product's kernel or before it."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_opencl
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from torch_backplane import drivers
from torch_backplane.planning.launch import dialect_of

if not drivers.device(0).properties.dialect:
    pytest.skip("the devices have no dialect", allow_module_level=True)

import fused_templates
from fused_templates import CANDIDATES, kernels

from torch_backplane.compile import template_kernel
from torch_backplane.compile.indexing import PLACE, index_at_place
from torch_backplane.tuning.choosing import forcing

Shape = tuple[int, ...]
Case = tuple[Callable[..., Any], list[Shape], list[Shape]]  # function, shapes of numbers, shapes of int8 weights

needs_gpu = pytest.mark.skipif(
    not dialect_of(0).target.simt, reason="on CPUs, operators on operands run as separate kernels"
)


def several_results(a: torch.Tensor, b: torch.Tensor) -> Any:
    h = a.sin() @ b
    return h, h > 0, h.relu()


def other_order(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The operand's elements are computed in another order than that in which they are stored."""
    return (x.t() + y).to(a.dtype).mul(0.5) @ a


CASES: dict[str, Case] = {
    "dequantized": (lambda x, s, w: x @ (w.to(x.dtype) * s), [(33, 40), (70,)], [(40, 70)]),
    "dequantized by rows": (lambda x, s, w: x @ (w.to(x.dtype) * s), [(65, 40), (40, 1)], [(40, 33)]),
    "linear": (lambda x, s, b, w: F.linear(x, w.to(x.dtype) * s, b), [(4, 9, 40), (70, 1), (70,)], [(70, 40)]),
    "with activation": (
        lambda x, s, b, w: F.gelu(F.linear(x, w.to(x.dtype) * s, b)), [(33, 100), (70, 1), (70,)], [(70, 100)]
    ),
    "zero point": (lambda x, s, z, w: x @ ((w.to(x.dtype) - z) * s), [(20, 50), (30,), (30,)], [(50, 30)]),
    "first operand": (lambda a, b: a.sin() @ b, [(33, 17), (17, 50)], []),
    "first operand, rows": (lambda x, w: F.linear(F.silu(x), w), [(4, 9, 40), (70, 40)], []),
    "both operands": (lambda a, b: a.exp() @ b.exp(), [(33, 17), (17, 50)], []),
    "infinite at zero": (lambda a, b: (1 / a) @ b.cos(), [(9, 13), (13, 21)], []),
    "batches": (lambda a, b: torch.bmm(a.exp(), b.sigmoid()), [(3, 20, 37), (3, 37, 40)], []),
    "batches added": (
        lambda c, a, b: torch.baddbmm(c, a, b.exp()).relu() + c, [(3, 20, 40), (3, 20, 8), (3, 8, 40)], []
    ),
    "alpha and beta": (
        lambda c, a, b: torch.addmm(c, a.exp(), b, alpha=2, beta=0.5), [(17, 48), (17, 9), (9, 48)], []
    ),
    "transposed": (lambda a, b: a.sin().t() @ b.cos().t(), [(40, 33), (70, 40)], []),
    "transposed before": (lambda a, b: a.t().sin() @ b, [(40, 33), (40, 70)], []),
    "other order": (other_order, [(33, 50)], [(33, 40), (40, 33)]),
    "long sums of few results": (lambda a, b, r: (a.exp() @ b).relu() * r, [(8, 5001), (5001, 12), (8, 12)], []),
    "long sums, dequantized": (lambda x, s, w: x @ (w.to(x.dtype) * s), [(8, 5001), (12,)], [(5001, 12)]),
    "short sums": (lambda a, b: (a.exp() @ b).tanh(), [(40, 3), (3, 50)], []),
    "several results": (several_results, [(33, 17), (17, 50)], []),
    "few rows": (lambda x, s, w: x @ (w.to(x.dtype) * s), [(3, 64), (50,)], [(64, 50)]),
    "heads": (lambda q, k: q.exp().transpose(1, 2) @ k.transpose(1, 2).mT, [(2, 18, 4, 16), (2, 20, 4, 16)], []),
    "expanded": (lambda a, b: torch.matmul(a.exp(), b.expand(3, 32, 40)), [(3, 20, 32), (32, 40)], []),
}  # fmt: skip
# Those that are not one kernel.
SEVERAL_KERNELS: dict[str, Case] = {
    "one row": (lambda x, s, w: x @ (w.to(x.dtype) * s), [(1, 64), (50,)], [(64, 50)]),
    "one column": (lambda a, b: a.sin() @ b, [(50, 64), (64, 1)], []),
    "no sums": (lambda a, b: a.exp() @ b.exp(), [(4, 0), (0, 5)], []),
    "no results": (lambda a, b: a.exp() @ b, [(0, 4), (4, 5)], []),
    "used twice": (lambda a: (h := a.sin(), h @ h.t()), [(33, 17)], []),
    "both operands the same": (lambda a: (h := a.sin()) @ h.t(), [(33, 17)], []),
    "more to read": (lambda a, b, c: (a + b) @ c, [(33, 17), (33, 17), (17, 20)], []),
    "checked indices": (lambda t, b, i: t[i.long() % 7] @ b, [(7, 16), (16, 30)], [(40,)]),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def operands(case: Case, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in case[2]]
    return [*(torch.randn(shape).to(dtype) for shape in case[1]), *weights]


def check(case: Case, candidate: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """Compares a case with the CPU, and returns its kernels."""
    return fused_templates.check(case[0], operands(case, dtype), candidate, dtype)


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_one_kernel(name: str) -> None:
    """Only sums that are split have another kernel, which adds up their parts."""
    first, *rest = check(CASES[name], template_kernel.FUSED)
    assert first.startswith("bp_matmul_")
    assert "_prologue" in first
    assert rest in ([], ["bp_matmul_sum"], ["bp_matmul_sum_chunks", "bp_matmul_sum"])


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_separate_kernels(name: str) -> None:
    first, *rest = check(CASES[name], template_kernel.SEPARATE)
    assert first.startswith("bp_fused_")
    assert not any("prologue" in one for one in rest)


@needs_gpu
@pytest.mark.parametrize("name", SEVERAL_KERNELS)
def test_not_fused(name: str) -> None:
    assert not any("prologue" in one for one in check(SEVERAL_KERNELS[name], template_kernel.FUSED))


# Inductor leaves arithmetic in half precision outside, but not conversions.
def scaled_after(x: torch.Tensor, s: torch.Tensor, w: torch.Tensor) -> Any:
    return (x @ w.to(x.dtype)) * s


SCALED_AFTER: Case = (scaled_after, [(33, 41), (70,)], [(41, 70)])


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, candidate: str) -> None:
    check(SCALED_AFTER, candidate, dtype)


@pytest.mark.parametrize("strides", [(20, 5, 1), (1, 3, 12), (5, 15, 1), (64, 8, 1), (1, 7, 29)])
def test_index_at_place(strides: tuple[int, ...]) -> None:
    """The index of an element in row-major order, from its place in dense, permuted and padded memory."""
    sizes = (3, 4, 5)
    variables = sympy.symbols("x0 x1 x2", integer=True, nonnegative=True)
    entries = {
        one: SimpleNamespace(length=sympy.Integer(size), divisor=sympy.Integer(divisor))
        for one, size, divisor in zip(variables, sizes, (20, 5, 1), strict=True)
    }
    place = sum(one * stride for one, stride in zip(variables, strides, strict=True))
    graph: Any = SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(graph):
        found = index_at_place(place, entries, sympy.Integer(60))
        overlapping = index_at_place(variables[0] * 2 + variables[1] + variables[2] * 20, entries, sympy.Integer(60))
        repeated = index_at_place(variables[0] * 5 + variables[2], entries, sympy.Integer(60))
    assert found is not None
    for index, at in enumerate(itertools.product(*map(range, sizes))):
        assert found.subs(PLACE, sum(one * stride for one, stride in zip(at, strides, strict=True))) == index
    assert overlapping is None
    assert repeated is None


@needs_gpu
def test_norms_stay_one_kernel() -> None:
    """Operators that belong to the kernel of a reduction are no prologue."""

    def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:]) @ w

    norm, *product = check((normed, [(33, 64), (64, 50)], []), template_kernel.FUSED)
    assert norm.startswith("bp_fused_")
    assert len(product) == 1
    assert "prologue" not in product[0]


@needs_gpu
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_dynamic_shapes(candidate: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> Any:
        return F.silu(F.linear(x.sin(), w.to(x.dtype) * s)) * x.shape[0]

    compiled = torch.compile(function, mode="max-autotune", dynamic=True)
    with forcing(template_kernel.FAMILY, candidate):
        for rows, depth, columns in ((12, 24, 50), (65, 24, 50), (33, 100, 7), (2, 9, 70), (12, 24, 50)):
            x, s = torch.randn(rows, depth), torch.randn(columns, 1)
            w = torch.randint(-9, 9, (columns, depth), dtype=torch.int8)
            on_bp = [one.to("bp") for one in (x, w, s)]
            torch.testing.assert_close(compiled(*on_bp).cpu(), function(x, w, s), rtol=1e-4, atol=1e-3)
            is_fused = kernels(compiled, *on_bp) == ["bp_matmul_tiled_prologue_epilogue"]
            assert is_fused == (candidate == template_kernel.FUSED)


@needs_gpu
def test_not_a_number_stays_in_its_row() -> None:
    a, b = torch.zeros(9, 13), torch.ones(13, 21)
    a[4, 7], a[6, 0] = float("nan"), float("inf")
    with forcing(template_kernel.FAMILY, template_kernel.FUSED):
        found = torch.compile(lambda a, b: a.exp() @ b, mode="max-autotune")(a.to("bp"), b.to("bp"))
    torch.testing.assert_close(found.cpu(), a.exp() @ b, equal_nan=True)


@needs_gpu
def test_the_first_call_measures() -> None:
    compiled = torch.compile(lambda x, s, w: (x @ (w.to(x.dtype) * s)).relu(), mode="max-autotune", dynamic=True)
    w, s = torch.randint(-9, 9, (40, 48), dtype=torch.int8, device="bp"), torch.randn(48, device="bp")
    for rows in (64, 30, 64):
        x = torch.randn(rows, 40, device="bp")
        torch.testing.assert_close(compiled(x, s, w), (x @ (w.float() * s)).relu(), rtol=1e-4, atol=1e-3)


@needs_gpu
def test_gradients() -> None:
    x, s, w = torch.randn(30, 20), torch.randn(40), torch.randint(-9, 9, (20, 40), dtype=torch.int8)
    given = [one.to("bp").requires_grad_(one.is_floating_point()) for one in (x, s, w)]
    compiled = torch.compile(lambda x, s, w: x.sin() @ (w.to(x.dtype) * s), mode="max-autotune")
    expected = [one.clone().requires_grad_(one.is_floating_point()) for one in (x, s, w)]
    compiled(*given).square().sum().backward()
    (expected[0].sin() @ (w.float() * expected[1])).square().sum().backward()
    for one, other in zip(given[:2], expected[:2], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-2, check_device=False)


@needs_gpu
def test_random_numbers_are_those_of_eager_mode() -> None:
    compiled = torch.compile(lambda a, b: F.dropout(a, 0.5) @ b, mode="max-autotune")
    a, b = torch.randn(20, 30, device="bp"), torch.randn(30, 40, device="bp")
    with forcing(template_kernel.FAMILY, template_kernel.FUSED):
        torch.bp.manual_seed(3)
        found = compiled(a, b)
    torch.bp.manual_seed(3)
    torch.testing.assert_close(found, F.dropout(a, 0.5) @ b, rtol=1e-4, atol=1e-4)


@needs_gpu
def test_in_a_graph() -> None:
    """The first call can be captured: nothing is measured then."""
    compiled = torch.compile(lambda a, b: a.exp() @ b, mode="max-autotune")
    a, b = torch.randn(20, 30, device="bp"), torch.randn(30, 40, device="bp")
    compiled(a, b)
    torch._dynamo.reset()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        result = compiled(a, b)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(result, a.exp() @ b, rtol=1e-4, atol=1e-4)


GPU = """
import sys
sys.path[:0] = PATHS
import torch
import test_product_prologues as tests
for name in tests.ON_MODELLED_GPU:
    torch._dynamo.reset()
    print(*tests.check(tests.CASES[name], "fused"))
for dtype in (torch.float16, torch.bfloat16):
    torch._dynamo.reset()
    print(*tests.check(tests.SCALED_AFTER, "fused", dtype))
"""
ON_MODELLED_GPU = ("linear", "both operands", "infinite at zero", "batches added", "long sums of few results")


def test_on_the_target_of_a_gpu(run_forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """In OpenCL C."""
    on_opencl.require_platform()
    folder = Path(__file__).parent
    program = GPU.replace("PATHS", repr([str(folder), str(folder.parent), str(folder.parent / "support")]))
    ran = run_forked(program, TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_TARGET="nvidia-ada")
    kernel = "bp_matmul_tiled_prologue"
    epilogue = f"{kernel}_epilogue"
    of_parts = "bp_matmul_parts_prologue bp_matmul_sum"
    assert ran.stdout.splitlines() == [kernel, kernel, kernel, epilogue, of_parts, epilogue, epilogue]
