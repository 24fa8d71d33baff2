"""Streams and events: torch.Stream and torch.Event with the additional API of torch.cuda.

All functions also accept a plain torch.Stream or torch.Event of a bp device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.accelerator._utils import DeviceLike, _get_device_index

__all__ = ["Event", "ExternalStream", "Stream"]


def _check_stream(stream: Any) -> torch.Stream:
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"expected a torch.Stream, but got {type(stream).__name__}")
    return stream


class Stream(torch.Stream):
    """A stream: a queue of commands on one device, which execute in order and independently of other streams.

    `with stream:` makes it this thread's current stream. Streams come round-robin from a pool of 32 for each device and
    priority, so two `Stream` objects can be the same stream.

    Args:
        device: the device; the current one by default or for a negative index.
        priority: 0, or -1 for high priority. Lower numbers mean -1, greater numbers 0. Drivers whose hardware has no
            priorities ignore it.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: int) -> Stream:
        """Create the stream, or refer to an existing one."""
        if "stream_id" in kwargs and "device_index" in kwargs:  # refers to an existing stream
            kwargs.setdefault("device_type", _C.DEVICE_TYPE)
            return super().__new__(cls, priority=priority, **kwargs)
        if kwargs:
            raise TypeError(f"Stream() takes device and priority, but got {', '.join(kwargs)}")
        return _wrap(_C.pool_stream(max(_get_device_index(device, optional=True), -1), priority), cls)

    @property
    def bp_stream(self) -> int:
        """The runtime's stream as an integer, which ExternalStream accepts. It is not a native handle."""
        return _C.stream_handle(self.device_index, self.stream_id)

    @property
    def native_handle(self) -> int:
        """The native handle of this stream (a cl_command_queue or CUstream, say), for other libraries.

        All commands that were submitted before are in the native queue.

        Raises:
            NotImplementedError: the device's driver provides no native handles.
            RuntimeError: the stream is being captured.
        """
        return _C.native_handle(self.device_index, self.stream_id)

    @property
    def priority(self) -> int:
        """The priority: 0, or -1 for high priority."""
        return _C.stream_priority(self.device_index, self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the (least, greatest) priority. Lower numbers are higher priorities."""
        return _C.LEAST_PRIORITY, _C.GREATEST_PRIORITY

    def wait_event(self, event: Event | torch.Event) -> None:
        """Make all future work of this stream wait for an event. The host does not wait.

        Args:
            event: the event.
        """
        event.wait(self)

    def wait_stream(self, stream: Stream | torch.Stream) -> None:
        """Make all future work of this stream wait for the work submitted to another stream so far.

        The host does not wait.

        Args:
            stream: the stream to wait for.
        """
        self.wait_event(_check_stream(stream).record_event())

    def record_event(self, event: Event | torch.Event | None = None) -> Event | torch.Event:
        """Record an event after all work submitted to this stream so far.

        Args:
            event: the event; a new one by default.

        Returns:
            The event.
        """
        if event is None:
            event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all submitted work is completed."""
        return super().query()

    def synchronize(self) -> None:
        """Wait until all submitted work is completed. Raises errors that its kernels and host callbacks reported."""
        super().synchronize()

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.bp_stream)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, torch.Stream):
            return False
        return (self.stream_id, self.device_index, self.device_type) == (
            other.stream_id,
            other.device_index,
            other.device_type,
        )

    def __hash__(self) -> int:
        return super().__hash__()  # the hash of a plain torch.Stream for the same stream

    def __repr__(self) -> str:
        return f"<torch.bp.Stream device={self.device} bp_stream={self.bp_stream:#x}>"


class ExternalStream(Stream):
    """A wrapper around a queue that was created elsewhere, such as by another library.

    It does not manage the life of the queue: the user must keep the queue alive while the stream is used.

    Args:
        stream_ptr: the queue as an integer: a native handle, if the device's driver can adopt queues, or a Stream's
            `bp_stream`. The handle of a destroyed queue is undefined behavior, as in torch.cuda.
        device: the device of the queue; the current one by default.

    Raises:
        RuntimeError: `stream_ptr` is not a `bp_stream`, and the driver does not adopt queues.
        ValueError: the driver rejects the handle, or the queue belongs to another context or device.
    """

    def __new__(cls, stream_ptr: int, device: DeviceLike = None, **kwargs: int) -> ExternalStream:
        """Create the stream of the foreign handle."""
        if kwargs:
            raise TypeError(f"ExternalStream() takes stream_ptr and device, but got {', '.join(kwargs)}")
        return _wrap(_C.external_stream(_get_device_index(device, optional=True), stream_ptr), cls)


