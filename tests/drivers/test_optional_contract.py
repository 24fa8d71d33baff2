"""Tests the optional features of drivers: launch attributes, device addresses, native handles, binaries, and resources
of kernels; and the errors of drivers without them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

Run = Callable[..., list[str]]

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

PREAMBLE = '''
import ctypes, torch
from torch_backplane import _C, drivers, plans
torch.accelerator.device_count()
import driver_offering_module as driver

TEXT = """#include <stdint.h>
void add_one(const uint64_t* items, const uint64_t* group, void** arguments) {
  float* x = *(float**)arguments[0];
  for (uint64_t i = 0; i < items[0]; ++i) x[i] += 1;
}"""
def add_one(): return _C.CompiledKernel(0, TEXT, "add_one", "test::add_one", ["output"])
x = torch.zeros(8, device="bp")
''' + driver_packages.RAISED


@pytest.fixture
def offering(tmp_path: Path) -> Run:
    """Returns offering(code, *what): the output of `code` on a driver with features `what` (offering_c_driver.py)."""
    driver_packages.install_queued(tmp_path)
    source = (paths.SUPPORT / "offering_c_driver.py").read_text(encoding="utf-8")
    driver_packages.install(tmp_path, "offering", source, "OfferingDriver")

    def call(code: str, *what: str, **env: str) -> list[str]:
        settings = {"TORCH_BACKPLANE_DRIVERS": "offering", "TORCH_BACKPLANE_DISCRETE": "0", "OFFERS": " ".join(what)}
        result = forked.run(PREAMBLE + code, tmp_path, **settings | env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()

    return call


# --- launches --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_launch_attributes_reach_the_launcher(offering: Run) -> None:
    offering("""
kernel = add_one()
_C.launch(kernel, [x], [8], [2], dynamic_shared_memory=64, cluster=[2], cooperative=True)
_C.launch(kernel, [x], [8], [4])
assert x.tolist() == [2.0] * 8
assert driver.launched() == [1, 8, 1, 1, 2, 1, 1, 64, 2, 1, 1, 1], driver.launched()
for one in ({"dynamic_shared_memory": 1}, {"cluster": (1, 1, 2)}, {"cooperative": True}):
    _C.launch(kernel, [x], [8, 1, 2], [8, 1, 1], **one)
assert driver.launched() == [4, 8, 1, 2, 8, 1, 1, 0, 1, 1, 1, 1], driver.launched()
""", "attributes")  # fmt: skip


OPERATOR = '''
from torch_backplane.planning import Call, operator, runtime
LIBRARY = torch.library.Library("backplane_attributes", "FRAGMENT")
LIBRARY.define("ones(Tensor x) -> Tensor")
kernel = add_one()
@operator("backplane_attributes::ones", variants=False)
def ones(call: Call, x):
    result = torch.zeros_like(x)
    runtime.launch(kernel, [result], [x.numel()], [2], dynamic_shared_memory=64, cluster=[2], cooperative=True)
    return result
op = torch.ops.backplane_attributes.ones
'''


@needs_compiler
@pytest.mark.parametrize("mode", ["0", "1", "check"])
@pytest.mark.slow
def test_plans_replay_launch_attributes(offering: Run, mode: str) -> None:
    offering(OPERATOR + """
for calls, n in enumerate((8, 8, 16, 4, 12), 1):
    assert op(torch.zeros(n, device="bp")).tolist() == [1.0] * n
    assert driver.launched() == [calls, n, 1, 1, 2, 1, 1, 64, 2, 1, 1, 1], driver.launched()
if plans.mode() != "0":
    assert plans.stats()["backplane_attributes::ones"]["dynamic_shape_replays"] > 0
    assert "groups of 2×1×1, 64 bytes of dynamic shared memory, clusters of 2×1×1 groups, cooperative" in (
        plans.explain(op, x)), plans.explain(op, x)
