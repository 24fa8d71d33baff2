"""Shutdown: makes PyTorch's autograd threads release their Python objects before Python is finalized.

PyTorch runs the backward passes of each device in a thread. `backward()` can return before that thread releases the
Python objects of the pass, for which it acquires the GIL. A thread that acquires the GIL while Python is being
finalized is unwound, which ends the process with "terminate called without an active exception". Therefore an empty
pass is run in each of these threads first.

Functions registered with `atexit` can run backward passes, too, and those registered before torch was imported run
after Backplane's. Python releases the registrations after it has called all functions and before finalization starts.
So the work is done when the argument of the registration is destroyed.

Not handled, as on other devices: daemon threads that are in a backward pass when the program ends, and the threads that
PyTorch starts for backward passes that are nested more than 60 deep.
"""

from __future__ import annotations

import atexit

from torch_backplane import _C


class _Shutdown:
    """Does the work when it is destroyed. The atexit registration holds the only reference."""

    def __del__(self) -> None:
        if _C.in_bad_fork():
            return  # the threads belong to the parent process
        _C.finish_autograd_threads()
        _C.finish_host_calls_at_exit()


def _keep(shutdown: _Shutdown) -> None:
    """The registered function. Does nothing: the work is done when Python releases the registration."""


def install() -> None:
    """Registers the work with `atexit`."""
    atexit.register(_keep, _Shutdown())
