"""Finds races between streams: two operators that use the same memory on different streams without synchronization.

    TORCH_BACKPLANE_SANITIZER=1 python program.py

or, for a part of a program:

    from torch_backplane.testing import sanitizer

    with sanitizer.sanitize():
        step()

Like torch.cuda's sanitizer, it checks every operator of the thread that enabled it, and of the backward passes that
this thread starts. It raises `RaceError` at the second of two operators that can run at the same time, with the stack
traces of both. It depends on synchronization only, not on timing. It compares bytes, so different parts of a tensor can
be used on different streams. It also tracks memory after it is freed, so it finds a block that is reused for a new
tensor while another stream still uses it (`Tensor.record_stream` prevents that).

It does not check replays of graphs, or host memory. During capture, it compares an operator only with others of the
same graph, because none of them runs yet.

Each stream has a vector clock: the latest operator of each stream that it has waited for (Lamport 1978; Mattern 1989).
Recording an event copies the clock, and waiting merges it. For each range of memory, the sanitizer stores the last
write and the reads since then.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane import _C

MAX_FRAMES = 20
"""Number of innermost stack frames that an error shows."""

MAX_RUNS = 256
"""Maximum number of separate memory ranges of a tensor that are checked. Further ranges are ignored."""

# Operators whose results are uninitialized memory.
_UNWRITTEN = re.compile(r"aten::(empty|new_empty|empty_like|empty_strided|new_empty_strided|empty_permuted)$")
# Operators that use only the metadata of their arguments.
_LIKE = re.compile(r"aten::(new_.*|.*_like)$")
# Tags of operators for which the host waits, because they return Python numbers or results of data-dependent size.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NO_WORK = {"aten::record_stream", "aten::set_", "aten::resize_", "aten::is_same_size", "aten::is_pinned"}


class StreamKey(NamedTuple):
    """A stream: the index of its device, and its id."""

    device: int
    stream: int

    def __str__(self) -> str:
        return f"stream {self.stream} of bp:{self.device}"


@dataclasses.dataclass(frozen=True)
class Access:
    """An operator's access to a tensor."""

    stream: StreamKey
    number: int
    writes: bool
    operator: str
    argument: str
    stack: traceback.StackSummary

    def __str__(self) -> str:
        what = f"{'writes' if self.writes else 'reads'} {self.argument} on {self.stream}"
        return f"{self.operator}, which {what}, called at:\n{''.join(self.stack.format())}"


class RaceError(RuntimeError):
    """Two operators can use the same memory at the same time. `first` and `second` are their accesses."""

    def __init__(self, first: Access, second: Access, range_: tuple[int, int]) -> None:
        self.first, self.second = first, second
        start, end = range_
        super().__init__(
            f"{end - start:,} bytes of bp:{second.stream.device} at {start:#x} can be used by two operators at the "
            f"same time: {second.stream} does not wait for {first.stream} between\n\n{first}\nand\n\n{second}"
        )


@dataclasses.dataclass
class _Interval:
    start: int
    end: int
    write: Access | None = None
    reads: dict[StreamKey, Access] = dataclasses.field(default_factory=dict)


