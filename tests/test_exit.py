"""Programs end as they should, whatever is under way: a sample of what `make test-exit` runs hundreds of times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import exit_ways
import pytest
import torch
from test_opencl import platform  # noqa: F401  # a fixture

from torch_backplane import _C, autograd


@pytest.fixture(scope="module", params=exit_ways.DRIVERS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[exit_ways.Runner]:
    if request.param == "opencl":
        request.getfixturevalue("platform")
    made = exit_ways.Runner(request.param, tmp_path_factory.mktemp("exit"))
    yield made
    made.close()


@pytest.mark.parametrize("way", exit_ways.WAYS)
def test_a_program_ends_as_it_should(runner: exit_ways.Runner, way: str) -> None:
    times = 8 if way == "end of script, at once" else 1  # the others differ from each other in a few of a hundred runs
    assert [runner.run(exit_ways.WAYS[way]) for _ in range(times)] == ["good"] * times


LET_GO = """
import os, torch, weakref
from torch_backplane import _C

class Held:
    pass

torch.autograd.Variable._execution_engine = torch._C._ImperativeEngine()  # of passes that C++ begins
x = torch.ones(3, device="bp:1", requires_grad=True)
found = []
for finish in (False, True, True, True):
    held = Held()
    gone = weakref.ref(held)
    torch._C._stash_obj_in_tls("held", held)  # a pass takes over what the thread has that asks for it
    (x * 2).sum().backward()
    torch._C._stash_obj_in_tls("held", None)
    del held
    if finish:
        _C.finish_autograd_threads()
    found.append(gone() is None)
print(*found, flush=True)
os._exit(0)
"""


def test_the_threads_of_devices_let_go_of_their_last_pass(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build late_threads.c with")
    library = tmp_path / "late_threads.so"
    source = Path(__file__).parent / "late_threads.c"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    env = os.environ | exit_ways.DRIVERS["host"] | {"LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", LET_GO], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "False True True True\n", done.stderr


def test_a_pass_in_a_pass_at_the_end_of_the_program() -> None:
    """What runs after our own function at the exit: empty passes that follow each pass, but not those in one."""
    engine = autograd.Engine(torch.autograd.Variable._execution_engine)
    engine.after_each_pass = _C.finish_autograd_threads
    x = torch.ones(3, device="bp", requires_grad=True)
    grads = []

    def inner(gradient: torch.Tensor) -> None:
        y = torch.ones(3, device="bp", requires_grad=True)
        with torch.enable_grad():
            loss = (y * 3).sum()
        loss.backward()
        grads.append(y.grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.Variable, "_execution_engine", engine)
        x.register_hook(inner)
        (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2] * 3
    assert [grad.tolist() for grad in grads] == [[3] * 3]
