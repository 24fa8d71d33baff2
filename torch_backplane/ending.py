"""The end of the program: what PyTorch's threads hold of Python is let go before Python is finalized.

PyTorch runs the backward passes of each device in a thread of that device's own, which may let go of the last pass a
moment after the program has got its result. What it lets go of holds Python objects, so it asks for the GIL; and a
thread that asks for the GIL while Python is being finalized is unwound, which ends the process with «terminate called
without an active exception». So before that, one empty pass goes through each of these threads.

Functions that the program registers with `atexit` run before ours if they were registered after torch was imported.
Others may still compute afterwards: from then on the empty passes follow each pass that is run.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch

from torch_backplane import _C


class _EngineAtTheEnd:
    """PyTorch's autograd engine, as its Python code calls it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            if torch._C._current_graph_task_id() == -1:  # else a pass inside a pass, whose thread is not free yet
                _C.finish_autograd_threads()


def _end() -> None:
    if _C.in_bad_fork():
        return  # the threads are the parent's
    variable: Any = torch.autograd.Variable
    variable._execution_engine = _EngineAtTheEnd(variable._execution_engine)
    _C.finish_autograd_threads()
    _C.finish_host_calls_at_exit()


def install() -> None:
    """Call it once, early: what is registered with `atexit` first comes last."""
    atexit.register(_end)
