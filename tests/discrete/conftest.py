"""Tests in this folder run on accelerators whose memory the CPU cannot reach.

Devices are found once per process, so these tests run in a process of their own, which has bp:0 and bp:1 of the toy
driver (examples/drivers/toy, no float64) and bp:2 and bp:3 in host memory. Fallbacks do not warn there unless a test
asks for it.
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
    """Makes the worker known to the hook below for every test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    worker, seed = pyfuncitem.funcargs["worker"], pyfuncitem.funcargs["test_seed"]
    worker.call(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments, seed)
    return True
