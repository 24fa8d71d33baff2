"""Tests in this folder run on the first OpenCL device, in a process that has it as bp:0 and a host device as bp:1.

Without an OpenCL device they skip, and with REQUIRE_OPENCL=1 they fail then. `TORCH_BACKPLANE_PLANS=0` or `=check` in
the environment runs them that way.
"""

from __future__ import annotations

import on_opencl
import pytest
from worker_process import Worker

SETTINGS = {
    "TORCH_BACKPLANE_DRIVERS": "opencl,host",
    "TORCH_BACKPLANE_VISIBLE_DEVICES": "opencl:0,host:0",
    "TORCH_BACKPLANE_HOST_DEVICES": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def worker() -> Worker:
    on_opencl.require_platform()
    return Worker(SETTINGS)


@pytest.fixture(autouse=True)
def _with_worker(worker: Worker) -> None:
    """Makes the worker known to the hook below for every test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    worker, seed = pyfuncitem.funcargs["worker"], pyfuncitem.funcargs["test_seed"]
    worker.call(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments, seed)
    return True
