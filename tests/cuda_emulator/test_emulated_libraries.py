"""Tests the emulated cuBLAS and cuFFT: which arguments they refuse, and the order of their work in streams."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_api as api
import pytest

FLOAT, COMPLEX = 0, 4  # cudaDataType
COMPUTE_FLOAT = 68
NOT_INITIALIZED, INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 1, 7, 13, 15  # cublasStatus_t
# cufftResult
INVALID_PLAN, INVALID_ARGUMENT, INTERNAL_ERROR, UNALIGNED_DATA, INVALID_DEVICE, NO_WORKSPACE = 1, 4, 5, 9, 11, 13

Call = Callable[..., int]


def caller(library: ctypes.CDLL) -> Call:
    return lambda name, *given: int(
        library[name](*(ctypes.c_int64(one) if isinstance(one, int) else one for one in given))
    )


@pytest.fixture
def cublas(libraries: Path) -> Call:
    return caller(ctypes.CDLL(str(libraries / "libcublas.so.13")))


@pytest.fixture
def cufft(libraries: Path) -> Call:
    return caller(ctypes.CDLL(str(libraries / "libcufft.so.12")))


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def made_handle(cublas: Call) -> int:
    handle = ctypes.c_uint64()
    assert cublas("cublasCreate_v2", ctypes.byref(handle)) == 0
    return handle.value


def product(cublas: Call, handle: int, **changed: Any) -> int:
    """c = a @ b of 2x3 and 3x2 matrices in columns."""
    given = {
        "a_operation": 0, "b_operation": 0, "m": 2, "n": 2, "k": 3, "alpha": ctypes.byref(ctypes.c_float(1)),
        "a": 0, "a_type": FLOAT, "a_columns": 2, "b": 0, "b_type": FLOAT, "b_columns": 3,
        "beta": ctypes.byref(ctypes.c_float(0)), "c": 0, "c_type": FLOAT, "c_columns": 2,
        "compute": COMPUTE_FLOAT, "algorithm": -1,
    } | changed  # fmt: skip
    return cublas("cublasGemmEx_64", handle, *given.values())


def test_products_are_in_the_order_of_the_stream(cublas: Call) -> None:
    handle, memory, stream, workspace = made_handle(cublas), api.allocate(4096), api.stream(), api.allocate(1 << 20)
    a, b, c = memory, memory + 512, memory + 1024
    with api.blocked(stream) as release:
        assert cublas("cublasSetStream_v2", handle, stream) == 0
        assert cublas("cublasSetWorkspace_v2", handle, workspace, 1 << 20) == 0
        assert product(cublas, handle, a=a, b=b, c=c) == 0
        api.write(a, floats(1, 2, 3, 4, 5, 6))
        api.write(b, floats(1, 0, 1, 2, 0, 0))
        assert api.status("cuStreamQuery", stream) == api.NOT_READY
        release()
        api.synchronize(stream)
    assert api.read(c, 16) == floats(6, 8, 2, 4)
    assert cublas("cublasDestroy_v2", handle) == 0


def test_products_check_their_arguments(cublas: Call, second: int) -> None:
    handle, memory = made_handle(cublas), api.allocate(4096)
    good = {"a": memory, "b": memory + 512, "c": memory + 1024}
    host = ctypes.create_string_buffer(4096)
    assert product(cublas, handle, **good | {"a": ctypes.addressof(host)}) == INVALID_VALUE
    assert product(cublas, handle, **good | {"c": memory + 4096 - 8}) == INVALID_VALUE
    for name, least in (("a_columns", 2), ("b_columns", 3), ("c_columns", 2)):
        assert product(cublas, handle, **good | {name: least - 1}) == INVALID_VALUE
    assert product(cublas, handle, **good | {"a_operation": 1}) == INVALID_VALUE  # then 3 rows
    assert product(cublas, handle, **good | {"c_type": COMPLEX}) == NOT_SUPPORTED
    assert product(cublas, handle, **good | {"compute": 70}) == NOT_SUPPORTED
    assert product(cublas, 4096, **good) == NOT_INITIALIZED
    assert cublas("cublasSetWorkspace_v2", handle, memory + 8, 1024) == INVALID_VALUE
    assert cublas("cublasSetWorkspace_v2", handle, ctypes.addressof(host) // 256 * 256, 1024) == INVALID_VALUE
    api.call("cuCtxSetCurrent", second)
    assert product(cublas, handle, **good) == EXECUTION_FAILED
    api.call("cuCtxSetCurrent", 0)
    assert cublas("cublasCreate_v2", ctypes.byref(ctypes.c_uint64())) == NOT_INITIALIZED


def made_plan(cufft: Call, *sizes: int, batch: int = 1) -> tuple[int, int]:
    """Return a complex plan and its bytes of workspace."""
    plan, workspace = ctypes.c_int(), ctypes.c_size_t()
    assert cufft("cufftCreate", ctypes.byref(plan)) == 0
    assert cufft("cufftSetAutoAllocation", plan.value, 0) == 0
    given = (ctypes.c_longlong * len(sizes))(*sizes)
    kinds = (None, 1, 1, COMPLEX, None, 1, 1, COMPLEX, batch, ctypes.byref(workspace), COMPLEX)
    assert cufft("cufftXtMakePlanMany", plan.value, len(sizes), given, *kinds) == 0
    return plan.value, workspace.value


def test_transforms_are_in_the_order_of_the_stream(cufft: Call) -> None:
    plan, needed = made_plan(cufft, 2, 2)
    memory, stream = api.allocate(4096), api.stream()
    with api.blocked(stream) as release:
        assert cufft("cufftSetStream", plan, stream) == 0
        assert cufft("cufftXtExec", plan, memory, memory + 512, -1) == NO_WORKSPACE
        assert cufft("cufftSetWorkArea", plan, memory + 4096 - needed) == 0
        assert cufft("cufftXtExec", plan, memory, memory + 512, -1) == 0
        api.write(memory, floats(1, 0, 2, 0, 3, 0, 4, 1))
        release()
        api.synchronize(stream)
    found = struct.unpack("8f", api.read(memory + 512, 32))
    assert found == pytest.approx((10, 1, -2, -1, -4, -1, 0, 1), abs=1e-6)
    with api.blocked(stream):  # the plan is destroyed too early
        assert cufft("cufftXtExec", plan, memory, memory + 512, -1) == 0
        assert cufft("cufftDestroy", plan) == 0
    assert api.read(memory + 512, 32) == b"\xff" * 32


def test_transforms_check_their_arguments(cufft: Call, second: int) -> None:
    plan, _ = made_plan(cufft, 4)
    memory = api.allocate(4096)
    host = ctypes.create_string_buffer(4096)
    assert cufft("cufftSetWorkArea", plan, memory + 1024) == 0
    assert cufft("cufftXtExec", plan, ctypes.addressof(host), memory, 1) == INVALID_ARGUMENT
    assert cufft("cufftXtExec", plan, memory, memory + 4096 - 8, 1) == INVALID_ARGUMENT
    assert cufft("cufftXtExec", plan, memory, memory + 516, 1) == UNALIGNED_DATA
    assert cufft("cufftXtExec", plan, memory, memory + 512, 2) == INVALID_ARGUMENT
    assert cufft("cufftXtExec", plan + 1000, memory, memory + 512, 1) == INVALID_PLAN
    api.call("cuCtxSetCurrent", second)
    assert cufft("cufftXtExec", plan, memory, memory + 512, 1) == INVALID_DEVICE


RELAXED, THREAD_LOCAL = 2, 1
INVALIDATED = 901


def captured(stream: int, *calls: Callable[[], int]) -> tuple[list[int], int, int]:
    """Return the statuses of calls, of the end of their capture in a stream, and the graph."""
    graph = ctypes.c_uint64()
    api.call("cuStreamBeginCapture_v2", stream, THREAD_LOCAL)
    statuses = [one() for one in calls]
    return statuses, api.status("cuStreamEndCapture", stream, ctypes.byref(graph)), graph.value


def test_captured_calls_are_executed_by_each_launch(cublas: Call, cufft: Call) -> None:
    handle, memory, stream, workspace = made_handle(cublas), api.allocate(4096), api.stream(), api.allocate(1 << 20)
    plan, needed = made_plan(cufft, 2)
    a, b, c, d = (memory + 512 * i for i in range(4))
    statuses, ended, graph = captured(
        stream,
        lambda: cublas("cublasSetStream_v2", handle, stream),
        lambda: cublas("cublasSetWorkspace_v2", handle, workspace, 1 << 20),
        lambda: product(cublas, handle, a=a, b=b, c=c),
        lambda: cufft("cufftSetStream", plan, stream),
        lambda: cufft("cufftSetWorkArea", plan, memory + 4096 - needed),
        lambda: cufft("cufftXtExec", plan, c, d, -1),
    )
    assert (statuses, ended) == ([0] * 6, 0)
    count = ctypes.c_size_t()
    api.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    assert count.value == 2
    executable = api.result("cuGraphInstantiateWithFlags", graph, 0)
    api.call("cuGraphDestroy", graph)
    for factor in (1, 2):
        api.write(a, floats(*(factor * one for one in (1, 2, 3, 4, 5, 6))))
        api.write(b, floats(1, 0, 1, 2, 0, 0))
        api.call("cuGraphLaunch", executable, stream)
        api.synchronize(stream)
        assert api.read(c, 16) == floats(*(factor * one for one in (6, 8, 2, 4)))
        assert api.read(d, 16) == floats(*(factor * one for one in (8, 12, 4, 4)))
    assert cufft("cufftDestroy", plan) == 0
    api.call("cuGraphLaunch", executable, stream)  # with a plan that does not exist any more
    api.synchronize(stream)
    assert api.read(d, 16) == b"\xff" * 16


def test_libraries_prepare_nothing_in_a_capture(cublas: Call, cufft: Call) -> None:
    """Unless the thread is relaxed: what they allocate is no part of the graph."""
    made, mode, stream = ctypes.c_uint64(), ctypes.c_int(RELAXED), api.stream()
    unmade, (done, _) = ctypes.c_int(), made_plan(cufft, 8)
    assert cufft("cufftCreate", ctypes.byref(unmade)) == 0
    assert cufft("cufftSetAutoAllocation", unmade.value, 0) == 0

    def prepare() -> int:
        kinds = (None, 1, 1, COMPLEX, None, 1, 1, COMPLEX, 1, ctypes.byref(ctypes.c_size_t()), COMPLEX)
        return cufft("cufftXtMakePlanMany", unmade.value, 1, (ctypes.c_longlong * 1)(4), *kinds)

    def exchange() -> int:
        return api.status("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    calls = (
        lambda: cublas("cublasCreate_v2", ctypes.byref(made)), prepare, lambda: cufft("cufftDestroy", done)
    )  # fmt: skip
    for call, error in zip(calls, (NOT_INITIALIZED, INTERNAL_ERROR, INTERNAL_ERROR), strict=True):
        assert captured(stream, call) == ([error], INVALIDATED, 0)
    statuses, ended, _ = captured(stream, exchange, *calls, exchange)
    assert (statuses, ended) == ([0] * 5, 0)
    assert mode.value == RELAXED


def test_versions(libraries: Path) -> None:
    for name, major in (("cublas", 13), ("cublas", 12), ("cufft", 12), ("cufft", 11)):
        found = ctypes.c_int()
        library = ctypes.CDLL(str(libraries / f"lib{name}.so.{major}"))
        assert library[f"{name}GetProperty"](0, ctypes.byref(found)) == 0
        assert found.value == major
