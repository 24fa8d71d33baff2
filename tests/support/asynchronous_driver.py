"""A driver for tests: an accelerator with asynchronous streams. A thread per stream runs the stream's work in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch_backplane.drivers import Device, DeviceProperties, Driver


class Stream:
    def __init__(self) -> None:
        self.work: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            work = self.work.get()
            work()
            self.work.task_done()


class Event:
    """`recording` is the latest record. A wait keeps the record that was the latest when it was submitted."""

    def __init__(self) -> None:
        self.recording = threading.Event()
        self.recording.set()
        self.time = 0.0


awake = threading.Event()  # set by tests; ends every sleep


class AsynchronousDevice(Device):
    def __init__(self, index: int) -> None:
        self.properties = DeviceProperties(name=f"Asynchronous {index}", total_memory=1 << 28)

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def free(self, handle: bytearray) -> None:
        handle.clear()

    def copy_in(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Stream) -> None:
        def work() -> None:
            handle[offset : offset + len(host_memory)] = host_memory

        stream.work.put(work)

    def copy_out(self, handle: bytearray, offset: int, host_memory: memoryview, stream: Stream) -> None:
        def work() -> None:
            host_memory[:] = handle[offset : offset + len(host_memory)]

        stream.work.put(work)

    def create_stream(self, priority: int) -> Stream:
        return Stream()

    def query_stream(self, stream: Stream) -> bool:
        return stream.work.unfinished_tasks == 0

    def synchronize_stream(self, stream: Stream) -> None:
        stream.work.join()

    def create_event(self, timing: bool) -> Event:
        return Event()

    def record_event(self, event: Event, stream: Stream) -> None:
        recording = event.recording = threading.Event()

        def work() -> None:
            event.time = time.perf_counter()
            recording.set()

        stream.work.put(work)

    def wait_event(self, event: Event, stream: Stream) -> None:
        stream.work.put(event.recording.wait)

    def query_event(self, event: Event) -> bool:
        return event.recording.is_set()

    def synchronize_event(self, event: Event) -> None:
        event.recording.wait()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return (end.time - start.time) * 1e3

    def sleep(self, milliseconds: float, stream: Stream) -> None:
        stream.work.put(lambda: awake.wait(milliseconds / 1e3))


class AsynchronousDriver(Driver):
    def devices(self) -> list[AsynchronousDevice]:
        return [AsynchronousDevice(0), AsynchronousDevice(1)]
