"""Tests the emulated CUDA driver: streams, events, host functions. Work is asynchronous."""

from __future__ import annotations

import ctypes
import threading
import time

import driver_api as api
import pytest


def _is_done(stream: int) -> bool:
    error = api.status("cuStreamQuery", stream)
    assert error in (0, api.NOT_READY)
    return error == 0


def test_work_waits_for_earlier_work_of_its_stream() -> None:
    stream, other, memory = api.stream(), api.stream(), api.allocate(4)
    api.write(memory, bytes(4))
    with api.blocked(stream) as release:
        api.call("cuMemsetD8Async", memory, 7, 4, stream)
        assert not _is_done(stream)
        assert _is_done(other)
        host = api.pinned(4)
        api.call("cuMemcpyDtoHAsync_v2", host, memory, 4, other)
        api.synchronize(other)
        assert ctypes.string_at(host, 4) == bytes(4)
        release()
        api.synchronize(stream)
    assert _is_done(stream)
    assert api.read(memory, 4) == b"\7" * 4


def test_events_are_reached_when_the_stream_reaches_them() -> None:
    stream, event = api.stream(), api.event()
    api.call("cuEventQuery", event)  # never recorded
    api.call("cuEventSynchronize", event)
    with api.blocked(stream) as release:
        api.call("cuEventRecord", event, stream)
        assert api.status("cuEventQuery", event) == api.NOT_READY
        threading.Timer(0.1, release).start()
        api.call("cuEventSynchronize", event)
    assert api.status("cuEventQuery", event) == 0


def test_a_stream_waits_for_the_latest_recording_before_the_call() -> None:
    first, second, waiting, event = *(api.stream() for _ in range(3)), api.event()
    with api.blocked(first) as release_first:
        api.call("cuEventRecord", event, first)
        api.call("cuStreamWaitEvent", waiting, event, 0)
        with api.blocked(second):
            api.call("cuEventRecord", event, second)  # does not matter for the wait above
            assert not _is_done(waiting)
            release_first()
            api.synchronize(waiting)
            assert api.status("cuEventQuery", event) == api.NOT_READY
    api.call("cuEventSynchronize", event)


def test_waits_stay_in_force_when_the_event_is_destroyed() -> None:
    stream, waiting, event = api.stream(), api.stream(), api.event()
    with api.blocked(stream) as release:
        api.call("cuEventRecord", event, stream)
        api.call("cuStreamWaitEvent", waiting, event, 0)
        api.call("cuEventDestroy_v2", event)
        assert not _is_done(waiting)
        release()
        api.synchronize(waiting)
    assert api.status("cuEventQuery", event) == api.INVALID_HANDLE


def test_work_of_a_destroyed_stream_is_done() -> None:
    stream, memory = api.stream(), api.allocate(4)
    api.write(memory, bytes(4))
    with api.blocked(stream):
        api.call("cuMemsetD8Async", memory, 1, 4, stream)
        api.call("cuStreamDestroy_v2", stream)
    api.call("cuCtxSynchronize")
    assert api.read(memory, 4) == b"\1" * 4
    assert api.status("cuStreamQuery", stream) == api.INVALID_HANDLE
    assert api.status("cuStreamDestroy_v2", stream) == api.INVALID_HANDLE


def test_legacy_default_stream_orders_blocking_streams() -> None:
    blocking, free = api.stream(0), api.stream()
    memory = api.allocate(4)
    with api.blocked(blocking) as release:
        api.call("cuMemsetD8Async", memory, 3, 4, 0)
        assert not _is_done(0)
        assert not _is_done(api.LEGACY)
        assert _is_done(free)
        release()
        api.synchronize(0)
    with api.blocked(0) as release:
        api.call("cuMemsetD8Async", memory, 4, 4, blocking)
        api.call("cuMemsetD8Async", memory, 5, 4, free)
        api.synchronize(free)
        assert not _is_done(blocking)
        release()
        api.synchronize(blocking)
    assert api.read(memory, 4) == b"\4" * 4


