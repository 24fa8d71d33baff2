"""Tests the emulated CUDA driver: memory and events of other processes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import driver_api as api
import pytest

EVENT_FLAGS = api.DISABLE_TIMING | api.INTERPROCESS


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


# Executes each line that it gets as Python code, and answers with the value of `answer`.
SERVER = """
import sys
import driver_api as api
from test_emulated_processes import EVENT_FLAGS, export, open_event, open_memory
api.call("cuInit", 0)
api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
names = dict(globals())
for line in sys.stdin:
    names["answer"] = None
    exec(line, names)
    print(repr(names["answer"]), flush=True)
"""


def export(kind: str, value: int) -> str:
    """Return a handle for another process. `kind`: Mem or Event."""
    handle = Handle()
    api.call(f"cuIpcGet{kind}Handle", ctypes.byref(handle), value)
    return bytes(handle.reserved).hex()


def _handle(text: str) -> Handle:
    return Handle.from_buffer_copy(bytes.fromhex(text))


def open_memory(text: str) -> int:
    return int(api.result("cuIpcOpenMemHandle_v2", _handle(text), 1))


def open_event(text: str) -> int:
    return int(api.result("cuIpcOpenEventHandle", _handle(text)))


class Process:
    """Another process, which executes code."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, line: str) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return eval(self.process.stdout.readline())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=30)


@pytest.fixture
def other(context: int) -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def test_memory_is_shared(other: Process) -> None:
    memory = api.allocate(3 << 20)
    api.write(memory, b"first" * 1000)
    handle = export("Mem", memory + 512)  # the whole allocation
    assert other(f"there = open_memory({handle!r}); answer = api.read(there, 5000)") == b"first" * 1000
    other("api.write(there + (2 << 20), b'second')")
    assert api.read(memory + (2 << 20), 6) == b"second"
    assert other(f"answer = open_memory({handle!r}) == there") is True  # opened twice
    for _ in range(2):
        assert other("answer = api.status('cuIpcCloseMemHandle', there)") == 0
    assert other("answer = api.status('cuIpcCloseMemHandle', there)") == api.INVALID_VALUE
    assert other("answer = api.status('cuMemcpyHtoD_v2', there, b'x', 1)") == api.INVALID_VALUE
    assert api.read(memory, 5) == b"first"


def test_kernels_use_memory_of_another_process(other: Process) -> None:
    handle = other("mine = api.allocate(64); api.write(mine, bytes(64)); answer = export('Mem', mine)")
    assert isinstance(handle, str)
    there = open_memory(handle)
    function = api.kernel('extern "C" __global__ void put(int* out) { out[threadIdx.x] = threadIdx.x; }', "put")
    assert api.launch(function, (1,), (16,), there) == 0
    api.synchronize()
    expected = b"".join(i.to_bytes(4, "little") for i in range(16))
    assert other("answer = api.read(mine, 64)") == expected
    api.call("cuIpcCloseMemHandle", there)


def test_events_are_shared(other: Process) -> None:
    event, stream = api.event(EVENT_FLAGS), api.stream()
    other(f"event = open_event({export('Event', event)!r}); stream = api.stream()")
    assert other("answer = api.status('cuEventQuery', event)") == 0  # never recorded
    with api.blocked(stream) as release:
        api.call("cuEventRecord", event, stream)
        assert other("answer = api.status('cuEventQuery', event)") == api.NOT_READY
        other("api.call('cuStreamWaitEvent', stream, event, 0)")
        time.sleep(0.05)
        assert other("answer = api.status('cuStreamQuery', stream)") == api.NOT_READY
        release()
        assert other("answer = api.status('cuStreamSynchronize', stream)") == 0
    assert other("answer = api.status('cuEventSynchronize', event)") == 0


def test_another_process_records_an_event(other: Process) -> None:
    handle = other("event = api.event(EVENT_FLAGS); stream = api.stream(); answer = export('Event', event)")
    assert isinstance(handle, str)
    event = open_event(handle)
    other("busy = api.blocked(stream); release = busy.__enter__(); api.call('cuEventRecord', event, stream)")
    assert api.status("cuEventQuery", event) == api.NOT_READY
    other("release()")
    api.call("cuEventSynchronize", event)
    other("busy.__exit__(None, None, None)")


def test_wrong_handles(other: Process) -> None:
    memory, event = api.allocate(64), api.event()
    handle = Handle()
    assert api.status("cuIpcGetEventHandle", ctypes.byref(handle), event) == api.INVALID_VALUE  # not for processes
    assert api.status("cuIpcGetMemHandle", ctypes.byref(handle), api.pinned(64)) == api.INVALID_VALUE
    made = ctypes.c_uint64()
    assert api.status("cuIpcOpenMemHandle_v2", ctypes.byref(made), handle, 1) == api.INVALID_VALUE  # all zero
    own = _handle(export("Mem", memory))
    assert api.status("cuIpcOpenMemHandle_v2", ctypes.byref(made), own, 1) == api.INVALID_CONTEXT
    exported = other("answer = export('Mem', api.allocate(64))")
    assert isinstance(exported, str)
    assert api.status("cuIpcOpenMemHandle_v2", ctypes.byref(made), _handle(exported), 0) == api.INVALID_VALUE
    other.close()
    assert api.status("cuIpcOpenMemHandle_v2", ctypes.byref(made), _handle(exported), 1) == api.INVALID_VALUE
