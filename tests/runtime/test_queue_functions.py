"""QueueFunction: library functions that planners call with the device's queue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler: neither cc nor the one that CC names"
)

Run = Callable[..., str]

PLANNERS = '''
import gc, threading, torch
from torch_backplane import _C, drivers, plans
torch.accelerator.device_count()
from torch_backplane.planning import Call, QueueFunction, operator, queue_api

LIBRARY = torch.library.Library("backplane_queue_functions", "FRAGMENT")
AXPY = ("output", "output", "input", torch.float32, torch.int64)

def declared(name, axpy):
    """torch.ops.backplane_queue_functions.<name>(y, x, a): the library's a x + y between two kernels."""
    LIBRARY.define(f"{name}(Tensor y, Tensor x, Scalar a) -> Tensor")
    @operator(f"backplane_queue_functions::{name}", variants=False)
    def planner(call: Call, y, x, a):
        result = y * 2
        scratch = torch.empty_like(result)
        axpy(result, scratch, x, a, result.numel())
        return result + 1
    return getattr(torch.ops.backplane_queue_functions, name)

def expected(y, x, a): return y * 2 + a * x + 1
''' + driver_packages.RAISED

QUEUED = PLANNERS + '''
import driver_queued_module as driver
axpy = QueueFunction("axpy", driver.library().axpy, *AXPY, explain=lambda status: {7: "too large"}.get(status, "?"))
y, x = torch.arange(12.0).view(3, 4), torch.linspace(-1, 1, 12).view(3, 4)
'''


@pytest.fixture
def queued(tmp_path: Path) -> Run:
    """queued(code, **env): runs code with a driver whose queues are threads in C."""
    driver_packages.install_queued(tmp_path)

    def call(code: str, **env: str) -> str:
        settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "TORCH_BACKPLANE_PLANS": "1"} | env
        result = forked.run(QUEUED + code, tmp_path, **settings)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call


def test_calls_are_planned_and_replayed_in_stream_order(queued: Run) -> None:
    queued("""
op = declared("axpy", axpy)
assert queue_api(torch.empty(1, device="bp").device) == "queued"
for a in (2.0, -0.5, 3.0):
    assert torch.allclose(op(y.to("bp"), x.to("bp"), a).cpu(), expected(y, x, a))
counts = plans.stats()["backplane_queue_functions::axpy"]
assert (counts["planner_calls"], counts["replays"], counts["unplannable_calls"]) == (1, 2, 0)
assert driver.called("axpy") == 3 and driver.with_gil() == 0
told = plans.explain(op, y.to("bp"), x.to("bp"), 2.0)
(line,) = [line for line in told.splitlines() if "call axpy at " in line]
given = "allocation 0 (written), allocation 1 (written), argument 1, number 0 as Float, 12"
assert line.endswith(f"on the queue with {given}"), line
""")


def test_views_pass_their_offset_and_streams_their_queue(queued: Run) -> None:
    queued("""
op = declared("axpy", axpy)
whole, other = torch.arange(40.0), torch.linspace(0, 1, 40)
on_device = whole.to("bp"), other.to("bp")
torch.bp.synchronize()
stream = torch.bp.Stream()
with stream:
    _C.sleep(100)
    found = [op(on_device[0][i : i + 8], on_device[1][i + 3 : i + 11], 2.0) for i in range(0, 24, 8)]
assert not stream.query()
stream.synchronize()
for i, one in enumerate(found):
    assert torch.allclose(one.cpu(), expected(whole[8 * i : 8 * i + 8], other[8 * i + 3 : 8 * i + 11], 2.0))
""")


def test_dynamic_shape_plans_replay_calls(queued: Run) -> None:
    for mode in ("1", "check"):
        queued("""
op = declared("axpy", axpy)
for n in (4, 7, 12, 31, 5, 64):
    a, b = torch.randn(n, 3), torch.randn(n, 3)
    assert torch.allclose(op(a.to("bp"), b.to("bp"), n).cpu(), expected(a, b, n), atol=1e-5)
counts = plans.stats()["backplane_queue_functions::axpy"]
assert counts["dynamic_shape_replays"] == 4 and not counts["reasons_for_exact"], counts
assert driver.called("axpy") == 6  # in check mode, too
""", TORCH_BACKPLANE_PLANS=mode)  # fmt: skip


def test_without_plans_and_within_another_planner(queued: Run) -> None:
    for mode in ("0", "1", "check"):
        queued("""
inner = declared("inner", axpy)
LIBRARY.define("outer(Tensor y, Tensor x, Scalar a) -> Tensor")
@operator("backplane_queue_functions::outer", variants=False, by_value=["a"])
def outer(call: Call, y, x, a):
    return inner(y, x, a) * inner(x, y, a)
for n in (4, 4, 9, 11):
    a, b = torch.randn(n), torch.randn(n)
    found = torch.ops.backplane_queue_functions.outer(a.to("bp"), b.to("bp"), 1.5)
    assert torch.allclose(found.cpu(), expected(a, b, 1.5) * expected(b, a, 1.5), atol=1e-5)
""", TORCH_BACKPLANE_PLANS=mode)  # fmt: skip


def test_calls_wait_for_kernels_that_are_being_built(queued: Run) -> None:
    queued("""
op = declared("axpy", axpy)
given = y.to("bp"), x.to("bp")
driver.gate.clear()
found = [op(*given, a) for a in (2.0, 5.0)]  # planned, and replayed
assert driver.called("axpy") == 0 and not torch.bp.current_stream().query()
del given
threading.Timer(0.1, driver.gate.set).start()
for one, a in zip(found, (2.0, 5.0)):
    assert torch.allclose(one.cpu(), expected(y, x, a))
assert driver.called("axpy") == 2 and driver.with_gil() == 0
""")


def test_an_error_status_raises_and_leaves_the_stream_usable(queued: Run) -> None:
    printed = queued("""
op = declared("axpy", axpy)
given = y.to("bp"), x.to("bp")
op(*given, 2.0)
torch.bp.synchronize()  # the kernels are built now
plans.clear()
for _ in range(2):  # in a planner call, and in a replay
    driver.answer("axpy", 7)
    print(raised(lambda: op(*given, 2.0)))
    driver.answer("axpy", 0)
    assert torch.allclose(op(*given, 2.0).cpu(), expected(y, x, 2.0))
driver.answer("axpy", -5)
try:
    op(*given, 2.0)
except torch.AcceleratorError as error:
    assert error.error_code == 2**32 - 5  # unsigned in PyTorch
driver.answer("axpy", 0)
# Behind a kernel that is being built
driver.gate.clear()
driver.answer("axpy", 7)
slow = y.to("bp").tan()  # its kernel is not built
found = op(*given, 3.0)
driver.gate.set()
print(raised(torch.bp.synchronize))
driver.answer("axpy", 0)
torch.bp.synchronize()
assert torch.allclose(op(*given, 2.0).cpu(), expected(y, x, 2.0))
assert not torch.bp.memory.memory_allocated() > 6 * 512, torch.bp.memory.memory_allocated()
""")
    text = (
        "AcceleratorError: bp:0 (Queued C accelerator) failed while calling axpy for backplane_queue_functions::axpy: "
        "axpy answered 7, which is: too large"
    )
    assert printed.splitlines() == [text] * 3


def test_explain_can_be_missing_or_fail(queued: Run) -> None:
    printed = queued("""
given = y.to("bp"), y.to("bp"), x.to("bp"), 2.0, 12
driver.answer("axpy", 9)
print(raised(lambda: QueueFunction("axpy", driver.library().axpy, *AXPY)(*given)))
print(raised(lambda: QueueFunction("axpy", driver.library().axpy, *AXPY, explain=lambda status: {}[status])(*given)))
""")
    start = "AcceleratorError: bp:0 (Queued C accelerator) failed while calling axpy for no operator: axpy answered 9"
    assert printed.splitlines() == [start, f"{start}, which is: unknown, because explain raised KeyError: 9"]


def test_functions_live_as_long_as_plans_that_call_them(queued: Run) -> None:
    queued("""
import ctypes, weakref
Signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
seen = []
def made():
    callback = Signature(lambda queue, arguments, count: seen.append(count) or 0)
    op = declared("kept", QueueFunction("callback", callback, *AXPY))
    return op, weakref.ref(callback)
op, kept = made()
for _ in range(3):
    op(y.to("bp"), x.to("bp"), 2.0)
gc.collect()
assert seen == [5] * 3 and kept() is not None
def unused():
    callback = Signature(lambda queue, arguments, count: 0)
    QueueFunction("callback", callback, *AXPY)(y.to("bp"), y.to("bp"), x.to("bp"), 2.0, 12)
    return weakref.ref(callback)
gone = unused()
gc.collect()
assert gone() is None
""")


def test_threads_call_functions_without_the_gil(queued: Run) -> None:
    queued("""
op = declared("axpy", axpy)
failures = []
def work(seed):
    with torch.bp.Stream() as stream:
        a, b = torch.full((16,), float(seed)), torch.ones(16)
        given = a.to("bp"), b.to("bp")
        for i in range(50):
            if not torch.allclose(op(*given, i).cpu(), expected(a, b, i)):
                failures.append((seed, i))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures and driver.called("axpy") == 200 and driver.with_gil() == 0
""")


def test_no_elements_and_lazily_shared_memory(queued: Run) -> None:
    queued("""
op = declared("axpy", axpy)
nothing = torch.empty(0, 4)
assert op(nothing.to("bp"), nothing.to("bp"), 2.0).shape == (0, 4)
whole = y.to("bp")
lazy = torch._lazy_clone(whole)
axpy(lazy, torch.empty_like(lazy), x.to("bp"), 2.0, 12)
assert torch.equal(whole.cpu(), y) and torch.allclose(lazy.cpu(), y + 2 * x)
""")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('QueueFunction("f", 0, "output")', "ValueError: library function f must have an address, but it is 0"),
        ('QueueFunction("f", "axpy", "output")', "TypeError: f must be a ctypes function or its address, but got"),
        ('QueueFunction("f", 1.5, "output")', "TypeError: f must be a ctypes function or its address, but got 1.5"),
        ('QueueFunction("f", 1, "inout")', "TypeError: a parameter of f must be \"input\", \"output\" or a dtype"),
        ('QueueFunction("f", 1, int)', "TypeError: a parameter of f must be"),
        ('QueueFunction("f", 1, torch.complex64)', "TypeError: kernel parameters cannot have dtype"),
        ('QueueFunction("f", 1, "input", explain=3)', "TypeError: explain of f must be a function of a status"),
        ("axpy(y.to('bp'))", "ValueError: axpy takes 5 arguments, but got 1"),
        ("axpy(1, 2, 3, 4, 5)", "TypeError: axpy needs a bp tensor among its arguments"),
        ("axpy(y.to('bp'), 2, 3, 4, 5)",
         "TypeError: argument 1 of function axpy must be a tensor, but got <class 'int'>"),
        ("axpy(y, y, y, 4, 5)", "ValueError: argument 0 of function axpy is on cpu, but must be on a bp device"),
        ("axpy(y.to('bp'), y, y, 4, 5)",
         "ValueError: argument 1 of function axpy is on cpu, but the function is on bp:0"),
        ("axpy(*[y.to('bp')] * 3, 'a', 5)", "RuntimeError: Unable to cast"),
        ("axpy(*[torch._neg_view(y.to('bp'))] * 3, 1, 5)", "ValueError: argument 0 of function axpy is lazily"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise(queued: Run, call: str, message: str) -> None:
    printed = queued(f"print(raised(lambda: {call}))\nassert driver.called('axpy') == 0")
    assert message in printed


def test_writes_to_undeclared_arguments_raise(queued: Run) -> None:
    printed = queued("""
LIBRARY.define("wrong(Tensor y, Tensor x) -> Tensor")
@operator("backplane_queue_functions::wrong", variants=False)
def wrong(call: Call, y, x):
    axpy(y, torch.empty_like(y), x, 1.0, 12)
    return x * 2
print(raised(lambda: torch.ops.backplane_queue_functions.wrong(y.to("bp"), x.to("bp"))))
""")
    assert "writes to an argument that the operator's schema does not declare as written" in printed


def test_drivers_without_a_native_launcher_raise(tmp_path: Path) -> None:
    from test_kernel_launch import TOY_DRIVER

    driver_packages.install(tmp_path, "gated", TOY_DRIVER, "KernelDriver")
    shutil.copy(paths.SUPPORT / "asynchronous_driver.py", tmp_path)
    result = forked.run(PLANNERS + """
x = torch.ones(4).to("bp")
assert queue_api(x.device) == ""
print(raised(lambda: QueueFunction("f", 1, "output")(x)))
""", tmp_path, TORCH_BACKPLANE_DRIVERS="gated")  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        "RuntimeError: f cannot be called on bp:0 (Gated): library calls need a driver with a native launcher, which "
        "provides the queue\n"
    )


# OpenCL libraries get a cl_command_queue and cl_mem buffers. This function builds its own kernel.
OPENCL = '''
import ctypes
import pyopencl as cl
from driver_plain_c_module import built

SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { void* memory; uint64_t offset; const void* data; uint64_t bytes; } argument_t;
typedef void* handle;
extern int clGetCommandQueueInfo(handle, unsigned, size_t, void*, size_t*);
extern handle clCreateProgramWithSource(handle, unsigned, const char**, const size_t*, int*);
extern int clBuildProgram(handle, unsigned, const handle*, const char*, handle, void*);
extern handle clCreateKernel(handle, const char*, int*);
extern int clSetKernelArg(handle, unsigned, size_t, const void*);
extern int clEnqueueNDRangeKernel(
  handle, handle, unsigned, const size_t*, const size_t*, const size_t*, unsigned, handle*, handle*);
static const char* text =
  "kernel void axpy(global float* y, uint at_y, global const float* x, uint at_x, float a)"
  "{ uint i = get_global_id(0); y[at_y + i] += a * x[at_x + i]; }";
int axpy(handle queue, const argument_t* given, uint64_t count) {
  handle context, program, kernel;
  if (!given[2].memory) return -38;
  int status = clGetCommandQueueInfo(queue, 0x1090, sizeof context, &context, 0);
  if (status) return status;
  program = clCreateProgramWithSource(context, 1, &text, 0, &status);
  if (!status) status = clBuildProgram(program, 0, 0, "", 0, 0);
  if (!status) kernel = clCreateKernel(program, "axpy", &status);
  if (status) return status;
  const unsigned at[] = {given[0].offset / 4, given[2].offset / 4};
  const size_t items = *(const uint64_t*)given[4].data;
  clSetKernelArg(kernel, 0, sizeof(handle), &given[0].memory);
  clSetKernelArg(kernel, 1, sizeof(unsigned), &at[0]);
  clSetKernelArg(kernel, 2, sizeof(handle), &given[2].memory);
  clSetKernelArg(kernel, 3, sizeof(unsigned), &at[1]);
  clSetKernelArg(kernel, 4, 4, given[3].data);
  return clEnqueueNDRangeKernel(queue, kernel, 1, 0, &items, 0, 0, 0, 0);
}
"""
def loaded():
    ctypes.CDLL(cl._cl.__file__, ctypes.RTLD_GLOBAL)  # and the libraries that it is linked with
    return built(SOURCE)
op = declared("axpy", QueueFunction("axpy", loaded().axpy, *AXPY))
'''


def test_an_opencl_library_gets_the_queue_and_buffers(platform: None, tmp_path: Path) -> None:
    driver_packages.install_queued(tmp_path)
    for mode in ("1", "check", "0"):
        result = forked.run(PLANNERS + OPENCL + """
assert queue_api(torch.empty(1, device="bp").device) == "opencl"
for n in (5, 5, 8, 13, 40):
    y, x = torch.randn(n, 3), torch.randn(2 * n, 3)
    found = op(y.to("bp"), x.to("bp")[4 : n + 4], 1.5)
    assert torch.allclose(found.cpu(), expected(y, x[4 : n + 4], 1.5), atol=1e-5)
if plans.mode() == "1":
    counts = plans.stats()["backplane_queue_functions::axpy"]
    assert (counts["planner_calls"], counts["replays"], counts["dynamic_shape_replays"]) == (2, 1, 2), counts
print(raised(lambda: op(y.to("bp"), torch.empty(0, device="bp"), 2.0)))
assert torch.allclose(op(y.to("bp"), y.to("bp"), 2.0).cpu(), expected(y, y, 2.0), atol=1e-5)
""", tmp_path, TORCH_BACKPLANE_DRIVERS="opencl", TORCH_BACKPLANE_PLANS=mode)  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert "failed while calling axpy for backplane_queue_functions::axpy: axpy answered -38\n" in result.stdout