""", "attributes", TORCH_BACKPLANE_PLANS=mode)  # fmt: skip


@needs_compiler
def test_graphs_replay_launch_attributes(offering: Run) -> None:
    offering(OPERATOR + """
op(x)
graph = torch.bp.Graph()
with torch.bp.graph(graph):
    y = op(x)
before = driver.launched()[0]
for replay in (1, 2):
    graph.replay()
    assert y.tolist() == [1.0] * 8
    assert driver.launched() == [before + replay, 8, 1, 1, 2, 1, 1, 64, 2, 1, 1, 1]
""", "attributes")  # fmt: skip


@needs_compiler
def test_launch_attributes_without_driver_support_raise_an_error(offering: Run) -> None:
    printed = offering("""
kernel = add_one()
for one in ({"dynamic_shared_memory": 16}, {"cluster": [2]}, {"cooperative": True}):
    print(raised(lambda: _C.launch(kernel, [x], [8], [4], **one)))
    _C.launch(kernel, [x], [8], [4])
assert x.tolist() == [3.0] * 8
""")
    start = "NotImplementedError: bp:0 (Offering accelerator) cannot launch the kernel add_one of test::add_one"
    attributes = "16 bytes of dynamic shared memory", "clusters of 2×1×1", "cooperative"
    for line, what in zip(printed, attributes, strict=True):
        assert line.startswith(f"{start} with attributes, {what}")
        assert "the group LAUNCH_ATTRIBUTES of a native launcher" in line


@needs_compiler
def test_invalid_attributes_and_too_much_shared_memory(offering: Run) -> None:
    printed = offering("""
kernel = add_one()
_C.launch(kernel, [x], [8], [4])
torch.bp.synchronize()
for one in (
    {"dynamic_shared_memory": 4097}, {"dynamic_shared_memory": 3097}, {"cluster": [3]}, {"cluster": [0]},
    {"cluster": [1, 1, 1, 1]},
):
    print(raised(lambda: _C.launch(kernel, [x], [8], [4], **one)))
print(raised(lambda: _C.launch(kernel, [x], [8], [4], dynamic_shared_memory=-1)).split(":")[0])
assert driver.launched()[0] == 0
_C.launch(kernel, [x], [8], [4], dynamic_shared_memory=3096)
assert x.tolist() == [2.0] * 8 and driver.launched()[0] == 1

from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.planning.launch import launch
made = Kernel("add_one", TEXT, (Parameter("output", torch.float32),), None, local_bytes=1000)
print(raised(lambda: launch(made, [x], [], [8], [4], dynamic_shared_memory=3097)))
launch(made, [x], [], [5], [2], dynamic_shared_memory=3096, cluster=[2])  # rounds 5 work items up to whole clusters
torch.bp.synchronize()
assert driver.launched()[:3] == [2, 8, 1]
""", "attributes", "resources")  # fmt: skip
    needs = "RuntimeError: the kernel add_one of test::add_one needs {} bytes of static and {} bytes of dynamic shared "
    needs += "memory, and a group of bp:0 (Offering accelerator) has 4096 (Target.local_memory)"
    assert printed == [
        needs.format(0, 4097),
        needs.format(1000, 3097),
        "ValueError: the kernel add_one of test::add_one has 2 groups in dimension 0, which is not a multiple of the 3 "
        "of a cluster",
        "ValueError: a cluster must have 1 to 3 dimensions of at least 1 group each, but got [0]",
        "ValueError: a cluster must have 1 to 3 dimensions of at least 1 group each, but got [1, 1, 1, 1]",
        "TypeError",
        "LimitExceeded: add_one needs 4,097 bytes of local memory, and its device takes 4,096 (Target.local_memory)",
    ]


@needs_compiler
def test_shared_memory_of_unbuilt_kernels_is_checked_after_the_build(offering: Run) -> None:
    printed = offering("""
