"""The first use of a device, and what is put off until then.

Discovering devices may be slow and must not happen in a program that uses none, so `torch.manual_seed` and the like are
remembered and run when the first device is used. The runtime calls `_lazy_init` at that moment.
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
NO_DEVICE_MESSAGE = "no bp device is available: `python -m torch_backplane info` tells what was looked for"


class DeferredBpCallError(Exception):
    """A call that was put off until the first use of a device failed then."""


@dataclass(frozen=True)
class DeferredCall:
    function: Callable[[], Any]
    seeds: str  # which generators it seeds: "" (not a seed), "one" or "all"
    stack: traceback.StackSummary


_deferred: list[DeferredCall] = []
_lock = threading.RLock()
_thread = threading.local()


def _is_compiled() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    """True in a child that was forked after its parent had used devices, or found devices of a driver in Python."""
    return _C.in_bad_fork()


def is_initialized() -> bool:
    """True once a device has been used in this process."""
    return _C.is_initialized() and not _C.in_bad_fork()


def init() -> None:
    """Discover the devices and run what was put off until then. Does nothing where that has happened.

    Nobody needs to call it: every use of a device does. It tells what is wrong where devices cannot be found.

    Raises:
        RuntimeError: there is no device, or this process was forked after its parent had used devices.
        ValueError: an environment variable is malformed.
        DeferredBpCallError: a call that was put off failed.
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
            raise RuntimeError(NO_DEVICE_MESSAGE)
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
            f"a bp call that was put off until the first use of a device failed: {error}\n\n"
            f"It was made at:\n\n{''.join(call.stack.format())}"
        ) from error


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Run `callable` now if a device has been used, else at the first use of one.

    Args:
        callable: takes no arguments.
        seed: it seeds the current device's generator, so an earlier such call need not be kept.
        seed_all: it seeds every generator, so no earlier call that seeds need be kept.
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
    """Find the devices; where one of them runs kernels, declare the operators that have any."""
    drivers.discover()
    if with_kernels := drivers.with_kernels():
        from torch_backplane.operators import (
            kernel_capabilities,  # declares all of them: slow, and not needed on other devices
        )

        kernel_capabilities.declare_kernel_capabilities(with_kernels)


_C.set_discovery_functions(discover=_discover, initialize=_lazy_init)
