"""`torch.bp.nvtx`: user-defined ranges and marks in profiles, with the API of `torch.cuda.nvtx`.

torch.profiler and torch.autograd.profiler show them like torch.profiler.record_function: on the host, and on the device
from the first to the last command that was submitted to a stream in the range. Without a profiler they cost almost
nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]

_local = threading.local()
_numbers = itertools.count(1)
_started: dict[int, torch.autograd.profiler.record_function] = {}


def _ranges() -> list[torch.autograd.profiler.record_function]:
    """The open ranges of this thread, innermost last."""
    if not hasattr(_local, "ranges"):
        _local.ranges = []
    found: list[torch.autograd.profiler.record_function] = _local.ranges
    return found


def _begun(msg: str) -> torch.autograd.profiler.record_function:
    if not isinstance(msg, str):
        raise TypeError(f"msg must be a str, but got {type(msg).__name__}")
    begun = torch.autograd.profiler.record_function(msg)
    begun.__enter__()
    return begun


def range_push(msg: str) -> int:
    """Push a range onto this thread's stack of nested ranges.

    Args:
        msg: the name of the range.

    Returns:
        The zero-based depth of the range.
    """
    ranges = _ranges()
    ranges.append(_begun(msg))
    return len(ranges) - 1


def range_pop() -> int:
    """Pop the innermost range from this thread's stack of nested ranges.

    Returns:
        The zero-based depth of the popped range.

    Raises:
        RuntimeError: the stack is empty.
    """
    ranges = _ranges()
    if not ranges:
        raise RuntimeError("range_pop() needs an open range in this thread: call range_push() first")
    ranges.pop().__exit__(None, None, None)
    return len(ranges)


def range_start(msg: str) -> int:
    """Begin a range that any thread can end.

    Args:
        msg: the name of the range.

    Returns:
        The id to pass to `range_end`.
    """
    number = next(_numbers)
    _started[number] = _begun(msg)
    return number


def range_end(range_id: int) -> None:
    """End a range that `range_start` began.

    Args:
        range_id: the id that `range_start` returned.

    Raises:
        ValueError: there is no such range, or it has ended.
    """
    begun = _started.pop(range_id, None)
    if begun is None:
        raise ValueError(f"no open range has the id {range_id!r}: pass an id that range_start() returned, once")
    begun.__exit__(None, None, None)


def mark(msg: str) -> None:
    """Mark an instant: a range without duration.

    Args:
        msg: the name of the mark.
    """
    _begun(msg).__exit__(None, None, None)


@contextmanager
def range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """Context manager and decorator that pushes a range on entry and pops it on exit.

    Args:
        msg: the name of the range, formatted with the other arguments by str.format.
    """
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