class Memory:
    """The accesses of each range of addresses: the last write, and the reads after it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._intervals: list[_Interval] = []

    def _split(self, at: int) -> None:
        place = bisect.bisect_right(self._starts, at) - 1
        if place < 0 or not self._intervals[place].start < at < self._intervals[place].end:
            return
        left = self._intervals[place]
        right = _Interval(at, left.end, left.write, dict(left.reads))
        left.end = at
        self._starts.insert(place + 1, at)
        self._intervals.insert(place + 1, right)

    def overlapping(self, start: int, end: int) -> list[_Interval]:
        """Return the intervals with bytes in [start, end), after splitting those that extend beyond it."""
        self._split(start)
        self._split(end)
        return self._intervals[bisect.bisect_left(self._starts, start) : bisect.bisect_left(self._starts, end)]

    def write(self, start: int, end: int, access: Access) -> None:
        """Record a write of the bytes from start to end; it replaces all accesses before it."""
        self._split(start)
        self._split(end)
        first, last = bisect.bisect_left(self._starts, start), bisect.bisect_left(self._starts, end)
        self._starts[first:last] = [start]
        self._intervals[first:last] = [_Interval(start, end, access)]

    def read(self, start: int, end: int, access: Access) -> None:
        """Record a read of the bytes from start to end."""
        place = start
        for interval in self.overlapping(start, end):
            if place < interval.start:
                self._insert(_Interval(place, interval.start, None, {access.stream: access}))
            interval.reads[access.stream] = access
            place = interval.end
        if place < end:
            self._insert(_Interval(place, end, None, {access.stream: access}))

    def _insert(self, interval: _Interval) -> None:
        place = bisect.bisect_left(self._starts, interval.start)
        self._starts.insert(place, interval.start)
        self._intervals.insert(place, interval)


Clock = dict[StreamKey, int]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Order:
    """Tracks which operators are complete before the next operator of a stream runs."""

    def __init__(self) -> None:
        self._streams: dict[StreamKey, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}  # operators that the host has waited for
        self._numbers = itertools.count(1)
        self._current = threading.local()

    @contextmanager
    def operator(self) -> Iterator[int]:
        """Start an operator in a `with` block and yield its number.

        A wait for a stream in the block includes this operator's work on that stream; item(), for example, waits for
        its own copy.
        """
        around = self._current_number()
        self._current.number = number = next(self._numbers)
        try:
            yield number
        finally:
            self._current.number = around

    def _current_number(self) -> int:
        """Return the number of the operator that the calling thread is running, or 0."""
        return getattr(self._current, "number", 0)

    def give(self, stream: StreamKey, number: int) -> None:
        """Submit the operator with this number to the stream."""
        clock = self._streams.setdefault(stream, {})
        _merge(clock, self._host)
        _merge(clock, {stream: number})

    def host_passed(self, streams: Iterable[StreamKey]) -> None:
        """The host has waited for these streams."""
        for stream in streams:
            _merge(self._host, self._known(stream))

    def is_over(self, access: Access, before: StreamKey) -> bool:
        """Whether the access completes before the current operator of the stream `before` runs."""
        return access.number <= self._streams.get(before, {}).get(access.stream, 0)

    def note(self, what: str, event: int, device: int, stream: int) -> None:
        """Record a synchronization that the runtime reports."""
        """Callback for `_C.watch_synchronization`."""
        key = StreamKey(device, stream)
        if what == "recorded":
            self._events[event] = self._known(key)
        elif what == "waits":
            _merge(self._streams.setdefault(key, {}), self._events.get(event, {}))
        elif what == "host passed event":
            _merge(self._host, self._events.get(event, {}))
        elif what == "host passed stream":
            self.host_passed([key])
        elif what == "host passed device":
            self.host_passed([one for one in self._streams if one.device == device])
        elif what == "destroyed":
            self._events.pop(event, None)

    def _known(self, stream: StreamKey) -> Clock:
        """Return the clock of the stream, including what the host has waited for and the running operator."""
        clock = dict(self._streams.get(stream, {}))
        _merge(clock, self._host)
        if number := self._current_number():
            clock[stream] = number
        return clock


def _is_in_memory(value: object) -> bool:
    """Whether the value is a strided tensor in bp memory, and not a fake tensor."""
    if not isinstance(value, torch.Tensor) or value.device.type != "bp" or value.layout != torch.strided:
        return False
    return value.untyped_storage().device.type == "bp"


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage. `data_ptr()` would materialize a lazy copy."""
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def _stream_of(tensor: torch.Tensor) -> StreamKey:
    """Return the current stream of the tensor's device."""
    index = tensor.device.index
    return StreamKey(index, torch.bp.current_stream(index).stream_id)  # type: ignore[attr-defined]


