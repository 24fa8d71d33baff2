"""Tests optional functions of native launchers: events, and copies from and to host memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

Run = Callable[..., str]

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

PREAMBLE = """
import gc, threading, torch
from torch_backplane import _C, drivers
torch.accelerator.device_count()

def forbid(*names):
    '''Makes methods of the driver raise an error.'''
    for name in names:
        def called(self, *arguments, name=name):
            raise AssertionError(f"{name} was called")
        setattr(type(drivers.device(0)), name, called)
COPIES = ("copy_in", "copy_out")
EVENTS = (
    "create_event", "destroy_event", "record_event", "wait_event", "query_event", "synchronize_event", "elapsed_ms"
)
""" + driver_packages.RAISED

QUEUED = PREAMBLE + """
import driver_queued_module as driver
"""

USE = """
host = torch.arange(1000.0).pin_memory()
x, y = torch.zeros(1000, device="bp"), torch.empty(1000).pin_memory()
torch.bp.synchronize()
side, event = torch.bp.Stream(), torch.bp.Event()
start, end = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
assert event.query()  # never recorded
event.synchronize()
torch.bp.current_stream().wait_event(event)
with side:
    start.record()
    torch.bp._sleep(100_000_000)
    x.copy_(host, non_blocking=True)
    event.record()
    end.record()
assert not event.query()
torch.bp.current_stream().wait_event(event)
event.record(side)  # recorded after the wait, which refers to the earlier record
y.copy_(x, non_blocking=True)
torch.bp.current_stream().synchronize()
assert torch.equal(y, torch.arange(1000.0))
end.synchronize()
assert end.query() and start.elapsed_time(end) >= 90, start.elapsed_time(end)
for i in range(3):
    assert torch.equal(torch.full((5,), float(i)).to("bp")[1:].cpu(), torch.full((4,), float(i)))
assert x[7].item() == 7
del event, start, end
gc.collect()
"""


@pytest.fixture
def queued(tmp_path: Path) -> Run:
    driver_packages.install_queued(tmp_path)

    def call(code: str, hands_over: str = "COPIES EVENTS", **env: str) -> str:
        settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": hands_over} | env
        result = forked.run(QUEUED + code, tmp_path, **settings)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    return call


@needs_compiler
@pytest.mark.parametrize("hands_over", ["COPIES EVENTS", "COPIES", "EVENTS", ""])
def test_native_functions_replace_the_drivers_methods(queued: Run, hands_over: str) -> None:
    forbidden = ", ".join(f"*{group}" for group in hands_over.split())
    checks = {
        "EVENTS": "assert driver.called('create_event') == driver.called('destroy_event') > 0\n",
        "COPIES": "assert driver.called('copy_in') > 0 and driver.called('copy_out') > 0\n",
    }
    queued(f"forbid({forbidden}){USE}{''.join(checks[group] for group in hands_over.split())}", hands_over)


@needs_compiler
def test_native_copies_release_the_gil(queued: Run) -> None:
    queued("""
x = torch.ones(100).to("bp")
for _ in range(10):
    assert torch.equal(x.cpu(), torch.ones(100))
assert driver.called("copy_out") == 10 and driver.with_gil() == 0
""", "COPIES")  # fmt: skip


@needs_compiler
def test_events_order_memory_used_by_two_streams(queued: Run) -> None:
    queued("""
x = torch.ones(100).to("bp")
with torch.bp.Stream() as side:
    x.record_stream(side)
    y = x + 1
def work():
    global x
    x = None  # its memory is freed after an event
thread = threading.Thread(target=work)
thread.start(); thread.join()
side.synchronize()  # the event is recorded when the kernel has been built
assert driver.called("record_event") > 0
assert torch.equal(y.cpu(), torch.full((100,), 2.0))
""", "EVENTS")  # fmt: skip


@needs_compiler
def test_commands_after_an_unbuilt_kernel_wait_for_it(queued: Run) -> None:
    queued("""