import threading, driver_queued_module
driver_queued_module.gate.clear()
kernel = add_one()
_C.launch(kernel, [x], [8], [4], dynamic_shared_memory=3097)
threading.Timer(0.1, driver_queued_module.gate.set).start()
print(raised(torch.bp.synchronize))
assert driver.launched()[0] == 0
_C.launch(kernel, [x], [8], [4], dynamic_shared_memory=3096)
assert x.tolist() == [1.0] * 8
""", "attributes", "resources")  # fmt: skip
    assert "1000 bytes of static and 3097 bytes of dynamic shared memory" in printed[0]


IN_PYTHON = driver_packages.MINIMAL.replace("1 << 26", "1 << 26, dialect='OpenCL C'") + '''
MinimalDevice.compile = lambda self, text, entry: entry
calls = []
MinimalDevice.launch = lambda self, kernel, items, group, arguments, stream: calls.append((kernel, items, group))
'''


def test_launch_attributes_of_drivers_in_python(tmp_path: Path) -> None:
    code = """
import torch
from torch_backplane import _C
torch.bp.init()
import driver_test_module as driver
kernel = _C.CompiledKernel(0, "text", "entry", "test::operator", [])
attributes = {"dynamic_shared_memory": 16, "cluster": [2, 2], "cooperative": True}
try:
    _C.launch(kernel, [], [8, 8], [4, 4], **attributes)
except NotImplementedError as error:
    print(error)
_C.launch(kernel, [], [8, 8], [4, 4])
torch.bp.synchronize()
print(driver.calls)
""" + driver_packages.RAISED
    printed = []
    for source in (
        IN_PYTHON,
        IN_PYTHON + """
from torch_backplane.drivers import LaunchAttributes
def launch(self, kernel, items, group, attributes, arguments, stream): calls.append((kernel, items, group, attributes))
MinimalDevice.launch_with_attributes = launch
""",
    ):
        site = tmp_path / str(len(printed))
        site.mkdir()
        driver_packages.install(site, "test", source, "MinimalDriver")
        result = forked.run(code, site, TORCH_BACKPLANE_DRIVERS="test")
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout)
    plain = "('entry', (8, 8, 1), (4, 4, 1))"
    assert printed[0] == (
        "bp:0 (Minimal) cannot launch the kernel entry of test::operator with attributes, 16 bytes of dynamic shared "
        "memory, clusters of 2×2×1 groups, cooperative: its driver offers no launch_with_attributes() method\n"
        f"[{plain}]\n"
    )
    given = "LaunchAttributes(dynamic_shared_memory=16, cluster=(2, 2, 1), cooperative=True)"
    assert printed[1] == f"[('entry', (8, 8, 1), (4, 4, 1), {given}), {plain}]\n"


# --- device addresses ------------------------------------------------------------------------------------------------


@needs_compiler
def test_tensors_and_launches_use_device_addresses(offering: Run) -> None:
    offering("""
properties = torch.bp.get_device_properties(0)
assert properties.address_space == "device" and not properties.host_accessible
device = drivers.device(0)
y = torch.arange(1000.0).to("bp")
assert ctypes.cast(y[3:].data_ptr(), ctypes.POINTER(ctypes.c_float))[0] == 3  # the memory is actually host memory
z = (y[7:] + 1)[1:] * 2
assert z.tolist() == [2 * (i + 1) for i in range(8, 1000)]
assert torch.equal(y[1:].clone().cpu(), torch.arange(1.0, 1000))  # copies, and fills
assert torch.full((5,), 3, dtype=torch.uint8, device="bp").tolist() == [3] * 5
assert driver.counted("plain_calls") > 0 and driver.counted("offsets") == 0
assert torch.linalg.matrix_exp(torch.zeros(2, 2, device="bp")).tolist() == [[1, 0], [0, 1]]  # a fallback
del y, z
torch.bp.empty_cache()
""", "pointers")  # fmt: skip


@needs_compiler
def test_synthetic_addresses_launch_with_segments_and_offsets(offering: Run) -> None:
    offering("""
