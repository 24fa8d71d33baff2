"""Scans in compiled graphs: their results equal those of eager PyTorch on the CPU and on the same device.

On devices with a dialect, the cases say how many kernels there are, and no operator of eager PyTorch may be called.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import on_opencl
import pytest
import torch
from scan_cases import CASES, check, eager_calls, kernels, on_bp
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torch_backplane import drivers

HAS_KERNELS = bool(drivers.device(0).properties.dialect)
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="the devices have no dialect")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", CASES)
def test_scans(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name])


TEAMS = """
import warnings
import torch
from scan_cases import CASES, check

warnings.simplefilter("ignore")
for name, case in CASES.items():
    if name in NAMES:
        torch.manual_seed(0)
        check(case)
        print(name)
"""
SOME = (
    "softmax before", "columns", "many columns", "few elements", "one tile", "one element more", "maxima",
    "exponentials of special", "half", "negative indices", "reduced", "several", "in place",
)  # fmt: skip


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_scans_by_teams_of_work_items(names: tuple[str, ...], tmp_path: Path) -> None:
    """On the target of a GPU; the devices of other tests are CPUs, whose work items scan alone."""
    on_opencl.require_platform()
    settings = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    done = forked.run(TEAMS.replace("NAMES", repr(names)), tmp_path, timeout=280, **settings)
    assert done.stdout.splitlines() == [one for one in CASES if one in names], done.stderr


@pytest.mark.slow
def test_scans_of_teams_have_no_races(tmp_path: Path) -> None:
    names = ("one tile", "maxima", "negative indices", "in place")
    settings = {"TORCH_BACKPLANE_SANITIZE_KERNELS": "1", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    done = forked.run(TEAMS.replace("NAMES", repr(names)), tmp_path, timeout=280, **settings)
    assert done.stdout.splitlines() == [one for one in CASES if one in names], done.stderr


LARGE_STATES = """
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code


def product(a, b):
    return [sum(a[3 * i + k] * b[3 * k + j] for k in range(3)) for i in range(3) for j in range(3)]


rows = [torch.rand(2, 3000, dtype=torch.float64) / 2 for _ in range(9)]
found, (code,) = run_and_get_code(torch.compile(associative_scan), product, [one.to("bp") for one in rows], 1)
state = [one[:, 0] for one in rows]
for position in range(1, 3000):
    state = product(state, [one[:, position] for one in rows])
torch.testing.assert_close(torch.stack(found).cpu()[..., -1], torch.stack(state))
print("team=128" in code)
"""


def test_teams_are_smaller_if_local_memory_cannot_hold_their_states(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The states of 3 x 3 matrices: 256 work items would need 36 KiB."""
    on_opencl.require_platform()
    done = run_forked(LARGE_STATES, TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_TARGET="nvidia-ada")
    assert done.stdout == "True\n", done.stderr


LONG_LINES = """
import torch
from scan_cases import eager_calls, kernels
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code


def check(function, *shape):
    x = torch.randn(shape)
    found, (code,) = run_and_get_code(torch.compile(function), x.to("bp"))
    torch.testing.assert_close(found.cpu(), (x * 2).cumsum(0), rtol=1e-3, atol=1e-2)
    print(len(kernels(code)), *eager_calls(code))


check(lambda x: (x * 2).cumsum(0), 200_000)
check(lambda x: (x * 2).cumsum(0), 2_000)
check(lambda x: associative_scan(torch.add, x * 2, 0), 200_000)
"""


def test_few_lines_of_many_elements_are_divided_as_in_eager_pytorch(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """On GPUs. associative_scan has no separate operator in eager PyTorch."""
    on_opencl.require_platform()
    done = run_forked(LONG_LINES, TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_TARGET="nvidia-ada")
    assert done.stdout == "1 cumsum\n1\n1\n", done.stderr


def test_dynamic_shapes() -> None:
    def function(x: torch.Tensor, dim: int) -> Any:
        values, positions = (x * 2).cummax(dim)
        return torch.softmax(x, dim).cumsum(dim) * x.shape[0], values, positions

    torch._dynamo.utils.counters.clear()
    for dim in (0, 1):
        compiled = torch.compile(function, dynamic=True)
        for shape in ((5, 70), (300, 64), (2, 3), (64, 65), (17, 1000), (1100, 20)):
            x = torch.randn(shape)
            found = compiled(x.to("bp"), dim)
            torch.testing.assert_close(found, function(x, dim), rtol=1e-4, atol=1e-4, check_device=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@needs_kernels
def test_the_results_of_a_scan_are_computed_together() -> None:
    _, (code,) = run_and_get_code(torch.compile(lambda x: x.cummax(-1)), torch.randn(5, 30, device="bp"))
    assert "scan0_1" in code
    assert "scan1_" not in code


def test_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.cumsum(-1).sin() + x.cumprod(0) + x.cummax(-1)[0]).logcumsumexp(0)

    x = torch.rand(20, 33, requires_grad=True)
    ours = x.detach().to("bp").requires_grad_()
    torch.compile(function)(ours).square().sum().backward()
    function(x).square().sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4)


# Combine functions of associative_scan, with the operands of 20 x 70 elements.


