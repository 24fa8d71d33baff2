"""Errors of OpenCL calls, and which of them a device does not survive."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pyopencl as cl

from torch_backplane.drivers.base import DeviceError

POCL = "Portable Computing Language"  # a platform's name

# Answers that say by themselves that device, context or queue are gone. Ours are valid as long as we use them.
LOST = (
    cl.status_code.DEVICE_NOT_AVAILABLE,
    cl.status_code.INVALID_COMMAND_QUEUE,
    cl.status_code.INVALID_CONTEXT,
    cl.status_code.INVALID_DEVICE,
)

# Answers to a call that was wrong: they say nothing about the device, which looked at the call and refused it.
REFUSED = range(cl.status_code.INVALID_GLOBAL_WORK_SIZE, cl.status_code.INVALID_VALUE + 1)


def status_name(status: int) -> str:
    """«CL_OUT_OF_RESOURCES (-5)»."""
    name = cl.status_code.to_string(status, "UNKNOWN_STATUS_%d")  # type: ignore[operator]  # added at run time
    return f"CL_{name} ({status})"


class Health:
    """Tells the errors that a device survives from its loss.

    Most answers are ambiguous. CL_OUT_OF_RESOURCES is a launch that needs more than there is, and with some
    implementations also all that is heard of a device whose context a fault has destroyed; and of a command that ended
    with an error, the standard says that queue and context «may no longer be available» (OpenCL 1.2, clGetEventInfo).
    So the device is asked: it is lost if it cannot do a trivial command any more.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._queue = cl.CommandQueue(context, device)
        self._buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16)
        self._lock = threading.Lock()
        if not self._works():
            raise RuntimeError("it cannot fill a buffer of 16 bytes")

    def error(self, what: str, status: int) -> DeviceError:
        """The exception for an OpenCL call, or a command, that ended with this status."""
        lost = status in LOST or (status not in REFUSED and not self._works())
        return DeviceError(f"{what} {status_name(status)}", code=status, lost=lost)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Makes PyOpenCL's errors such exceptions."""
        try:
            yield
        except cl.Error as error:
            raise self.error(f"{error.routine} answered", error.code) from error

    def wait(self, event: cl.Event, what: str) -> None:
        """Wait for a command; it is called `what` if it fails."""
        with self.watch():
            try:
                event.wait()
            except cl.Error:
                self.check(event, what)  # what wait() says is only that something is wrong
                raise
            self.check(event, what)

    def check(self, event: cl.Event, what: str) -> bool:
        """Whether a command is over. Raises if it failed."""
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