assert torch.bp.get_device_properties(0).address_space == "synthetic"
y = torch.arange(10.0).to("bp")
assert (y[3:] + 1).tolist() == list(range(4, 11)) and driver.counted("offsets") > 0
""")


PROPERTIES = {
    "address_space='gpu'": "address_space is 'gpu', and must be one of synthetic, host, device",
    "address_space=None": "address_space is None, and must be one of synthetic, host, device",
    "address_space='device'": "has the address space 'device' but no address() method",
    "dlpack_device=(2, 0)": "has a dlpack_device, but other libraries cannot use its synthetic addresses",
    "dlpack_device=2": "dlpack_device is 2, and must be a pair (type, id) of whole numbers",
}


@pytest.mark.parametrize("given", PROPERTIES)
def test_driver_with_invalid_address_properties_is_skipped(tmp_path: Path, given: str) -> None:
    source = driver_packages.MINIMAL.replace("1 << 26", f"1 << 26, {given}")
    driver_packages.install(tmp_path, "test", source, "MinimalDriver")
    result = forked.run("import torch; print(torch.bp.device_count())", tmp_path, TORCH_BACKPLANE_DRIVERS="test")
    assert result.stdout == "0\n", result.stderr
    assert PROPERTIES[given] in result.stderr


DLPACK = """
import numpy as np
from torch.utils import dlpack
class Exported(ctypes.Structure):  # the first fields of DLManagedTensorVersioned in dlpack.h
    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2)]
class OldExported(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2)]
get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
def exported(x, **options):
    capsule = x.__dlpack__(max_version=(1, 0), **options)
    old = x.__dlpack__(**options)
    new = Exported.from_address(get(capsule, b"dltensor_versioned"))
    old = OldExported.from_address(get(old, b"dltensor"))
    assert list(new.device) == list(old.device)
    return new.data == x.data_ptr(), *new.device
y = x[2:]
for back in (torch.from_dlpack(y), dlpack.from_dlpack(y), torch.from_dlpack(dlpack.to_dlpack(y))):
    assert back.device == y.device and back.data_ptr() == y.data_ptr()
copy = torch.from_dlpack(y, copy=True)
assert copy.device == y.device and copy.data_ptr() != y.data_ptr()
assert torch.from_dlpack(y, device="cpu").device.type == "cpu"
"""


@needs_compiler
def test_dlpack_uses_the_device_that_the_driver_declares(offering: Run) -> None:
    offering(DLPACK + """
assert y.__dlpack_device__() == (2, 3) and y.__dlpack_device__()[0] is dlpack.DLDeviceType.kDLCUDA
for options in ({}, {"stream": 1}, {"stream": -1}, {"dl_device": (2, 3)}):
    assert exported(y, **options) == (True, 2, 3)
assert exported(y, copy=True) == (False, 2, 3)
assert exported(y, dl_device=(1, 0)) == (False, 1, 0)
print(raised(lambda: np.from_dlpack(y)))
""", "pointers", "cuda")  # fmt: skip


@needs_compiler
def test_numpy_imports_memory_of_a_host_dlpack_device(offering: Run) -> None:
    offering(DLPACK + """
assert y.__dlpack_device__() == (1, 0) and exported(y) == (True, 1, 0)
y += 5  # the export to NumPy waits for it
array = np.from_dlpack(y)
assert array.ctypes.data == y.data_ptr() and array.tolist() == [5.0] * 6
""", "host", "cpu")  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("what", ["pointers", "host", ""])
def test_dlpack_without_a_declared_device(offering: Run, what: str) -> None:
    offering(DLPACK + "assert y.__dlpack_device__() == (12, 0) and exported(y) == (True, 12, 0)", *what.split())


@needs_compiler
def test_hidden_host_memory_is_not_exported_as_host_memory(offering: Run) -> None:
    offering("""
assert x.__dlpack_device__() == (12, 0)
assert torch.from_dlpack(x).data_ptr() == x.data_ptr()
""", "host", "cpu", TORCH_BACKPLANE_DISCRETE="1")  # fmt: skip


# --- native handles --------------------------------------------------------------------------------------------------


@needs_compiler
def test_native_handles_of_streams_and_the_context(offering: Run) -> None:
    offering("""