a = torch.tensor([1.0, 2.0]).to("bp")
hundreds, host = torch.full((2,), 100.0).pin_memory(), torch.empty(2).pin_memory()
torch.bp.synchronize()
driver.gate.clear()
stream, event, side = torch.bp.current_stream(), torch.bp.Event(), torch.bp.Stream()
b = a * 3 + 1
a.copy_(hundreds, non_blocking=True)
host.copy_(b, non_blocking=True)
event.record()
assert not stream.query() and not event.query()
before = driver.called("copy_in"), driver.called("record_event")
assert before[1] == 0
threading.Timer(0.1, driver.gate.set).start()
side.wait_event(event)
event.synchronize()
assert event.query() and host.tolist() == [4, 7]
with side:
    assert a.cpu().tolist() == [100, 100]
assert driver.called("copy_in") == before[0] + 1
""")


FAILURES = {
    "copy_in": ("x.copy_(torch.ones(4))", "copying 16 bytes to it"),
    "copy_out": ("x.cpu()", "copying 16 bytes from it"),
    "create_event": ("torch.bp.Event().record()", "creating an event"),
    "record_event": ("event.record()", "recording an event"),
    "wait_event": ("torch.bp.current_stream().wait_event(event)", "making a stream wait for an event"),
    "query_event": ("event.query()", "querying an event"),
    "synchronize_event": ("event.synchronize()", "waiting for an event"),
    "elapsed": ("start.elapsed_time(event)", "measuring the time between events"),
}


@needs_compiler
@pytest.mark.parametrize("name", FAILURES)
def test_error_status_raises_and_the_next_call_succeeds(queued: Run, name: str) -> None:
    action, doing = FAILURES[name]
    printed = queued(f"""
x = torch.arange(4.0).to("bp")
start, event = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
start.record(); event.record(); event.synchronize()
{action}
for _ in range(2):
    driver.answer({name!r}, 7)
    print(raised(lambda: {action}))
    driver.answer({name!r}, 0)
    {action}
torch.bp.synchronize()
x.copy_(torch.ones(4))
assert x.sum().item() == 4
""")
    text = f"AcceleratorError: bp:0 (Queued C accelerator) failed while {doing}: {name} answered 7"
    assert printed.splitlines() == [text] * 2


@needs_compiler
def test_lost_device_receives_no_calls(queued: Run) -> None:
    printed = queued("""
from torch_backplane.drivers import DeviceError
type(drivers.device(0)).native_error = lambda self, call, status: DeviceError(f"{call} said {status}", lost=True)
x, event = torch.ones(4).to("bp"), torch.bp.Event()
event.record()
driver.answer("copy_out", 3)
print(raised(x.cpu))
driver.answer("copy_out", 0)
before = [driver.called(name) for name in driver.NAMES]
for call in (x.cpu, event.query, event.record, event.synchronize, lambda: x.copy_(torch.ones(4))):
    assert "was lost while copying 16 bytes from it: copy_out said 3" in raised(call)
del x, event, call
gc.collect()
assert before == [driver.called(name) for name in driver.NAMES]
""")
    assert "AcceleratorError: bp:0 (Queued C accelerator) was lost while copying 16 bytes from it" in printed


@needs_compiler
def test_device_with_native_events_needs_no_event_methods(tmp_path: Path) -> None:
    driver_packages.install_queued(tmp_path)
    source = (paths.SUPPORT / "queued_c_driver.py").read_text(encoding="utf-8")
    methods = "create_event", "record_event", "wait_event", "query_event", "synchronize_event", "elapsed_ms"
    removed = "".join(f"del QueuedDevice.{name}\n" for name in methods)
    (tmp_path / "driver_queued_module.py").write_text(source + "\n" + removed)
    for hands_over in ("EVENTS", ""):
        code = QUEUED + (USE if hands_over else "print(torch.bp.device_count())")
        settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": hands_over}
        result = forked.run(code, tmp_path, **settings)
        assert result.returncode == 0, result.stdout + result.stderr
        missing = f"an asynchronous device also needs {', '.join(methods)}"
        assert hands_over or (result.stdout == "0\n" and missing in result.stderr)


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("copy_out", "NativeLauncher.functions has copy_in; copies from and to host memory also need copy_out"),
        ("copy_in", "NativeLauncher.functions has copy_out; copies from and to host memory also need copy_in"),
        ("elapsed", "synchronize_event; events also need elapsed"),
        ("create_event", "NativeLauncher.functions has destroy_event, "),
        ("flush", "NativeLauncher.functions has no address for flush, which 'c' needs"),
    ],
)
def test_driver_with_a_missing_function_is_skipped(queued: Run, change: str, message: str) -> None:
    printed = queued("print(torch.bp.device_count())", QUEUED_C_WITHOUT=change)
    assert printed.startswith("0\n")
    assert message in printed


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("functions['copyin'] = 1", "functions has the unknown name 'copyin'; 'c' has launch, copy, fill, flush, "),
        ("functions['copy_in'] = 0", "NativeLauncher.functions['copy_in'] is 0, and must be an address above 0"),
        ("functions['copy_in'] = 'x'", "NativeLauncher.functions['copy_in'] is 'x', and must be an address above 0"),
        ("object.__setattr__(made.native_launcher, 'functions', [1])", "must be a dictionary of names and addresses"),
    ],
)
def test_driver_with_invalid_functions_is_skipped(tmp_path: Path, change: str, message: str) -> None:
    driver_packages.install_queued(tmp_path)
    source = (paths.SUPPORT / "queued_c_driver.py").read_text(encoding="utf-8")
    source += f"""
