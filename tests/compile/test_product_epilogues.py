"""Products under max-autotune: elementwise operations on their results, in the product's kernel or a separate one."""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_opencl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_backplane import drivers

if not drivers.device(0).properties.dialect:
    pytest.skip("the devices have no dialect", allow_module_level=True)

import fused_templates
from fused_templates import CANDIDATES, kernels

from torch_backplane.compile import template_kernel
from torch_backplane.tuning.choosing import forcing

Case = tuple[Callable[..., Any], list[tuple[int, ...]]]


def residual_in_place_of_an_operand(a: torch.Tensor, b: torch.Tensor) -> Any:
    """The result could replace `h`, which other work items still read."""
    h = a.sin()
    return h @ b + h


def heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    h = torch.addmm(b, x, w).relu()
    return h.view(2, 18, 4, 10).transpose(1, 2).contiguous()


def several_results(a: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
    h = a @ b
    return h, h > 0, (h * r).to(torch.float64), h.sigmoid()


CASES: dict[str, Case] = {
    "bias and activation": (lambda x, w, b: F.gelu(torch.addmm(b, x, w)), [(33, 40), (40, 70), (70,)]),
    "residual": (lambda x, w, b, r: F.linear(x, w, b) + r * 0.5, [(4, 9, 40), (70, 40), (70,), (4, 9, 70)]),
    "scaled": (lambda a, b: (a @ b * 0.125).tanh(), [(65, 30), (30, 64)]),
    "alpha and beta": (
        lambda c, a, b: torch.addmm(c, a, b, alpha=2, beta=0.5).exp().clamp(max=3),
        [(17, 48), (17, 9), (9, 48)],
    ),
    "without c": (lambda c, a, b: torch.addmm(c, a, b, beta=0).relu(), [(17, 48), (17, 9), (9, 48)]),
    "batches": (lambda a, b, m: torch.bmm(a, b) * 0.5 + m, [(3, 20, 32), (3, 32, 40), (20, 40)]),
    "batches added": (lambda c, a, b: torch.baddbmm(c, a, b).relu() + c, [(3, 20, 40), (3, 20, 8), (3, 8, 40)]),
    "broadcast columns": (lambda a, b, r: (a @ b) / (1 + r.abs()), [(50, 64), (64, 33), (50, 1)]),
    "transposed operands": (lambda a, b: (a.t() @ b.t()).sin() + 1, [(40, 33), (70, 40)]),
    "transposed result": (lambda a, b, r: (a @ b).relu() + r.t(), [(40, 33), (33, 70), (70, 40)]),
    "other rows": (lambda a, b, r: (a @ b).view(5, 5, 48) * r, [(40, 16), (16, 30), (5, 1, 48)]),
    "other rows, kept": (lambda a, b, r: (h := a @ b, h.view(5, 5, 48) * r), [(40, 16), (16, 30), (5, 1, 48)]),
    "several results": (several_results, [(33, 17), (17, 50), (33, 50)]),
    "kept for a later product": (lambda a, b: (h := (a @ b).relu(), h @ h.t()), [(33, 17), (17, 50)]),
    "kept itself": (lambda a, b: (h := a @ b, h.relu() @ h.t()), [(33, 17), (17, 50)]),
    "in place of an operand": (residual_in_place_of_an_operand, [(64, 64), (64, 64)]),
    "heads": (heads, [(36, 40), (40, 40), (40,)]),
    "long sums of few results": (lambda a, b, r: (a @ b).relu() * r, [(8, 5000), (5000, 12), (8, 12)]),
    "short sums": (lambda a, b: (a @ b).exp(), [(40, 3), (3, 50)]),
    "few rows": (lambda a, b, r: (a @ b).abs() + r, [(3, 64), (64, 50), (3, 50)]),
    "one row": (lambda a, b, r: (a @ b).abs() + r, [(1, 64), (64, 50), (1, 50)]),
    "one column": (lambda a, b, r: (a @ b).abs() + r, [(50, 64), (64, 1), (50, 1)]),
    "expanded result": (lambda a, b, r: ((a @ b) * r).sum(0), [(20, 16), (16, 30), (4, 20, 30)]),
    "not a number": (lambda c, a, b: torch.addmm(c, a, b, beta=float("inf")).isnan(), [(9, 8), (9, 7), (7, 8)]),
    "no sums": (lambda a, b, r: (a @ b).exp() + r, [(4, 0), (0, 5), (4, 5)]),
    "no results": (lambda a, b: (a @ b).exp(), [(0, 4), (4, 5)]),
    "softmax of scores": (lambda q, k: torch.softmax(q @ k.mT * 0.25, -1), [(2, 20, 16), (2, 30, 16)]),
    "checked indices": (
        lambda a, b, t: (a @ b) + t[torch.arange(20, device=a.device) % 7],
        [(20, 16), (16, 9), (7, 9)],
    ),
}
# Those whose operations the product's kernel computes all.
ONE_KERNEL = (
    "bias and activation", "residual", "scaled", "alpha and beta", "without c", "batches", "batches added",
    "broadcast columns", "transposed operands", "other rows", "other rows, kept", "several results", "short sums",
)  # fmt: skip
RESHAPED = ("residual", "other rows", "other rows, kept")  # whose operations use a view of the product


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def operands(name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in CASES[name][1]]


def check(name: str, candidate: str, dtype: torch.dtype = torch.float32) -> None:
    """Compares a case with the CPU in float64, for the given candidate."""
    fused_templates.check(CASES[name][0], operands(name, dtype), candidate, dtype)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("name", CASES)
def test_results(name: str, candidate: str) -> None:
    check(name, candidate)


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bias and activation", "residual", "batches added", "several results", "few rows"])
def test_half_precision(name: str, dtype: torch.dtype, candidate: str) -> None:
    check(name, candidate, dtype)


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel(name: str) -> None:
    if name in RESHAPED and torch.__version__ < "2.12":
        pytest.skip("Inductor of torch 2.11 fuses no operators that use a view of a product with other sizes")
    compiled = torch.compile(CASES[name][0], options={"max_autotune_gemm": True})
    given = [one.to("bp") for one in operands(name)]
    with forcing(template_kernel.FAMILY, template_kernel.FUSED):
        (kernel,) = kernels(compiled, *given)
    assert kernel.startswith("bp_matmul_")
    assert kernel.endswith("_epilogue")
    with forcing(template_kernel.FAMILY, template_kernel.SEPARATE):
        *_, last = kernels(compiled, *given)
    assert last.startswith("bp_fused_")


def test_default_mode_fuses_nothing() -> None:
    given = [one.to("bp") for one in operands("scaled")]
    _, (code,) = torch._inductor.utils.run_and_get_code(torch.compile(CASES["scaled"][0]), *given)
    assert "extern_kernels.mm(" in code
    assert "TemplateKernel" not in code


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_dynamic_shapes(candidate: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> Any:
        return F.silu(F.linear(x, w, b)) + r * x.shape[0]

    compiled = torch.compile(function, mode="max-autotune", dynamic=True)
    with forcing(template_kernel.FAMILY, candidate):
        for rows, depth, columns in ((12, 24, 50), (65, 24, 50), (33, 100, 7), (2, 9, 70), (12, 24, 50)):
            given = [torch.randn(shape) for shape in ((rows, depth), (columns, depth), (columns,), (rows, columns))]
            on_bp = [one.to("bp") for one in given]
            torch.testing.assert_close(compiled(*on_bp).cpu(), function(*given), rtol=1e-4, atol=1e-4)
            assert kernels(compiled, *on_bp)[0].endswith("_epilogue") == (candidate == template_kernel.FUSED)


def test_the_first_call_measures(caplog: pytest.LogCaptureFixture) -> None:
    """Both candidates; the log names the one that is used from then on, also for other sizes."""
    compiled = torch.compile(lambda a, b, s: (a @ b).relu() * s, mode="max-autotune", dynamic=True)
    b, scale = torch.randn(40, 48, device="bp"), torch.tensor(2.0, device="bp")
    with caplog.at_level(logging.INFO, "torch._inductor.bp.__autotuning"):
        for rows in (64, 30, 64):
            a = torch.randn(rows, 40, device="bp")
            torch.testing.assert_close(compiled(a, b, scale), (a @ b).relu() * 2, rtol=1e-4, atol=1e-4)
    (text,) = (one.getMessage() for one in caplog.records if "bp_fused_" in one.getMessage())
    is_fused = kernels(compiled, torch.randn(64, 40, device="bp"), b, scale)[0].endswith("_epilogue")
    assert text.endswith("one kernel" if is_fused else "the product as in eager PyTorch, then a kernel")


@pytest.mark.filterwarnings("default")
def test_a_kernel_that_does_not_build(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    def broken(statements: str, *rest: Any, **named: Any) -> Any:
        return epilogue("this is no statement;", *rest, **named)

    epilogue = template_kernel.Operations
    monkeypatch.setattr(template_kernel, "Operations", broken)
    compiled = torch.compile(lambda a, b: (a @ b).cos() * 3, mode="max-autotune")
    for rows in (20, 20):
        a, b = torch.randn(rows, 30), torch.randn(30, 40)
        found = compiled(a.to("bp"), b.to("bp"))
        torch.testing.assert_close(found.cpu(), (a @ b).cos() * 3, rtol=1e-4, atol=1e-4)
    (warning,) = (str(one.message) for one in recwarn if "ProductWithOperations" in str(one.message))
    assert warning.startswith("fused is left out")


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_training(candidate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are products with epilogues, too; they are computed in other threads."""
    family = template_kernel.FAMILY
    monkeypatch.setattr(template_kernel.tuning, "forced", lambda one: candidate if one == family else None)
    model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8))
    ours, x = copy.deepcopy(model).to("bp"), torch.randn(30, 20)
    torch.compile(ours, mode="max-autotune")(x.to("bp")).square().sum().backward()
    model(x).square().sum().backward()
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3, check_device=False)


def test_random_numbers_are_those_of_eager_mode() -> None:
    """Kernels with random numbers stay separate."""
    compiled = torch.compile(lambda a, b: F.dropout(a @ b, 0.5), mode="max-autotune")
    a, b = torch.randn(20, 30, device="bp"), torch.randn(30, 40, device="bp")
    with forcing(template_kernel.FAMILY, template_kernel.FUSED):
        torch.bp.manual_seed(3)
        found = compiled(a, b)
    torch.bp.manual_seed(3)
    torch.testing.assert_close(found, F.dropout(a @ b, 0.5), rtol=1e-4, atol=1e-4)


def test_in_a_graph() -> None:
    """The first call can be captured: nothing is measured then."""
    compiled = torch.compile(lambda a, b: (a @ b).relu() + 1, mode="max-autotune")
    a, b = torch.randn(20, 30, device="bp"), torch.randn(30, 40, device="bp")
    compiled(a, b)
    torch._dynamo.reset()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        result = compiled(a, b)
    a.normal_()
    graph.replay()
    torch.testing.assert_close(result, (a @ b).relu() + 1, rtol=1e-4, atol=1e-4)


GPU = """
import sys
sys.path[:0] = PATHS
import torch
import test_product_epilogues as tests
from torch_backplane.tuning.choosing import forcing
for name in tests.CASES:
    torch._dynamo.reset()
    tests.check(name, "fused")
for name in ("residual", "several results"):
    for dtype in (torch.float16, torch.bfloat16):
        torch._dynamo.reset()
        tests.check(name, "fused", dtype)
for name in ("scaled", "long sums of few results"):
    torch._dynamo.reset()
    compiled = torch.compile(tests.CASES[name][0], mode="max-autotune")
    with forcing(tests.template_kernel.FAMILY, "fused"):
        print(*tests.kernels(compiled, *(one.to("bp") for one in tests.operands(name))))
"""


def test_tiles_of_gpus(run_forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """On the target of a GPU, whose kernels use tiles in local memory, and add up parts of long sums."""
    on_opencl.require_platform()
    folder = Path(__file__).parent
    program = GPU.replace("PATHS", repr([str(folder), str(folder.parent), str(folder.parent / "support")]))
    ran = run_forked(program, TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_TARGET="nvidia-ada")
    assert ran.stdout == "bp_matmul_tiled_epilogue\nbp_matmul_parts bp_matmul_sum\n"
