"""Tests benchmarks/graphs.py, and its reference loop in C, which submits the same commands to OpenCL as the replay."""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import benchmark_modules
import on_opencl
import pytest
from test_benchmarks import run_json

launches = benchmark_modules.load("launches")

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler (cc) to build launches.c"
)

SET = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p)
ENQUEUE = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


class OpenCL:
    """Replaces OpenCL: records arguments and launches. Kernels are numbers; `origin` maps a copy to its kernel."""

    def __init__(self) -> None:
        self.arguments: dict[int, dict[int, bytes]] = {}
        self.origin: dict[int, int] = {}
        self.launched: list[tuple[int, int, dict[int, bytes], tuple[int, ...], tuple[int, ...]]] = []
        self.sets = 0
        self.answer = 0
        self.functions = (SET(self.set_argument), ENQUEUE(self.enqueue))

    def set_argument(self, kernel: int, index: int, size: int, value: int) -> int:
        self.sets += 1
        self.arguments.setdefault(kernel, {})[index] = ctypes.string_at(value, size)
        return self.answer

    def enqueue(self, queue: int, kernel: int, dimensions: int, offset: Any, items: Any, group: Any, *_: Any) -> int:
        sizes = (tuple(one[:dimensions]) for one in (items, group))
        self.launched.append((queue, self.origin.get(kernel, kernel), dict(self.arguments[kernel]), *sizes))
        return self.answer

    def another(self, kernel: int) -> int:
        made = 1000 + len(self.origin)
        self.origin[made] = kernel
        return made

    def ask(self, function: str, *given: Any) -> None:
        assert function == "clSetKernelArg"
        kernel, index, _, value = given
        self.arguments.setdefault(kernel.value, {})[index] = value


@pytest.fixture
def opencl(monkeypatch: pytest.MonkeyPatch) -> OpenCL:
    found = OpenCL()
    monkeypatch.setattr(launches.Loop, "_another", lambda self, kernel: found.another(kernel))
    monkeypatch.setattr(launches.Loop, "_ask", lambda self, *given: found.ask(*given))
    return found


@pytest.fixture
def library(opencl: OpenCL) -> ctypes.CDLL:
    built = launches.build()
    built.forward_to(*opencl.functions)
    return built


def launch(kernel: int, items: tuple[int, ...], **arguments: int) -> Any:
    values = {int(name[1:]): value.to_bytes(8, "little") for name, value in arguments.items()}
    return launches.Launch(7, kernel, len(items), items, tuple(16 for _ in items), values)


CYCLE = [
    launch(1, (64,), a0=5, a1=6),
    launch(2, (32, 16), a0=8),
    launch(1, (64,), a0=5, a1=9),
    launch(1, (128,), a0=4, a1=9),
]


@needs_compiler
@pytest.mark.parametrize(("beforehand", "sets"), [(False, 4), (True, 0)])
def test_loop_repeats_the_recorded_launches(
    opencl: OpenCL, library: ctypes.CDLL, beforehand: bool, sets: int
) -> None:
    loop = launches.Loop(library, CYCLE, beforehand)
    for _ in range(2):
        loop()
    same = [(one.queue, one.kernel, one.arguments, one.items, one.group) for one in CYCLE]
    assert opencl.launched == same * 2
    assert loop.sets == sets
    assert opencl.sets == 2 * sets
    assert len(opencl.origin) == (4 if beforehand else 2)


@needs_compiler
def test_loop_stops_at_an_error(opencl: OpenCL, library: ctypes.CDLL) -> None:
    loop = launches.Loop(library, CYCLE, beforehand=True)
    opencl.answer = -5
    with pytest.raises(RuntimeError, match="returned -5"):
        loop()
    assert len(opencl.launched) == 1


@pytest.fixture
def watch(opencl: OpenCL, library: ctypes.CDLL) -> Any:
    """Returns a Watch that uses only launches.c: it watches no device of this process."""
    made = object.__new__(launches.Watch)
    made._library = library
    library.recorded_calls.restype = ctypes.POINTER(launches._Call)
    library.watch(1)
    return made


def give(library: ctypes.CDLL, given: Any, offset: Any = None) -> None:
    for index, value in given.arguments.items():
        size = ctypes.c_size_t(len(value))
        library.watched_set_kernel_arg(ctypes.c_void_p(given.kernel), index, size, value)
    items, group = ((ctypes.c_size_t * 3)(*one) for one in (given.items, given.group))
    handles = (ctypes.c_void_p(one) for one in (given.queue, given.kernel))
    library.watched_enqueue_kernel(*handles, given.dimensions, offset, items, group, 0, None, None)


@needs_compiler
def test_watch_records_and_forwards_launches(opencl: OpenCL, library: ctypes.CDLL, watch: Any) -> None:
    give(library, CYCLE[0])
    start = watch.calls()
    library.watched_set_kernel_arg(ctypes.c_void_p(1), 1, ctypes.c_size_t(8), CYCLE[2].arguments[1])
    give(library, launch(1, (64,)))  # the other argument is unchanged
    give(library, CYCLE[1])
    assert watch.launches(start) == [CYCLE[2], CYCLE[1]]
    watch.stop()
    give(library, CYCLE[0])
    assert watch.launches(0) == [CYCLE[0], CYCLE[2], CYCLE[1]]
    assert [kernel for _, kernel, *_ in opencl.launched] == [1, 1, 2, 1]


@needs_compiler
def test_launch_that_the_loop_cannot_repeat_is_detected(library: ctypes.CDLL, watch: Any) -> None:
    give(library, CYCLE[0], offset=(ctypes.c_size_t * 1)(1))
    with pytest.raises(launches.Unavailable):
        watch.launches(0)


def test_missing_compiler_is_reported_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = benchmark_modules.load("graphs")
    monkeypatch.setattr(graphs.launches.shutil, "which", lambda name: None)
    missing = graphs.watched()
    assert str(missing) == "there is no C compiler"
    with pytest.raises(graphs.launches.Unavailable, match="no C compiler"):
        graphs.bare_loops(missing, None, None)
    result = graphs.Result("made up", 3, 1, 1, 1, 1, 1, 1, without_loop=str(missing))
    assert graphs.loop_ratios([result]) == {"made up, without a loop in C": "there is no C compiler"}


@pytest.mark.slow
def test_replayed_chain_is_compared_with_the_loop() -> None:
    on_opencl.require_platform()
    report = run_json("graphs.py", "--driver", "opencl", "--match", "chain", "--rounds", "1")
    (result,) = report["results"]
    assert result["nodes"] == 1000
    assert result["by_eager"] == pytest.approx(result["eager_us"] / result["replay_us"])
    if shutil.which("cc") is None:
        assert result["without_loop"] == "there is no C compiler"
        return
    assert result["by_loop"] == pytest.approx(result["near_loop_us"] / result["loop_us"])
    assert result["by_set_before"] == pytest.approx(result["near_loop_us"] / result["set_before_us"])


@pytest.mark.slow
def test_chain_on_a_host_device_has_no_loop() -> None:
    (result,) = run_json("graphs.py", "--driver", "host", "--match", "chain", "--rounds", "1")["results"]
    assert result["nodes"] == 1000
    assert result["by_cpu"] == pytest.approx(result["cpu_us"] / result["replay_us"])
    assert result["by_loop"] is None
    assert result["without_loop"]
