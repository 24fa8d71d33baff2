"""Fault injection: makes calls of devices fail, to test how a program handles errors.

    from torch_backplane.testing import faults

    faults.prepare()                          # before devices are discovered
    with faults.fails("allocate", nth=3, kind="out of memory"):
        train()

Faults affect all devices of the process, of every driver. Calls are counted over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_backplane import _C

CALLS: tuple[str, ...] = tuple(_C.fault_names())
"""The calls that can fail: the methods of the C++ class in `csrc/devices/device.h`, which calls a driver's device."""

KINDS = {"error": "error", "out of memory": "memory", "lost": "lost"}


def prepare() -> None:
    """Enable fault injection and counting for devices that are discovered from now on.

    Raises:
        RuntimeError: devices have already been discovered, by `torch.bp.device_count()` or the first use of one.
    """
    _C.prepare_faults()


def fail(call: str, nth: int = 1, kind: str = "error") -> None:
    """Make the nth call of this name from now on fail, once.

    Args:
        call: one of `CALLS`.
        nth: 1 is the next call.
        kind: "error" raises a RuntimeError. "out of memory", for `allocate` and `map`, reports that the device has no
            memory left; the program gets an OutOfMemoryError only if the call fails again after caches are emptied.
            "lost" makes every later use of the device raise torch.AcceleratorError, until the process ends.

    Raises:
        ValueError: the call or the kind is unknown, they cannot be combined, or nth is below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, and got {kind!r}")
    if nth < 1:
        raise ValueError(f"nth is counted from 1, and got {nth}")
    _C.fail_call(call, nth, KINDS[kind])


@contextmanager
def fails(call: str, nth: int = 1, kind: str = "error") -> Iterator[None]:
    """Like `fail`, but only in a `with` block."""
    fail(call, nth, kind)
    try:
        yield
    finally:
        clear()


@contextmanager
def by_chance(probability: float, seed: int, calls: Sequence[str] = CALLS) -> Iterator[None]:
    """Make each call of these names fail with this probability in a `with` block.

    The same seed makes the same calls fail if a single thread calls the devices.

    Raises:
        ValueError: a call is unknown, or the probability is not between 0 and 1.
    """
    _C.fail_by_chance(list(calls), probability, seed)
    try:
        yield
    finally:
        clear()


@contextmanager
def slow(milliseconds: float) -> Iterator[None]:
    """Delay each call by this time in a `with` block.

    Raises:
        ValueError: the time is negative.
    """
    _C.slow_calls(milliseconds)
    try:
        yield
    finally:
        clear()


def clear() -> None:
    """Remove all faults and delays. A device that is lost stays lost."""
    _C.clear_faults()


def counts(reset: bool = False) -> dict[str, int]:
    """Return how often each call was made. With `reset`, start `counts` and `failed` at 0 again."""
    return dict(_C.fault_counts(reset)[0])


def failed(reset: bool = False) -> int:
    """Return how many calls failed by injection. With `reset`, start `counts` and `failed` at 0 again."""
    return _C.fault_counts(reset)[1]