import driver_queued_module, time
stream = torch.bp.Stream()
handle = stream.native_handle
assert handle != stream.bp_stream and handle == torch.bp.ExternalStream(handle).native_handle
assert torch.bp.ExternalStream(handle) == torch.bp.ExternalStream(stream.bp_stream) == stream
with stream:
    assert torch.bp.current_stream().native_handle == torch.accelerator.current_stream().native_handle == handle
assert torch.bp.native_context() == torch.bp.native_context("bp:0") == 0xC0
# Synchronization includes work that was submitted to the queue directly.
stream.synchronize()
begin = time.perf_counter()
driver_queued_module.library().keep_busy(ctypes.c_void_p(handle), ctypes.c_uint64(200_000))
assert not stream.query()
stream.synchronize()
assert time.perf_counter() - begin > 0.19
# Reading native_handle submits all pending commands, and waits for their kernels to be built.
import threading
driver_queued_module.gate.clear()
kernel = add_one()
with stream:
    _C.launch(kernel, [x], [8], [8])
    threading.Timer(0.1, driver_queued_module.gate.set).start()
    stream.native_handle
driver_queued_module.library().finish(ctypes.c_void_p(handle))
assert x.tolist() == [1.0] * 8
def capture():
    with torch.bp.graph(torch.bp.Graph()):
        assert "it submits work that cannot be replayed" in raised(
            lambda: torch.bp.current_stream().native_handle)
assert "the capture failed" in raised(capture)
""", "adopts", "context")  # fmt: skip


@needs_compiler
def test_external_streams_wrap_foreign_queues(offering: Run) -> None:
    printed = offering("""
queue = driver.foreign_queue()
external = torch.bp.ExternalStream(queue, "bp:0")
assert external == torch.bp.ExternalStream(queue) != torch.bp.current_stream()
assert torch.bp.get_stream_from_external(queue) == external and external.native_handle == queue
x.zero_()
external.wait_stream(torch.bp.current_stream())
with external:
    torch.bp._sleep(100_000_000)
    x += 1
    event = external.record_event()
assert not external.query()
torch.bp.current_stream().wait_event(event)
assert (x + 1).tolist() == [2.0] * 8
print(raised(lambda: torch.bp.ExternalStream(0x10000)))
print(raised(lambda: torch.bp.ExternalStream(0)))
assert torch.bp.ExternalStream(external.bp_stream) == external
made = [torch.bp.ExternalStream(driver.foreign_queue()) for _ in range(255)]
print(raised(lambda: torch.bp.ExternalStream(driver.foreign_queue())))
assert torch.bp.ExternalStream(queue) == external
torch.bp.synchronize()
""", "adopts")  # fmt: skip
    assert printed[0] == "ValueError: the queue 65536 is not of the context 0xC0"
    assert printed[1].startswith("RuntimeError: an external stream must be made from the bp_stream of a stream of bp:0")
    assert printed[2].startswith("RuntimeError: bp:0 has 256 external streams, which is the maximum")


@needs_compiler
def test_driver_without_native_handles_raises_an_error(offering: Run) -> None:
    printed = offering("""
print(raised(lambda: torch.bp.ExternalStream(driver.foreign_queue())))
print(raised(torch.bp.native_context))
assert (x + 1).tolist() == [1.0] * 8
""")
    assert "; native handles are not accepted, because the driver offering has no adopt_stream() method" in printed[0]
    assert printed[1:] == [
        "NotImplementedError: bp:0 has no native context: the driver offering sets no native_context"
    ]


def test_host_and_python_drivers_have_no_native_handles(tmp_path: Path) -> None:
    driver_packages.install(tmp_path, "test", driver_packages.MINIMAL, "MinimalDriver")
    code = "import torch\n" + driver_packages.RAISED + """