def _recurrence(earlier: Any, later: Any) -> Any:
    """Composes y = a x + b."""
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def _statistics(earlier: Any, later: Any) -> Any:
    """Of several dtypes: a count, a mean and a maximum."""
    count = earlier["count"] + later["count"]
    mean = earlier["mean"] + (later["mean"] - earlier["mean"]) * (later["count"] / count)
    return {"count": count, "mean": mean, "most": torch.maximum(earlier["most"], later["most"])}


ASSOCIATIVE: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "sum": (torch.add, lambda: torch.randn(20, 70)),
    "maximum": (torch.maximum, lambda: torch.randn(20, 70)),
    "exclusive or": (torch.bitwise_xor, lambda: torch.randint(0, 99, (20, 70), dtype=torch.int32)),
    "last that is not zero": (lambda a, b: torch.where(b != 0, b, a), lambda: torch.randint(-1, 2, (20, 70)).half()),
    "recurrence": (_recurrence, lambda: (torch.rand(20, 70), torch.randn(20, 70))),
    "matrices": (
        lambda a, b: [a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2],
                      a[2] * b[1] + a[3] * b[3]],
        lambda: [torch.rand(20, 70) * 0.6 for _ in range(4)],
    ),
    "several dtypes": (
        _statistics,
        lambda: {
            "count": torch.ones(20, 70, dtype=torch.int64),
            "mean": torch.randn(20, 70, dtype=torch.float64),
            "most": torch.randn(20, 70).bfloat16(),
        },
    ),
}  # fmt: skip


def _one_after_another(combine: Callable[..., Any], xs: Any, dim: int) -> Any:
    """The definition of a scan."""
    leaves, structure = tree_flatten(xs)
    lines = [one.unbind(dim) for one in leaves]
    state = tree_unflatten([one[0] for one in lines], structure)
    states = [state]
    for position in range(1, len(lines[0])):
        state = combine(state, tree_unflatten([one[position] for one in lines], structure))
        states.append(state)
    columns = zip(*(tree_flatten(one)[0] for one in states), strict=True)
    return tree_unflatten([torch.stack(one, dim) for one in columns], structure)


@needs_kernels
@pytest.mark.parametrize("name", ASSOCIATIVE)
def test_associative_scans(name: str) -> None:
    combine, make = ASSOCIATIVE[name]
    for dim in (0, -1):
        torch._dynamo.reset()
        xs = make()
        expected = _one_after_another(combine, xs, dim)
        found, (code,) = run_and_get_code(torch.compile(associative_scan), combine, on_bp(xs), dim)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_device=False)
        assert not eager_calls(code)
        assert len(kernels(code)) == 1
        eager = associative_scan(combine, on_bp(xs), dim)
        torch.testing.assert_close(eager, expected, rtol=1e-2, atol=1e-2, check_device=False)


@needs_kernels
def test_associative_scans_with_their_neighbours() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(a)
        return associative_scan(_recurrence, (gates, b * (1 - gates)), -1)[1].relu()

    def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gates = torch.sigmoid(a)
        return _one_after_another(_recurrence, (gates, b * (1 - gates)), -1)[1].relu()

    given = [torch.randn(9, 300) for _ in range(2)]
    found, (code,) = run_and_get_code(torch.compile(function), *on_bp(given))
    torch.testing.assert_close(found.cpu(), expected(*given), rtol=1e-4, atol=1e-5)
    assert len(kernels(code)) == 1


@needs_kernels
@pytest.mark.parametrize("mode", ["pointwise", "generic"])
def test_reverse_associative_scans(mode: str) -> None:
    xs = torch.rand(20, 70), torch.randn(20, 70)
    expected = tree_map(lambda one: one.flip(1), _one_after_another(_recurrence, [one.flip(1) for one in xs], 1))
    compiled = torch.compile(lambda xs: associative_scan(_recurrence, xs, 1, reverse=True, combine_mode=mode))
    torch.testing.assert_close(compiled(on_bp(xs)), tuple(expected), rtol=1e-4, atol=1e-5, check_device=False)


def test_associative_scans_that_are_refused() -> None:
    x = torch.randn(4, 3, device="bp")
    refused: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (ValueError, "Combine_fn must be a callable, but got 3", (3, x, 0)),
        (ValueError, "Dim must be an int, but got <class 'str'>", (torch.add, x, "0")),
        (RuntimeError, "Reverse must be a bool, but got <class 'int'>", (torch.add, x, 0, 1)),
        (IndexError, r"xs of shape \(4, 3\) have no dimension 2", (torch.add, x, 2)),
        (ValueError, r"xs of shape \(0, 3\) have no elements along the scan dimension 0", (torch.add, x[:0], 0)),
        (ValueError, r"xs must have the same shape, but got \(4, 3\) and \(4,\)", (_recurrence, (x, x[:, 0]), 0)),
        (ValueError, "all input tensors need to be on CUDA or XPU", (_recurrence, (x, x.cpu()), 0)),
    ]
    for kind, text, arguments in refused:
        with pytest.raises(kind, match=text):
            associative_scan(*arguments)


@needs_kernels
def test_a_combine_function_must_be_of_scalars() -> None:
    with pytest.raises(Exception, match="the combine_fn needs to be pointwise"):
        torch.compile(lambda x: associative_scan(lambda a, b: a.sum() + b, x, 0))(torch.randn(4, 3, device="bp"))
