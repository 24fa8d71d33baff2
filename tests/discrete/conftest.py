"""Tests in this folder run on accelerators whose memory the CPU cannot reach.

Devices are found once per process, so these tests run in a process of their own, which has bp:0 and bp:1 of the toy
driver (examples/drivers/toy, no float64) and bp:2 and bp:3 in host memory. Fallbacks do not warn there unless a test
asks for it.
"""

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

TESTS = Path(__file__).parent.parent

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
    sys.path[:0] = [site, str(TESTS), str(Path(__file__).parent)]
    import torch_backplane

    torch_backplane._C.set_fallback_policy(torch_backplane._C.FallbackPolicy.silent)


def _call(module: str, function: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), function)(**arguments)


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    from driver_packages import install_toy

    site = tmp_path_factory.mktemp("site")
    install_toy(site)
    return Worker(site)


@pytest.fixture(autouse=True)
def _with_worker(worker: Worker) -> None:
    """Makes the worker known to the hook below for every test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.funcargs["worker"].call(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments)
    return True
