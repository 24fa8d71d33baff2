"""Tests the emulated CUDA driver and NVRTC: compilation, modules, launches, errors of kernels."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import driver_api as api
import pytest


def _floats(memory: int, count: int) -> list[float]:
    return list(struct.unpack(f"{count}f", api.read(memory, 4 * count)))


def _ints(memory: int, count: int) -> list[int]:
    return list(struct.unpack(f"{count}i", api.read(memory, 4 * count)))


def _run(source: str, name: str, count: int, grid: tuple[int, ...], block: tuple[int, ...], **given: Any) -> list[int]:
    """Launch a kernel that has one argument, `int* out`, and return what it has stored."""
    memory = api.allocate(4 * count)
    api.call("cuMemsetD32_v2", memory, 0, count)
    assert api.launch(api.kernel(source, name), grid, block, memory, **given) == 0
    api.synchronize()
    return _ints(memory, count)


# --- compilation


def test_a_syntax_error_has_its_line() -> None:
    source = 'extern "C" __global__ void wrong(float* out) {\n  int i = threadIdx.x;\n  out[i] = missing + 1;\n}\n'
    program = api.compile_source(source)
    assert program.status == 6
    assert "kernel.cu(3): error: " in program.log
    assert "missing" in program.log
    assert "1 error" in program.log


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--gpu-architecture=sm_12", "invalid value for --gpu-architecture"),
        ("-arch=80", "invalid value for --gpu-architecture"),
        ("--optimise", "unrecognized option --optimise"),
    ],
)
def test_wrong_options(option: str, message: str) -> None:
    program = api.compile_source("", option, "-arch=sm_80")
    assert program.status == 5
    assert message in program.log


def test_definitions_and_the_architecture() -> None:
    source = 'extern "C" __global__ void put(int* out) { out[0] = VALUE; out[1] = __CUDA_ARCH__; out[2] = OTHER; }'
    program = api.compile_source(source, "-DVALUE=3", "--define-macro=OTHER=4", "-arch=sm_80", "--fmad=false")
    module = api.result("cuModuleLoadData", program.binary)
    memory = api.allocate(12)
    assert api.launch(api.result("cuModuleGetFunction", module, "put"), (1,), (1,), memory) == 0
    assert _ints(memory, 3) == [3, 800, 4]


def test_language_standards_and_headers() -> None:
    source = '#include "own/value.h"\nextern "C" __global__ void put(int* out) { *out = VALUE; }'
    standard = 'extern "C" __global__ void put(int* out) { *out = (int)__cplusplus; }'
    assert api.compile_source(source).status == 6
    found = []
    for option in ("--std=c++17", "--std=c++20", "-std=c++14"):
        module = api.result("cuModuleLoadData", api.compile_source(standard, option).binary)
        memory = api.allocate(4)
        assert api.launch(api.result("cuModuleGetFunction", module, "put"), (1,), (1,), memory) == 0
        found += _ints(memory, 1)
    assert found[0] == found[2] == 201703
    assert found[1] > found[0]
    program = api.Program(source, headers={"own/value.h": "#define VALUE 1000"})
    assert program.status == 0, program.log


def test_architectures() -> None:
    count = ctypes.c_int()
    program = api.compile_source("")
    program.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    all_of_them = (ctypes.c_int * count.value)()
    program.call("nvrtcGetSupportedArchs", all_of_them)
    assert {75, 80, 90, 100} <= set(all_of_them)


@pytest.mark.parametrize(
    ("architecture", "error"),
    [("sm_80", 0), *((one, api.NO_BINARY_FOR_GPU) for one in ("sm_75", "sm_86", "sm_90"))],
)
def test_a_binary_is_for_its_architecture(architecture: str, error: int) -> None:
    program = api.compile_source("", f"--gpu-architecture={architecture}")
    module = ctypes.c_uint64()
    assert api.status("cuModuleLoadData", ctypes.byref(module), program.binary) == error


@pytest.mark.parametrize(("architecture", "error"), [("compute_75", 0), ("sm_80", 0), ("compute_90", api.INVALID_PTX)])
def test_ptx_is_for_later_architectures(architecture: str, error: int) -> None:
    program = api.compile_source('extern "C" __global__ void one(int* at) { *at = 1; }', f"-arch={architecture}")
    assert (program.binary == b"") == architecture.startswith("compute")
    assert b".target" in program.ptx
    module = ctypes.c_uint64()
    assert api.status("cuModuleLoadDataEx", ctypes.byref(module), program.ptx, 0, None, None) == error
    if error == 0:
        memory = api.allocate(4)
        assert api.launch(api.result("cuModuleGetFunction", module.value, "one"), (1,), (1,), memory) == 0
        assert _ints(memory, 1) == [1]


def test_templates_have_lowered_names() -> None:
    source = "template <class T> __global__ void put(T* out, T value) { *out = value; }"
    program = api.compile_source(source, expressions=["put<float>", "&put<int>"])
    assert program.status == 0, program.log
    names = [program.lowered_name(one) for one in ("put<float>", "&put<int>")]
    assert names == ["_Z3putIfEvPT_S0_", "_Z3putIiEvPT_S0_"]
    module, memory = api.result("cuModuleLoadData", program.binary), api.allocate(4)
    function = api.result("cuModuleGetFunction", module, names[0])
    assert api.launch(function, (1,), (1,), memory, ctypes.c_float(1.5)) == 0
    assert _floats(memory, 1) == [1.5]


def test_wrong_images() -> None:
    module = ctypes.c_uint64()
    assert api.status("cuModuleLoadData", ctypes.byref(module), b"no image") == api.INVALID_IMAGE
    assert api.status("cuModuleLoadData", ctypes.byref(module), b".version 8.0\n.target sm_80\n") == api.INVALID_PTX
    assert api.status("cuModuleLoadData", ctypes.byref(module), None) == api.INVALID_VALUE
    assert api.status("cuModuleLoad", ctypes.byref(module), "/no/such/file") == 301
    binary = api.compile_source("").binary
    of_another_build = binary.replace(api.emulator.library_folder().name.encode(), b"0123456789abcdef")
    assert api.status("cuModuleLoadData", ctypes.byref(module), of_another_build) == api.INVALID_IMAGE


# --- modules


def test_functions_of_a_module() -> None:
    source = """
    extern "C" {
    /* __global__ void commented(int*); */
    __global__ void first(int* at);
    __global__ void first(int* at) { *at = 1; }
    }
    extern "C" __global__ __launch_bounds__(2 * (32)) void second(int* at) { *at = 2; }
    static __device__ const char* text = "__global__ void quoted(";
    """
    module = api.module(source)
    count = ctypes.c_uint()
    api.call("cuModuleGetFunctionCount", ctypes.byref(count), module)
    assert count.value == 2
    second = api.result("cuModuleGetFunction", module, "second")
    assert api.number("cuFuncGetAttribute", 0, second) == 64
    memory = api.allocate(4)
    assert api.launch(second, (1,), (65,), memory) == 701
    assert api.launch(second, (1,), (64,), memory) == 0
    assert _ints(memory, 1) == [2]
    found = ctypes.c_uint64()
    assert api.status("cuModuleGetFunction", ctypes.byref(found), module, "third") == api.NOT_FOUND
    api.call("cuModuleUnload", module)
    assert api.status("cuModuleGetFunction", ctypes.byref(found), module, "first") == api.INVALID_HANDLE
    assert api.launch(second, (1,), (1,), memory) == api.INVALID_HANDLE


def test_variables_of_a_module() -> None:
    source = """
    extern "C" { __device__ int counter = 5; __constant__ float table[4]; }
    extern "C" __global__ void put(float* out) { out[threadIdx.x] = table[threadIdx.x] + counter++; }
    """
    module, memory = api.module(source), api.allocate(16)
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    api.call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, "table")
    assert size.value == 16
    api.write(address.value, struct.pack("4f", 10, 20, 30, 40))
    assert api.launch(api.result("cuModuleGetFunction", module, "put"), (1,), (4,), memory) == 0
    assert _floats(memory, 4) == [15, 26, 37, 48]
    api.call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), module, "counter")
    assert _ints(address.value, 1) == [9]
    assert api.status("cuModuleGetGlobal_v2", ctypes.byref(address), None, module, "none") == api.NOT_FOUND


def test_libraries_need_no_context(second: int) -> None:
    program = api.compile_source('extern "C" __global__ void one(int* at) { *at = 1; }')
    library = api.result("cuLibraryLoadData", program.binary, None, None, 0, None, None, 0)
    function = api.result("cuKernelGetFunction", api.result("cuLibraryGetKernel", library, "one"))
    for context in (api.result("cuCtxGetCurrent"), second):
        api.call("cuCtxPushCurrent_v2", context)
        memory = api.allocate(4)
        assert api.launch(function, (1,), (1,), memory) == 0
        assert _ints(memory, 1) == [1]
        api.call("cuCtxPopCurrent_v2", None)
    api.call("cuLibraryUnload", library)
    assert api.launch(function, (1,), (1,), memory) == api.INVALID_HANDLE


# --- execution


def test_grids_and_blocks() -> None:
    source = """
    extern "C" __global__ void number(int* out) {
      const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      const int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
      out[i] = i;
    }
    """
    assert _run(source, "number", 2 * 3 * 4 * 5 * 6 * 7, (2, 3, 4), (5, 6, 7)) == list(range(5040))


def test_arguments_have_their_sizes() -> None:
    source = """
    struct Pair { double x; char y; };
    extern "C" __global__ void take(double* out, char a, double b, short c, Pair d, bool e, float f) {
      double values[] = {(double)a, b, (double)c, d.x, (double)d.y, (double)e, (double)f};
      for (int i = 0; i < 7; ++i) out[i] = values[i];
    }
    """

    class Pair(ctypes.Structure):
        _fields_ = (("x", ctypes.c_double), ("y", ctypes.c_char))

    memory, function = api.allocate(56), api.kernel(source, "take")
    given = [
        ctypes.c_byte(-1), ctypes.c_double(2.5), ctypes.c_short(-300), Pair(4.25, b"\5"), ctypes.c_bool(True),
        ctypes.c_float(0.5),
    ]  # fmt: skip
    assert api.launch(function, (1,), (1,), memory, *given) == 0
    expected = [-1, 2.5, -300, 4.25, 5, 1, 0.5]
    assert list(struct.unpack("7d", api.read(memory, 56))) == expected
    # The same as one buffer.
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    api.call("cuFuncGetParamInfo", function, 6, ctypes.byref(offset), ctypes.byref(size))
    assert (offset.value, size.value) == (52, 4)
    buffer = struct.pack("<Qb7xdh6xdb7x?3xf", memory, -1, 2.5, -300, 4.25, 5, True, 0.5)
    length = ctypes.c_size_t(len(buffer))
    extra = (ctypes.c_void_p * 5)(1, ctypes.cast(buffer, ctypes.c_void_p), 2, ctypes.addressof(length), 0)
    api.call("cuMemsetD8_v2", memory, 0, 56)
    api.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, None, extra)
    assert list(struct.unpack("7d", api.read(memory, 56))) == expected
    length.value -= 1
    assert api.status("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, None, extra) == api.INVALID_VALUE


def test_arguments_are_copied_at_the_launch() -> None:
    function = api.kernel('extern "C" __global__ void put(int* out, int value) { *out = value; }', "put")
    stream, memory, value = api.stream(), api.allocate(4), ctypes.c_int(1)
    with api.blocked(stream):
        assert api.launch(function, (1,), (1,), memory, value, on=stream) == 0
        value.value = 2
    assert _ints(memory, 1) == [1]


def test_barriers_and_shared_memory() -> None:
    source = """
    extern "C" __global__ void reverse(int* out) {
      __shared__ int part[128];
      extern __shared__ int more[];
      part[threadIdx.x] = threadIdx.x;
      more[threadIdx.x] = 1000 * blockIdx.x;
      __syncthreads();
      const int other = blockDim.x - 1 - threadIdx.x;
      out[blockIdx.x * blockDim.x + threadIdx.x] = part[other] + more[other];
    }
    """
    expected = [1000 * block + 127 - thread for block in range(3) for thread in range(128)]
    assert _run(source, "reverse", 384, (3,), (128,), shared=512) == expected


def test_dynamic_shared_memory_has_limits() -> None:
    source = """
    extern "C" __global__ void fill(int* out, int count) {
      extern __shared__ double values[];
      for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = i;
      __syncthreads();
      if (threadIdx.x == 0) *out = (int)values[count - 1];
    }
    """
    function, memory = api.kernel(source, "fill"), api.allocate(4)
    assert api.launch(function, (1,), (32,), memory, ctypes.c_int(6144), shared=48 << 10) == 0
    assert _ints(memory, 1) == [6143]
    assert api.launch(function, (1,), (32,), memory, ctypes.c_int(1), shared=(48 << 10) + 1) == api.INVALID_VALUE
    assert api.status("cuFuncSetAttribute", function, 8, 164 << 10) == api.INVALID_VALUE
    api.call("cuFuncSetAttribute", function, 8, 163 << 10)
    assert api.launch(function, (1,), (32,), memory, ctypes.c_int(20864), shared=163 << 10) == 0
    assert _ints(memory, 1) == [20863]
    assert api.launch(function, (1,), (32,), memory, ctypes.c_int(6145), shared=48 << 10) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("__shfl_sync(0xffffffffu, i, 5)", lambda i: i // 32 * 32 + 5),
        ("__shfl_sync(0xffffffffu, i, i + 1, 8)", lambda i: i // 8 * 8 + (i + 1) % 8),
        ("__shfl_down_sync(0xffffffffu, i, 3)", lambda i: i + 3 if i % 32 < 29 else i),
        ("__shfl_up_sync(0xffffffffu, i, 2, 16)", lambda i: i - 2 if i % 16 >= 2 else i),
        ("__shfl_xor_sync(0xffffffffu, i, 9)", lambda i: i ^ 9),
        ("(int)__shfl_xor_sync(0xffffffffu, (double)i, 16)", lambda i: i ^ 16),
        ("__popc(__ballot_sync(0xffffffffu, i % 3 == 0))", lambda i: [11, 11][i // 32]),
        ("__any_sync(0xffffffffu, i == 40)", lambda i: i // 32),
        ("__all_sync(0xffffffffu, i < 40)", lambda i: 1 - i // 32),
    ],
)
def test_warps(call: str, expected: Any) -> None:
    source = f'extern "C" __global__ void put(int* out) {{ int i = threadIdx.x; out[i] = {call}; }}'
    assert _run(source, "put", 64, (1,), (64,)) == [expected(i) for i in range(64)]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("atomicAdd(out, 2)", 200), ("atomicSub(out, 1)", -100), ("atomicMax(out, i)", 99), ("atomicMin(out, -i)", -99),
        ("atomicOr(out, 1 << i % 7)", 127), ("atomicXor(out, 1)", 0), ("atomicExch(out, 7)", 7),
        ("atomicCAS(out, i, i + 1)", 100), ("atomicAdd((float*)out, 1.0f)", 0x42C80000),
        ("atomicInc((unsigned*)out, 6u)", 100 % 7),
    ],
)  # fmt: skip
def test_atomics(call: str, expected: int) -> None:
    source = f'extern "C" __global__ void put(int* out) {{ int i = blockIdx.x * 10 + threadIdx.x; {call}; }}'
    assert _run(source, "put", 1, (10,), (10,)) == [expected]


def test_vectors_and_words() -> None:
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void put(int* out) {
      *(int4*)out = make_int4(1, 2, 3, min(9, 4));
      *(float2*)(out + 4) = make_float2(__uint_as_float(5u), rsqrtf(4.0f));
      out[6] = __popc(255u) + __clz(1) + __ffs(8) + warpSize;
      out[7] = (int)__umulhi(1u << 31, 6u);
    }
    """.replace("    #include <cuda_fp16.h>\n", "")
    half = struct.unpack("i", struct.pack("f", 0.5))[0]
    assert _run(source, "put", 8, (1,), (1,)) == [1, 2, 3, 4, 5, half, 8 + 31 + 4 + 32, 3]


