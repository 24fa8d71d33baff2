"""Tests Triton kernels on emulated CUDA devices. Triton compiles them for the GPU, and the emulator calls functions in
Python instead of the binaries' instructions (tests/support/triton_kernels.py). So these tests compare what is launched,
and when, but not what Triton's compiler makes of a kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import paths
import pytest

Run = Callable[..., str]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: `make test-triton` installs it"
)

PREAMBLE = f"""\
import sys
sys.path.append({str(paths.SUPPORT)!r})
import torch
import triton
from triton.runtime import driver
import triton_kernels as kernels
from triton_kernels import grid

def launches():
    torch.bp.synchronize()
    return kernels.launches
"""
ADDED = """
def added(n=1000, scale=0.5, device="bp"):
    x, y = torch.randn(n, device=device), torch.randn(n, device=device)
    out = torch.full((n,), torch.nan, device=device)
    kernels.add[grid(n)](x, y, out, n, scale, BLOCK=128)
    return out, x.cpu() + scale * y.cpu()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what Triton compiles, which the tests of a process share."""
    folder = tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def test_kernels_compute_on_tensors_of_bp(run: Run) -> None:
    code = """
for n in (1000, 7, 128, 2):
    out, expected = added(n)
    torch.testing.assert_close(out.cpu(), expected)