class Event(torch.Event):
    """A synchronization marker in a stream, to wait for and to measure time with.

    The runtime's event is created when it is first recorded, on the device of that stream. Only streams of the same
    device can record it again. Streams of any device can wait for it.

    Args:
        enable_timing: whether the event measures time.
        blocking: ignored: `synchronize` always blocks the thread and never spins.
        interprocess: whether other processes can wait for the event (see `ipc_handle`). Excludes `enable_timing`.
        external: must be False.

    Raises:
        NotImplementedError: `interprocess` is True and no device's driver has the INTERPROCESS functions, or `external`
            is True.
        ValueError: `interprocess` and `enable_timing` are True.
    """

    _interprocess = False

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        """Create the event."""
        if interprocess and enable_timing:
            raise ValueError("interprocess events do not measure time: enable_timing must be False")
        if interprocess:
            cls._check_shared()
        if external:
            raise NotImplementedError("external events are not supported: no driver records events in a graph's replay")
        event = super().__new__(cls, torch.device("bp"), enable_timing=enable_timing, blocking=blocking)
        event._interprocess = interprocess
        return event

    @staticmethod
    def _check_shared() -> None:
        if not any(map(_C.shares_between_processes, range(_C.device_count()))):
            raise NotImplementedError(
                "bp events cannot be shared between processes: no device's driver has the INTERPROCESS functions"
            )

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        """Open an event of another process.

        Args:
            device: the device of the event.
            handle: the handle that `ipc_handle` returned in the other process.

        Raises:
            NotImplementedError: the device's driver lacks the INTERPROCESS functions.
            ValueError: `handle` does not have 64 bytes.
        """
        index = _get_device_index(device, optional=True)
        event = super().__new__(cls, torch.device("bp"))
        event._interprocess = True
        _C.import_event(event, index, handle)
        return event

    def ipc_handle(self) -> bytes:
        """Return a handle of 64 bytes with which another process can open this event (`from_ipc_handle`).

        Record the event before the other process waits for it. An event that was never recorded is created on the
        current device.

        Raises:
            NotImplementedError: the device's driver lacks the INTERPROCESS functions.
            RuntimeError: the event was created without interprocess=True.
        """
        self._check_shared()
        if not self._interprocess:
            raise RuntimeError("ipc_handle() requires an event that was created with interprocess=True")
        self._share(-1)
        return _C.export_event(self)

    def _share(self, index: int) -> None:
        if not self.event_id:
            _C.make_shared_event(self, index)

    def record(self, stream: Stream | torch.Stream | None = None) -> None:
        """Record the event after all work submitted to a stream so far.

        Args:
            stream: the stream; the current one by default.

        Raises:
            RuntimeError: the event was recorded on another device before.
        """
        stream = current_stream() if stream is None else _check_stream(stream)
        if self._interprocess:
            self._share(stream.device_index)
        super().record(stream)

    def wait(self, stream: Stream | torch.Stream | None = None) -> None:
        """Make all future work of a stream wait for the event.

        If the stream is of another device, the host waits.

        Args:
            stream: the stream; the current one by default.
        """
        super().wait(current_stream() if stream is None else _check_stream(stream))

    def query(self) -> bool:
        """Return whether the work before the event is completed; True if the event was never recorded."""
        return super().query()

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the time from this event to `end_event` in milliseconds.

        Args:
            end_event: the later event.

        Raises:
            RuntimeError: one of the events was not recorded, is not completed, or does not measure time.
        """
        if not isinstance(end_event, torch.Event):
            raise TypeError(f"expected a torch.Event, but got {type(end_event).__name__}")
        # torch.Event.elapsed_time rejects subclasses of torch.Event.
        return _C.elapsed_ms(self.event_id, end_event.event_id)

    def synchronize(self) -> None:
        """Wait until the work before the event is completed."""
        super().synchronize()

    @property
    def bp_event(self) -> int:
        """The runtime's event as an integer; 0 before the event is first recorded."""
        return self.event_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.bp_event)

    def __repr__(self) -> str:
        return f"<torch.bp.Event {self.bp_event:#x}>" if self.bp_event else "<torch.bp.Event uninitialized>"


class StreamContext:
    """Context manager that changes the current stream, and the current device to the stream's device.

    Args:
        stream: the stream; None does nothing.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = None if stream is None else _check_stream(stream)
        self.src_prev_stream: Stream | None = None
        self.dst_prev_stream: Stream | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self.src_prev_stream = current_stream()
        self.dst_prev_stream = current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        if self.dst_prev_stream is not None and self.src_prev_stream is not None:
            set_stream(self.dst_prev_stream)
            set_stream(self.src_prev_stream)


def _wrap(triple: tuple[int, int, int], cls: type[Any] = Stream) -> Any:
    stream_id, device_index, device_type = triple
    return torch.Stream.__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager that changes the current stream (see `StreamContext`).

    Args:
        stream: the stream; None does nothing.
    """
    return StreamContext(stream)


def set_stream(stream: torch.Stream) -> None:
    """Set this thread's current stream, and its current device to the stream's device.

    Args:
        stream: the stream; None does nothing.
    """
    if stream is not None:
        _set_stream_by_id(_check_stream(stream).stream_id, stream.device_index, stream.device_type)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    _C.set_stream(stream_id, device_index, device_type)


def current_stream(device: DeviceLike = None) -> Stream:
    """Return this thread's current stream on a device.

    Args:
        device: the device; the current one by default.
    """
    return _wrap(_C.current_stream(_get_device_index(device, optional=True)))


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the default stream of a device.

    Args:
        device: the device; the current one by default.
    """
    return _wrap(_C.default_stream(_get_device_index(device, optional=True)))


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> Stream:
    """Return a stream for a queue that was created elsewhere (see `ExternalStream`).

    Args:
        data_ptr: the queue as an integer.
        device: the device of the queue; the current one by default.
    """
    return _wrap(_C.external_stream(_get_device_index(device, optional=True), data_ptr))