# --- attributes


def test_attributes_and_occupancy() -> None:
    body = "__shared__ int part[1000]; part[threadIdx.x] = 1; *out = part[0];"
    function = api.kernel(f'extern "C" __global__ void put(int* out) {{ {body} }}', "put")
    assert api.number("cuFuncGetAttribute", 0, function) == 1024
    assert 4000 <= api.number("cuFuncGetAttribute", 1, function) <= 4256
    assert api.number("cuFuncGetAttribute", 6, function) == 80

    def blocks(threads: int, shared: int) -> int:
        return api.number("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared)

    assert blocks(1024, 0) == 2
    assert blocks(33, 0) == 32
    assert blocks(32, 75 << 10) == 2
    assert blocks(1025, 0) == 0
    grid, block = ctypes.c_int(), ctypes.c_int()
    arguments = (ctypes.byref(grid), ctypes.byref(block), function, None, 0, 0)
    api.call("cuOccupancyMaxPotentialBlockSize", *arguments)
    assert (grid.value, block.value) == (2, 1024)
    value = ctypes.c_int()
    assert api.status("cuFuncGetAttribute", ctypes.byref(value), 99, function) == api.INVALID_VALUE
    assert api.status("cuFuncGetAttribute", ctypes.byref(value), 0, 4096) == api.INVALID_HANDLE


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


@pytest.mark.parametrize(
    ("attribute", "error"),
    [(None, 0), ((2, [1]), 0), ((4, [1, 1, 1]), 0), ((4, [2, 1, 1]), api.NOT_SUPPORTED), ((8, [1]), 0)],
)
def test_launch_attributes(attribute: tuple[int, list[int]] | None, error: int) -> None:
    function, memory = api.kernel('extern "C" __global__ void one(int* at) { *at = 1; }', "one"), api.allocate(4)
    config = LaunchConfig(1, 1, 1, 1, 1, 1, 0, None, None, 0)
    if attribute is not None:
        made = LaunchAttribute(attribute[0], 0, (ctypes.c_uint * 16)(*attribute[1]))
        config.attributes, config.count = ctypes.addressof(made), 1
    pointer = ctypes.c_uint64(memory)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    assert api.status("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None) == error
    if error == 0:
        assert _ints(memory, 1) == [1]


def test_cooperative_launches_fit_on_the_device() -> None:
    function, memory = api.kernel('extern "C" __global__ void one(int* at) { *at = 1; }', "one"), api.allocate(4)
    pointer = ctypes.c_uint64(memory)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    # 4 multiprocessors have 2 blocks of 1024 threads each.
    for blocks, error in ((8, 0), (9, 720)):
        assert api.status("cuLaunchCooperativeKernel", function, blocks, 1, 1, 1024, 1, 1, 0, 0, arguments) == error
        attribute = LaunchAttribute(2, 0, (ctypes.c_uint * 16)(1))
        config = LaunchConfig(blocks, 1, 1, 1024, 1, 1, 0, None, ctypes.addressof(attribute), 1)
        assert api.status("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None) == error


def test_clusters_of_later_architectures(run_apart: Callable[..., str]) -> None:
    script = (
        "import ctypes\n"
        "from test_emulated_kernels import LaunchAttribute, LaunchConfig\n"
        "api.call('cuInit', 0)\n"
        "api.call('cuCtxSetCurrent', api.result('cuDevicePrimaryCtxRetain', 0))\n"
        "program = api.compile_source('extern \"C\" __global__ void nothing() {}', '-arch=sm_90')\n"
        "function = api.result('cuModuleGetFunction', api.result('cuModuleLoadData', program.binary), 'nothing')\n"
        "for cluster in ([2, 1, 1], [4, 1, 1], [1, 3, 1], [0, 1, 1], [16, 1, 1]):\n"
        "    attribute = LaunchAttribute(4, 0, (ctypes.c_uint * 16)(*cluster))\n"
        "    config = LaunchConfig(16, 2, 1, 1, 1, 1, 0, None, ctypes.addressof(attribute), 1)\n"
        "    print(api.status('cuLaunchKernelEx', ctypes.byref(config), function, None, None))\n"
    )
    assert run_apart(script, CUDA_EMULATOR_ARCHITECTURE="90").split() == ["0", "0", "1", "1", "1"]


# --- errors


@pytest.mark.parametrize(
    ("grid", "block"),
    [((0,), (1,)), ((1,), (0,)), ((1,), (1025,)), ((1,), (512, 4)), ((1,), (1, 1, 65)), ((1, 65536), (1,))],
)
def test_wrong_sizes_of_launches(grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    function = api.kernel('extern "C" __global__ void nothing() {}', "nothing")
    assert api.launch(function, grid, block) == api.INVALID_VALUE
    assert api.launch(function, (1,), (1,)) == 0  # the error is not sticky
    api.synchronize()


def test_wrong_handles_of_launches() -> None:
    function = api.kernel('extern "C" __global__ void put(int* out) { *out = 1; }', "put")
    assert api.launch(4096, (1,), (1,)) == api.INVALID_HANDLE
    assert api.launch(function, (1,), (1,), api.allocate(4), on=4096) == api.INVALID_HANDLE
    assert api.status("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, None, None) == api.INVALID_VALUE


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("out[1 << 20] = 1;", api.ILLEGAL_ADDRESS),
        ("out[128] = 1;", api.ILLEGAL_ADDRESS),  # 512 bytes after the beginning
        ("*(int*)8 = 1;", api.ILLEGAL_ADDRESS),
        ("*(int*)((char*)out + 2) = 1;", api.MISALIGNED_ADDRESS),
        ("__shared__ int part[4]; part[blockDim.x << 23] = 1; __syncthreads(); *out = part[0];", api.ILLEGAL_ADDRESS),
        ("__trap();", api.LAUNCH_FAILED),
        ("assert(threadIdx.x != 3);", api.ASSERT),
    ],
)
def test_errors_of_kernels_are_sticky(body: str, error: int, context: int) -> None:
    function = api.kernel(f'extern "C" __global__ void wrong(int* out) {{ {body} }}', "wrong")
    stream, memory = api.stream(), api.allocate(100)
    assert api.launch(function, (2,), (8,), memory, on=stream) == 0
    assert api.status("cuStreamSynchronize", stream) == error
    value = ctypes.c_uint64()
    assert api.status("cuMemAlloc_v2", ctypes.byref(value), 4) == error
    assert api.status("cuCtxSynchronize") == error
    assert api.launch(function, (1,), (1,), memory) == error
    assert api.status("cuMemFree_v2", memory) == error
    api.call("cuDevicePrimaryCtxReset_v2", 0)
    api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
    assert _run('extern "C" __global__ void put(int* out) { *out = 1; }', "put", 1, (1,), (1,)) == [1]


@pytest.mark.parametrize(
    "call",
    [
        ("cuMemAlloc_v2", "out", 64), ("cuMemHostAlloc", "out", 64, 0), ("cuMemFree_v2", "memory"),
        ("cuMemcpyHtoD_v2", "memory", b"data", 4), ("cuMemsetD8Async", "memory", 0, 4, "stream"),
        ("cuStreamCreate", "out", 1), ("cuStreamQuery", "stream"), ("cuStreamSynchronize", "stream"),
        ("cuStreamDestroy_v2", "stream"), ("cuStreamWaitEvent", "stream", "event", 0), ("cuEventCreate", "out", 0),
        ("cuEventRecord", "event", "stream"), ("cuEventQuery", "event"), ("cuEventSynchronize", "event"),
        ("cuEventDestroy_v2", "event"), ("cuFuncGetAttribute", "out", 0, "function"), ("cuGraphCreate", "out", 0),
        ("cuModuleLoadData", "out", b"image"), ("cuCtxSynchronize",),
    ],
)  # fmt: skip
def test_calls_after_an_error_return_it(call: tuple[Any, ...]) -> None:
    function = api.kernel('extern "C" __global__ void wrong(int* out) { *out = 1; }', "wrong")
    known = {"memory": api.allocate(64), "stream": api.stream(), "event": api.event(), "function": function}
    out = ctypes.c_uint64()
    assert api.launch(function, (1,), (1,), 4096) == 0
    assert api.status("cuStreamSynchronize", 0) == api.ILLEGAL_ADDRESS
    name, *given = call
    arguments = [ctypes.byref(out) if one == "out" else known.get(one, one) for one in given]
    assert api.status(name, *arguments) == api.ILLEGAL_ADDRESS
    assert api.number("cuDeviceGetAttribute", 1, 0) == 1024  # facts of devices are still there


def test_errors_do_not_reach_other_devices(context: int, second: int) -> None:
    function = api.kernel('extern "C" __global__ void wrong(int* out) { *out = 1; }', "wrong")
    assert api.launch(function, (1,), (1,), 4096) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS
    api.call("cuCtxPushCurrent_v2", second)
    assert _run('extern "C" __global__ void put(int* out) { *out = 1; }', "put", 1, (1,), (1,)) == [1]
    api.call("cuCtxPopCurrent_v2", None)


def test_a_kernel_cannot_use_other_host_memory() -> None:
    host = ctypes.create_string_buffer(64)
    function = api.kernel('extern "C" __global__ void put(int* out) { *out = 1; }', "put")
    assert api.launch(function, (1,), (1,), ctypes.addressof(host)) == 0
    assert api.status("cuCtxSynchronize") == api.ILLEGAL_ADDRESS
    assert host.raw == bytes(64)


@pytest.mark.parametrize(("setting", "written"), [("0", 0), ("1", 7)])
def test_launches_without_a_run(run_apart: Callable[..., str], setting: str, written: int) -> None:
    script = """
api.call("cuInit", 0)
api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
function = api.kernel('extern "C" __global__ void put(int* out) { *out = 7; }', "put")
memory = api.allocate(4)
assert api.launch(function, (1,), (1,), memory) == 0
api.synchronize()
print(int.from_bytes(api.read(memory, 4), "little"))
"""
    assert run_apart(script, CUDA_EMULATOR_RUN=setting) == f"{written}\n"
