"""The device of the OpenCL driver. Segments are buffers, and streams are in-order command queues.

The driver (driver.py) imports this module if PyOpenCL is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pyopencl as cl

from torch_backplane.drivers.base import (
    ALL_DTYPES,
    EVENTS,
    FLOAT64_DTYPES,
    HOST_COPIES,
    LEAST_LARGEST,
    NATIVE_APIS,
    NATIVE_GROUPS,
    Device,
    DeviceError,
    DeviceProperties,
    KernelResources,
    NativeLauncher,
)
from torch_backplane.drivers.opencl import libraries
from torch_backplane.drivers.opencl.compiler import Programs
from torch_backplane.drivers.opencl.errors import POCL, Health, status_name
from torch_backplane.drivers.opencl.staging import LEAST, Staging
from torch_backplane.drivers.opencl.target import target

OLDEST_VERSION = (1, 2)
LEAST_ADDRESS = 1 << 16  # no memory is mapped below it

# Statuses of clCreateBuffer, and of the first use of a buffer, if there is not enough memory.
OUT_OF_MEMORY = (
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_RESOURCES,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
)  # unless the device is lost

BEFORE_EVENT = "a command before the event failed with"

POLL = 2e-4  # seconds between polls for the start of a sleep, or for a marker in an idle queue
MARKER_POLLS = 50  # 10 ms: a busy processor may not run PoCL's thread for a time slice

PROBE = "__kernel void probe(__global int *out) { out[get_global_id(0)] = 40 + (int)get_global_id(0); }"


class Stream:
    """An in-order command queue and its pending commands.

    PyOpenCL's event of a transfer keeps the memoryview of the host memory, and deleting the event waits for the
    transfer. So events are kept here until their commands are complete.
    """

    def __init__(
        self, context: cl.Context, device: cl.Device, health: Health, queue: cl.CommandQueue | None = None
    ) -> None:
        self.health = health
        self.queue = queue or cl.CommandQueue(context, device, cl.command_queue_properties.PROFILING_ENABLE)
        self._lock = threading.Lock()  # PyOpenCL releases the GIL
        self._pending: deque[cl.Event] = deque()
        self.is_marked = False  # set by launched_natively(), reset by a query
        self._failed: int | None = None  # the status of the first failed command, until synchronize() raises it

    def submit(self, enqueue: Callable[..., cl.Event], *arguments: Any, **options: Any) -> cl.Event:
        """Submit a command: `enqueue(queue, *arguments, **options)`."""
        with self.health.watch(), self._lock:
            event = enqueue(self.queue, *arguments, **options)
            self._pending.append(event)
            self.queue.flush()  # other queues and polling threads can wait for it
            self._forget_done()
        return event

    def is_done(self) -> bool:
        with self.health.watch(), self._lock:
            self._forget_done()
            return not self._pending

    def synchronize(self) -> None:
        """Wait for all commands. Raises the error of the first failed command, once."""
        with self.health.watch():
            with self._lock:
                latest = self._pending[-1] if self._pending else None
            self.queue.finish()
            # After a clFlush, clFinish of Mesa 22.3 returns while commands are running.
            if latest is not None and latest.command_execution_status > cl.command_execution_status.COMPLETE:
                with contextlib.suppress(cl.Error):  # the command's status is checked below
                    latest.wait()
            with self._lock:
                self._forget_done()
                failed, self._failed = self._failed, None
        if failed is not None:
            raise self.health.error("an earlier command failed with", failed)

    def _forget_done(self) -> None:
        while self._pending:
            status = self._pending[0].command_execution_status
            if status > cl.command_execution_status.COMPLETE:
                return
            if status < 0 and self._failed is None:
                self._failed = status
            self._pending.popleft()


@functools.cache
def native_launcher(platform: str, calls_functions: bool, stages: bool) -> NativeLauncher:
    """Return OpenCL's functions in the library that PyOpenCL has loaded.

    Args:
        platform: the name of the platform.
        calls_functions: the device supports native kernels: it is a processor and executes host functions.
        stages: transfers go through pinned memory (staging.py), so they cannot be native.
    """
    library = ctypes.CDLL(cl._cl.__file__)  # finds symbols of the libraries that it is linked with, too
    names = [*NATIVE_APIS["opencl"], *NATIVE_GROUPS["opencl"][EVENTS]]
    if not stages:
        names += NATIVE_GROUPS["opencl"][HOST_COPIES]
    if platform == POCL:
        names.append("clFinish")  # wider launches wait for narrower ones: csrc/drivers/opencl/opencl_launcher.cpp
    if calls_functions:
        names.append("clEnqueueNativeKernel")
    return NativeLauncher(
        api="opencl",
        functions={name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names},
    )


class Event:
    """An event. `marker` is its latest recording; a wait refers to the marker at the time of the call."""

    marker: cl.Event | None = None


class OpenCLDevice(Device):
    """A device of any OpenCL platform, with its own context.

    Raises:
        RuntimeError: the device is too old, or returns wrong results for a trivial kernel.
        pyopencl.Error: the device cannot compile or run a kernel.
    """

    def __init__(self, device: cl.Device) -> None:
        self.properties = describe(device)
        self.device = device
        self.context = cl.Context([device])
        self.native_context = self.context.int_ptr
        self._programs = Programs(self.context, device)
        self.health = Health(self.context, device)
        self._own_stream = Stream(self.context, device, self.health)
        # The buffers of a processor are in host memory, so transfers need no pinned memory.
        self.staging = self._make_staging() if self.properties.kind != "cpu" else None
        self.native_launcher = native_launcher(
            device.platform.name,
            bool(device.execution_capabilities & cl.device_exec_capabilities.NATIVE_KERNEL),
            stages=self.staging is not None,
        )
        self.libraries = libraries.installed(cl._cl.__file__, is_processor=self.properties.kind == "cpu")
        self._run_probe()

    def _run_probe(self) -> None:
        kernel = cl.Kernel(self._programs.build(PROBE), "probe")
        buffer = self.allocate(16)
        kernel.set_arg(0, buffer)
        self._own_stream.submit(cl.enqueue_nd_range_kernel, kernel, (4,), None)
        result = memoryview(bytearray(16))
        self.copy_out(buffer, 0, result, self._own_stream)
        self._own_stream.synchronize()
        if result.cast("i").tolist() != [40, 41, 42, 43]:
            raise RuntimeError(f"a trivial kernel returned {result.cast('i').tolist()} instead of [40, 41, 42, 43]")

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> cl.Buffer:
        try:
            with self.health.watch():
                buffer = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, nbytes)
                # Many implementations allocate the memory at the first use of a buffer. Touch it here, to detect a lack
                # of memory now.
                touched = cl.enqueue_fill_buffer(self._own_stream.queue, buffer, b"\0", 0, 1)
            self.health.wait(touched, "the first use of the buffer failed with")
        except DeviceError as error:
            if error.code in OUT_OF_MEMORY and not error.lost:
                raise MemoryError(str(error)) from error
            raise
        return buffer

    def free(self, handle: cl.Buffer) -> None:
        with self.health.watch():
            handle.release()

    # --- transfers ---------------------------------------------------------------------------------------------------

    def _make_staging(self) -> Staging:
        return Staging(self.context, self._own_stream.queue, self.health)

    def copy_in(self, handle: cl.Buffer, offset: int, host_memory: memoryview, stream: Stream) -> None:
        if self.staging is not None and len(host_memory) >= LEAST:
            self.staging.copy_in(handle, offset, host_memory, stream)
            return
        stream.submit(cl.enqueue_copy, handle, host_memory, dst_offset=offset, is_blocking=False)

    def copy_out(self, handle: cl.Buffer, offset: int, host_memory: memoryview, stream: Stream) -> None:
        if self.staging is not None and len(host_memory) >= LEAST:
            self.staging.copy_out(handle, offset, host_memory, stream)
            return
        stream.submit(cl.enqueue_copy, host_memory, handle, src_offset=offset, is_blocking=False)

    def copy(
        self,
        dst_handle: cl.Buffer,
        dst_offset: int,
        src_handle: cl.Buffer,
        src_offset: int,
        nbytes: int,
        stream: Stream,
    ) -> None:
        if dst_handle is src_handle and abs(dst_offset - src_offset) < nbytes:
            # OpenCL rejects a copy between overlapping ranges. It frees the temporary buffer after the second copy.
            between = self.allocate(nbytes)
            self.copy(between, 0, src_handle, src_offset, nbytes, stream)
            src_handle, src_offset = between, 0
        stream.submit(
            cl.enqueue_copy, dst_handle, src_handle, dst_offset=dst_offset, src_offset=src_offset, byte_count=nbytes
        )

    # --- kernels -----------------------------------------------------------------------------------------------------

    def compile(self, text: str, entry: str) -> cl.Kernel:
        try:
            return cl.Kernel(self._programs.get(text), entry)
        except cl.Error as error:
            failure = self.health.error(f"{error.routine} answered", error.code)
            if failure.lost:
                raise failure from error
            raise  # the message contains the compiler's log

    def load(self, binary: bytes, entry: str) -> cl.Kernel:
        try:
            return cl.Kernel(self._programs.load(binary), entry)
        except cl.Error as error:
            raise ValueError(
                f"the binary is not for {self.properties.name}, or has no kernel {entry}: "
                f"{error.routine} answered {status_name(error.code)}"
            ) from error

    def kernel_resources(self, kernel: cl.Kernel) -> KernelResources:
        info = cl.kernel_work_group_info
        return KernelResources(
            spilled_bytes=int(kernel.get_work_group_info(info.PRIVATE_MEM_SIZE, self.device)),
            static_shared_memory=int(kernel.get_work_group_info(info.LOCAL_MEM_SIZE, self.device)),
        )

    def build_counts(self) -> dict[str, int]:
        return dict(self._programs.counts)

    def native_kernel(self, kernel: cl.Kernel) -> int:
        return kernel.int_ptr

    def native_stream(self, stream: Stream) -> int:
        return stream.queue.int_ptr

    def native_segment(self, handle: cl.Buffer) -> int:
        return handle.int_ptr

    def native_error(self, call: str, status: int) -> Exception:
        return self.health.error(f"{call} answered", status)

    def launched_natively(self, stream: Stream) -> None:
        stream.submit(cl.enqueue_marker)
        stream.is_marked = True

    # --- streams and events ------------------------------------------------------------------------------------------

    def create_stream(self, priority: int) -> Stream:
        with self.health.watch():
            return Stream(self.context, self.device, self.health)  # OpenCL 1.2 has no priorities

    def adopt_stream(self, handle: int) -> Stream:
        if not is_object_like(handle, self._own_stream.queue.int_ptr):
            raise ValueError(f"{handle} is not a command queue of the platform of {self.properties.name}")
        try:
            queue = cl.CommandQueue.from_int_ptr(handle, retain=True)
            context, device, properties = queue.context, queue.device, queue.properties
        except cl.Error as error:
            raise ValueError(f"{handle} is not a command queue: {status_name(error.code)}") from error
        if context != self.context or device != self.device:
            raise ValueError(
                f"the command queue {handle} does not belong to the context of {self.properties.name}: "
                "create it in torch.bp.native_context()"
            )
        if properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE:
            raise ValueError(f"the command queue {handle} executes out of order; create an in-order queue")
        return Stream(self.context, self.device, self.health, queue)

    def destroy_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def query_stream(self, stream: Stream) -> bool:
        # OpenCL has no query for an idle queue, and a marker in an idle queue is reached only after a moment. If the
        # native handle is shared, each query needs a new marker, which it would never find reached without polling.
        polls, stream.is_marked = MARKER_POLLS if stream.is_marked else 0, False
        while not stream.is_done():
            if polls == 0:
                return False
            polls -= 1
            time.sleep(POLL)
        return True

    def synchronize_stream(self, stream: Stream) -> None:
        stream.synchronize()

    def create_event(self, timing: bool) -> Event:
        return Event()

    def record_event(self, event: Event, stream: Stream) -> None:
        event.marker = stream.submit(cl.enqueue_marker)

    def wait_event(self, event: Event, stream: Stream) -> None:
        if event.marker is not None:
            stream.submit(cl.enqueue_barrier, wait_for=[event.marker])

    def query_event(self, event: Event) -> bool:
        return event.marker is None or self.health.check(event.marker, BEFORE_EVENT)

    def synchronize_event(self, event: Event) -> None:
        if event.marker is not None:
            self.health.wait(event.marker, BEFORE_EVENT)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        assert start.marker is not None
        assert end.marker is not None
        with self.health.watch():
            return (end.marker.profile.end - start.marker.profile.end) / 1e6

    def sleep(self, milliseconds: float, stream: Stream) -> None:
        begin = stream.submit(cl.enqueue_marker)
        alarm = cl.UserEvent(self.context)
        stream.submit(cl.enqueue_barrier, wait_for=[alarm])

        def ring() -> None:
            # Poll, because a thread that waits inside the library would be stopped there when Python exits.
            while begin.command_execution_status > cl.command_execution_status.COMPLETE:
                time.sleep(POLL)
            time.sleep(milliseconds / 1e3)
            alarm.set_status(cl.command_execution_status.COMPLETE)

        threading.Thread(target=ring, daemon=True).start()


def is_object_like(handle: int, other: int) -> bool:
    """Return whether `handle` looks like an OpenCL object of the same platform as `other`.

    Each OpenCL object begins with the address of its platform's function table (cl_khr_icd). An OpenCL call with
    another value would crash.
    """
    if not LEAST_ADDRESS <= handle < 2**47 or handle % ctypes.sizeof(ctypes.c_void_p):
        return False
    return ctypes.c_void_p.from_address(handle).value == ctypes.c_void_p.from_address(other).value


def describe(device: cl.Device) -> DeviceProperties:
    """Return the properties of an OpenCL device.

    Raises:
        RuntimeError: its OpenCL version is older than 1.2.
    """
    version = re.match(r"OpenCL (\d+)\.(\d+)", device.version)
    capability = (int(version[1]), int(version[2])) if version else (0, 0)
    if capability < OLDEST_VERSION:
        raise RuntimeError(f"its version is {device.version!r}, but OpenCL 1.2 or later is required")
    platform, is_a = device.platform, kind(device.type)
    return DeviceProperties(
        name=device.name.strip(),
        total_memory=device.global_mem_size,
        largest_allocation=max(int(device.max_mem_alloc_size), LEAST_LARGEST),
        dtypes=[dtype for dtype in ALL_DTYPES if device.double_fp_config or dtype not in FLOAT64_DTYPES],
        compute_units=max(1, device.max_compute_units),
        capability=capability,
        dialect="OpenCL C",
        kind=is_a,
        target=target(device, is_a),
        software=f"{platform.name.strip()}, {platform.version.strip()}, driver {device.driver_version.strip()}",
    )


def kind(device_type: int) -> str:
    """Return the kind (DeviceProperties.kind) for OpenCL's bit mask of device types."""
    if device_type & cl.device_type.GPU:
        return "gpu"
    return "cpu" if device_type & cl.device_type.CPU else "accelerator"
