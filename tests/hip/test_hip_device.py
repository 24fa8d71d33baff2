"""Tests the HIP driver's devices on the emulator: properties, current device, kernels, graphs, memory, errors."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from typing import Any

import paths
import pytest

Run = Callable[..., str]
Result = Callable[..., "subprocess.CompletedProcess[str]"]

PREAMBLE = """
import ctypes, os, torch
from library_programs import raised

hip = ctypes.CDLL(os.environ["TORCH_BACKPLANE_HIP_LIBRARY"])

def current():
    device = ctypes.c_int(-1)
    assert hip.hipGetDevice(ctypes.byref(device)) == 0
    return device.value
"""


@pytest.fixture
def values(run: Run) -> Callable[..., Any]:
    """values(code, **env): runs code after PREAMBLE, and returns the value that it assigns to `found`."""
    return lambda code, **env: ast.literal_eval(run(f"{PREAMBLE}\n{code}\nprint(repr(found))", **env))


def test_properties_come_from_the_device(values: Callable[..., Any]) -> None:
    found = values(
        """
from torch_backplane import drivers
device = drivers.device(1)
target, one = device.properties.target, torch.bp.get_device_properties(1)
found = (
    torch.bp.device_count(), one.name, (one.major, one.minor), one.total_memory, one.multi_processor_count,
    target.subgroup_size, target.max_group_size, target.local_memory, target.subgroup_shuffles, device.architecture,
    target.matrix_dtypes == frozenset(), device.triton_target,
    device.properties.dialect, device.properties.dlpack_device, device.properties.software, device.bus,
    [name for name in ("temperature", "power_draw") if not raised(getattr(torch.bp, name)).startswith("no error")],
)
""",
        CUDA_EMULATOR_MEMORY=str(1 << 30),
        CUDA_EMULATOR_UNITS="7",
    )
    assert found == (
        *(4, "Emulated HIP device 1", (11, 0), 1 << 30, 7),
        *(32, 1024, 48 << 10, True, "gfx1100"),
        *(True, None, "HIP C++", (10, 1), "HIP 6.3", "0000:02:00.0", ["temperature", "power_draw"]),
    )


def test_small_kernels_agree_with_the_cpu(run: Run) -> None:
    code = f"""
import sys, torch
sys.path[:0] = {[str(paths.TESTS / one) for one in ("opencl", "support")]!r}
from torch.utils._pytree import tree_leaves
from test_small_kernels import KERNELS

torch.manual_seed(0)
wrong = []
for name in ("elementwise", "cast", "sum", "cumsum", "softmax", "product", "index_put, adding"):
    function, arguments = KERNELS[name]
    given = arguments()
    found = tree_leaves(function(*(one.to("bp:1") for one in given)))
    wrong += [name for one, other in zip(found, tree_leaves(function(*given)))
              if not torch.allclose(one.cpu(), other, rtol=1e-4, atol=1e-4)]
halves = torch.randn(50).half()
wrong += ["half"] * (not torch.equal((halves.to("bp:1") * 3).cpu(), halves * 3))
print(wrong, torch.bp.fallback_counts() if hasattr(torch.bp, "fallback_counts") else "")
"""
    assert run(code).startswith("[]")


def test_kernels_have_no_ptx(values: Callable[..., Any]) -> None:
    """Also where the numbers of AMD's architectures are as large as NVIDIA's compute capabilities."""
    found = values(
        """
from torch_backplane.drivers.cuda.compiler import Compiler
texts, get = [], Compiler.get
Compiler.get = lambda self, text, load: texts.append(text) or get(self, text, load)
a, b = (torch.randn(128, 128).half() for _ in range(2))
product = (a.to("bp") @ b.to("bp")).cpu()
torch.ones(3, 300, device="bp").half().softmax(1).sum().item()
found = (
    torch.allclose(product.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2), len(texts) > 2,
    [word for word in ("asm", "_sync(", "__CUDA_ARCH__") if any(word in text for text in texts)],
)
"""
    )
    assert found == (True, True, [])


def test_the_current_device_of_the_program_stays(values: Callable[..., Any]) -> None:
    found = values(
        """
x = torch.arange(8.0, device="bp:2")
assert hip.hipSetDevice(1) == 0
y = (x + 1).to("bp:3")
with torch.bp.device(2):
    stream = torch.bp.Stream(priority=-1)
    with torch.bp.stream(stream):
        z = x * 2
    stream.synchronize()
