"""Tests kernels of Python drivers: asynchronous builds, launches in stream order, and OpenCL's native launcher.

Each test runs in a separate process, on OpenCL devices or on the driver below, whose kernels are Python functions and
whose builds wait for an event.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Prepended to each test's code: kernels that compute `o = a + alpha * b` and `o = alpha * a * b`, and launch helpers.
OPENCL = '''
import struct, threading, torch
from torch_backplane import _C, drivers
from torch_backplane.drivers import builds
from torch_backplane.drivers.opencl import compiler

compiler.KEEP_THEIR_OWN = ()  # use the kernel cache on PoCL too: these tests can query its binaries safely

PARAMETERS = """(global const float* a_base, const ulong a_offset, global const float* b_base, const ulong b_offset,
    global float* o_base, const ulong o_offset, const float alpha, const uint count) {
  global const float* a = (global const float*)((global const char*)a_base + a_offset);
  global const float* b = (global const float*)((global const char*)b_base + b_offset);
  global float* o = (global float*)((global char*)o_base + o_offset);
  const uint i = (uint)get_global_id(0);"""
ADD = "kernel void add" + PARAMETERS + " if (i < count) o[i] = a[i] + alpha * b[i]; }"
MULTIPLY = "kernel void multiply" + PARAMETERS + " if (i < count) o[i] = alpha * a[i] * b[i]; }"
BROKEN = "kernel void broken" + PARAMETERS + "\\n  this does not compile\\n}"

def compile(text, entry, operator="test::operator"): return _C.compile_kernel(0, text, entry, operator)
def launch(kernel, a, b, o, alpha=1.0, stream=None, times=1):
    count = o.numel()
    arguments = [a, b, o, struct.pack("f", alpha), struct.pack("I", count)]
    _C.launch_kernel(0, kernel, (-(-count // 16) * 16, 1, 1), (16, 1, 1), arguments, stream, times)
def bp(*values): return torch.tensor(values, dtype=torch.float32, device="bp")
'''

# A driver without a native launcher. A kernel's text is `lambda arrays, numbers: …`; builds wait for `gate`.
TOY_DRIVER = '''
import struct, threading, time
from asynchronous_driver import AsynchronousDevice
from torch_backplane.drivers import Device, DeviceProperties, Driver

gate = threading.Event()
gate.set()
builds = []

class KernelDevice(AsynchronousDevice):
    def __init__(self):
        self.properties = DeviceProperties(name="Gated", total_memory=1 << 28, dialect="OpenCL C")

    def compile(self, text, entry):
        builds.append(entry)
        assert gate.wait(60)
        return eval(text)

    def launch(self, kernel, items, group, arguments, stream):
        assert items[0] % group[0] == 0 and len(items) == len(group) == 3
        memory = [argument for argument in arguments if isinstance(argument, tuple)]
        numbers = [argument for argument in arguments if isinstance(argument, bytes)]
        def work():
            views = [memoryview(handle)[offset:offset + 4 * items[0]].cast("f") for handle, offset in memory]
            kernel(views, [struct.unpack("f", number)[0] for number in numbers])
            for view in views: view.release()
        stream.work.put(work)

class KernelDriver(Driver):
    def devices(self): return [KernelDevice()]
'''

TOY = '''
import struct, sys, threading, torch
from torch_backplane import _C
torch.accelerator.device_count()
driver = sys.modules["driver_gated_module"]
ADD = """lambda arrays, numbers: [arrays[2].__setitem__(i, arrays[0][i] + numbers[0] * arrays[1][i])
                                 for i in range(len(arrays[2]))]"""

def compile(text=ADD, entry="add", operator="test::add"): return _C.compile_kernel(0, text, entry, operator)
def launch(kernel, a, b, o, alpha=1.0, stream=None):
    _C.launch_kernel(0, kernel, (o.numel(), 1, 1), (1, 1, 1), [a, b, o, struct.pack("f", alpha)], stream)
def bp(*values): return torch.tensor(values, dtype=torch.float32, device="bp")
'''


def checked(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def run(platform: None, tmp_path: Path) -> Run:
    """Returns run(code, **env), which uses the OpenCL devices and an empty kernel cache."""

    def call(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_CACHE_DIR": str(tmp_path / "cache")} | env
        return checked(forked.run(OPENCL + code, tmp_path, **env))

    return call


@pytest.fixture
def toy(tmp_path: Path) -> Run:
    """Returns toy(code, **env), which uses the driver in Python."""
    driver_packages.install(tmp_path, "gated", TOY_DRIVER, "KernelDriver")
    (tmp_path / "asynchronous_driver.py").write_text(
        (paths.SUPPORT / "asynchronous_driver.py").read_text(encoding="utf-8")
    )

    def call(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        return checked(forked.run(TOY + code, tmp_path, TORCH_BACKPLANE_DRIVERS="gated", **env))

    return call


# --- OpenCL ----------------------------------------------------------------------------------------------------------


def test_a_kernel_computes_its_results(run: Run) -> None:
    run("""
assert _C.device_properties(0).dialect == "OpenCL C"
a, b = torch.randn(1000), torch.randn(1000)
o = torch.empty(1000, device="bp")
add = compile(ADD, "add")
launch(add, a.to("bp"), b.to("bp"), o, 2.0)
torch.testing.assert_close(o.cpu(), a + 2 * b, rtol=1e-6, atol=1e-6)
_C.destroy_kernel(0, add)
""")


def test_views_pass_their_offset(run: Run) -> None:
    run("""
a, o = torch.arange(32.0).to("bp"), torch.zeros(32, device="bp")
add = compile(ADD, "add")
launch(add, a[3:11], a[20:28], o[5:13])
expected = torch.zeros(32)
expected[5:13] = torch.arange(3.0, 11.0) + torch.arange(20.0, 28.0)
assert torch.equal(o.cpu(), expected)
""")


def test_launches_do_not_reuse_arguments_of_other_launches(run: Run) -> None:
    run("""
add = compile(ADD, "add")
big = [torch.full((1 << 22,), float(i), device="bp") for i in range(3)]  # each in its own segment
for alpha in (1.0, 2.0):
    for i, j in ((0, 1), (1, 2), (2, 0)):
        o = torch.zeros(16, device="bp")
        launch(add, big[i], big[j], o, alpha)
        assert o.tolist() == [i + alpha * j] * 16
""")


def test_memory_that_was_freed_and_allocated_again(run: Run) -> None:
    run("""
add = compile(ADD, "add")
for value in range(8):
    a, b = torch.full((1 << 22,), float(value), device="bp"), torch.ones(1 << 22, device="bp")
    launch(add, a, b, b)
    assert b[0].item() == b[-1].item() == value + 1
    del a, b
    torch.bp.empty_cache()
""")


def test_threads_launch_the_same_kernel(run: Run) -> None:
    run("""
add = compile(ADD, "add")
failures = []

def work(seed):
    stream = torch.bp.Stream()
    with stream:
        a, b = bp(*[float(seed)] * 16), bp(*[1.0] * 16)
        stream.synchronize()
        for _ in range(300):
            launch(add, a, b, a, float(seed))
        result = a.cpu().tolist()
    if result != [seed + 300.0 * seed] * 16:
        failures.append((seed, result))

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
""")


def test_launches_of_unbuilt_kernels_run_in_order(run: Run) -> None:
    run("""
a, b = bp(*[1.0] * 16), bp(*[3.0] * 16)
add, multiply = compile(ADD, "add"), compile(MULTIPLY, "multiply")
for _ in range(3):
    launch(add, a, b, a)       # a = a + 3
    launch(multiply, a, b, a)  # a = 3 a
a.add_(0)
launch(add, a, b, a)
assert a.tolist() == [((((1 + 3) * 3) + 3) * 3 + 3) * 3 + 3.0] * 16
""")


def test_a_build_error_names_operator_and_kernel_at_the_next_synchronization(run: Run) -> None:
    run("""
a = bp(*range(16))
broken, add = compile(BROKEN, "broken", "aten::broken_op"), compile(ADD, "add")
launch(broken, a, a, a)
launch(add, a, a, a)
try:
    torch.bp.synchronize()
    raise AssertionError("no error")
except RuntimeError as error:
    message = str(error)
torch.bp.synchronize()  # the error is raised only once
for part in ("aten::broken_op", "kernel broken", "BUILD_PROGRAM_FAILURE", "error:", "\\n7\\t  this does not compile"):
    assert part in message, (part, message)
try:
    launch(broken, a, a, a)
    raise AssertionError("launched")
except RuntimeError as error:
    assert "aten::broken_op" in str(error)
launch(add, a, a, a)
assert a.cpu().tolist() == [4.0 * i for i in range(16)]  # both additions ran
""")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("[a, a, a, b'1234']", "CL_INVALID_KERNEL_ARGS"),
        ("[a, a, a, b'1234', b'1234', b'1234']", "the kernel add of test::operator: clSetKernelArg of argument 8"),
        ("[a, a, a, b'12345678', b'1234']", "CL_INVALID_ARG_SIZE"),
        ("[a, a, torch.zeros(16), b'1234', b'1234']", "are not memory of"),
    ],
)
def test_wrong_arguments(run: Run, arguments: str, message: str) -> None:
    run(f"""
a = bp(*range(16))
add = compile(ADD, "add")
try:
    _C.launch_kernel(0, add, (16, 1, 1), (16, 1, 1), {arguments})
    torch.bp.synchronize()
    raise AssertionError("launched")
except RuntimeError as error:
    assert {message!r} in str(error), error
launch(add, a, a, a)
assert a.tolist() == [2.0 * i for i in range(16)]
""")


def test_launch_with_zero_work_items_does_nothing(run: Run) -> None:
    run("""
a = bp(1.0)
_C.launch_kernel(0, compile(ADD, "add"), (0, 1, 1), (16, 1, 1), [])
torch.bp.synchronize()
""")


HELD_STREAM = """
import pyopencl as cl
made = []
create_stream = type(drivers.device(0)).create_stream
type(drivers.device(0)).create_stream = lambda self, priority: made.append(create_stream(self, priority)) or made[-1]

def held():
    # A stream that is blocked until the event is set, without the driver's knowledge.
    stream = torch.bp.Stream()
    alarm = cl.UserEvent(drivers.device(0).context)
    cl.enqueue_barrier(made[-1].queue, wait_for=[alarm])
    return stream, lambda: alarm.set_status(cl.command_execution_status.COMPLETE)
"""


def test_query_includes_native_launches(run: Run) -> None:
    run(f"""
{HELD_STREAM}
a = bp(*range(16))
add = compile(ADD, "add")
launch(add, a, a, a)
torch.bp.synchronize()
stream, go = held()
assert stream.query()  # nothing was submitted through the runtime
launch(add, a, a, a, 1.0, stream.stream_id)
assert not stream.query()
go()
stream.synchronize()
assert stream.query()
assert a.tolist() == [4.0 * i for i in range(16)]
""")


def test_events_order_native_launches_of_two_streams(run: Run) -> None:
    run(f"""
{HELD_STREAM}
add = compile(ADD, "add")
(first, go), second, event = held(), torch.bp.Stream(), torch.bp.Event()
a, b = bp(*[1.0] * 16), bp(*[10.0] * 16)
torch.bp.current_stream().synchronize()
launch(add, a, a, a, 1.0, first.stream_id)   # a = 2
event.record(first)
second.wait_event(event)
launch(add, b, a, b, 1.0, second.stream_id)  # b = 10 + a
assert not event.query() and not second.query()
go()
second.synchronize()
assert event.query()
assert b.tolist() == [12.0] * 16
""")


def test_second_process_loads_cached_kernels(run: Run) -> None:
    code = """
a = bp(*range(16))
launch(compile(ADD, "add"), a, a, a)
assert a.tolist() == [2.0 * i for i in range(16)]
builds.wait_for_all()
print(drivers.device(0).build_counts())
"""
    assert run(code).stdout == "{'built': 1, 'loaded': 0}\n"
    assert run(code).stdout == "{'built': 0, 'loaded': 1}\n"
    assert run(code, TORCH_BACKPLANE_CACHE_DIR="").stdout == "{'built': 1, 'loaded': 0}\n"
    assert run(code, PYOPENCL_BUILD_OPTIONS="-D OTHER").stdout == "{'built': 1, 'loaded': 0}\n"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign", "unloadable"])
def test_damaged_cache_entries_are_rebuilt(run: Run, tmp_path: Path, damage: str) -> None:
    code = """
a = bp(*range(16))
launch(compile(ADD, "add"), a, a, a)
assert a.tolist() == [2.0 * i for i in range(16)]
builds.wait_for_all()
print(drivers.device(0).build_counts()["loaded"])
"""
    assert run(code).stdout == "0\n"
    # A small entry says that OpenCL's implementations can be listed; the other one is the kernel.
    _, entry = sorted(
        (path for path in (tmp_path / "cache").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    good = entry.read_bytes()
    if damage == "unloadable":  # an intact entry that contains no valid binary
        from torch_backplane.drivers import kernel_cache

        entry.write_bytes(kernel_cache._entry(entry.name, b"nonsense"))
    elif damage == "foreign":
        from torch_backplane.drivers import kernel_cache

        entry.write_bytes(kernel_cache._entry("f" * 64, b"nonsense"))
    else:
        flipped = good[:-1] + bytes([good[-1] ^ 1])
        entry.write_bytes({"cut": good[:-9], "changed": flipped, "empty": b""}[damage])
    assert run(code).stdout == "0\n"
    assert run(code).stdout == "1\n"


def test_unwritable_cache_gives_one_warning(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(
        """
a = bp(*range(16))
launch(compile(ADD, "add"), a, a, a)
launch(compile(MULTIPLY, "multiply"), a, a, a)
assert a.tolist() == [4.0 * i * i for i in range(16)]
builds.wait_for_all()
""",
        TORCH_BACKPLANE_CACHE_DIR=str(tmp_path / "file"),
    )
    assert result.stderr.count("compiled kernels cannot be stored") == 1


def test_processes_share_the_cache(run: Run, tmp_path: Path) -> None:
    code = """
import multiprocessing, os
a = bp(*range(16))
for i in range(6):
    launch(compile(f"// {i}\\n{ADD}", "add"), a, a, a, 0.0)
assert a.tolist() == [float(i) for i in range(16)]
builds.wait_for_all()
"""
    threads = []
    import threading

    failures: list[BaseException] = []

    def work() -> None:
        try:
            run(code)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert run(code + "print(drivers.device(0).build_counts())").stdout == "{'built': 0, 'loaded': 6}\n"


# --- the driver in Python --------------------------------------------------------------------------------------------


def test_a_kernel_in_python(toy: Run) -> None:
    toy("""
a, o = bp(*range(16)), bp(*[0] * 16)
launch(compile(), a[2:], a, o[4:8], 2.0)
assert o.tolist() == [0] * 4 + [2 + 3.0 * i for i in range(4)] + [0] * 8
""")


def test_commands_after_an_unbuilt_kernel_wait_for_it(toy: Run) -> None:
    toy("""
a, b, o = bp(1, 2), bp(10, 10), bp(0, 0)
torch.bp.synchronize()
driver.gate.clear()
slow = compile(entry="slow")
stream, event = torch.bp.current_stream(), torch.bp.Event()
hundreds = torch.tensor([100.0, 100.0]).pin_memory()
launch(slow, a, b, o)         # o = 11, 12
a.copy_(hundreds, non_blocking=True)  # ordered after the launch that reads it
launch(slow, a, o, b)         # b = 111, 112
host = torch.empty(2).pin_memory()
host.copy_(b, non_blocking=True)
event.record()
assert not stream.query() and not event.query()
threading.Timer(0.1, driver.gate.set).start()
event.synchronize()
assert event.query()
assert host.tolist() == [111, 112]
assert o.tolist() == [11, 12] and stream.query()
assert driver.builds == ["slow"]  # built only once
""")


def test_a_deferred_wait_keeps_its_event(toy: Run) -> None:
    """The wait is submitted while deferred commands execute, so it is deferred behind the last one."""
    toy("""
import weakref
a, b, o = bp(1, 2), bp(10, 10), bp(0, 0)
side, stream = torch.bp.Stream(), torch.bp.current_stream()
torch.bp.synchronize()
device, events, seen = driver.KernelDevice, [], []
create_event, run = device.create_event, device.launch

def created(self, timing):
    event = create_event(self, timing)
    events.append(weakref.ref(event))
    return event

def launched(self, *given):
    run(self, *given)
    if not seen:
        stream.wait_event(side.record_event())
        side.record_event().synchronize()  # the stream's thread has no reference to the first event any more
    seen.append(events[0]() is not None)

device.create_event, device.launch = created, launched
driver.gate.clear()
slow = compile(entry="slow")
launch(slow, a, b, o)
launch(slow, a, o, b)
driver.gate.set()
stream.synchronize()
assert seen == [True, True] and b.tolist() == [12, 14]
assert events[0]() is None
""")


@pytest.mark.parametrize("before", ["a build", "slow work", "a build, and slow work behind it"])
def test_submission_blocks_while_many_commands_are_pending(toy: Run, before: str) -> None:
    toy(f"""
import asynchronous_driver
before = {before!r}
a, b = bp(1, 2), bp(10, 10)
torch.bp.synchronize()
if "build" in before:
    driver.gate.clear()
add = compile()
if "build" not in before:
    launch(add, b, b, b, 0.0)
    torch.bp.synchronize()
if "slow" in before:
    torch.bp._sleep(60_000_000_000)
given = 0

def give():
    global given
    for given in range(1, 3001):
        launch(add, a, b, a)

def stops():
    last = -1
    while last != given or given == 0:
        last = given
        threading.Event().wait(0.3)
    return last

thread = threading.Thread(target=give)
thread.start()
assert stops() < 1100, given
driver.gate.set()
if "slow" in before:
    assert stops() < 2200, given
asynchronous_driver.awake.set()
thread.join()
assert given == 3000 and a.tolist() == [30001, 30002]
""")


def test_other_streams_do_not_wait_for_a_build(toy: Run) -> None:
    toy("""
a, b, o = bp(1, 2), bp(10, 10), bp(0, 0)
torch.bp.synchronize()
quick = compile(entry="quick")
launch(quick, a, b, o)
torch.bp.synchronize()
driver.gate.clear()
side = torch.bp.Stream()
slow = compile(entry="slow")
launch(slow, a, b, o, 2.0, side.stream_id)
launch(quick, a, b, a)
assert a.tolist() == [11, 12]  # synchronizes only the current stream
assert not side.query()
driver.gate.set()
side.synchronize()
assert o.tolist() == [31, 32]
""")


def test_stream_waits_for_an_event_recorded_after_an_unbuilt_kernel(toy: Run) -> None:
    toy("""
a, b = bp(1, 2), bp(10, 10)
torch.bp.synchronize()
driver.gate.clear()
add, side, event = compile(), torch.bp.Stream(), torch.bp.Event()
launch(add, a, b, a)
event.record()
threading.Timer(0.1, driver.gate.set).start()
side.wait_event(event)
launch(add, a, b, b, 1.0, side.stream_id)
side.synchronize()
assert b.tolist() == [21, 22]
""")


def test_finished_build_starts_the_commands_that_waited(toy: Run) -> None:
    toy("""
a, done = bp(1, 2), threading.Event()
driver.done = done
torch.bp.synchronize()
driver.gate.clear()
kernel = compile("lambda arrays, numbers: done.set()", "telling")
launch(kernel, a, a, a)
driver.gate.set()
assert done.wait(60)  # without a query or a synchronization
""")


def test_memory_and_kernels_can_be_freed_before_their_launch(toy: Run) -> None:
    toy("""
o = bp(0, 0, 0, 0)
a = torch.ones(1 << 22).to("bp")
torch.bp.synchronize()
driver.gate.clear()
add = compile()
launch(add, a, a, o)
_C.destroy_kernel(0, add)
del a
threading.Timer(0.1, driver.gate.set).start()
torch.bp.empty_cache()  # frees a's segment, but only after the launch
assert o.tolist() == [2.0] * 4
""")


def test_synchronize_waits_for_launches_after_an_earlier_synchronize(toy: Run) -> None:
    toy("""
a, done = bp(1, 2), threading.Event()
driver.done = done
kernel = compile("lambda arrays, numbers: done.wait(60)", "waiting")
for _ in range(4):
    torch.bp.synchronize()
    torch.bp.synchronize()
    done.clear()
    launch(kernel, a, a, a)
    assert not torch.bp.current_stream().query()
    threading.Timer(0.1, done.set).start()
    torch.bp.synchronize()
    assert done.is_set()
""")


def test_errors_of_a_build_and_of_a_launch(toy: Run) -> None:
    toy("""
a = bp(1, 2)
torch.bp.synchronize()
driver.gate.clear()
broken, wrong = compile("lambda arrays,\\nnumbers", "broken", "aten::tan"), compile(entry="wrong")
launch(broken, a, a, a)
_C.launch_kernel(0, wrong, (3, 1, 1), (2, 1, 1), [a])  # the driver raises AssertionError
driver.gate.set()
try:
    torch.bp.synchronize()
    raise AssertionError("no error")
except RuntimeError as error:
    message = str(error)
assert "the kernel broken of aten::tan could not be built for Gated: SyntaxError" in message, message
assert "\\n2\\tnumbers" in message, message
torch.bp.synchronize()  # only the first error is raised
try:
    _C.launch_kernel(0, wrong, (3, 1, 1), (2, 1, 1), [a])
    raise AssertionError("no error")
except AssertionError as error:
    assert "no error" not in str(error)
assert a.tolist() == [1, 2]
""")


def test_program_can_exit_during_builds(toy: Run) -> None:
    result = toy("""
import atexit
a = bp(1, 2)
torch.bp.synchronize()
driver.gate.clear()
kernels = [compile(entry=f"k{i}") for i in range(20)]
launch(kernels[19], a, a, a)
driver.gate.set()
assert a.tolist() == [2, 4]
print("end")
""")
    assert result.stdout == "end\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del KernelDevice.launch", "KernelDevice takes kernels in OpenCL C, but does not override launch"),
        ("KernelDevice.native_launcher = 7", "native_launcher is 7, and must be a NativeLauncher or None"),
        (
            "KernelDevice.native_launcher = NativeLauncher(api='metal', functions={})",
            "NativeLauncher.api is 'metal', and must be one of opencl",
        ),
        (
            "KernelDevice.native_launcher = NativeLauncher(api='opencl', functions={'clFlush': 1})",
            "NativeLauncher.functions has no address for clSetKernelArg",
        ),
    ],
)
def test_incomplete_driver_is_skipped(tmp_path: Path, change: str, message: str) -> None:
    source = f"{TOY_DRIVER}\nfrom torch_backplane.drivers import NativeLauncher\n{change}\n"
    driver_packages.install(tmp_path, "gated", source, "KernelDriver")
    (tmp_path / "asynchronous_driver.py").write_text(
        (paths.SUPPORT / "asynchronous_driver.py").read_text(encoding="utf-8")
    )
    result = checked(
        forked.run(
            "import torch; print(torch.accelerator.device_count())", tmp_path, TORCH_BACKPLANE_DRIVERS="gated"
        )
    )
    assert result.stdout == "0\n"
    assert message in result.stderr


def test_device_without_a_dialect_rejects_kernels(tmp_path: Path) -> None:
    checked(
        forked.run(
            """
from torch_backplane import _C
try:
    _C.compile_kernel(0, "text", "entry", "operator")
    raise AssertionError("compiled")
except NotImplementedError as error:
    assert "run no kernels" in str(error), error
""",
            tmp_path,
            TORCH_BACKPLANE_DRIVERS="host",
        )
    )


@pytest.mark.parametrize("alone", [True, False])
def test_builds_are_serialized_for_compilers_that_are_not_thread_safe(run: Run, alone: bool) -> None:
    run(f"""
import pyopencl as cl
device = cl.get_platforms()[0].get_devices()[0]
compiler.ONE_BUILD_AT_A_TIME = (device.platform.name,) if {alone} else ()
programs = [compiler.Programs(cl.Context([device]), device) for _ in range(2)]
both = threading.Barrier(2)
met = []

class Program:
    def _build(self, options):
        try:
            both.wait(0.5)
            met.append(True)
        except threading.BrokenBarrierError:
            pass
        raise cl.Error("built")

def build(one):
    try:
        one._built(Program())
    except Exception:
        pass

threads = [threading.Thread(target=build, args=(one,)) for one in programs]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert bool(met) != {alone}
""")
