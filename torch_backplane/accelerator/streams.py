"""Streams and events: torch.Stream and torch.Event with what torch.cuda adds to them.

Every function here takes a plain torch.Stream or torch.Event of a bp device as well as the classes below.
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
        raise TypeError(f"expected a torch.Stream, and got {type(stream).__name__}")
    return stream


class Stream(torch.Stream):
    """A queue of work on one device, done in order and independently of other streams.

    `with stream:` makes it the current one of this thread. Streams come from a pool of 32 for each device and priority,
    handed out in turn, so two `Stream` objects may be the same queue.

    Args:
        device: where; None or a negative index means the current device.
        priority: 0, or -1 for work that should run first; other values mean the nearer of the two. A driver whose
            hardware has no priorities ignores it.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: int) -> Stream:
        if "stream_id" in kwargs and "device_index" in kwargs:  # one that exists
            kwargs.setdefault("device_type", _C.DEVICE_TYPE)
            return super().__new__(cls, priority=priority, **kwargs)
        if kwargs:
            raise TypeError(f"Stream() takes device and priority, and got {', '.join(kwargs)}")
        return _wrap(_C.pool_stream(max(_get_device_index(device, optional=True), -1), priority), cls)

    @property
    def bp_stream(self) -> int:
        """An integer for the runtime's queue, which ExternalStream takes; not a handle of the hardware's API."""
        return _C.stream_handle(self.device_index, self.stream_id)

    @property
    def native_handle(self) -> int:
        """The hardware API's handle of this queue (a cl_command_queue, a CUstream), for work that other libraries give
        it. All that was submitted before is in the queue.

        Raises:
            NotImplementedError: the device's driver has no native handles.
            RuntimeError: the stream is being captured.
        """
        return _C.native_handle(self.device_index, self.stream_id)

    @property
    def priority(self) -> int:
        """0, or -1 for a stream whose work should run first."""
        return _C.stream_priority(self.device_index, self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """(least, greatest) priority; lower numbers are greater priorities."""
        return _C.LEAST_PRIORITY, _C.GREATEST_PRIORITY

    def wait_event(self, event: Event | torch.Event) -> None:
        """Let work that is submitted from now on wait for `event`; the host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: Stream | torch.Stream) -> None:
        """Let work that is submitted from now on wait for all that `stream` has been given; the host does not wait."""
        self.wait_event(_check_stream(stream).record_event())

    def record_event(self, event: Event | torch.Event | None = None) -> Event | torch.Event:
        """Record `event` (None: a new one) behind all work that this stream has been given, and return it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """True where all work is done."""
        return super().query()

    def synchronize(self) -> None:
        """Wait on the host until all work is done."""
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
        return super().__hash__()  # equal to that of a plain torch.Stream for the same queue

    def __repr__(self) -> str:
        return f"<torch.bp.Stream device={self.device} bp_stream={self.bp_stream:#x}>"


class ExternalStream(Stream):
    """A stream around a queue that is kept alive elsewhere.

    Args:
        stream_ptr: the queue as an integer: a handle of the hardware's API, where the device's driver adopts such
            queues, or a Stream's `bp_stream`. The handle of a queue that does not exist any more is undefined
            behaviour, as with torch.cuda.
        device: where the queue was made.

    Raises:
        RuntimeError: the number is no `bp_stream`, and the driver adopts no queues.
        ValueError: the driver says that it is no queue, or one of another context or device.
    """

    def __new__(cls, stream_ptr: int, device: DeviceLike = None, **kwargs: int) -> ExternalStream:
        if kwargs:
            raise TypeError(f"ExternalStream() takes stream_ptr and device, and got {', '.join(kwargs)}")
        return _wrap(_C.external_stream(_get_device_index(device, optional=True), stream_ptr), cls)


class Event(torch.Event):
    """A mark in a stream, to wait for and to measure time with. It is made when it is first recorded, on that device.

    Args:
        enable_timing: measure time.
        blocking: accepted for torch.cuda's sake; `synchronize` always sleeps and never spins.
        interprocess: other processes may wait for it, by `ipc_handle`. Such an event measures no time.
        external: must be False.

    Raises:
        NotImplementedError: interprocess, where the drivers of all devices lack the INTERPROCESS functions, or external
            (those that a replay of a graph records).
        ValueError: interprocess and enable_timing.
    """

    _interprocess = False

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        if interprocess and enable_timing:
            raise ValueError("events that are shared between processes measure no time: enable_timing must be False")
        if interprocess:
            cls._check_shared()
        if external:
            raise NotImplementedError("events that are recorded in the middle of a graph's replay: no driver has them")
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
        """The event of another process that `ipc_handle` there gave a handle of.

        Raises:
            NotImplementedError: the device's driver lacks the INTERPROCESS functions.
        """
        index = _get_device_index(device, optional=True)
        event = super().__new__(cls, torch.device("bp"))
        event._interprocess = True
        _C.import_event(event, index, handle)
        return event

    def ipc_handle(self) -> bytes:
        """64 bytes by which another process opens this event (`from_ipc_handle`). Record it before that process waits.

        An event that was never recorded becomes one of the current device.

        Raises:
            NotImplementedError: the device's driver lacks the INTERPROCESS functions.
            RuntimeError: the event was made without interprocess=True.
        """
        self._check_shared()
        if not self._interprocess:
            raise RuntimeError("only events that are made with interprocess=True have an ipc_handle()")
        self._share(-1)
        return _C.export_event(self)

    def _share(self, index: int) -> None:
        if not self.event_id:
            _C.make_shared_event(self, index)

    def record(self, stream: Stream | torch.Stream | None = None) -> None:
        """Put the mark behind all work that `stream` (None: the current one) has been given.

        Raises:
            RuntimeError: the event was recorded on another device before.
        """
        stream = current_stream() if stream is None else _check_stream(stream)
        if self._interprocess:
            self._share(stream.device_index)
        super().record(stream)

    def wait(self, stream: Stream | torch.Stream | None = None) -> None:
        """Let work that `stream` (None: the current one) is given from now on wait for the mark.

        A stream of another device may wait too.
        """
        super().wait(current_stream() if stream is None else _check_stream(stream))

    def query(self) -> bool:
        """True where the mark has been reached, or was never recorded."""
        return super().query()

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from this mark to `end_event`.

        Raises:
            RuntimeError: one of them was not recorded, has not been reached, or does not measure time.
        """
        if not isinstance(end_event, torch.Event):
            raise TypeError(f"expected a torch.Event, and got {type(end_event).__name__}")
        # torch.Event.elapsed_time takes no subclass of torch.Event.
        return _C.elapsed_ms(self.event_id, end_event.event_id)

    def synchronize(self) -> None:
        """Wait on the host until the mark has been reached."""
        super().synchronize()

    @property
    def bp_event(self) -> int:
        """The runtime's event as an integer; 0 before it is first recorded."""
        return self.event_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.bp_event)

    def __repr__(self) -> str:
        return f"<torch.bp.Event {self.bp_event:#x}>" if self.bp_event else "<torch.bp.Event uninitialized>"


class StreamContext:
    """Context manager that makes a stream the current one, and its device the current device; None changes nothing."""

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
    """Context manager that makes `stream` the current one; None changes nothing."""
    return StreamContext(stream)


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` the current one of this thread, and its device the current device; None changes nothing."""
    if stream is not None:
        _set_stream_by_id(_check_stream(stream).stream_id, stream.device_index, stream.device_type)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    _C.set_stream(stream_id, device_index, device_type)


def current_stream(device: DeviceLike = None) -> Stream:
    """The current stream of this thread on the device (None: the current one)."""
    return _wrap(_C.current_stream(_get_device_index(device, optional=True)))


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream that is current until another is chosen, on the device (None: the current one)."""
    return _wrap(_C.default_stream(_get_device_index(device, optional=True)))


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> Stream:
    """A stream around a queue that is kept alive elsewhere; see ExternalStream."""
    return _wrap(_C.external_stream(_get_device_index(device, optional=True), data_ptr))
