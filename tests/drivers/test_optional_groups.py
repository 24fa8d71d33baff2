"""Tests optional functions of native launchers beyond copies and events, on drivers with and without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_packages
import forked
import paths
import pytest
import torch

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

Run = Callable[..., str]

PREAMBLE = '''
import sys, time, torch
from torch_backplane import _C, drivers, plans
torch.accelerator.device_count()
import driver_queued_module as driver
from torch_backplane.planning import Call, QueueFunction, call_on_cpu, operator, random_numbers

def timed(call):
    """The call's result, and its time in milliseconds."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1000
''' + driver_packages.RAISED


@pytest.fixture
def queued(tmp_path: Path) -> Run:
    driver_packages.install_queued(tmp_path)

    def call(code: str, hands_over: str, **env: str) -> str:
        settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": hands_over} | env
        result = forked.run(PREAMBLE + code, tmp_path, **settings)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout + result.stderr

    return call


# --- host callbacks

ON_HOST = """
LIBRARY = torch.library.Library("backplane_optional_groups", "FRAGMENT")
LIBRARY.define("reciprocal_on_host(Tensor x, int row) -> Tensor")

@operator("backplane_optional_groups::reciprocal_on_host", variants=False)
def planner(call: Call, x, row):
    doubled = x * 2
    result = torch.empty_like(x)
    call_on_cpu(torch.ops.aten.reciprocal.out, doubled, out=result)
    index = torch.full((1,), row, dtype=torch.int64, device=x.device)
    call_on_cpu(torch.ops.aten.index_fill_.int_Scalar, result, 0, index, -1.0)
    return result + 1
on_host = torch.ops.backplane_optional_groups.reciprocal_on_host
x = torch.arange(1, 9.0).to("bp")
expected = 1 / (torch.arange(1, 9.0) * 2) + 1
expected[3] = 0
"""


@pytest.mark.parametrize("offered", [True, False])
def test_host_callbacks_run_in_stream_order(queued: Run, offered: bool) -> None:
    queued(ON_HOST + f"""
for _ in range(3):
    torch.testing.assert_close(on_host(x, 3).cpu(), expected)
torch.bp._sleep(300_000_000)
with_gil = driver.with_gil()
result, took = timed(lambda: on_host(x, 3))
assert driver.with_gil() == with_gil
assert (took < 200) == {offered}, took
torch.testing.assert_close(result.cpu(), expected)
assert driver.called("host_callback") == (8 if {offered} else 0)
assert "out of bounds" in raised(lambda: on_host(x, 70).cpu())
torch.testing.assert_close(on_host(x, 3).cpu(), expected)
""", "COPIES EVENTS" + " HOST_CALLBACKS" * offered, QUEUED_C_HOST_ACCESSIBLE="1")  # fmt: skip


def test_host_callback_error_status_raises(queued: Run) -> None:
    printed = queued(ON_HOST + """
on_host(x, 3).cpu()
driver.answer("host_callback", 7)
print(raised(lambda: on_host(x, 3).cpu()))
driver.answer("host_callback", 0)
torch.testing.assert_close(on_host(x, 3).cpu(), expected)
""", "COPIES EVENTS HOST_CALLBACKS", QUEUED_C_HOST_ACCESSIBLE="1")  # fmt: skip
    expected = "failed while submitting a host callback: host_callback answered 7"
    assert printed == f"AcceleratorError: bp:0 (Queued C accelerator) {expected}\n"


# --- peer devices

PEERS = "PEER_COPIES CROSS_DEVICE_WAITS"
TWO = """
x = torch.arange(1000.0).to("bp:0")
torch.bp.synchronize(0); torch.bp.synchronize(1)
"""


@pytest.mark.parametrize("hands_over", [f"EVENTS {PEERS}", "EVENTS PEER_COPIES", "EVENTS"])
def test_copies_between_devices(queued: Run, hands_over: str) -> None:
    """Without wait_peer_event, the host waits for the source. Without copy_from_peer, data passes through the host."""
    natively, waits = "PEER_COPIES" in hands_over, "CROSS_DEVICE_WAITS" in hands_over
    queued(TWO + f"""
x += 1
torch.bp._sleep(300_000_000)  # bp:0
x += 1
y, took = timed(lambda: x.to("bp:1"))
assert (took < 200) == {waits}, took
x.zero_()  # ordered after the copy
assert torch.equal(y.cpu(), torch.arange(1000.0) + 2)
assert not x.any()
assert driver.called("copy_from_peer") == {int(natively)}
assert driver.called("wait_peer_event") == (2 if {waits} else 0)
assert torch.bp.can_device_access_peer(0, 1)
assert torch.equal(x[5:7].to("bp:1").cpu(), torch.zeros(2))
""", hands_over, QUEUED_C_DEVICES="2")  # fmt: skip


@pytest.mark.parametrize("hands_over", ["EVENTS CROSS_DEVICE_WAITS", "EVENTS", ""])
def test_stream_waits_for_an_event_of_another_device(queued: Run, hands_over: str) -> None:
    """Waits with wait_peer_event if the launcher has it, else on the host. Without EVENTS, uses Python's wait_event."""
    waits = hands_over != "EVENTS"
    queued(TWO + f"""
event, after = torch.bp.Event(), torch.bp.Event()
torch.bp._sleep(300_000_000)
event.record()
with torch.bp.device(1):
    _, took = timed(event.wait)
    after.record()
assert (took < 200) == {waits}, took
assert not ({waits} and after.query())
after.synchronize()
assert event.query()
assert driver.called("wait_peer_event") == {int("CROSS" in hands_over)}
""", hands_over, QUEUED_C_DEVICES="2")  # fmt: skip


def test_wait_for_another_device_includes_unbuilt_kernels(queued: Run) -> None:
    queued(TWO + """
import threading
driver.gate.clear()
event = torch.bp.Event()
y = x * 3 + 1
event.record()
threading.Timer(0.2, driver.gate.set).start()
with torch.bp.device(1):
    event.wait()
z = y.to("bp:1")
assert torch.equal(z.cpu(), torch.arange(1000.0) * 3 + 1)
""", "EVENTS PEER_COPIES CROSS_DEVICE_WAITS", QUEUED_C_DEVICES="2")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "doing"),
    [
        ("copy_from_peer", "copying from another device"),
        ("wait_peer_event", "making a stream wait for an event of another device"),
    ],
)
def test_peer_function_error_status_raises(queued: Run, name: str, doing: str) -> None:
    printed = queued(TWO + f"""
driver.answer({name!r}, 7)
print(raised(lambda: x.to("bp:1")))
driver.answer({name!r}, 0)
assert torch.equal(x.to("bp:1").cpu(), torch.arange(1000.0))
""", "EVENTS PEER_COPIES CROSS_DEVICE_WAITS", QUEUED_C_DEVICES="2")  # fmt: skip
    assert f"bp:1 (Queued C accelerator) failed while {doing}: {name} answered 7" in printed


# --- priorities

def test_driver_receives_stream_priorities(queued: Run) -> None:
    queued("""
torch.ones(1, device="bp")
streams = [torch.bp.Stream(priority=priority) for priority in (0, -1, 5, -7)]
assert driver.priorities[-4:] == [0, -1, 0, -1] and set(driver.priorities[:-4]) <= {0}, driver.priorities
assert [stream.priority for stream in streams] == [0, -1, 0, -1]
assert torch.bp.Stream.priority_range() == (0, -1)
""", "")


# --- interprocess sharing

EXPORTER = PREAMBLE + """
x = torch.arange(1000.0).to("bp")
event = torch.bp.Event(interprocess=True)
torch.bp._sleep(1_500_000_000)
x += 1
event.record()
print(_C.export_memory(x[10:]))
print(event.ipc_handle(), flush=True)
assert not event.query()
sys.stdin.readline()
assert torch.equal(x.cpu(), (torch.arange(1000.0) + 1) * 2), x
driver.library().unlink_all()
"""

IMPORTER = PREAMBLE + """
x = torch.arange(7.0).to("bp")
memory, handle = eval(sys.stdin.readline()), eval(sys.stdin.readline())
there = _C.import_memory(0, *memory).view(torch.float32)
event = torch.bp.Event.from_ipc_handle("bp:0", handle)
assert not event.query()
_, took = timed(event.wait)
assert took < 500, took
there *= 2
assert torch.equal(there.cpu(), (torch.arange(1000.0) + 1) * 2), there
assert event.query()
there[3:].copy_(there[:-3].clone())
there.copy_(((torch.arange(1000.0) + 1) * 2).to("bp"))
torch.bp.synchronize()
del there
assert driver.called("close_memory") == 1
assert x.sum().item() == 21
print("done")
"""


def test_two_processes_share_memory_and_an_event(tmp_path: Path) -> None:
    driver_packages.install_queued(tmp_path)
    settings = os.environ | {
        "TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": "COPIES EVENTS INTERPROCESS",
        "PYTHONPATH": driver_packages.python_path(tmp_path),
    }  # fmt: skip
    pipe = subprocess.PIPE
    pipes: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "env": settings}
    start = [sys.executable, "-c"]
    with (
        subprocess.Popen([*start, EXPORTER], **pipes) as exporter,
        subprocess.Popen([*start, IMPORTER], **pipes) as importer,
    ):
        expected = exporter.stdout.readline() + exporter.stdout.readline()
        output, errors = importer.communicate(expected, timeout=100)
        assert (importer.returncode, output) == (0, "done\n"), errors + exporter.communicate("\n")[1]
        _, errors = exporter.communicate("\n", timeout=100)
        assert exporter.returncode == 0, errors


def test_invalid_use_of_shared_memory_and_events(queued: Run) -> None:
    printed = queued("""
x, event = torch.ones(3).to("bp"), torch.bp.Event(interprocess=True)
handle = event.ipc_handle()  # never recorded: an event of the current device
assert len(handle) == 64 and event.query() and handle == event.ipc_handle()
event.record(); event.synchronize()
same = torch.bp.Event.from_ipc_handle(0, handle)
same.wait(); same.synchronize()
print(raised(torch.bp.Event().ipc_handle))
other = torch.bp.Event(interprocess=True)
torch.Event.record(other, torch.bp.current_stream())
print(raised(other.ipc_handle))
print(raised(lambda: torch.bp.Event(enable_timing=True, interprocess=True)))
print(raised(lambda: torch.bp.Event.from_ipc_handle(0, b"short")))
print(raised(lambda: torch.bp.Event.from_ipc_handle(0, b"x" * 64)))
memory = _C.export_memory(x)
print(raised(lambda: _C.import_memory(0, memory[0], 1024, 512, 1000)))
print(raised(lambda: _C.import_memory(0, b"x" * 64, *memory[1:])))
driver.answer("export_memory", 7)
print(raised(lambda: _C.export_memory(x)))
driver.library().unlink_all()
""", "COPIES EVENTS INTERPROCESS").splitlines()
    where = "AcceleratorError: bp:0 (Queued C accelerator) failed while"
    assert printed == [
        "RuntimeError: ipc_handle() requires an event that was created with interprocess=True",
        "RuntimeError: this event cannot be shared with other processes: it was first recorded by another method than "
        "torch.bp.Event.record() or torch.bp.Stream.record_event()",
        "ValueError: interprocess events do not measure time: enable_timing must be False",
        "ValueError: a handle has 64 bytes, but got 5",
        f"{where} importing an event: import_event answered -1",
        "ValueError: 1000 bytes at offset 512 do not fit in a segment of size 1024",
        f"{where} importing memory: import_memory answered -1",
        f"{where} exporting memory: export_memory answered 7",
    ]


BY_QUEUE = """
import os, signal, torch
import torch.multiprocessing as mp
from torch_backplane.accelerator import processes

def receive(connection, x):
    import driver_queued_module as driver
    second, views = connection.recv(), connection.recv()
    assert len({one.untyped_storage()._cdata for one in (x, *views)}) == 1
    assert driver.called("import_memory") == 1  # the tensors are in one segment
    views[0].copy_((views[0].cpu() * 2).to("bp"))
    torch.bp.synchronize()
    connection.send((x.tolist(), second.tolist()))
    connection.recv()
    del x, views, second
    connection.send(None)
    connection.recv()

if __name__ == "__main__":
    x, second = torch.arange(4.0).to("bp"), torch.ones(3).to("bp")
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=receive, args=(there, x))
    process.start()
    torch.bp._sleep(300_000_000)
    second.copy_((second.cpu() * 2).to("bp"))
    here.send(second)
    here.send((x[1:3], x[2:]))
    print(*here.recv(), x.tolist())
    torch.bp.ipc_collect()
    print(len(processes._sent))
    allocated = torch.bp.memory_allocated()
    del x  # the receiver still has it
    assert torch.bp.memory_allocated() == allocated
    here.send(None)
    here.recv()
    torch.bp.ipc_collect()
    print(len(processes._sent))  # what a process is started with is kept as long as the process
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    del process
    torch.bp.ipc_collect()
    print(len(processes._sent))
    del second
    print(torch.bp.memory_allocated())
    import driver_queued_module as driver
    driver.library().unlink_all()
"""


def test_tensors_are_sent_by_handle(tmp_path: Path) -> None:
    driver_packages.install_queued(tmp_path)
    (tmp_path / "program.py").write_text(BY_QUEUE)
    settings = os.environ | {
        "TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": "COPIES EVENTS INTERPROCESS",
        "PYTHONPATH": driver_packages.python_path(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env=settings, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["[0.0, 2.0, 4.0, 3.0] [2.0, 2.0, 2.0] [0.0, 2.0, 4.0, 3.0]", "2", "1", "0", "0"]


def test_sharing_without_interprocess_functions_raises(queued: Run) -> None:
    printed = queued("""
x = torch.ones(3).to("bp")
for call in (
    lambda: torch.bp.Event(interprocess=True), torch.bp.Event().ipc_handle,
    lambda: torch.bp.Event.from_ipc_handle(0, bytes(64)), lambda: _C.export_memory(x),
    lambda: _C.import_memory(0, bytes(64), 1024, 0, 12),
):
    print(raised(call))
""", "EVENTS")  # fmt: skip
    assert printed.count("NotImplementedError") == 5
    assert printed.count("INTERPROCESS functions") == 5


# --- graphs

GRAPH = """
x, w = torch.randn(6, 5).to("bp"), torch.randn(5, 5).to("bp")

def step():
    y = torch.nn.functional.dropout(x @ w, 0.4, training=True) + torch.rand(6, 5, device="bp")
    z = torch.zeros(6, 5, device="bp")
    z[1:].copy_(y[:-1])
    return y.softmax(1) + z

def captured(function):
    function()
    torch.bp.synchronize()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        result = function()
    return graph, result
graph, result = captured(step)

def check(times=3):
    torch.manual_seed(1)
    right = [step().cpu() for _ in range(times)]
    torch.manual_seed(1)
    for one in right:
        graph.replay()
        assert torch.equal(result.cpu(), one)
    return right
"""
OFFERED = "COPIES EVENTS HOST_CALLBACKS GRAPHS"


@pytest.mark.parametrize("offered", [True, False])
def test_graph_is_replayed_by_one_native_call(queued: Run, offered: bool) -> None:
    queued(GRAPH + f"""
import ctypes
right = check()
assert not torch.equal(right[0], right[1])  # each call draws new random numbers
x.copy_(torch.randn(6, 5))
check()
names = ("graph_create", "graph_update", "graph_launch", "graph_destroy")
assert [driver.called(name) for name in names] == ([1, 6, 6, 0] if {offered} else [0] * 4)
assert (ctypes.c_uint64.in_dll(driver.library(), "edges").value > 0) == {offered}
before, with_gil = driver.called("launch"), driver.with_gil()
graph.replay()
assert (driver.called("launch") == before) == {offered}
assert not {offered} or driver.with_gil() == with_gil
graph.reset()
assert driver.called("graph_destroy") == int({offered})
""", OFFERED if offered else "COPIES EVENTS")  # fmt: skip


def test_graph_without_random_numbers_is_not_updated(queued: Run) -> None:
    queued(GRAPH + """
graph, result = captured(lambda: (x * 2 + 1).softmax(1))
before = driver.called("graph_update")
for _ in range(3):
    graph.replay()
    torch.testing.assert_close(result.cpu(), (x.cpu() * 2 + 1).softmax(1))
assert driver.called("graph_update") == before
""", OFFERED)


def test_graph_is_recreated_if_the_update_is_refused(queued: Run) -> None:
    queued(GRAPH + """
import ctypes
ctypes.c_int.in_dll(driver.library(), "refuses_updates").value = 1
check()
assert [driver.called(f"graph_{name}") for name in ("create", "update", "launch", "destroy")] == [4, 3, 3, 3]
""", OFFERED)


def test_graph_replays_on_several_streams_and_threads(queued: Run) -> None:
    queued(GRAPH + """
import threading
graph, result = captured(lambda: x.add_(1))
x.zero_()
streams = [torch.bp.Stream() for _ in range(3)]
torch.bp.synchronize()
def replays(stream):
    with stream:
        for _ in range(50):
            graph.replay()
            stream.synchronize()
for stream in streams:
    replays(stream)
assert torch.equal(x.cpu(), torch.full((6, 5), 150.0))
torch.bp._sleep(100_000_000)
graph.replay()
assert not torch.bp.current_stream().query()
assert torch.equal(x.cpu(), torch.full((6, 5), 151.0))
threads = [threading.Thread(target=replays, args=(stream,)) for stream in streams]
for thread in threads: thread.start()
for thread in threads: thread.join()
""", OFFERED)


@pytest.mark.parametrize("hands_over", [OFFERED, "COPIES EVENTS GRAPHS", "COPIES EVENTS"])
@pytest.mark.slow
def test_host_callbacks_in_a_graph(queued: Run, hands_over: str) -> None:
    """Graphs with host callbacks are native only if the launcher has host callbacks."""
    queued(ON_HOST + f"""
on_host(x, 3); torch.bp.synchronize()
graphs, results = [], []
for row in (3, 70):
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        results.append(on_host(x, row))
    graphs.append(graph)
for _ in range(2):
    with torch.bp.Stream() as stream:
        graphs[0].replay()
        stream.synchronize()
        torch.testing.assert_close(results[0].cpu(), expected)
        graphs[1].replay()
        assert "out of bounds" in raised(stream.synchronize)
assert driver.called("graph_launch") == (4 if {hands_over == OFFERED} else 0)
del graph, graphs
""", hands_over, QUEUED_C_HOST_ACCESSIBLE="1")  # fmt: skip


AXPY = """
del graph, result
LIBRARY = torch.library.Library("backplane_optional_groups", "FRAGMENT")
LIBRARY.define("axpy(Tensor y, Tensor x) -> Tensor")
LIBRARY.define("random_axpy(Tensor y, Tensor x) -> Tensor")
meanings = {7: "no room"}
axpy = QueueFunction(
    "axpy", driver.library().axpy, "output", "output", "input", torch.float32, torch.int64, explain=meanings.get
)
@operator("backplane_optional_groups::axpy", variants=False)
def planner(call: Call, y, x):
    result = y * 2
    axpy(result, torch.empty_like(result), x, 3.0, result.numel())
    return result
@operator("backplane_optional_groups::random_axpy", variants=False)
def random_planner(call: Call, y, x):
    result = y * 2
    axpy(result, torch.empty_like(result), x, random_numbers(1)[1], result.numel())
    return result
ops = torch.ops.backplane_optional_groups
names = ("graph_create", "graph_update", "graph_launch", "graph_destroy", *driver.CAPTURES)
counts = lambda: [driver.called(name) for name in names]
before = counts()
called_since = lambda: [now - then for now, then in zip(counts(), before, strict=True)]
"""


def test_library_calls_in_a_graph_are_captured(queued: Run) -> None:
    queued(GRAPH + AXPY + """
def step():
    return ops.axpy(ops.axpy(x, x) + 1, x).relu()

graph, result = captured(step)
axpy_calls = driver.called("axpy")
for _ in range(3):
    x.copy_(torch.randn(6, 5))
    graph.replay()
    torch.testing.assert_close(result.cpu(), (x.cpu() * 13 + 2).relu())
assert driver.called("axpy") == axpy_calls  # replays do not call the library
assert called_since() == [1, 0, 3, 0, 2, 2, 0], called_since()
torch.bp._sleep(50_000_000)
graph.replay()
graph.reset()  # while the replay is pending
assert called_since() == [1, 0, 4, 1, 2, 2, 2], called_since()
torch.testing.assert_close(result.cpu(), (x.cpu() * 13 + 2).relu())
""", OFFERED + " CAPTURES")


@pytest.mark.parametrize("refuses_updates", [False, True])
def test_library_calls_with_other_arguments_are_captured_again(queued: Run, refuses_updates: bool) -> None:
    """The argument is a random number, which the first replay has in common with the capture; the other call stays."""
    queued(GRAPH + AXPY + f"""
import ctypes
ctypes.c_int.in_dll(driver.library(), "refuses_updates").value = {int(refuses_updates)}

def step():
    return ops.axpy(ops.random_axpy(x, x), x)

graph, result = captured(step)
check()
assert not torch.equal(*(graph.replay() or result.cpu() for _ in range(2)))
made = 1 + 5 if {refuses_updates} else 1
assert called_since() == [made, 5, 5, made - 1, 2 + 4, 2 + 4, 4], called_since()
del graph
assert called_since() == [made, 5, 5, made, 2 + 4, 2 + 4, 2 + 4], called_since()
""", OFFERED + " CAPTURES")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"axpy": 7}, "failed while capturing axpy for backplane_optional_groups::axpy: axpy answered 7, which is: "
         "no room"),
        ({"end_capture": 8}, "failed while capturing axpy for backplane_optional_groups::axpy: end_capture answered 8"),
        ({"axpy": 7, "end_capture": 8}, "failed while capturing axpy for backplane_optional_groups::axpy, which "
         "answered 7 (no room): end_capture answered 8"),
        ({"begin_capture": 9}, "failed while capturing axpy for backplane_optional_groups::axpy: begin_capture "
         "answered 9"),
        ({"graph_create": 6}, "failed while creating a graph: graph_create answered 6"),
    ],
)  # fmt: skip
def test_commands_of_a_graph_whose_capture_is_refused_are_replayed_one_by_one(
    queued: Run, answers: dict[str, int], reason: str
) -> None:
    printed = queued(GRAPH + AXPY + f"""
ops.axpy(x, x); torch.bp.synchronize()
graph = torch.bp.Graph(keep_graph=True)
with torch.bp.graph(graph):
    result = ops.axpy(x, x)
answers = {answers!r}
for name, status in answers.items(): driver.answer(name, status)
graph.instantiate()
for name in answers: driver.answer(name, 0)
for _ in range(2):
    x.copy_(torch.randn(6, 5))
    graph.replay()
    torch.testing.assert_close(result.cpu(), x.cpu() * 5)
assert driver.called("graph_launch") == before[2]
""", OFFERED + " CAPTURES")
    warning = f"replays of this graph submit its commands one by one: bp:0 (Queued C accelerator) {reason}"
    assert printed.count(warning) == 1


def test_a_refused_capture_of_an_update_raises(queued: Run) -> None:
    printed = queued(GRAPH + AXPY + """
graph, result = captured(lambda: ops.random_axpy(x, x))
driver.answer("axpy", 7)
print(raised(graph.replay))
driver.answer("axpy", 0)
first = [graph.replay() or result.cpu() for _ in range(2)]
assert not torch.equal(*first)
""", OFFERED + " CAPTURES")
    assert printed == (
        "AcceleratorError: bp:0 (Queued C accelerator) failed while capturing axpy for "
        "backplane_optional_groups::random_axpy: axpy answered 7, which is: no room\n"
    )


def test_commands_without_native_graph_support_are_replayed_one_by_one(queued: Run) -> None:
    queued(GRAPH + AXPY + """
before = driver.called("graph_create")
graph, result = captured(lambda: ops.axpy(x, x))
graph.replay()
torch.testing.assert_close(result.cpu(), x.cpu() * 5)
host = torch.zeros(6, 5).pin_memory()
graph, result = captured(lambda: host.copy_(x, non_blocking=True))
graph.replay(); torch.bp.synchronize()
assert torch.equal(host, x.cpu())
assert driver.called("graph_create") == before
""", OFFERED)


def test_graph_function_error_status_raises(queued: Run) -> None:
    printed = queued(GRAPH + """
calls = {"graph_update": graph.replay, "graph_launch": graph.replay, "graph_create": lambda: captured(step)}
for name, call in calls.items():
    driver.answer(name, 7)
    print(raised(call))
    driver.answer(name, 0)
check()
""", OFFERED)  # fmt: skip
    assert printed.splitlines() == [
        f"AcceleratorError: bp:0 (Queued C accelerator) failed while {doing} a graph: graph_{name} answered 7"
        for name, doing in (("update", "launching"), ("launch", "launching"), ("create", "creating"))
    ]


@pytest.mark.skipif(
    not hasattr(torch.autograd.ProfilerState, "KINETO_PRIVATEUSE1"),
    reason="PyTorch 2.11 has no interface for profilers of other devices",
)
def test_profiler_records_each_command_of_a_graph(queued: Run) -> None:
    queued(GRAPH + """
launches = driver.called("graph_launch")
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]):
    graph.replay()
assert driver.called("graph_launch") == launches
check()
""", OFFERED)  # fmt: skip


# --- invalid drivers

@pytest.mark.parametrize(
    ("hands_over", "without", "message"),
    [
        ("EVENTS INTERPROCESS", "import_event", "memory and events of other processes also need import_event"),
        ("GRAPHS", "graph_update", "NativeLauncher.functions has graph_create, graph_launch, graph_destroy; graphs "
         "also need graph_update"),
        ("CROSS_DEVICE_WAITS", "", "has wait_peer_event; waits for events of another device also need the "
         "functions of events: create_event, destroy_event, "),
        ("INTERPROCESS", "", "import_event; memory and events of other processes also need the functions of "
         "events"),
        ("CAPTURES", "", "destroy_captured; captures of library calls also need the functions of graphs: "
         "graph_create, "),
    ],
)  # fmt: skip
def test_driver_with_missing_functions_is_skipped(queued: Run, hands_over: str, without: str, message: str) -> None:
    code = "print(torch.bp.device_count())"
    printed = queued(code, hands_over, QUEUED_C_WITHOUT=without)
    assert printed.startswith("0\n")
    assert message in printed


@pytest.mark.parametrize(
    ("group", "method", "purpose"),
    [
        ("PEER_COPIES", "can_access_peer", "copies from another device"),
        ("CROSS_DEVICE_WAITS", "can_wait_for_peer", "waits for events of another device"),
    ],
)
def test_driver_with_peer_functions_needs_peer_methods(
    tmp_path: Path, group: str, method: str, purpose: str
) -> None:
    driver_packages.install_queued(tmp_path)
    source = (paths.SUPPORT / "queued_c_driver.py").read_text(encoding="utf-8")
    (tmp_path / "driver_queued_module.py").write_text(f"{source}\ndel QueuedDevice.{method}\n")
    settings = {"TORCH_BACKPLANE_DRIVERS": "queued", "QUEUED_C_HANDS_OVER": f"EVENTS {group}"}
    result = forked.run("import torch; print(torch.bp.device_count())", tmp_path, **settings)
    assert result.stdout == "0\n"
    text = f"QueuedDevice.native_launcher has functions for {purpose}, but there is no {method}()"
    assert text in result.stderr
