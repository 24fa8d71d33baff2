"""Runs the tests of this folder on the first OpenCL device, in a process where it is bp:0 and a host device is bp:1.

With `--on cuda`, they run on a CUDA device instead, except those of FILES_OF_OPENCL.

Without an OpenCL device the tests skip; with REQUIRE_OPENCL=1 they fail instead. `TORCH_BACKPLANE_PLANS=0` and `=check`
in the environment apply to them.

A device may lack float64 and complex128, as Mesa's CPU device does. A test with a dtype among its parameters skips if
the device lacks that dtype. A test that needs a dtype otherwise calls `agreement.need`. A test that loops over several
dtypes calls `agreement.had` to get those that the device supports. `@pytest.mark.fault(name)` marks tests that fail
because of a bug in an OpenCL implementation (`faults.py`).
"""

from __future__ import annotations

import faults
import on_opencl
import pytest
import torch
from torch.utils._pytree import tree_leaves
from worker_process import Worker

SETTINGS = {
    "TORCH_BACKPLANE_DRIVERS": "opencl,host",
    "TORCH_BACKPLANE_VISIBLE_DEVICES": "opencl:0,host:0",
    "TORCH_BACKPLANE_HOST_DEVICES": "1",
    "OMP_NUM_THREADS": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name): fails if the OpenCL implementation has this bug (faults.py)")


CUDA_SETTINGS = SETTINGS | {
    "TORCH_BACKPLANE_DRIVERS": "cuda,host",
    "TORCH_BACKPLANE_VISIBLE_DEVICES": "cuda:0,host:0",
}
# Tests of what only OpenCL devices have.
FILES_OF_OPENCL = {
    "test_cpu_functions.py": "C functions for processors",
    "test_host_attention.py": "CPU libraries on the device's memory",
    "test_host_convolutions.py": "CPU libraries on the device's memory",
    "test_host_work.py": "CPU libraries on the device's memory",
    "test_library_calls.py": "OpenCL's queues",
    "test_library_transforms.py": "VkFFT",
}


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> Worker:
    if request.config.getoption("--on") == "cuda":
        return Worker(CUDA_SETTINGS)
    on_opencl.require_platform()
    return Worker(SETTINGS)


@pytest.fixture(autouse=True)
def _of_any_device(request: pytest.FixtureRequest) -> None:
    reason = FILES_OF_OPENCL.get(request.path.name)
    if reason is not None and request.config.getoption("--on") == "cuda":
        pytest.skip(f"tests {reason}")


@pytest.fixture(autouse=True)
def _with_worker(worker: Worker) -> None:
    """Provides the worker to the hook below for every test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    worker, seed = pyfuncitem.funcargs["worker"], pyfuncitem.funcargs["test_seed"]
    _skip_without(worker, _dtypes(pyfuncitem))
    marks = [mark.args[0] for mark in pyfuncitem.iter_markers("fault")]
    on_opencl_device = pyfuncitem.config.getoption("--on") != "cuda"
    known = [name for name in marks if on_opencl_device and worker.ask("faults", "present", name)]
    try:
        worker.call(pyfuncitem.module.__name__, pyfuncitem.function.__name__, arguments, seed)
    except AssertionError as error:  # faults produce wrong numbers
        if not known:
            raise
        pytest.xfail(f"{faults.DESCRIPTIONS[known[0]]}: {error!r:.200}")
    if known:
        pytest.fail(f"passes, although {faults.DESCRIPTIONS[known[0]]}", pytrace=False)
    return True


def _dtypes(test: pytest.Function) -> list[torch.dtype]:
    """Returns the dtypes among the test's parameters."""
    parameters = test.callspec.params if hasattr(test, "callspec") else {}
    return [value for value in tree_leaves(list(parameters.values())) if isinstance(value, torch.dtype)]


def _skip_without(worker: Worker, dtypes: list[torch.dtype]) -> None:
    reason = worker.ask("agreement", "why_not", dtypes) if dtypes else None
    if reason:
        pytest.skip(reason)
