"""Configuration of all tests: four devices, one CPU thread, and fixtures that run programs in other processes.

The default devices are host devices. `pytest --on opencl` selects OpenCL devices, `--on cuda` emulated CUDA devices,
`--on hip` emulated HIP devices, and `--on late-host` asynchronous host devices; on_opencl.py and on_cuda.py list the
tests that these options leave out. TORCH_BACKPLANE_DRIVERS and related variables in the environment select other
devices.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# Tests of other folders use a driver of tests/drivers/.
sys.path[:0] = [str(HERE / one) for one in ("support", "sweeps", "drivers")]

import covering  # noqa: E402
import forked  # noqa: E402
import on_cuda  # noqa: E402
import on_hip  # noqa: E402
import on_opencl  # noqa: E402
from opencl_platform import platform  # noqa: E402, F401  # a fixture

# Before torch is imported, which reads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before NVIDIA's libraries are loaded: no TF32, in which cuDNN computes convolutions by default.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on", choices=["host", "late-host", "opencl", "cuda", "hip"], default="host",
        help="the devices to run on: host devices (default), host devices with streams in threads and random delays "
        "(--seed), OpenCL devices, CUDA devices (emulated, unless TORCH_BACKPLANE_CUDA_LIBRARY is set), emulated HIP "
        "devices",
    )  # fmt: skip
    parser.addoption(
        "--cover", type=int, default=0, metavar="N",
        help="of each test, run only cases that cover all combinations of N parameter values (default: all cases)",
    )  # fmt: skip
    parser.addoption(
        "--share", type=int, default=1, metavar="N",
        help="run one Nth of the tests, chosen by their names (default: all)",
    )  # fmt: skip
    parser.addoption("--whole", action="store_true", help="run all of tests/pytorch (default: a part of it)")
    parser.addoption("--seed", type=int, default=0, help="seed of the random numbers in every test (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes many seconds, or repeats what others cover; not in `make test`")
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.getoption("--seed"))
    if config.getoption("--on").endswith("host"):
        os.environ.setdefault("TORCH_BACKPLANE_DRIVERS", "host")
        os.environ.setdefault("TORCH_BACKPLANE_HOST_DEVICES", "4")
        if config.getoption("--on") == "late-host":
            os.environ.setdefault("TORCH_BACKPLANE_HOST_DELAYS", str(config.getoption("--seed")))
    elif config.getoption("--on") == "cuda":
        if not on_cuda.choose_devices():
            pytest.exit(f"NO TEST RUNS ON CUDA: {on_cuda.missing() or 'there is no device'}.", returncode=1)
    elif config.getoption("--on") == "hip":
        os.environ.update(on_hip.environment())
    elif not on_opencl.choose_devices():
        pytest.exit(
            "NO TEST RUNS ON OPENCL: there is no device (pip install pyopencl, apt-get install pocl-opencl-icd).",
            returncode=1 if on_opencl.required() else 0,
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"random numbers: --seed {config.getoption('--seed')}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if on_opencl.WITHOUT in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("WITHOUT OPENCL", red=True, bold=True)
        terminalreporter.write_line(
            f"{len(skipped)} tests have not run, as there is no OpenCL device. REQUIRE_OPENCL=1 makes that a failure."
        )


@pytest.fixture(autouse=True)
def test_seed(request: pytest.FixtureRequest) -> int:
    """Seeds PyTorch from the test's id and --seed, so a failure does not depend on other tests or on the process."""
    import torch

    seed = zlib.crc32(f"{request.node.nodeid} {request.config.getoption('--seed')}".encode())
    torch.manual_seed(seed)
    return seed


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_of_other_files() -> None:
    """Collects tensors in reference cycles of earlier files before tests of this file count memory.

    The objects that remain, mostly PyTorch's, are frozen: garbage collections in this file do not traverse them.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return not is_general(collection_path, config) or None


def is_general(path: Path, config: pytest.Config) -> bool:
    """Whether the tests of the file can run on the devices of --on."""
    place, on = path.relative_to(HERE).parts, config.getoption("--on")
    if on == "host" or not place:
        return True
    if place[0] == "opencl" and on in ("cuda", "hip"):
        return True
    return place[0] not in on_opencl.FOLDERS and place[-1] not in on_opencl.FILES


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    changing = [item.nodeid for item in items if covering.changes_per_process(item.nodeid)]
    if changing:
        raise pytest.UsageError(f"test ids with a set or an address differ between processes: {', '.join(changing)}")
    kept = covering.keep(items, config.getoption("--cover")) if config.getoption("--cover") else list(items)
    kept = [item for item in kept if zlib.crc32(item.nodeid.encode()) % config.getoption("--share") == 0]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept
    if config.getoption("--on") == "host":
        return
    # Files named on the command line are not ignored.
    items[:] = [item for item in items if is_general(item.path, config)]
    left_out = {
        "late-host": on_opencl.LATE_TESTS,
        "opencl": on_opencl.TESTS,
        "cuda": on_opencl.TESTS | on_cuda.TESTS,
        "hip": on_opencl.TESTS | on_cuda.TESTS,
    }[config.getoption("--on")]  # fmt: skip
    for item in items:
        name = f"{item.path.name}::{item.nodeid.rpartition('::')[2]}"
        reason = left_out.get(name) or left_out.get(name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # All tests named on the command line can be among those that are left out.
    if session.config.getoption("--on") != "host" and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On late-host devices, runs some tests in several threads concurrently, all on the default stream.

    The state of a stream must be right whichever thread uses it next.
    """
    if pyfuncitem.config.getoption("--on") != "late-host" or not on_opencl.runs_in_threads(pyfuncitem):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    start = threading.Barrier(on_opencl.THREADS)

    def run() -> None:
        start.wait()
        pyfuncitem.obj(**arguments)

    with ThreadPoolExecutor(on_opencl.THREADS) as pool:
        for each in [pool.submit(run) for _ in range(on_opencl.THREADS)]:
            each.result()
    return True


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_python(code, **env): runs code in a fresh interpreter with env added to the environment (None: removed)."""

    def run(code: str, timeout: float = 120, **env: str | None) -> subprocess.CompletedProcess[str]:
        merged = {**os.environ, **env}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def run_forked(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Like run_python, in a fork of a process that has imported torch but has not discovered devices."""

    def run(code: str, **env: str | None) -> subprocess.CompletedProcess[str]:
        return forked.run(code, tmp_path, **env)

    return run