assert [sizes for _, sizes, _ in launches()] == [(-(-n // 128), 1, 1, 128, 1, 1, 0) for n in (1000, 7, 128, 2)]
x = torch.arange(10.0, device="bp")
kernels.double[(1,)](x[2:], 8, BLOCK=16)  # at an offset
print(x.tolist())
base = torch.arange(4.0, device="bp")
clone = torch._lazy_clone(base)
kernels.double[(1,)](clone, 4, BLOCK=16)
print(base.tolist(), clone.tolist())
kernels.double[(0,)](base, 4, BLOCK=16)
print(base.tolist())
"""
    assert run(PREAMBLE + ADDED + code).splitlines() == [
        "[0.0, 1.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0]",
        "[0.0, 1.0, 2.0, 3.0] [0.0, 2.0, 4.0, 6.0]",
        "[0.0, 1.0, 2.0, 3.0]",
    ]


def test_autotuned_kernels_and_heuristics(run: Run) -> None:
    code = """
x, out = torch.randn(300, device="bp"), torch.empty(300, device="bp")
kernels.tuned[grid(300)](x, out, 300)
measured = len(launches())
assert {sizes[3] for _, sizes, _ in launches()} == {64, 128}  # both configurations
torch.testing.assert_close(out.cpu(), x.cpu() + 1)
kernels.tuned[grid(300)](x, out, 300)
assert len(launches()) == measured + 1
for n, minus, blocks in ((20, 1, 1), (60, -1, 2), (300, -1, 3)):
    kernels.negated[grid(n)](x, out, n)
    torch.testing.assert_close(out[:n].cpu(), minus * x[:n].cpu())
    assert launches()[-1][1][0] == blocks
print("passed")
"""
    assert run(PREAMBLE + code) == "passed\n"


def test_arguments_of_all_types(run: Run) -> None:
    code = """
out, other = torch.zeros(1, dtype=torch.float64, device="bp"), torch.zeros(1, device="bp")
kernels.numbers[(3, 2, 2)](out, True, -7, 2**40, 2**63 + 1, 0.5, 0.1, None, (1.5, other))
name, sizes, given = launches()[-1]
print(sizes, given[1:8], given[8] == other.data_ptr(), out.item())
"""
    assert run(PREAMBLE + code) == (
        "(3, 2, 2, 128, 1, 1, 0) (True, -7, 1099511627776, 9223372036854775809, 14336, 0.1, 1.5) True 8.0\n"
    )


def test_shared_memory_beyond_the_default(run: Run) -> None:
    code = """
a, b = torch.randn(128, 256, device="bp").half(), torch.randn(256, 128, device="bp").half()
c = torch.empty(128, 128, device="bp")
kernel = kernels.product[(1,)](a, b, c, 256, M=128, N=128, KB=64, num_stages=4, num_warps=8)
torch.testing.assert_close(c.cpu(), a.cpu().float() @ b.cpu().float())
assert launches()[-1][1][6] == kernel.metadata.shared > 48 << 10
try:
    kernels.product[(1,)](a, b, c, 256, M=128, N=128, KB=128, num_stages=4, num_warps=8)
except triton.runtime.errors.OutOfResources as error:
    print(error)
"""
    assert "out of resource: shared memory, Required: " in run(PREAMBLE + code)


def test_clusters(run: Run) -> None:
    code = """
x = torch.arange(100.0, device="bp")
kernels.double[(4,)](x, 100, BLOCK=32, num_ctas=2)
assert driver.active.get_current_target().arch == 90
print(launches()[-1][1], x[:3].tolist())
"""
    out = run(PREAMBLE + code, CUDA_EMULATOR_ARCHITECTURE="90")
    assert out == "(8, 1, 1, 128, 1, 1, 0) [0.0, 2.0, 4.0]\n"


def test_streams_and_devices(run: Run) -> None:
    code = """
side = torch.bp.Stream()
x = torch.zeros(1000, device="bp")
torch.bp.synchronize()
with side:
    x.fill_(3)
    kernels.double[grid(1000)](x, 1000, BLOCK=128)  # after the fill, on the same stream
torch.bp.current_stream().wait_stream(side)
x += 1
print(x[0].item())
with torch.bp.device(2):
    out, expected = added(device="bp:2")
    torch.testing.assert_close(out.cpu(), expected)
    print(driver.active.get_active_torch_device(), driver.active.get_current_device())
    try:
        kernels.double[(1,)](x, 4, BLOCK=16)
    except ValueError as error:
        print(error)
try:
    kernels.double[(1,)](torch.zeros(4), 4, BLOCK=16)
except ValueError as error:
    print(error)
"""
    lines = run(PREAMBLE + ADDED + code).splitlines()
    assert lines[:2] == ["7.0", "bp:2 2"]
    assert lines[2] == (
        "argument x of the Triton kernel double is on bp:0, but must be on the current device bp:2; "
        "torch.bp.set_device() makes another one current"
    )
    assert lines[3].startswith("argument x of the Triton kernel double is on cpu, but must be on the current device bp")


def test_graphs_capture_launches(run: Run) -> None:
    code = """
x, out = torch.randn(1000, device="bp"), torch.empty(1000, device="bp")
def work():
    y = torch.sin(x)
    kernels.add[grid(1000)](x, y, out, 1000, 2.0, BLOCK=128)
    out.mul_(3)
work()
torch.bp.synchronize()
count = len(launches())
graph = torch.bp.Graph()
with torch.bp.graph(graph):
    work()
torch.bp.synchronize()
assert len(launches()) == count  # captured, not launched
for _ in range(3):
    x.normal_()
    graph.replay()
    torch.testing.assert_close(out.cpu(), 3 * (x.cpu() + 2 * x.cpu().sin()), rtol=1e-5, atol=1e-5)
assert len(launches()) == count + 3
with torch.profiler.profile() as profile:
    work()
    torch.bp.synchronize()
print(*sorted({event.name for event in profile.events() if event.name == "add"}))
"""
    assert run(PREAMBLE + code) == "add\n"


def test_memory_that_triton_allocates(run: Run) -> None:
    code = """
x = torch.arange(64.0, device="bp")
seen = []
@kernels.defined("workspace", "Qi")
def _(sizes, address, n):
    kernels.tensor(address, n).mul_(2)
try:
    kernels.workspace[(2,)](x, 64, BLOCK=32)
except RuntimeError as error:
    print(error)
def allocate(nbytes, alignment, stream):
    seen.append((nbytes, torch.empty(nbytes, dtype=torch.int8, device="bp")))
    return seen[-1][1]
triton.set_allocator(allocate)
kernels.workspace[(2,)](x, 64, BLOCK=32)
print(len(seen), launches()[-1][2][-2] == seen[-1][1].data_ptr(), launches()[-1][2][-1], x[1].item())
"""
    out = run(PREAMBLE + code, CUDA_EMULATOR_ARCHITECTURE="90").splitlines()
    assert "no allocator was set" in out[0]
    assert out[1] == "1 True 0 2.0"


def test_errors_name_what_is_accepted(run: Run) -> None:
    code = """
from triton.tools.tensor_descriptor import TensorDescriptor
x = torch.zeros(64, device="bp")
for call in (
    lambda: kernels.described[(1,)](TensorDescriptor.from_tensor(x, [32]), BLOCK=32),
    lambda: kernels.workspace[(1,)](x, 64, BLOCK=32),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
    lines = run(PREAMBLE + code).splitlines()
    assert "argument source of the Triton kernel described has the type tensordesc<" in lines[0]
    # The emulator does not know the kernel, so it refuses the binary.
    assert "ValueError the binary is for sm_80, and Emulated CUDA device 0 is sm_80; or it has no kernel" in lines[1]


def test_other_devices_are_refused(run: Run) -> None:
    code = """
try:
    kernels.double[(1,)](torch.zeros(4, device="bp"), 4, BLOCK=16)
except RuntimeError as error:
    print(error)
"""
    without = run(PREAMBLE + code, TORCH_BACKPLANE_DRIVERS="host")
    assert without.startswith("0 active drivers")
    both = run(
        PREAMBLE + "torch.bp.set_device(torch.bp.device_count() - 1)" + code, TORCH_BACKPLANE_DRIVERS="cuda,host"
    )
    assert both.startswith("Triton kernels do not run on bp:7 (")
    assert "They run on CUDA devices: bp:0, bp:1, bp:2, bp:3." in both


def test_only_programs_that_need_it_use_bp(run: Run) -> None:
    code = """
import sys, torch
assert "triton" not in sys.modules
import triton
from triton.backends import backends
slow = {"torch_backplane.drivers.cuda", "torch_backplane.planning", "torch_backplane.triton_driver.launcher"}
assert not torch.bp.is_initialized() and not slow & set(sys.modules)
class Other:
    @staticmethod
    def is_active():
        return True
    def __init__(self):
        pass
backends["other"] = type(backends["bp"])(backends["nvidia"].compiler, Other)
assert not backends["bp"].driver.is_active()
assert not slow & set(sys.modules)
assert type(triton.runtime.driver.active) is Other
triton.runtime.driver.set_active(backends["bp"].driver())
print(triton.runtime.driver.active.get_active_torch_device())
"""
    assert run(code) == "bp:0\n"


def test_compiled_graphs_call_kernels(run: Run) -> None:
    code = """
import torch._dynamo
from torch_backplane import plans

@torch.compile(fullgraph=True)
def function(x, y):
    out = torch.empty_like(x)
    kernels.add[grid(x.numel())](x.sin(), y, out, x.numel(), 2.0, BLOCK=128)
    kernels.double[(triton.cdiv(x.numel(), 64),)](out, x.numel(), BLOCK=64)
    return out.cos() + 1

def expected(x, y):
    return (2 * (x.sin() + 2 * y)).cos() + 1

for n in (1000, 1000, 1000, 300, 300, 77):
    x, y = torch.randn(n), torch.randn(n)
    given = x.to("bp"), y.to("bp")
    torch.testing.assert_close(function(*given).cpu(), expected(x, y), rtol=1e-4, atol=1e-4)
    assert torch.equal(given[0].cpu(), x)
count = len(launches())
before = plans.stats()["backplane::compiled_graph"]["replays"]
function(*given)
assert plans.stats()["backplane::compiled_graph"]["replays"] == before + 1  # without the wrapper
torch.bp.synchronize()
assert len(launches()) == count + 2
print("passed")
"""
    assert run(PREAMBLE + code) == "passed\n"


def test_compiled_graphs_write_their_arguments(run: Run) -> None:
    code = """
@torch.compile(fullgraph=True)
def function(x, out):
    kernels.tuned[grid(x.numel())](x, out, x.numel())
    kernels.negated[grid(x.numel())](out, out, x.numel())

for n in (300, 300, 300):
    x, out = torch.randn(n), torch.zeros(n, device="bp")
    function(x.to("bp"), out)
    torch.testing.assert_close(out.cpu(), -(x + 1))
with torch.bp.device(1):
    x, out = torch.randn(40, device="bp"), torch.zeros(40, device="bp")
    function(x, out)
    torch.testing.assert_close(out.cpu(), x.cpu() + 1)
print("passed")
"""
    assert run(PREAMBLE + code) == "passed\n"


def test_graphs_from_inductors_cache_find_their_kernels(run: Run, tmp_path: Path) -> None:
    code = """
from torch._dynamo.utils import counters
{before}
@torch.compile(fullgraph=True)
def function(x):
    x = x + 1
    kernels.double[(1,)](x, 8, BLOCK=16)
    return x

print(function(torch.zeros(8, device="bp"))[0].item(), counters["inductor"]["fxgraph_cache_hit"])
"""
    another = "torch.compile(lambda x: kernels.negated[(1,)](x, x, 8))(torch.zeros(8, device='bp'))"
    cached = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert run(PREAMBLE + code.replace("{before}", ""), **cached) == "2.0 0\n"
    # In this process, the kernel has another number.
    assert run(PREAMBLE + code.replace("{before}", another), **cached) == "2.0 1\n"


def test_compiled_graphs_on_other_devices_refuse(run: Run) -> None:
    code = """
torch.bp.set_device(torch.bp.device_count() - 1)

@torch.compile(fullgraph=True)
def function(x):
    kernels.double[(1,)](x, 8, BLOCK=16)
    return x

try:
    function(torch.zeros(8, device="bp"))
except Exception as error:
    print(error)
"""
    found = run(PREAMBLE + code, TORCH_BACKPLANE_DRIVERS="cuda,host")
    assert "Triton kernels do not run on bp:7 (" in found
