"""Worker processes with their own devices, which run the tests of a folder: a process discovers devices only once."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest


class Worker:
    """A worker process. After a crash, the next call starts a new process.

    Args:
        settings: environment variables, added to those of this process.
        path: folders to prepend to sys.path.
    """

    def __init__(self, settings: Mapping[str, str], path: Sequence[Path] = ()) -> None:
        self.settings = dict(settings)
        self.path = [str(folder) for folder in path]
        self.pool: ProcessPoolExecutor | None = None

    def call(self, module: str, function: str, arguments: dict[str, Any], seed: int) -> None:
        """Seeds PyTorch and runs a test in the worker."""
        skipped = self._result(_call, module, function, arguments, seed)
        if skipped is not None:
            pytest.skip(skipped)

    def ask(self, module: str, function: str, *arguments: Any) -> Any:
        """Returns the result of a function call in the worker."""
        return self._result(_ask, module, function, arguments)

    def _result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(self.settings, self.path))
        try:
            return self.pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self.pool = None
            pytest.fail("the worker crashed; the CPU probably accessed memory that it cannot reach", pytrace=False)


def _start(settings: dict[str, str], path: list[str]) -> None:
    os.environ.update(settings)
    sys.path[:0] = path
    import torch_backplane

    torch_backplane._C.set_fallback_policy(torch_backplane._C.FallbackPolicy.silent)
    gc.freeze()  # collections skip the objects that exist now, mostly PyTorch's


def _call(module: str, function: str, arguments: dict[str, Any], seed: int) -> str | None:
    """Runs a test and returns its skip reason, if it skipped. Synchronizes the devices afterwards, so that asynchronous
    errors are reported for this test and not for the next one.
    """
    import torch

    from torch_backplane import plans

    torch.manual_seed(seed)
    try:
        getattr(importlib.import_module(module), function)(**arguments)
        _report_late_errors()
    except pytest.skip.Exception as reason:
        return str(reason)
    except pytest.fail.Exception as failure:  # for example by pytest.raises; it cannot be pickled
        raise AssertionError(str(failure)) from None
    finally:
        with contextlib.suppress(Exception):
            _report_late_errors()
        plans.set_mode(os.environ.get("TORCH_BACKPLANE_PLANS", "1"))  # in case the test changed it
    return None


def _ask(module: str, function: str, arguments: Sequence[Any]) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments)


def _report_late_errors() -> None:
    import torch

    if torch.bp.is_initialized():
        for index in range(torch.bp.device_count()):
            torch.bp.synchronize(index)