for device in ("bp:0", "bp:1"):
    for call in (lambda: torch.bp.Stream(device).native_handle, lambda: torch.bp.native_context(device)):
        print(raised(call))
"""
    result = forked.run(code, tmp_path, TORCH_BACKPLANE_DRIVERS="test,host", TORCH_BACKPLANE_HOST_DEVICES="1")
    assert result.stdout.splitlines() == [
        "NotImplementedError: MinimalDevice has no native_stream(): its streams have no native handle",
        "NotImplementedError: bp:0 has no native context: the driver test sets no native_context",
        "NotImplementedError: host devices have no native stream handles",
        "NotImplementedError: bp:1 has no native context: the driver host sets no native_context",
    ], result.stdout + result.stderr


OPENCL = """
import torch, pyopencl as cl
from torch_backplane import _C, drivers, plans
torch.bp.init()
""" + driver_packages.RAISED


@pytest.fixture
def opencl(platform: None, tmp_path: Path) -> Run:
    def call(code: str) -> list[str]:
        result = forked.run(OPENCL + code, tmp_path, TORCH_BACKPLANE_DRIVERS="opencl")
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.splitlines()

    return call


def test_native_handles_of_opencl(opencl: Run) -> None:
    printed = opencl("""
device = drivers.device(0)
context = cl.Context.from_int_ptr(torch.bp.native_context(0))
assert context == device.context
x = torch.ones(1000, device="bp")
y = x + 1
handle = torch.bp.current_stream().native_handle
assert cl.CommandQueue.from_int_ptr(handle).context == context
assert torch.bp.ExternalStream(handle) == torch.bp.current_stream()

mine = cl.CommandQueue(context, device.device)
external = torch.bp.ExternalStream(mine.int_ptr)
assert external.native_handle == mine.int_ptr and torch.bp.ExternalStream(mine.int_ptr) == external
external.wait_stream(torch.bp.current_stream())
with external:
    z = y * 3
    assert z.tolist() == [6.0] * 1000
gate = cl.UserEvent(context)  # synchronization includes work that was submitted to the queue directly
cl.enqueue_barrier(mine, wait_for=[gate])
assert not external.query()
gate.set_status(cl.command_execution_status.COMPLETE)
external.synchronize()
assert external.query()

other = cl.CommandQueue(cl.Context([device.device]), device.device)
for number in (other.int_ptr, external.bp_stream + 8, 12345, 2**64 - 8):
    print(raised(lambda: torch.bp.ExternalStream(number)).partition(str(number))[2])
print(raised(lambda: torch.bp.ExternalStream(0)))
assert (x + 1).sum().item() == 2000
""")
    assert printed[0].startswith(" does not belong to the context of ")
    assert "create it in torch.bp.native_context()" in printed[0]
    assert all(line.startswith(" is not a command queue of the platform of ") for line in printed[1:4])
    assert printed[4].startswith("RuntimeError: an external stream must be made from the bp_stream of a stream of bp:0")


# --- binaries and resources of kernels -------------------------------------------------------------------------------

BINARY = """
import os, pathlib, subprocess, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "kernel.c").write_text(TEXT)
command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", str(folder / "kernel.c"), "-o", str(folder / "kernel.so")]
subprocess.run(command, check=True)
binary = (folder / "kernel.so").read_bytes()
def load(binary, entry="add_one"): return _C.CompiledKernel(0, binary, entry, "test::add_one", ["output"])
"""


@needs_compiler
def test_kernel_loaded_from_a_binary(offering: Run) -> None:
    printed = offering(BINARY + """
