"""Tests the emulated libraries: which arguments they refuse, and the order of their work in streams."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_api as api
import pytest

FLOAT, COMPLEX = 0, 4  # cudaDataType
COMPUTE_HALF, COMPUTE_FLOAT, COMPUTE_TF32 = 64, 68, 77
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
def cublaslt(libraries: Path) -> Call:
    return caller(ctypes.CDLL(str(libraries / "libcublasLt.so.13")))


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
    for compute in (70, COMPUTE_HALF):
        assert product(cublas, handle, **good | {"compute": compute}) == NOT_SUPPORTED
    assert cublas("cublasSetMathMode", handle, 0) == cublas("cublasSetMathMode", handle, 16) == 0
    assert cublas("cublasSetMathMode", handle, 8) == NOT_SUPPORTED
    assert product(cublas, 4096, **good) == NOT_INITIALIZED
    assert cublas("cublasSetWorkspace_v2", handle, memory + 8, 1024) == INVALID_VALUE
    assert cublas("cublasSetWorkspace_v2", handle, ctypes.addressof(host) // 256 * 256, 1024) == INVALID_VALUE
    api.call("cuCtxSetCurrent", second)
    assert product(cublas, handle, **good) == EXECUTION_FAILED
    api.call("cuCtxSetCurrent", 0)
    assert cublas("cublasCreate_v2", ctypes.byref(ctypes.c_uint64())) == NOT_INITIALIZED


def test_products_in_tf32(cublas: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, memory = made_handle(cublas), api.allocate(4096)
    given = {"m": 1, "n": 1, "k": 1, "b_columns": 1, "a": memory, "b": memory + 512, "c": memory + 1024}
    api.write(memory, floats(1 + 2**-10 + 2**-12))
    api.write(memory + 512, floats(1))
    for override, expected in (("1", 1 + 2**-10), ("0", 1 + 2**-10 + 2**-12)):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        assert product(cublas, handle, **given, compute=COMPUTE_TF32) == 0
        api.call("cuCtxSynchronize")
        assert api.read(memory + 1024, 4) == floats(expected)
    double = dict.fromkeys(("a_type", "b_type", "c_type"), 1)
    assert product(cublas, handle, **given, **double, compute=COMPUTE_TF32) == NOT_SUPPORTED


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


OPERATION_EPILOGUE, OPERATION_BIAS = 7, 8  # cublasLtMatmulDescAttributes_t
PREFERENCE_WORKSPACE, PREFERENCE_SCHEMES = 1, 3  # cublasLtMatmulPreferenceAttributes_t
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)
RELU_AND_BIAS = 6


class LtProduct:
    """c = a @ b of 2x3 and 3x2 matrices in columns, with a bias and an activation."""

    def __init__(self, call: Call, **changed: int) -> None:
        given = {"compute": COMPUTE_FLOAT, "factor_type": FLOAT, "type": FLOAT, "depth": 3} | changed
        self.call = call
        self.handle = self.made("cublasLtCreate")
        self.operation = self.made("cublasLtMatmulDescCreate", given["compute"], given["factor_type"])
        self.a, self.b, self.c = (
            self.made("cublasLtMatrixLayoutCreate", given["type"], *sizes)
            for sizes in ((2, 3, 2), (given["depth"], 2, 3), (2, 2, 2))
        )
        self.preference = self.made("cublasLtMatmulPreferenceCreate")
        assert self.set("cublasLtMatmulDescSetAttribute", self.operation, OPERATION_EPILOGUE, RELU_AND_BIAS, 4) == 0

    def made(self, name: str, *given: int) -> int:
        found = ctypes.c_uint64()
        assert self.call(name, ctypes.byref(found), *given) == 0
        return found.value

    def set(self, name: str, one: int, attribute: int, value: int, nbytes: int) -> int:
        return self.call(name, one, attribute, ctypes.byref(ctypes.c_uint64(value)), nbytes)

    def prefer(self, attribute: int, value: int) -> None:
        nbytes = 8 if attribute == PREFERENCE_WORKSPACE else 4
        assert self.set("cublasLtMatmulPreferenceSetAttribute", self.preference, attribute, value, nbytes) == 0

    def search(self, most: int = 8) -> tuple[int, list[Algorithm]]:
        found, count = (Algorithm * 8)(), ctypes.c_int()
        layouts = (self.a, self.b, self.c, self.c)
        status = self.call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.operation, *layouts, self.preference, most, found,
            ctypes.byref(count),
        )  # fmt: skip
        return status, list(found[: count.value])

    def run(self, algorithm: Algorithm, stream: int, **changed: int) -> int:
        given = {"a": 0, "b": 0, "c": 0, "d": 0, "workspace": 0, "bytes": 0} | changed
        one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        return self.call(
            "cublasLtMatmul", self.handle, self.operation, one, given["a"], self.a, given["b"], self.b, zero,
            given["c"], self.c, given["d"] or given["c"], self.c, algorithm.algorithm, given["workspace"],
            given["bytes"], stream,
        )  # fmt: skip


def test_products_with_a_bias_are_in_the_order_of_the_stream(cublaslt: Call) -> None:
    product, memory, stream = LtProduct(cublaslt), api.allocate(8192), api.stream()
    a, b, c, bias, workspace = (memory + 512 * n for n in range(5))
    product.prefer(PREFERENCE_WORKSPACE, 4096)
    assert product.set("cublasLtMatmulDescSetAttribute", product.operation, OPERATION_BIAS, bias, 8) == 0
    status, found = product.search()
    assert (status, len(found)) == (0, 5)
    for algorithm in found:
        api.write(a, floats(0, 0, 0, 0, 0, 0))
        with api.blocked(stream) as release:
            given = {"a": a, "b": b, "c": c, "workspace": workspace, "bytes": algorithm.workspace}
            assert product.run(algorithm, stream, **given) == 0
            api.write(a, floats(1, 2, 3, 4, 5, 6))
            api.write(b, floats(1, 0, 1, 2, 0, 0))
            api.write(bias, floats(-7, 1))
            assert api.status("cuStreamQuery", stream) == api.NOT_READY
            release()
            api.synchronize(stream)
        assert api.read(c, 16) == floats(0, 9, 0, 5)  # of [[6, 2], [8, 4]] in columns


def test_algorithms_fit_what_is_asked_for(cublaslt: Call) -> None:
    product, memory, stream = LtProduct(cublaslt), api.allocate(8192), api.stream()
    good = {"a": memory, "b": memory + 512, "c": memory + 1024}
    bias = memory + 1536
    assert product.set("cublasLtMatmulDescSetAttribute", product.operation, OPERATION_BIAS, bias, 8) == 0
    assert [one.workspace for one in product.search()[1]] == [0, 0]  # by default, there is no workspace
    product.prefer(PREFERENCE_WORKSPACE, 4096)
    for schemes, count in ((0, 2), (1, 3), (2, 3), (4, 3), (7, 5)):
        product.prefer(PREFERENCE_SCHEMES, schemes)
        assert len(product.search()[1]) == count
    assert len(product.search(3)[1]) == 3
    vectors, needs = product.search()[1][1], product.search()[1][0]
    assert product.run(vectors, stream, **good) == 0
    for name in ("a", "b", "c"):  # it was found for multiples of 16 bytes
        assert product.run(vectors, stream, **good | {name: good[name] + 8}) == INVALID_VALUE
    for attribute in PREFERENCE_ALIGNMENTS:
        product.prefer(attribute, 8)
        assert len(product.search()[1]) == 4
        product.prefer(attribute, 16)
    assert product.run(needs, stream, **good) == INVALID_VALUE  # without its workspace
    assert product.run(vectors, stream, **good | {"d": memory + 2048}) == NOT_SUPPORTED
    assert product.run(vectors, stream, **good | {"c": memory + 8192 - 8}) == INVALID_VALUE
    other = LtProduct(cublaslt)
    assert other.run(vectors, stream, **good) == INVALID_VALUE  # it has no bias
    assert other.set("cublasLtMatmulDescSetAttribute", other.operation, OPERATION_BIAS, bias, 8) == 0
    assert other.run(vectors, stream, **good) == 0
    assert other.set("cublasLtMatmulDescSetAttribute", other.operation, OPERATION_EPILOGUE, 4, 4) == 0
    assert other.run(vectors, stream, **good) == INVALID_VALUE  # of a product with an activation
    product.handle = 4096
    assert product.run(vectors, stream, **good) == product.search()[0] == NOT_INITIALIZED


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"depth": 4}, INVALID_VALUE),
        ({"compute": 70}, NOT_SUPPORTED),
        ({"compute": COMPUTE_HALF}, NOT_SUPPORTED),
        ({"factor_type": 1}, NOT_SUPPORTED),
        ({"type": COMPLEX}, NOT_SUPPORTED),
    ],
    ids=str,
)
def test_products_without_algorithms(cublaslt: Call, changed: dict[str, int], status: int) -> None:
    assert LtProduct(cublaslt, **changed).search() == (status, [])


def test_attributes_of_products_check_their_sizes(cublaslt: Call) -> None:
    product = LtProduct(cublaslt)
    for name, one, attribute, nbytes in (
        ("cublasLtMatmulDescSetAttribute", product.operation, OPERATION_EPILOGUE, 8),
        ("cublasLtMatmulDescSetAttribute", product.operation, 99, 4),
        ("cublasLtMatrixLayoutSetAttribute", product.a, 5, 8),
        ("cublasLtMatmulPreferenceSetAttribute", product.preference, PREFERENCE_WORKSPACE, 4),
        ("cublasLtMatmulPreferenceSetAttribute", product.a, PREFERENCE_WORKSPACE, 8),
    ):
        assert product.set(name, one, attribute, 1, nbytes) == INVALID_VALUE
    for name, one in (("MatmulDesc", product.operation), ("MatrixLayout", product.a)):
        assert cublaslt(f"cublasLt{name}Destroy", one) == 0
        assert cublaslt(f"cublasLt{name}Destroy", one) == INVALID_VALUE
    assert product.search() == (INVALID_VALUE, [])


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
    for name, major in (
        ("cublas", 13),
        ("cublas", 12),
        ("cufft", 12),
        ("cufft", 11),
        ("cusolver", 12),
        ("cusolver", 11),
    ):
        found = ctypes.c_int()
        library = ctypes.CDLL(str(libraries / f"lib{name}.so.{major}"))
        assert library[f"{name}GetProperty"](0, ctypes.byref(found)) == 0
        assert found.value == major


# --- cuSOLVER, and cuBLAS's triangular systems -----------------------------------------------------------------------

DOUBLE = 1  # cudaDataType
SOLVER_NOT_INITIALIZED, SOLVER_INVALID_VALUE, SOLVER_EXECUTION_FAILED, SOLVER_INTERNAL_ERROR = 1, 3, 6, 7
SOLVER_NOT_SUPPORTED, INVALID_WORKSPACE = 9, 31  # cusolverStatus_t
A, B, PIVOTS, INFO, WORKSPACE, ROOM = 0, 4096, 8192, 8448, 8704, 4096  # places in the memory of a test


@pytest.fixture
def cusolver(libraries: Path) -> Call:
    return caller(ctypes.CDLL(str(libraries / "libcusolver.so.12")))


def made_solver(cusolver: Call) -> tuple[int, int]:
    handle, params = ctypes.c_uint64(), ctypes.c_uint64()
    assert cusolver("cusolverDnCreate", ctypes.byref(handle)) == 0
    assert cusolver("cusolverDnCreateParams", ctypes.byref(params)) == 0
    return handle.value, params.value


def doubles(*values: float) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def read_doubles(at: int, count: int) -> tuple[float, ...]:
    return struct.unpack(f"{count}d", api.read(at, 8 * count))


def factored(cusolver: Call, solver: tuple[int, int], memory: int, **changed: Any) -> int:
    """The Cholesky decomposition of a 2x2 matrix of doubles."""
    given = {
        "fill": 0, "n": 2, "type": DOUBLE, "a": memory + A, "columns": 2, "compute": DOUBLE,
        "workspace": memory + WORKSPACE, "bytes": ROOM, "host": None, "host_bytes": 0, "info": memory + INFO,
    } | changed  # fmt: skip
    return cusolver("cusolverDnXpotrf", *solver, *given.values())


def decomposed(cusolver: Call, solver: tuple[int, int], memory: int, **changed: Any) -> int:
    """The LU decomposition of a 2x2 matrix of doubles."""
    given = {
        "m": 2, "n": 2, "type": DOUBLE, "a": memory + A, "columns": 2, "pivots": memory + PIVOTS, "compute": DOUBLE,
        "workspace": memory + WORKSPACE, "bytes": ROOM, "host": None, "host_bytes": 0, "info": memory + INFO,
    } | changed  # fmt: skip
    return cusolver("cusolverDnXgetrf", *solver, *given.values())


def solved(cusolver: Call, solver: tuple[int, int], memory: int, **changed: Any) -> int:
    """The solution of a system of 2 equations, from the LU decomposition."""
    given = {
        "operation": 0, "n": 2, "columns": 1, "a_type": DOUBLE, "a": memory + A, "a_columns": 2,
        "pivots": memory + PIVOTS, "b_type": DOUBLE, "b": memory + B, "b_columns": 2, "info": memory + INFO,
    } | changed  # fmt: skip
    return cusolver("cusolverDnXgetrs", *solver, *given.values())


def eigenvalues(cusolver: Call, solver: tuple[int, int], memory: int, **changed: Any) -> int:
    given = {
        "vectors": 1, "fill": 0, "n": 2, "type": DOUBLE, "a": memory + A, "columns": 2, "real": DOUBLE,
        "values": memory + B, "compute": DOUBLE, "workspace": memory + WORKSPACE, "bytes": ROOM, "host": None,
        "host_bytes": 0, "info": memory + INFO,
    } | changed  # fmt: skip
    return cusolver("cusolverDnXsyevd", *solver, *given.values())


def test_decompositions_are_in_the_order_of_the_stream(cusolver: Call) -> None:
    solver, memory, stream = made_solver(cusolver), api.allocate(1 << 14), api.stream()
    assert cusolver("cusolverDnSetStream", solver[0], stream) == 0
    with api.blocked(stream) as release:
        assert decomposed(cusolver, solver, memory) == 0
        assert solved(cusolver, solver, memory) == 0
        api.write(memory + A, doubles(1, 2, 3, 4))  # the columns
        api.write(memory + B, doubles(7, 10))
        release()
        api.synchronize(stream)
    assert read_doubles(memory + A, 4) == (2, 0.5, 4, 1)
    assert struct.unpack("2q", api.read(memory + PIVOTS, 16)) == (2, 2)
    assert read_doubles(memory + B, 2) == pytest.approx((1, 2))
    api.write(memory + B, doubles(5, 11))
    assert solved(cusolver, solver, memory, operation=1) == 0
    api.synchronize(stream)
    assert read_doubles(memory + B, 2) == pytest.approx((1, 2))
    api.write(memory + A, doubles(4, 2, 99, 5))
    assert factored(cusolver, solver, memory) == 0
    api.synchronize(stream)
    assert read_doubles(memory + A, 2) == (2, 1)
    assert read_doubles(memory + A + 24, 1) == (2,)
    assert struct.unpack("i", api.read(memory + INFO, 4)) == (0,)
    api.write(memory + A, doubles(1, 2, 2, 1))
    assert factored(cusolver, solver, memory) == 0
    api.synchronize(stream)
    assert struct.unpack("i", api.read(memory + INFO, 4)) == (2,)
    api.write(memory + A, doubles(1, 2, 99, 1))
    assert eigenvalues(cusolver, solver, memory) == 0
    api.synchronize(stream)
    assert read_doubles(memory + B, 2) == pytest.approx((-1, 3))
    assert [abs(one) for one in read_doubles(memory + A, 4)] == pytest.approx([0.5**0.5] * 4)
    assert cusolver("cusolverDnDestroy", solver[0]) == 0


def test_decompositions_check_their_arguments(cusolver: Call, second: int) -> None:
    solver, memory = made_solver(cusolver), api.allocate(1 << 14)
    buffer = ctypes.create_string_buffer(4096)
    host = ctypes.addressof(buffer)
    for call in (factored, decomposed, eigenvalues):
        assert call(cusolver, solver, memory) == 0
        assert call(cusolver, solver, memory, bytes=8) == INVALID_WORKSPACE
        for name in ("a", "info", "workspace"):
            assert call(cusolver, solver, memory, **{name: host}) == SOLVER_INVALID_VALUE
        assert call(cusolver, solver, memory, columns=1) == SOLVER_INVALID_VALUE
        assert call(cusolver, solver, memory, n=0) == SOLVER_INVALID_VALUE
        assert call(cusolver, solver, memory, compute=FLOAT) == SOLVER_INVALID_VALUE
        assert call(cusolver, (4096, solver[1]), memory) == SOLVER_NOT_INITIALIZED
        assert call(cusolver, (solver[0], 4096), memory) == SOLVER_INVALID_VALUE
    assert factored(cusolver, solver, memory, type=2, compute=2) == SOLVER_NOT_SUPPORTED
    assert decomposed(cusolver, solver, memory, pivots=host) == SOLVER_INVALID_VALUE
    assert eigenvalues(cusolver, solver, memory, real=FLOAT) == SOLVER_INVALID_VALUE
    assert solved(cusolver, solver, memory) == 0
    for changed in ({"operation": 3}, {"a_columns": 1}, {"b_columns": 1}, {"b": host}, {"pivots": host}, {"b_type": 0}):
        assert solved(cusolver, solver, memory, **changed) == SOLVER_INVALID_VALUE
    api.call("cuCtxSetCurrent", second)
    assert factored(cusolver, solver, memory) == SOLVER_EXECUTION_FAILED
    api.call("cuCtxSetCurrent", 0)
    assert cusolver("cusolverDnCreate", ctypes.byref(ctypes.c_uint64())) == SOLVER_NOT_INITIALIZED


def test_large_decompositions_need_memory_on_the_host(cusolver: Call) -> None:
    solver, memory, stream = made_solver(cusolver), api.allocate(1 << 16), api.stream()
    assert cusolver("cusolverDnSetStream", solver[0], stream) == 0
    kept = ctypes.create_string_buffer(4096)
    buffer = {"host": ctypes.addressof(kept), "host_bytes": 4096}
    for n, needs_host in ((32, False), (40, True)):
        on_device, on_host = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = (ctypes.byref(on_device), ctypes.byref(on_host))
        assert cusolver("cusolverDnXpotrf_bufferSize", *solver, 0, n, DOUBLE, None, n, DOUBLE, *sizes) == 0
        assert (on_device.value, on_host.value > 0) == (8 * n * n, needs_host)
        large = {"n": n, "columns": n, "workspace": memory + (1 << 15), "bytes": 1 << 15, "info": memory + (3 << 14)}
        assert factored(cusolver, solver, memory, **large) == (INVALID_WORKSPACE if needs_host else 0)
        assert factored(cusolver, solver, memory, **large | buffer) == 0
        statuses, *_ = captured(stream, lambda given=large | buffer: factored(cusolver, solver, memory, **given))
        assert statuses == [SOLVER_INTERNAL_ERROR if needs_host else 0]


def test_triangular_systems(cublas: Call) -> None:
    handle, memory, stream = made_handle(cublas), api.allocate(1 << 14), api.stream()
    one = doubles(1)

    def solve(**changed: Any) -> int:
        given = {
            "side": 0, "fill": 0, "operation": 0, "unit": 0, "m": 2, "n": 1, "alpha": one,
            "a": memory + A, "a_columns": 2, "b": memory + B, "b_columns": 2,
        } | changed  # fmt: skip
        return cublas("cublasDtrsm_v2_64", handle, *given.values())

    assert cublas("cublasSetStream_v2", handle, stream) == 0
    with api.blocked(stream) as release:
        assert solve() == 0
        api.write(memory + A, doubles(2, 1, 99, 4))
        api.write(memory + B, doubles(2, 9))
        release()
        api.synchronize(stream)
    assert read_doubles(memory + B, 2) == (1, 2)
    for changed, b, x in (
        ({"operation": 1}, (4, 8), (1, 2)),
        ({"unit": 1}, (1, 3), (1, 2)),
        ({"side": 1, "m": 1, "n": 2, "b_columns": 1}, (4, 8), (1, 2)),
        ({"side": 1, "m": 1, "n": 2, "b_columns": 1, "operation": 1}, (2, 9), (1, 2)),
    ):
        api.write(memory + B, doubles(*b))
        assert solve(**changed) == 0
        api.synchronize(stream)
        assert read_doubles(memory + B, 2) == x, changed
    buffer = ctypes.create_string_buffer(4096)
    host = ctypes.addressof(buffer)
    for changed in (
        {"side": 2}, {"fill": 2}, {"operation": 3}, {"unit": 2}, {"m": 0}, {"alpha": None}, {"a_columns": 1},
        {"b_columns": 1}, {"a": host}, {"b": host},
    ):  # fmt: skip
        assert solve(**changed) == INVALID_VALUE, changed


# --- cuDNN -----------------------------------------------------------------------------------------------------------

# cudnnBackendDescriptorType_t, cudnnBackendAttributeType_t, cudnnDataType_t and cudnnStatus_t
CONVOLUTION, TENSOR, GRAPH, PRODUCT, PRODUCT_OPERATION = 1, 17, 15, 18, 19
HANDLE, DATA_TYPE, BOOLEAN, INT64, DESCRIPTOR = 0, 1, 2, 3, 15
FLOATS, HALVES = 0, 2
SHAPE_MISMATCH, DUPLICATED, UNSUPPORTED = 2008, 2009, 3000
BAD_PARAM, NOT_FINALIZED, SIZE_INSUFFICIENT, WRONG_TYPE, UNSUPPORTED_LAYOUT = 2000, 2004, 2006, 2010, 3004


@pytest.fixture
def cudnn(libraries: Path) -> Call:
    return caller(ctypes.CDLL(str(libraries / "libcudnn.so.9")))


def descriptor(cudnn: Call, kind: int) -> int:
    made = ctypes.c_uint64()
    assert cudnn("cudnnBackendCreateDescriptor", kind, ctypes.byref(made)) == 0
    return made.value


def set_attribute(cudnn: Call, of: int, name: int, kind: int, *values: int) -> int:
    number = {DATA_TYPE: ctypes.c_int, BOOLEAN: ctypes.c_bool}.get(kind, ctypes.c_int64)
    return cudnn("cudnnBackendSetAttribute", of, name, kind, len(values), (number * len(values))(*values))


def finalized_tensor(cudnn: Call, *, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """The descriptor and the status of its finalization."""
    made = descriptor(cudnn, TENSOR)
    for name, kind, values in ((900, INT64, (16,)), (901, DATA_TYPE, (0,)), (902, INT64, sizes), (903, INT64, strides)):
        assert set_attribute(cudnn, made, name, kind, *values) == 0
    assert cudnn("cudnnBackendFinalize", made) == BAD_PARAM  # without an identity
    assert set_attribute(cudnn, made, 906, INT64, 7) == 0
    return made, cudnn("cudnnBackendFinalize", made)


def test_descriptors_check_their_attributes(cudnn: Call) -> None:
    tensor, status = finalized_tensor(cudnn, sizes=(2, 3, 4, 5), strides=(60, 1, 15, 3))
    assert status == 0
    assert set_attribute(cudnn, tensor, 906, INT64, 8) == BAD_PARAM  # it is final
    assert finalized_tensor(cudnn, sizes=(2, 3, 4, 5), strides=(60, 20, 5))[1] == SIZE_INSUFFICIENT
    assert finalized_tensor(cudnn, sizes=(2, 3, 4, 5), strides=(60, 20, 4, 1))[1] == UNSUPPORTED_LAYOUT
    assert set_attribute(cudnn, descriptor(cudnn, TENSOR), 901, INT64, 0) == WRONG_TYPE
    convolution = descriptor(cudnn, CONVOLUTION)
    operation = descriptor(cudnn, 10)
    assert set_attribute(cudnn, operation, 702, DESCRIPTOR, convolution) == NOT_FINALIZED
    assert set_attribute(cudnn, operation, 704, DESCRIPTOR, tensor) == 0
    assert cudnn("cudnnBackendDestroyDescriptor", tensor) == 0
    assert cudnn("cudnnBackendDestroyDescriptor", tensor) == BAD_PARAM
    assert set_attribute(cudnn, operation, 704, DESCRIPTOR, tensor) == BAD_PARAM


def operand(cudnn: Call, identity: int, *sizes: int, row: int = 0, virtual: bool = False) -> int:
    """A tensor of one batch and one head. `row`: the distance of rows, if it is not the number of columns."""
    made, step = descriptor(cudnn, TENSOR), row or sizes[1]
    for name, kind, values in (
        (900, INT64, (16,)), (901, DATA_TYPE, (FLOATS if virtual else HALVES,)), (902, INT64, (1, 1, *sizes)),
        (903, INT64, (sizes[0] * step, sizes[0] * step, step, 1)), (906, INT64, (identity,)),
        (907, BOOLEAN, (virtual,)),
    ):  # fmt: skip
        assert set_attribute(cudnn, made, name, kind, *values) == 0
    assert cudnn("cudnnBackendFinalize", made) == 0
    return made


def matrix_product(cudnn: Call, *operands: int) -> int:
    how, made = descriptor(cudnn, PRODUCT), descriptor(cudnn, PRODUCT_OPERATION)
    assert set_attribute(cudnn, how, 1500, DATA_TYPE, FLOATS) == 0
    assert cudnn("cudnnBackendFinalize", how) == 0
    for name, one in zip((1520, 1521, 1522, 1523), (*operands, how), strict=True):
        assert set_attribute(cudnn, made, name, DESCRIPTOR, one) == 0
    assert cudnn("cudnnBackendFinalize", made) == 0
    return made


def graph_status(cudnn: Call, *operations: int) -> int:
    handle, graph = ctypes.c_uint64(), descriptor(cudnn, GRAPH)
    assert cudnn("cudnnCreate", ctypes.byref(handle)) == 0
    assert set_attribute(cudnn, graph, 800, HANDLE, handle.value) == 0
    assert set_attribute(cudnn, graph, 801, DESCRIPTOR, *operations) == 0
    return cudnn("cudnnBackendFinalize", graph)


def test_graphs_of_attention_are_checked(cudnn: Call) -> None:
    query, key, value = operand(cudnn, 1, 3, 8), operand(cudnn, 2, 8, 16), operand(cudnn, 3, 16, 8)
    scores, out = operand(cudnn, 4, 3, 16, virtual=True), operand(cudnn, 5, 3, 8)
    first, second = matrix_product(cudnn, query, key, scores), matrix_product(cudnn, scores, value, out)
    assert graph_status(cudnn, first, second) == 0
    assert graph_status(cudnn, second, first) == BAD_PARAM  # the scores are not made yet
    assert graph_status(cudnn, first, first) == DUPLICATED  # they are made twice
    assert graph_status(cudnn, first) == UNSUPPORTED  # no engine for a product alone
    for one, expected in (
        (operand(cudnn, 1, 4, 8), SHAPE_MISMATCH),
        (operand(cudnn, 1, 3, 8, row=12), UNSUPPORTED_LAYOUT),
        (operand(cudnn, 3, 3, 8), DUPLICATED),
    ):
        assert graph_status(cudnn, matrix_product(cudnn, one, key, scores), second) == expected