found = (current(), y.tolist(), z.tolist(), torch.bp.native_context(2))
"""
    )
    assert found == (1, [1.0 + i for i in range(8)], [2.0 * i for i in range(8)], 3)


def test_copies_between_devices_and_events(values: Callable[..., Any]) -> None:
    found = values(
        """
x = torch.arange(6.0, device="bp:0")
start, end = (torch.bp.Event(enable_timing=True) for _ in range(2))
start.record()
y = x.to("bp:1", non_blocking=True) + x.to("bp:1")
end.record()
end.synchronize()
found = (y.tolist(), start.elapsed_time(end) >= 0, end.query(), str(y.device))
"""
    )
    assert found == ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], True, True, "bp:1")


def test_graphs_are_replayed(values: Callable[..., Any]) -> None:
    found = values(
        """
x, y = torch.ones(5, device="bp:1"), torch.zeros(5, device="bp:1")
graph = torch.bp.CUDAGraph() if hasattr(torch.bp, "CUDAGraph") else torch.bp.Graph()
with torch.bp.device(1), torch.bp.graph(graph):
    y.zero_()          # a fill
    z = y.clone()      # a copy
    z += x * 3         # kernels
x.fill_(2.0)
graph.replay()
first = z.tolist()
x.fill_(4.0)
graph.replay()
found = (first, z.tolist())
"""
    )
    assert found == ([6.0] * 5, [12.0] * 5)


def test_expandable_segments_and_pinned_memory(values: Callable[..., Any]) -> None:
    found = values(
        """
x = torch.ones(1 << 20, device="bp:0")
host = torch.arange(4.0).pin_memory()
y = host.to("bp:0", non_blocking=True)
torch.bp.synchronize()
found = (x.sum().item(), y.tolist(), host.is_pinned(), [one["is_expandable"] for one in torch.bp.memory_snapshot()])
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert found[:3] == (float(1 << 20), [0.0, 1.0, 2.0, 3.0], True)
    assert found[3]
    assert all(found[3])


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("hipMalloc:1:2,hipMalloc:2:2", "torch.empty(10, device='bp')", "OutOfMemoryError: bp out of memory"),
        ("hipModuleLaunchKernel:1:719", "torch.zeros(3, device='bp') + 1", "hipModuleLaunchKernel answered hipError"),
        ("hipMemcpyHtoDAsync:1:999", "torch.ones(3).to('bp')", "hipMemcpyHtoDAsync answered hipErrorUnknown (999)"),
        ("hipStreamCreateWithPriority:1:999", "torch.bp.Stream()", "hipStreamCreateWithPriority answered hipErrorUnkn"),
        ("hiprtcCompileProgram:1:6", "torch.ones(3, device='bp').erf()", "HIPRTC_ERROR_COMPILATION for --offload-arch"),
    ],
)
def test_errors_name_functions_of_hip(values: Callable[..., Any], fault: str, code: str, message: str) -> None:
    found = values(
        f"""
def compute():
    {code}
    torch.bp.synchronize()
found = raised(compute)
""",
        CUDA_EMULATOR_FAULTS=fault,
        TORCH_BACKPLANE_CACHE_DIR="",
    )
    assert message in found


def test_kernels_of_the_cache_are_loaded(values: Callable[..., Any], tmp_path: Any) -> None:
    code = """
from torch_backplane import drivers
from torch_backplane.drivers import builds
torch.ones(3, device="bp") + 2
torch.bp.synchronize()
builds.wait_for_all()
found = dict(drivers.device(0).build_counts())
"""
    first = values(code, TORCH_BACKPLANE_CACHE_DIR=str(tmp_path))
    second = values(code, TORCH_BACKPLANE_CACHE_DIR=str(tmp_path))
    assert first["built"] > 0
    assert second == {"built": 0, "loaded": first["built"]}


def test_binaries_for_other_devices_are_refused(values: Callable[..., Any]) -> None:
    found = values(
        """
from torch_backplane import drivers
found = raised(drivers.device(0).load, b"\\x7fELF amdgcn-amd-amdhsa--gfx90a and more", "add")
"""
    )
    assert found.startswith("ValueError: the binary is for gfx90a, and Emulated HIP device 0 is gfx1100; or it has no")