def devices(self):
    made = QueuedDevice()
    functions = made.native_launcher.functions
    {change}
    return [made]
QueuedDriver.devices = devices
"""
    (tmp_path / "driver_queued_module.py").write_text(source)
    settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": "COPIES"}
    result = forked.run("import torch; print(torch.bp.device_count())", tmp_path, **settings)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "0\n"
    assert message in result.stderr


def test_opencl_has_native_events_and_copies_without_staging(platform: None, tmp_path: Path) -> None:
    code = PREAMBLE + """
from torch_backplane.drivers.base import EVENTS as of_events, HOST_COPIES
device = drivers.device(0)
assert device.native_launcher.has(of_events)
assert device.native_launcher.has(HOST_COPIES) == (device.staging is None)
forbid(*EVENTS, *(COPIES if device.staging is None else ()))
""" + USE  # fmt: skip
    result = forked.run(code, tmp_path, TORCH_BACKPLANE_DRIVERS="opencl")
    assert result.returncode == 0, result.stdout + result.stderr


FAULTY = """
import torch
from torch_backplane import drivers
torch.bp.device_count()
import driver_faulty_module as faulty
answers = faulty.answers
x = torch.arange(4.0).to("bp:0")
start, event = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
start.record(); event.record(); event.synchronize()
torch.bp.synchronize()
"""

OPENCL_FAILURES = {
    "clEnqueueWriteBuffer": ("x.copy_(torch.ones(4))", "copying 16 bytes to it"),
    "clEnqueueReadBuffer": ("x.cpu()", "copying 16 bytes from it"),
    "clEnqueueMarkerWithWaitList": ("event.record()", "recording an event"),
    "clEnqueueBarrierWithWaitList": FAILURES["wait_event"],
    "clGetEventInfo": ("event.query()", "querying an event"),
    "clWaitForEvents": ("event.synchronize()", "waiting for an event"),
    "clGetEventProfilingInfo": ("start.elapsed_time(event)", "measuring the time between events"),
}


@pytest.mark.parametrize("name", OPENCL_FAILURES)
def test_opencl_error_status_raises_and_the_next_call_succeeds(
    platform: None,
    tmp_path: Path,
    name: str,
) -> None:
    action, doing = OPENCL_FAILURES[name]
    run = driver_packages.opencl_runner(tmp_path, "faulty", FAULTY, TORCH_BACKPLANE_DRIVERS="faulty")
    printed = run(f"""
stages = drivers.device(0).staging is not None and "Buffer" in {name!r}
if stages:
    print("staged")
for _ in range(0 if stages else 2):
    answers[{name!r}] = -5
    try:
        {action}
    except torch.AcceleratorError as error:
        print(error)
    answers.clear()
    {action}
torch.bp.synchronize()
assert x.cpu().numel() == 4
""")
    if printed != "staged\n":
        said = f"failed while {doing}: {name} answered CL_OUT_OF_RESOURCES (-5)"
        assert [said in line for line in printed.splitlines()] == [True] * 2, printed
