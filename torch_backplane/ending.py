"""The end of the program: PyTorch's autograd threads drop their Python objects before Python is finalized.

PyTorch runs the backward passes of each device in a thread. `backward()` may return a moment before that thread drops
the pass, and the pass holds Python objects, so the thread asks for the GIL. A thread that asks for the GIL while Python
is being finalized is unwound, which ends the process with «terminate called without an active exception». Therefore one
empty pass goes through each of these threads first.

Functions registered with `atexit` may run backward passes as well, and those registered before torch was imported run
after any function of ours. Python drops its registrations only after it has called all of them, and before it starts
finalization. So the work is done when the argument of our registration is dropped.

Not covered, as on other devices: a daemon thread that is inside a backward pass when the program ends, and the threads
that PyTorch starts for backward passes nested more than 60 deep.
"""

from __future__ import annotations

import atexit

from torch_backplane import _C


class _Ending:
    """Its only reference is the registration's."""

    def __del__(self) -> None:
        if _C.in_bad_fork():
            return  # the threads are the parent's
        _C.finish_autograd_threads()
        _C.finish_host_calls_at_exit()


def _keep(ending: _Ending) -> None:
    """Called by `atexit`. Does nothing: the work is done when Python drops the registration."""


def install() -> None:
    atexit.register(_keep, _Ending())
