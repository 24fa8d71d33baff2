"""Ranges and marks of one's own in profiles: torch.bp.nvtx.

The names and meaning are those of torch.cuda.nvtx. There, tools of NVIDIA's show them; here, torch.profiler and
torch.autograd.profiler do, as they show torch.profiler.record_function: on the host, and on the device from the first
to the last of what was given to a stream meanwhile. Where no profile is taken they do next to nothing.
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
    """The ranges that this thread is in, innermost last."""
    if not hasattr(_local, "ranges"):
        _local.ranges = []
    found: list[torch.autograd.profiler.record_function] = _local.ranges
    return found


def _begun(msg: str) -> torch.autograd.profiler.record_function:
    if not isinstance(msg, str):
        raise TypeError(f"the message of a range is a str, and got {type(msg).__name__}")
    begun = torch.autograd.profiler.record_function(msg)
    begun.__enter__()
    return begun


def range_push(msg: str) -> int:
    """Begins a range inside those that this thread is in, and returns how many those are."""
    ranges = _ranges()
    ranges.append(_begun(msg))
    return len(ranges) - 1


def range_pop() -> int:
    """Ends the innermost range of this thread, and returns how many it is in now.

    Raises RuntimeError where it is in none.
    """
    ranges = _ranges()
    if not ranges:
        raise RuntimeError("range_pop() ends a range, and this thread is in none: range_push() begins one")
    ranges.pop().__exit__(None, None, None)
    return len(ranges)


def range_start(msg: str) -> int:
    """Begins a range that any thread may end, by range_end() of the number that this returns."""
    number = next(_numbers)
    _started[number] = _begun(msg)
    return number


def range_end(range_id: int) -> None:
    """Ends a range of range_start(). Raises ValueError where there is none of that number, or it has ended."""
    begun = _started.pop(range_id, None)
    if begun is None:
        raise ValueError(f"{range_id!r} is not a range that has begun and not ended: range_start() returns its number")
    begun.__exit__(None, None, None)


def mark(msg: str) -> None:
    """Marks a moment: a range of no length."""
    _begun(msg).__exit__(None, None, None)


@contextmanager
def range(msg: str, *args: object, **kwargs: object) -> Iterator[None]:
    """A range around a block or a function; `msg` is formatted with the other arguments, as by str.format."""
    range_push(msg.format(*args, **kwargs))
    try:
        yield
    finally:
        range_pop()
