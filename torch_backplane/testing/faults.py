"""Calls of devices that fail when they are told to: what a program makes of that can be tested on any machine.

    from torch_backplane.testing import faults

    faults.prepare()                          # before devices are found
    with faults.fails("allocate", nth=3, kind="out of memory"):
        train()

Faults are of all devices of the process, whatever their driver, and counted over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch_backplane import _C

CALLS: tuple[str, ...] = tuple(_C.fault_names())
"""The calls that can fail: those of `csrc/devices/device.h`, which a driver's device is behind."""

KINDS = {"error": "error", "out of memory": "memory", "lost": "lost"}


def prepare() -> None:
    """Let calls of the devices that are found from now on be told to fail. Without it they are not even counted.

    Raises:
        RuntimeError: devices have been found already (`torch.bp.device_count()` and whatever uses one finds them).
    """
    _C.prepare_faults()


def fail(call: str, nth: int = 1, kind: str = "error") -> None:
    """Let the nth call of this name from now fail, once.

    Args:
        call: one of `CALLS`.
        nth: 1 is the next one.
        kind: "error", a RuntimeError; "out of memory", for `allocate` and `map`, which then say that the device has
            none left: a program sees an OutOfMemoryError if it is so again once caches are emptied; "lost", after which
            every use of the device is a torch.AcceleratorError, for the rest of the process.

    Raises:
        ValueError: a call or a kind that there is not, or that do not go together; nth below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"a fault's kind is one of {', '.join(KINDS)}, and got {kind!r}")
    if nth < 1:
        raise ValueError(f"calls are counted from 1, and got {nth}")
    _C.fail_call(call, nth, KINDS[kind])


@contextmanager
def fails(call: str, nth: int = 1, kind: str = "error") -> Iterator[None]:
    """As `fail`, within the context only."""
    fail(call, nth, kind)
    try:
        yield
    finally:
        clear()


@contextmanager
def by_chance(probability: float, seed: int, calls: Sequence[str] = CALLS) -> Iterator[None]:
    """Each call of these names fails with this probability within the context; a seed fails the same ones again, as
    long as one thread calls the devices.

    Raises:
        ValueError: a call that there is not, or no probability.
    """
    _C.fail_by_chance(list(calls), probability, seed)
    try:
        yield
    finally:
        clear()


@contextmanager
def slow(milliseconds: float) -> Iterator[None]:
    """Each call takes so much longer within the context. Raises ValueError for a negative time."""
    _C.slow_calls(milliseconds)
    try:
        yield
    finally:
        clear()


def clear() -> None:
    """Let no call fail any more. A device that is lost stays lost."""
    _C.clear_faults()


def counts(reset: bool = False) -> dict[str, int]:
    """How often each call was made; with `reset`, counted anew from now."""
    return dict(_C.fault_counts(reset)[0])


def failed(reset: bool = False) -> int:
    """How many calls have failed on purpose; with `reset`, `counts` and this are counted anew from now."""
    return _C.fault_counts(reset)[1]
