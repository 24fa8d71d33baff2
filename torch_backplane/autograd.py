"""Where backward passes run: in the thread that asks for them, as PyTorch's do on the CPU.

Otherwise PyTorch runs the nodes of each device in a thread of that device's. What computes on the host is spread over
several threads then, each with a team of OpenMP's, and where there are more threads in teams than processors, those
that wait for others fall asleep at once (csrc/devices/openmp.h). A step of training on host devices took twice as long
so (docs/measurements.md). It is what `torch.autograd.set_multithreading_enabled(False)` does, for each pass of a
program that has used a bp device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_backplane import _C


class Engine:
    """PyTorch's autograd engine, as its Python code calls it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.after_each_pass: Callable[[], None] | None = None
        """Called when a pass has ended that is inside of no other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        before = torch._C._is_multithreading_enabled()
        try:
            torch._C._set_multithreading_enabled(before and not _C.is_initialized())
            return self._engine.run_backward(*args, **kwargs)
        finally:
            torch._C._set_multithreading_enabled(before)
            if self.after_each_pass is not None and torch._C._current_graph_task_id() == -1:
                self.after_each_pass()


def install() -> Engine:
    """Puts ours in PyTorch's place, and returns it."""
    variable: Any = torch.autograd.Variable
    engine = variable._execution_engine
    if not isinstance(engine, Engine):
        engine = variable._execution_engine = Engine(engine)
    return engine