def _runs(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the address ranges [start, end) of the tensor's elements."""
    start = _storage_of(tensor)
    if tensor.numel() == 0 or start == 0:
        return []
    start += int(tensor.storage_offset()) * tensor.element_size()
    length = tensor.element_size()
    others: list[tuple[int, int]] = []  # (stride in bytes, size)
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        step = stride * tensor.element_size()
        if size == 1 or stride == 0:
            continue
        if step <= length and not others:
            length += (size - 1) * step
        else:
            others.append((step, size))
    starts = [start]
    for step, size in others:
        starts = [start + index * step for index in range(min(size, MAX_RUNS)) for start in starts][:MAX_RUNS]
    return [(start, start + length) for start in starts]


class Sanitizer(TorchDispatchMode):
    """Checks the operators of the threads in which this mode is active."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._order = Order()
        self._memory: dict[int, Memory] = {}
        self._captured: dict[int, tuple[int, Memory]] = {}
        """For each device, the number of its latest graph capture, and the accesses that the graph will make."""
        self.operators = 0
        """Number of operators checked."""

    def note(self, what: str, event: int, device: int, stream: int) -> None:
        """Record a synchronization that the runtime reports."""
        with self._lock:
            self._order.note(what, event, device, stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _NO_WORK:
            return func(*args, **kwargs)
        given = list(self._given(func._schema, args, kwargs, bool(_LIKE.match(name))))
        with self._order.operator() as number:
            result = func(*args, **kwargs)
            if _WAITING.intersection(func.tags):
                with self._lock:
                    self._order.host_passed({_stream_of(tensor) for _, tensor, _ in given})
        made = [] if _UNWRITTEN.match(name) else list(self._made(func._schema, result, args, kwargs))
        if given or made:
            stack = traceback.StackSummary.extract(
                traceback.walk_stack(None), limit=MAX_FRAMES + 1, lookup_lines=False
            )
            stack.reverse()
            del stack[-1:]  # this function
            with self._lock:
                self.operators += 1
                self._look(str(func), [*given, *made], number, stack)
        return result

    @staticmethod
    def _given(schema: Any, args: Any, kwargs: Any, is_like: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield (description, tensor, whether it is written) for each argument that is read or written."""
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if value is None or (alias is not None and not alias.is_write) or (is_like and alias is None):
                continue  # None; only viewed; or only its metadata is used
            for tensor in pytree.tree_leaves(value):
                if _is_in_memory(tensor):
                    yield f"argument {argument.name}", tensor, alias is not None

    @staticmethod
    def _made(schema: Any, result: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
        known = {_storage_of(tensor) for tensor in pytree.tree_leaves((args, kwargs)) if _is_in_memory(tensor)}
        results = (result,) if len(schema.returns) == 1 else result or ()
        for returned, value in zip(schema.returns, results, strict=False):
            if returned.alias_info is not None:
                continue
            for tensor in pytree.tree_leaves(value):
                # If the memory is known, the result is a view, although the schema does not say so.
                if _is_in_memory(tensor) and _storage_of(tensor) not in known:
                    yield "its result", tensor, True

    def _memory_of(self, device: int) -> Memory:
        """Return the accesses on the device, or in the graph that its current stream captures."""
        capture = _C.capture_of(device)
        if capture == 0:
            return self._memory.setdefault(device, Memory())
        if self._captured.get(device, (0,))[0] != capture:
            self._captured[device] = capture, Memory()
        return self._captured[device][1]

    def _look(
        self,
        operator: str,
        tensors: list[tuple[str, torch.Tensor, bool]],
        number: int,
        stack: traceback.StackSummary,
    ) -> None:
        streams: set[StreamKey] = set()
        found: RaceError | None = None
        for argument, tensor, writes in sorted(tensors, key=lambda one: one[2]):
            stream = _stream_of(tensor)
            if stream not in streams:
                streams.add(stream)
                self._order.give(stream, number)
            access = Access(stream, number, writes, operator, argument, stack)
            memory = self._memory_of(stream.device)
            for start, end in _runs(tensor):
                for interval in memory.overlapping(start, end):
                    before = [*interval.reads.values()] if writes else []
                    before += [interval.write] if interval.write is not None else []
                    for other in before:
                        if found is None and not self._order.is_over(other, stream):
                            found = RaceError(other, access, (interval.start, interval.end))
                if writes:
                    memory.write(start, end, access)
                else:
                    memory.read(start, end, access)
        if found is not None:
            raise found


_enabled: Sanitizer | None = None


@contextmanager
def sanitize() -> Iterator[Sanitizer]:
    """Check the operators of this thread, and of backward passes that it starts, in a `with` block.

    The block starts by synchronizing all devices, so earlier work cannot race.

    Raises:
        RaceError: at the second of two operators that can use the same memory at the same time.
        RuntimeError: the sanitizer is already enabled.
    """
    global _enabled
    if _enabled is not None:
        raise RuntimeError("the sanitizer is enabled already in this process")
    sanitizer = Sanitizer()
    for index in range(torch.bp.device_count()):  # type: ignore[attr-defined]
        torch.bp.synchronize(index)  # type: ignore[attr-defined]
    _enabled = sanitizer
    _C.watch_synchronization(sanitizer.note)
    try:
        with sanitizer:
            yield sanitizer
    finally:
        _C.watch_synchronization(None)
        _enabled = None


def enable() -> None:
    """Check this thread's operators until the program ends. TORCH_BACKPLANE_SANITIZER=1 calls this.

    Raises:
        RuntimeError: the sanitizer is already enabled.
    """
    global _enabled
    if _enabled is not None:
        raise RuntimeError("the sanitizer is enabled already in this process")
    _enabled = Sanitizer()
    _C.watch_synchronization(_enabled.note)
    _enabled.__enter__()
