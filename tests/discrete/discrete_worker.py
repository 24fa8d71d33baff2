"""The process in which the tests of this folder run; see conftest.py."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

SETTINGS = {
    "TORCH_BACKPLANE_DRIVERS": "toy,host",
    "TORCH_BACKPLANE_HOST_DEVICES": "2",
    "TORCH_BACKPLANE_DISCRETE": "0",
    "TOY_DEVICES": "2",
    "TOY_MEMORY": "256MiB",
    "OMP_NUM_THREADS": "1",
}


class Worker:
    """The process; a new one after a crash."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.pool: ProcessPoolExecutor | None = None

    def call(self, module: str, function: str, arguments: dict[str, Any]) -> None:
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(str(self.site),))
        try:
            self.pool.submit(_call, module, function, arguments).result()
        except BrokenProcessPool:
            self.pool = None
            pytest.fail("the process crashed: the CPU touched memory that it cannot reach", pytrace=False)


def _start(site: str) -> None:
    os.environ.update(SETTINGS)
    sys.path.insert(0, site)
    import torch_backplane

    torch_backplane._C.set_fallback_policy(torch_backplane._C.FallbackPolicy.silent)


def _call(module: str, function: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), function)(**arguments)
