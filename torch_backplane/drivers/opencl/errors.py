"""Errors of OpenCL calls, and detection of lost devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pyopencl as cl

from torch_backplane.drivers.base import DeviceError

POCL = "Portable Computing Language"  # the name of the platform

# Statuses of a lost device. INVALID_… statuses mean loss, because the driver only passes valid objects.
LOST = (
    cl.status_code.DEVICE_NOT_AVAILABLE,
    cl.status_code.INVALID_COMMAND_QUEUE,
    cl.status_code.INVALID_CONTEXT,
    cl.status_code.INVALID_DEVICE,
)

# Statuses of invalid calls. The device works: it has checked the call and rejected it.
REFUSED = range(cl.status_code.INVALID_GLOBAL_WORK_SIZE, cl.status_code.INVALID_VALUE + 1)


def status_name(status: int) -> str:
    """Return the name and number of a status: "CL_OUT_OF_RESOURCES (-5)"."""
    name = cl.status_code.to_string(status, "UNKNOWN_STATUS_%d")  # type: ignore[operator]  # added at run time
    return f"CL_{name} ({status})"


class Health:
    """Distinguishes the loss of a device from other errors.

    Most statuses are ambiguous. CL_OUT_OF_RESOURCES is the status of a launch that needs too many resources. Some
    implementations also return it if a fault has destroyed the context. After a command that failed, queue and context
    "may no longer be available" (OpenCL 1.2, clGetEventInfo). So after an ambiguous status, the device executes a
    trivial command; it is lost if that fails.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._queue = cl.CommandQueue(context, device)
        self._buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16)
        self._lock = threading.Lock()
        if not self._works():
            raise RuntimeError("it cannot fill a buffer of 16 bytes")

    def error(self, what: str, status: int) -> DeviceError:
        """Return the exception for an OpenCL call or command with this status. `what` begins the message."""
        lost = status in LOST or (status not in REFUSED and not self._works())
        return DeviceError(f"{what} {status_name(status)}", code=status, lost=lost)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Convert PyOpenCL's errors with `error`."""
        try:
            yield
        except cl.Error as error:
            raise self.error(f"{error.routine} answered", error.code) from error

    def wait(self, event: cl.Event, what: str) -> None:
        """Wait for a command. Raises `error(what, …)` if it failed."""
        with self.watch():
            try:
                event.wait()
            except cl.Error:
                self.check(event, what)  # the error of wait() has no specific status
                raise
            self.check(event, what)

    def check(self, event: cl.Event, what: str) -> bool:
        """Return whether a command is complete. Raises `error(what, …)` if it failed."""
        with self.watch():
            status = event.command_execution_status
        if status < 0:
            raise self.error(what, status)
        return status == cl.command_execution_status.COMPLETE

    def _works(self) -> bool:
        try:
            with self._lock:
                event = cl.enqueue_fill_buffer(self._queue, self._buffer, b"\0", 0, 16)
                event.wait()
            return event.command_execution_status == cl.command_execution_status.COMPLETE
        except cl.Error:
            return False
