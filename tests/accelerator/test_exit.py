"""Programs exit cleanly whatever is running: a sample of what `make test-exit` runs hundreds of times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import exit_scenarios
import paths
import pytest


@pytest.fixture(scope="module", params=exit_scenarios.DRIVERS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[exit_scenarios.Runner]:
    if request.param == "opencl":
        request.getfixturevalue("platform")
    made = exit_scenarios.Runner(request.param, tmp_path_factory.mktemp("exit"))
    yield made
    made.close()


@pytest.mark.parametrize("scenario", exit_scenarios.SCENARIOS)
def test_a_program_exits_cleanly(runner: exit_scenarios.Runner, scenario: str) -> None:
    times = 8 if scenario == "end of script, GIL kept" else 1  # it provokes a race; other ways need hundreds of runs
    assert [runner.run(exit_scenarios.SCENARIOS[scenario]) for _ in range(times)] == ["good"] * times


LATE = """
import ctypes, os, sys, torch, weakref
from torch_backplane import _C

class Held:
    pass

x = torch.ones(3, device="bp:1", requires_grad=True)

def keep_in_thread_state(kept):
    before = sys.getrefcount(kept)
    torch._C._stash_obj_in_tls("held", kept)
    if sys.getrefcount(kept) == before:  # PyTorch 2.11 takes over the caller's reference
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

def hold_in_a_pass():
    held = Held()
    keep_in_thread_state(held)  # a backward pass inherits the thread's state
    (x * 2).sum().backward()
    keep_in_thread_state(None)
    return weakref.ref(held)
"""

LET_GO = f"""{LATE}
found = []
for finish in (False, True, True, True):
    gone = hold_in_a_pass()
    if finish:
        _C.finish_autograd_threads()
    found.append(gone() is None)
print(*found, flush=True)
os._exit(0)
"""

# The pass's objects are released after the atexit function has run and before Python is finalized.
LAST_PASS = f"""
import atexit
functions = []
atexit.register(lambda: functions[0]())
{LATE}
def last_pass():
    gone = hold_in_a_pass()
    print(gone() is None, flush=True)
    functions.append(weakref.ref(gone(), lambda _: os.write(1, b"dropped")))

functions.append(last_pass)
"""


@pytest.fixture(scope="module")
def late_threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program whose autograd threads release their passes late."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build late_threads.c")
    library = tmp_path_factory.mktemp("late") / "late_threads.so"
    source = paths.SUPPORT / "late_threads.c"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return os.environ | exit_scenarios.DRIVERS["host"] | {"LD_PRELOAD": str(library)}


def test_device_threads_release_their_last_pass(late_threads: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LET_GO], env=late_threads, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "False True True True\n", done.stderr


def test_backward_in_an_atexit_function_registered_before_importing_torch(
    late_threads: dict[str, str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAST_PASS], env=late_threads, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\ndropped"), done.stderr
