"""Lazy initialization at the first use of a device.

Discovery of devices can be slow and must not happen in programs that use none. Therefore calls such as
`torch.manual_seed` are deferred until the first use of a device, when the runtime calls `_lazy_init`.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_backplane import _C, drivers

FORK_MESSAGE = (
    "Cannot re-initialize bp in forked subprocess. To use bp with multiprocessing, you must use the 'spawn' start "
    "method"
)


class DeferredBpCallError(Exception):
    """Raised at the first use of a device if a deferred call fails, such as one that sets a generator's state."""


@dataclass(frozen=True)
class DeferredCall:
    """A call that waits for the first use of a device."""

    function: Callable[[], Any]
    seeds: str  # which generators it seeds: "" (not a seed), "one" or "all"
    stack: traceback.StackSummary


_deferred: list[DeferredCall] = []
_lock = threading.RLock()
_thread = threading.local()


def _is_compiled() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    """Whether this process was forked after its parent used a device, or discovered devices of a driver in Python."""
    return _C.in_bad_fork()


def is_initialized() -> bool:
    """Return whether torch.bp has been initialized, which the first use of a device does."""
    return _C.is_initialized() and not _C.in_bad_fork()


def init() -> None:
    """Initialize torch.bp: discover the devices and run deferred calls. Does nothing if it is initialized.

    Programs need not call it, as the first use of a device does. It is useful to get the error if devices cannot be
    discovered.

    Raises:
        RuntimeError: there is no device, or this process was forked after its parent used a device.
        ValueError: an environment variable is malformed.
        DeferredBpCallError: a deferred call failed.
    """
    _lazy_init()


def _lazy_init() -> None:
    if is_initialized() or getattr(_thread, "initializing", False):
        return
    if _C.in_bad_fork():
        raise RuntimeError(FORK_MESSAGE)
    with _lock:
        if is_initialized():
            return
        _discover()
        if _C.device_count() == 0:
            raise RuntimeError(drivers.no_device_message())
        _thread.initializing = True
        try:
            while _deferred:
                _run(_deferred.pop(0))
        finally:
            del _thread.initializing
        _C.finish_initialization()


def _run(call: DeferredCall) -> None:
    try:
        call.function()
    except Exception as error:
        raise DeferredBpCallError(
            f"a bp call that was deferred until the first use of a device failed: {error}\n\n"
            f"The call was originally made at:\n\n{''.join(call.stack.format())}"
        ) from error


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Run `callable` now if torch.bp is initialized, else defer it until then.

    Args:
        callable: a function without arguments.
        seed: whether it seeds the current device's generator. It then replaces earlier deferred calls with `seed`.
        seed_all: whether it seeds every generator. It then replaces all earlier deferred calls that seed.
    """
    seeds = "all" if kwargs.get("seed_all") else "one" if kwargs.get("seed") else ""
    with _lock:
        put_off = not is_initialized() and not getattr(_thread, "initializing", False)
        if put_off:
            superseded = {"all": ("one", "all"), "one": ("one",), "": ()}[seeds]
            _deferred[:] = [call for call in _deferred if call.seeds not in superseded]
            frames = traceback.walk_stack(None)  # innermost first
            stack = traceback.StackSummary.extract(frames, limit=8, lookup_lines=False)
            stack.reverse()
            _deferred.append(DeferredCall(callable, seeds, stack))
    if not put_off:
        callable()


def _discover() -> None:
    """Discover the devices. If one of them runs kernels, declare the operators that have planners."""
    drivers.discover()
    if with_kernels := drivers.with_kernels():
        from torch_backplane.operators import (
            kernel_capabilities,  # imports and declares all operators, which is slow and not needed on other devices
        )

        kernel_capabilities.declare_kernel_capabilities(with_kernels)


_C.set_discovery_functions(discover=_discover, initialize=_lazy_init)
