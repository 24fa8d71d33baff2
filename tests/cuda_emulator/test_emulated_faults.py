"""Tests faults that are injected into the emulated CUDA driver: each function can fail at a chosen call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import driver_api as api
import pytest


def test_a_chosen_call_fails_once() -> None:
    api.inject("cuMemAlloc", 3, api.OUT_OF_MEMORY)
    address = ctypes.c_uint64()
    errors = [api.status("cuMemAlloc_v2", ctypes.byref(address), 4) for _ in range(5)]
    assert errors == [0, 0, api.OUT_OF_MEMORY, 0, 0]


def test_a_fault_can_be_removed() -> None:
    api.inject("cuStreamQuery", 1, 999)
    api.inject("cuStreamQuery", 0, 0)
    api.call("cuStreamQuery", 0)


def test_faults_of_the_environment(run_apart: Callable[..., str]) -> None:
    script = (
        "print(api.status('cuInit', 0), api.status('cuInit', 0), api.status('cuInit', 0))\n"
        "count = api.ctypes.byref(api.ctypes.c_int())\n"
        "print(api.status('cuDeviceGetCount', count), api.status('cuDeviceGetCount', count))\n"
    )
    faults = "cuInit:2:802,cuDeviceGetCount:1:3"
    assert run_apart(script, CUDA_EMULATOR_FAULTS=faults).split() == ["0", "802", "0", "3", "0"]


def test_wrong_faults_of_the_environment(run_apart: Callable[..., str]) -> None:
    with pytest.raises(AssertionError, match="CUDA_EMULATOR_FAULTS: «cuInit:2» is not CALL:NUMBER:ERROR"):
        run_apart("api.status('cuInit', 0)", CUDA_EMULATOR_FAULTS="cuInit:2")


@pytest.mark.parametrize("error", [214, 700, 719])
def test_a_kernel_fails_while_it_runs(error: int) -> None:
    function, memory = api.kernel('extern "C" __global__ void put(int* out) { *out = 1; }', "put"), api.allocate(4)
    api.inject("(kernel)", 2, error)
    assert api.launch(function, (1,), (1,), memory) == 0
    api.synchronize()
    assert api.launch(function, (1,), (1,), memory) == 0
    assert api.status("cuCtxSynchronize") == error
    assert api.status("cuStreamQuery", 0) == error


class Program:
    """Uses many functions."""

    def __init__(self) -> None:
        self.failed: list[str] = []  # the names of those that failed

    def use(self, name: str, *arguments: object) -> bool:
        error = api.status(name, *arguments)
        if error != 0:
            self.failed.append(name)
        return error == 0


def _streams_and_memory() -> list[str]:
    program = Program()
    use = program.use
    made, memory, host, event = (ctypes.c_uint64() for _ in range(4))
    if use("cuStreamCreate", ctypes.byref(made), 1):
        use("cuStreamQuery", made.value)
        use("cuStreamSynchronize", made.value)
        if use("cuEventCreate", ctypes.byref(event), 0):
            use("cuEventRecord", event.value, made.value)
            use("cuStreamWaitEvent", made.value, event.value, 0)
            for _ in range(2):  # if the first one fails, the event need not be reached
                use("cuEventSynchronize", event.value)
            use("cuEventQuery", event.value)
            use("cuEventDestroy_v2", event.value)
        use("cuStreamDestroy_v2", made.value)
    if use("cuMemAlloc_v2", ctypes.byref(memory), 64):
        use("cuMemsetD8_v2", memory.value, 0, 64)
        if use("cuMemHostAlloc", ctypes.byref(host), 64, 0):
            use("cuMemcpyHtoD_v2", memory.value, host.value, 64)
            use("cuMemcpyDtoH_v2", host.value, memory.value, 64)
            use("cuMemFreeHost", host.value)
        use("cuMemFree_v2", memory.value)
    use("cuCtxSynchronize")
    return program.failed


_NOTHING = api.HostFunction(lambda _: None)  # graphs can call it later


def _captures_and_graphs() -> list[str]:
    program = Program()
    use = program.use
    stream, memory, graph, child, node, executable, keeper = (ctypes.c_uint64() for _ in range(7))
    state, mode = ctypes.c_int(), ctypes.c_int(2)
    if use("cuMemAlloc_v2", ctypes.byref(memory), 64) and use("cuStreamCreate", ctypes.byref(stream), 1):
        if use("cuStreamBeginCapture_v2", stream.value, 1):
            use("cuMemsetD8Async", memory.value, 0, 64, stream.value)
            use("cuStreamGetCaptureInfo_v2", stream.value, ctypes.byref(state), None, ctypes.byref(graph), None, None)
            if use("cuUserObjectCreate", ctypes.byref(keeper), None, _NOTHING, 2, 1):
                if graph.value:
                    use("cuGraphRetainUserObject", graph.value, keeper.value, 1, 1)
                use("cuUserObjectRelease", keeper.value, 1)
            if use("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode)):
                use("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            use("cuStreamEndCapture", stream.value, ctypes.byref(child))
        if child.value and use("cuGraphCreate", ctypes.byref(graph), 0):
            if (
                use("cuGraphAddChildGraphNode", ctypes.byref(node), graph.value, None, 0, child.value)
                and use("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph.value, 0)
            ):
                use("cuGraphExecChildGraphNodeSetParams", executable.value, node.value, child.value)
                use("cuGraphLaunch", executable.value, stream.value)
                use("cuGraphExecDestroy", executable.value)
            use("cuGraphDestroy", graph.value)
        use("cuStreamDestroy_v2", stream.value)
        use("cuMemFree_v2", memory.value)
    return program.failed


@pytest.mark.parametrize(("program", "count"), [(_streams_and_memory, 18), (_captures_and_graphs, 19)])
def test_every_function_fails_once(program: Callable[[], list[str]], count: int) -> None:
    before = api.calls()
    assert program() == []
    used = [name for name, now in api.calls().items() if now > before.get(name, 0)]
    assert len(used) == count
    for name in used:
        api.inject(name, 1, 999)
        failed = program()
        assert [one.removesuffix("_v2") for one in failed] == [name]
        assert program() == []


def test_functions_of_nvrtc_fail() -> None:
    api.inject("nvrtcCompileProgram", 2, 11)
    programs = [api.compile_source('extern "C" __global__ void nothing() {}') for _ in range(3)]
    assert [one.status for one in programs] == [0, 11, 0]
    api.inject("nvrtcGetCUBINSize", 1, 1)
    with pytest.raises(AssertionError, match="nvrtcGetCUBINSize: error 1"):
        _ = programs[0].binary
    assert programs[0].binary