_C.launch(load(binary), [x], [8], [8])
assert x.tolist() == [1.0] * 8
foreign = bytearray(binary)
foreign[18:20] = (183).to_bytes(2, "little")  # AArch64
print(raised(lambda: load(bytes(foreign))))
print(raised(lambda: load(binary, "absent")).split(": ")[1])
_C.launch(load(binary), [x], [8], [8])
assert x.tolist() == [2.0] * 8
""", "loads")  # fmt: skip
    if os.uname().machine == "x86_64":
        assert printed[0] == (
            "RuntimeError: the kernel add_one of test::add_one could not be loaded for Offering accelerator: "
            "ValueError: the binary is for the architecture 183, and Offering accelerator has 62"
        )
    assert printed[1] == "the kernel absent of test::add_one could not be loaded for Offering accelerator"


@needs_compiler
def test_driver_without_binary_support_raises_an_error(offering: Run) -> None:
    printed = offering(BINARY + """
print(raised(lambda: load(binary)))
_C.launch(add_one(), [x], [8], [8])
assert x.tolist() == [1.0] * 8
""")
    assert printed == [
        "RuntimeError: the kernel add_one of test::add_one could not be loaded for Offering accelerator: "
        "NotImplementedError: OfferingDevice does not implement load(), so it cannot load binaries"
    ]


@needs_compiler
@pytest.mark.parametrize(
    ("what", "plan_text"),
    [
        ("resources", "[registers: 32, spilled bytes: None, static shared memory: 1000]"),
        ("", "[registers: None, spilled bytes: None, static shared memory: None]"),
    ],
)
def test_explain_shows_kernel_resources(offering: Run, what: str, plan_text: str) -> None:
    offering(f"""
for _ in range(2):  # planned, and replayed
    (line,) = [one for one in plans.explain(lambda: x + 1).splitlines() if "launch " in one]
    assert line.endswith({plan_text!r}), line
""", *what.split())  # fmt: skip


@needs_compiler
def test_explain_shows_plans_whose_kernels_cannot_be_built(offering: Run) -> None:
    offering("""
import driver_queued_module
import threading
driver_queued_module.gate.clear()  # otherwise the launch itself can raise the build error
def compile(self, text, entry):
    assert driver_queued_module.gate.wait(60)
    raise RuntimeError("no compiler today")
type(drivers.device(0)).compile = compile
threading.Timer(0.2, driver_queued_module.gate.set).start()
plan_text = plans.explain(lambda: x * 3)
assert "[resources unknown: " in plan_text and "no compiler today" in plan_text, plan_text
assert "no compiler today" in raised(torch.bp.synchronize)
assert x.tolist() == [0.0] * 8
""")


def test_binaries_and_resources_of_opencl(opencl: Run) -> None:
    printed = opencl('''
TEXT = """kernel void add_one(global float* x, const ulong offset) {
  local float shared[64];
  shared[get_local_id(0)] = 1;
  barrier(CLK_LOCAL_MEM_FENCE);
  ((global float*)((global char*)x + offset))[get_global_id(0)] += shared[get_local_size(0) - 1 - get_local_id(0)];
}"""
x = torch.zeros(8, device="bp")
torch.bp.synchronize()
device = drivers.device(0)
binary = cl.Program(device.context, TEXT).build().binaries[0]
def load(binary, entry="add_one"): return _C.CompiledKernel(0, binary, entry, "test::add_one", ["output"])
_C.launch(load(binary), [x], [8], [4])
assert x.tolist() == [1.0] * 8
for wrong in ((b"\\0" * 64,), (binary, "absent")):
    print(raised(lambda: load(*wrong)).partition(": ValueError: ")[2])
assert (x + 1).tolist() == [2.0] * 8
kernel = device.compile(TEXT, "add_one")
resources = device.kernel_resources(kernel)
assert resources.static_shared_memory >= 256 and resources.spilled_bytes >= 0 and resources.registers is None, resources
plan_text = plans.explain(lambda: x + 1)
assert "[registers: None, spilled bytes: " in plan_text and "static shared memory: 0]" in plan_text, plan_text
print(raised(lambda: _C.launch(load(binary), [x], [8], [4], dynamic_shared_memory=16)))
''')
    assert all("the binary is not for " in line and " answered CL_" in line for line in printed[:2]), printed
    assert "or has no kernel absent" in printed[1]
    assert printed[2].startswith("NotImplementedError: bp:0")
