"""The end of the program: what PyTorch's threads hold of Python is let go before Python is finalized.

PyTorch has a thread for the backward passes of each device, which may let go of the last pass a moment after the
program has got its result; of those passes, that is, which run there, as do those that C++ begins (`autograd`). What it
lets go of holds Python objects, so it asks for the GIL; and a thread that asks for the GIL while Python is being
finalized is unwound, which ends the process with «terminate called without an active exception». So before that, one
empty pass goes through each of these threads.

Functions that the program registers with `atexit` run before ours if they were registered after torch was imported.
Others may still compute afterwards: from then on the empty passes follow each pass that is run.
"""

from __future__ import annotations

import atexit

from torch_backplane import _C, autograd


def _end() -> None:
    if _C.in_bad_fork():
        return  # the threads are the parent's
    autograd.install().after_each_pass = _C.finish_autograd_threads
    _C.finish_autograd_threads()
    _C.finish_host_calls_at_exit()


def install() -> None:
    """Call it once, early: what is registered with `atexit` first comes last."""
    atexit.register(_end)
