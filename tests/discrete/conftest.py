"""Runs the tests of this folder on accelerators whose memory the CPU cannot access.

A process discovers devices only once, so these tests run in a worker process. It has bp:0 and bp:1 of the toy driver
(examples/drivers/toy, without float64) and host devices bp:2 and bp:3. Fallbacks do not warn unless a test enables the
warnings.
"""

from __future__ import annotations

import pytest
from worker_process import Worker

SETTINGS = {
    "TORCH_BACKPLANE_DRIVERS": "toy,host",
    "TORCH_BACKPLANE_HOST_DEVICES": "2",
    "TORCH_BACKPLANE_DISCRETE": "0",
    "TOY_DEVICES": "2",
    "TOY_MEMORY": "256MiB",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    from driver_packages import install_toy

    site = tmp_path_factory.mktemp("site")
    install_toy(site)
    return Worker(SETTINGS, [site])


@pytest.fixture(autouse=True)
def _with_worker(worker: Worker) -> None:
    """Makes the worker available to the hook below for every test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    worker, seed = pyfuncitem.funcargs["worker"], pyfuncitem.funcargs["test_seed"]
    worker.call(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments, seed)
    return True