def test_each_thread_has_a_default_stream(context: int) -> None:
    seen = []

    def run() -> None:
        api.call("cuCtxSetCurrent", context)
        seen.append(_is_done(api.PER_THREAD))

    function = api.HostFunction(lambda _: time.sleep(0.3))
    api.call("cuLaunchHostFunc", api.PER_THREAD, function, 0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
    assert not _is_done(api.PER_THREAD)
    api.synchronize(api.PER_THREAD)


def test_facts_of_streams(context: int) -> None:
    priorities = {}
    for given, expected in ((0, 0), (-5, -5), (-99, -5), (3, 0)):
        stream = api.result("cuStreamCreateWithPriority", api.NON_BLOCKING, given)
        value = ctypes.c_int()
        api.call("cuStreamGetPriority", stream, ctypes.byref(value))
        priorities[stream] = value.value
        assert value.value == expected
        flags = ctypes.c_uint()
        api.call("cuStreamGetFlags", stream, ctypes.byref(flags))
        assert flags.value == api.NON_BLOCKING
        of = ctypes.c_uint64()
        api.call("cuStreamGetCtx", stream, ctypes.byref(of))
        assert of.value == context
    ids = set()
    for stream in priorities:
        number = ctypes.c_uint64()
        api.call("cuStreamGetId", stream, ctypes.byref(number))
        ids.add(number.value)
    assert len(ids) == 4
    made = ctypes.c_uint64()
    assert api.status("cuStreamCreate", ctypes.byref(made), 2) == api.INVALID_VALUE
    assert api.status("cuStreamSynchronize", 4096) == api.INVALID_HANDLE


# --- time


def test_time_between_events() -> None:
    stream, start, end, never = api.stream(), api.event(), api.event(), api.event()
    api.call("cuEventRecord", start, stream)
    function = api.HostFunction(lambda _: time.sleep(0.05))
    api.call("cuLaunchHostFunc", stream, function, 0)
    api.call("cuEventRecord", end, stream)
    assert _elapsed(start, end)[0] == api.NOT_READY
    api.synchronize(stream)
    error, milliseconds = _elapsed(start, end)
    assert error == 0
    assert 50 <= milliseconds < 5000
    assert _elapsed(end, start)[1] == -milliseconds
    assert _elapsed(start, never)[0] == api.INVALID_HANDLE


def test_events_without_timing() -> None:
    events = [api.event(api.DISABLE_TIMING), api.event()]
    for one in events:
        api.call("cuEventRecord", one, 0)
    api.synchronize()
    assert _elapsed(*events)[0] == api.INVALID_HANDLE
    made = ctypes.c_uint64()
    for wrong in (api.INTERPROCESS, 64):  # an event for other processes has no timing
        assert api.status("cuEventCreate", ctypes.byref(made), wrong) == api.INVALID_VALUE


def _elapsed(start: int, end: int) -> tuple[int, float]:
    value = ctypes.c_float()
    return api.status("cuEventElapsedTime_v2", ctypes.byref(value), start, end), value.value


# --- host functions


def test_host_functions_are_called_in_order() -> None:
    stream, seen = api.stream(), []
    function = api.HostFunction(lambda argument: seen.append((argument, threading.get_ident())))
    for i in range(1, 20):
        api.call("cuLaunchHostFunc", stream, function, i)
    api.synchronize(stream)
    assert [one for one, _ in seen] == list(range(1, 20))
    assert all(thread != threading.get_ident() for _, thread in seen)


def test_host_functions_cannot_call_the_driver() -> None:
    seen: list[int] = []
    function = api.HostFunction(lambda _: seen.append(api.status("cuCtxSynchronize")))
    api.call("cuLaunchHostFunc", 0, function, 0)
    api.synchronize()
    assert seen == [api.NOT_PERMITTED]
    assert api.status("cuLaunchHostFunc", 0, None, 0) == api.INVALID_VALUE


def test_host_functions_are_not_called_after_an_error() -> None:
    stream, seen = api.stream(), []
    function = api.HostFunction(lambda _: seen.append(1))
    api.inject("(kernel)", 1, 214)  # an uncorrectable memory error
    kernel = api.kernel('extern "C" __global__ void nothing() {}', "nothing")
    with api.blocked(stream):
        assert api.launch(kernel, (1,), (1,), on=stream) == 0
        api.call("cuLaunchHostFunc", stream, function, 0)
    assert api.status("cuStreamSynchronize", stream) == 214
    assert seen == []


@pytest.mark.parametrize("count", [3, 17])
def test_many_streams_and_threads(count: int, context: int) -> None:
    """Threads add to counters on their own streams, and hand over with events; the sum is exact."""
    source = 'extern "C" __global__ void add(int* at, int by) { at[threadIdx.x] += by; }'
    function, memory = api.kernel(source, "add"), api.allocate(64)
    api.call("cuMemsetD8_v2", memory, 0, 64)
    event = api.event(api.DISABLE_TIMING)
    api.call("cuEventRecord", event, 0)
    lock = threading.Lock()

    def run(by: int) -> None:
        api.call("cuCtxSetCurrent", context)
        stream = api.stream()
        for _ in range(5):
            with lock:
                api.call("cuStreamWaitEvent", stream, event, 0)
                assert api.launch(function, (1,), (16,), memory, ctypes.c_int(by), on=stream) == 0
                api.call("cuEventRecord", event, stream)
        api.synchronize(stream)

    threads = [threading.Thread(target=run, args=[i]) for i in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    total = 5 * sum(range(count))
    assert api.read(memory, 64) == total.to_bytes(4, "little") * 16
