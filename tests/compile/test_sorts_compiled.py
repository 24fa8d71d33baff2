"""Sorts in compiled graphs: their results equal those of eager PyTorch on the CPU and on the same device.

On GPUs, the cases say how many kernels there are. Other devices call the operators of eager PyTorch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import on_opencl
import pytest
import torch
from scan_cases import eager_calls
from sort_cases import CASES, HAS_KERNELS, IS_GPU, check
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.filterwarnings("ignore")
GPU = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}


@pytest.mark.parametrize("name", ["neighbours", "floats", "257 elements", "no element", "several", "gathered"])
def test_sorts(name: str) -> None:
    torch.manual_seed(0)
    check(name)


@pytest.mark.skipif(IS_GPU or not HAS_KERNELS, reason="for CPUs with a dialect")
def test_cpus_call_the_operator() -> None:
    x = torch.randn(20, 50, device="bp")
    _, (code,) = run_and_get_code(torch.compile(lambda x: (x * 2).sort(-1)), x)
    assert eager_calls(code) == ["sort"]


PROGRAM = """
import warnings
import torch
from sort_cases import CASES, check

warnings.simplefilter("ignore")
for name in CASES:
    if name in NAMES:
        torch.manual_seed(0)
        check(name)
        print(name)
"""
SOME = (
    "lengths", "floats", "integers", "booleans", "one element", "columns", "neighbours", "positions only", "reduced",
    "several", "short rows", "short columns", "in place", "gathered", "topk", "257 elements",
)  # fmt: skip


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def test_sorts_on_gpus(names: tuple[str, ...], tmp_path: Path) -> None:
    on_opencl.require_platform()
    done = forked.run(PROGRAM.replace("NAMES", repr(names)), tmp_path, timeout=280, **GPU)
    assert done.stdout.splitlines() == [one for one in CASES if one in names], done.stderr


@pytest.mark.slow
def test_sorts_have_no_races(tmp_path: Path) -> None:
    names = ("lengths", "several", "chain", "short rows", "in place", "indices", "scanned")
    settings = {"TORCH_BACKPLANE_SANITIZE_KERNELS": "1", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    done = forked.run(PROGRAM.replace("NAMES", repr(names)), tmp_path, timeout=280, **settings)
    assert done.stdout.splitlines() == [one for one in CASES if one in names], done.stderr


DYNAMIC = """
import torch
from scan_cases import eager_calls, kernels
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

config.force_disable_caches = True  # graphs in Inductor's cache also have guards for the bounds of earlier ones


def check(bounds, *shapes):
    def call(x):
        given = x.to("bp")
        torch._dynamo.mark_dynamic(given, 0)
        torch._dynamo.mark_dynamic(given, 1, **bounds)
        found = compiled(given)
        # Some numbers of a row are equal. The kernels are stable; sort() of the CPU is not on all processors.
        torch.testing.assert_close(tuple(found), tuple((x * 2).sort(dim=-1, stable=True)), check_device=False)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2).sort(-1))
    _, (code,) = run_and_get_code(call, torch.randn(5, 100))
    print(len(kernels(code)), *eager_calls(code))
    torch._dynamo.utils.counters.clear()
    for shape in shapes:
        call(torch.randn(shape))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


check({"min": 2, "max": 200}, (300, 200), (3, 2), (64, 65))
check({"min": 2, "max": 256}, (3, 256))
check({"min": 2, "max": 257}, (3, 257))
check({}, (3, 1000))
"""


def test_dynamic_lengths_are_sorted_in_kernels_if_they_are_bounded(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    on_opencl.require_platform()
    done = run_forked(DYNAMIC, **GPU)
    assert done.stdout.splitlines() == ["1", "1", "1 sort", "1 sort"], done.stderr


LARGE_STATES = """
import torch
from scan_cases import eager_calls, kernels
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code


def product(a, b):
    return [sum(a[3 * i + k] * b[3 * k + j] for k in range(3)) for i in range(3) for j in range(3)]


def function(*rows):
    return associative_scan(product, list(rows), 1), rows[0].sort(-1)


rows = [torch.rand(2, 256, dtype=torch.float64) / 2 for _ in range(9)]
(scanned, ordered), (code,) = run_and_get_code(torch.compile(function), *(one.to("bp") for one in rows))
state = [one[:, 0] for one in rows]
for position in range(1, 256):
    state = product(state, [one[:, position] for one in rows])
torch.testing.assert_close(torch.stack(scanned).cpu()[..., -1], torch.stack(state))
torch.testing.assert_close(tuple(ordered), tuple(rows[0].sort(-1)), check_device=False)
print(len(kernels(code)), *eager_calls(code))
"""


def test_sorts_are_apart_from_scans_if_local_memory_cannot_hold_both(
    run_forked: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A team of 256 work items would need 36 KiB for the states of 3 x 3 matrices."""
    on_opencl.require_platform()
    done = run_forked(LARGE_STATES, **GPU)
    assert done.stdout == "2\n", done.stderr


GRADIENTS = """
import torch


def function(x):
    values, positions = (x * 2).sort(-1)
    return (values.square() * positions).sum()


x = torch.randn(20, 33, requires_grad=True)
ours = x.detach().to("bp").requires_grad_()
torch.compile(function)(ours).backward()
function(x).backward()
torch.testing.assert_close(ours.grad.cpu(), x.grad)
print("done")
"""


def test_gradients(run_forked: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    on_opencl.require_platform()
    done = run_forked(GRADIENTS, **GPU)
    assert done.stdout == "done\n", done.stderr
