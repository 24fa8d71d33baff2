"""Tests that cuda-bindings runs on the emulated CUDA driver unchanged."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import emulator
import pytest

if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
    pytest.skip("cuda-bindings is not installed (pip install cuda-bindings)", allow_module_level=True)

BEGINNING = """
import ctypes
import threading
from cuda.bindings import driver, nvrtc

def check(answer):
    error, *values = answer
    assert int(error) == 0, error
    return values[0] if len(values) == 1 else tuple(values)

check(driver.cuInit(0))
context = check(driver.cuDevicePrimaryCtxRetain(0))
check(driver.cuCtxSetCurrent(context))

def compiled(source):
    program = check(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_80", b"--std=c++17", b"--fmad=true"]
    answer = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(answer[0]) != 0:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    binary = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(binary)

ADD = b'extern "C" __global__ void add(float* at, float by) { at[threadIdx.x] += by; }'

def load(source, name):
    module = check(driver.cuModuleLoadData(compiled(source)))
    return check(driver.cuModuleGetFunction(module, name))

def launch(function, stream, memory, by, count=8):
    types = (ctypes.c_void_p, ctypes.c_float)
    return driver.cuLaunchKernel(function, 1, 1, 1, count, 1, 1, 0, stream, ((int(memory), by), types), 0)

def floats(memory, count=8):
    values = (ctypes.c_float * count)()
    check(driver.cuMemcpyDtoH(ctypes.addressof(values), memory, 4 * count))
    return list(values)

def zeros(count=8):
    memory = check(driver.cuMemAlloc(4 * count))
    check(driver.cuMemsetD32(memory, 0, count))
    return memory
"""


def _run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + script],
        env={**os.environ, **emulator.environment()}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_devices_and_contexts(libraries: Path) -> None:
    _run(
        """
assert check(driver.cuDriverGetVersion()) == 13000
assert check(driver.cuDeviceGetCount()) == 2
assert check(driver.cuDeviceGetName(64, 0)).split(b"\\0")[0] == b"Emulated CUDA device 0"
attribute = driver.CUdevice_attribute
major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
assert check(driver.cuDeviceGetAttribute(major, 0)) == 8
limit = attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
assert check(driver.cuDeviceGetAttribute(limit, 0)) == 163 << 10
for name, value in {
    "WARP_SIZE": 32, "MAX_THREADS_PER_BLOCK": 1024, "MAX_BLOCK_DIM_Z": 64, "MAX_GRID_DIM_Y": 65535,
    "UNIFIED_ADDRESSING": 1, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1, "STREAM_PRIORITIES_SUPPORTED": 1,
    "COOPERATIVE_LAUNCH": 1, "MAX_THREADS_PER_MULTIPROCESSOR": 2048, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10, "MAX_REGISTERS_PER_BLOCK": 65536,
    "MULTIPROCESSOR_COUNT": 4, "CAN_MAP_HOST_MEMORY": 1, "MANAGED_MEMORY": 0, "INTEGRATED": 0, "COMPUTE_MODE": 0,
    "HOST_REGISTER_SUPPORTED": 1, "PCI_BUS_ID": 1, "L2_CACHE_SIZE": 40 << 20, "MEMORY_POOLS_SUPPORTED": 0,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1, "COMPUTE_PREEMPTION_SUPPORTED": 1, "ECC_ENABLED": 0,
    "MAX_PERSISTING_L2_CACHE_SIZE": 30 << 20, "RESERVED_SHARED_MEMORY_PER_BLOCK": 1024, "ASYNC_ENGINE_COUNT": 3,
    "HOST_NATIVE_ATOMIC_SUPPORTED": 1, "GLOBAL_MEMORY_BUS_WIDTH": 5120, "MEMORY_CLOCK_RATE": 1215000,
    "CLOCK_RATE": 1410000, "CONCURRENT_KERNELS": 1, "GPU_OVERLAP": 1, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 0,
}.items():
    assert check(driver.cuDeviceGetAttribute(getattr(attribute, "CU_DEVICE_ATTRIBUTE_" + name), 0)) == value, name
assert len(check(driver.cuDeviceGetUuid(0)).bytes) == 16
assert int(check(driver.cuCtxGetCurrent())) == int(context)
assert check(driver.cuGetErrorName(driver.CUresult.CUDA_ERROR_NOT_READY)) == b"CUDA_ERROR_NOT_READY"
made = check(driver.cuCtxCreate(None, 0, 1))
assert int(check(driver.cuCtxGetDevice())) == 1
check(driver.cuCtxDestroy(made))
assert driver.cuDeviceGet(9)[0] == driver.CUresult.CUDA_ERROR_INVALID_DEVICE
"""
    )


def test_memory_streams_and_events(libraries: Path) -> None:
    _run(
        """
memory, stream, event = zeros(), check(driver.cuStreamCreate(1)), check(driver.cuEventCreate(0))
host = check(driver.cuMemHostAlloc(32, 0))
released = threading.Event()
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
function = kind(lambda argument: released.wait(60) and None)
check(driver.cuLaunchHostFunc(stream, ctypes.cast(function, ctypes.c_void_p).value, None))
check(driver.cuMemsetD32Async(memory, 0x3F800000, 8, stream))
check(driver.cuMemcpyDtoHAsync(host, memory, 32, stream))
check(driver.cuEventRecord(event, stream))
assert driver.cuEventQuery(event)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
assert driver.cuStreamQuery(stream)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
released.set()
check(driver.cuEventSynchronize(event))
assert list((ctypes.c_float * 8).from_address(int(host))) == [1.0] * 8
other = check(driver.cuEventCreate(0))
check(driver.cuEventRecord(other, stream))
check(driver.cuStreamSynchronize(stream))
assert check(driver.cuEventElapsedTime(event, other)) >= 0
free, total = check(driver.cuMemGetInfo())
assert 0 < free < total
kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
assert int(check(driver.cuPointerGetAttribute(kind, memory))) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
check(driver.cuMemFree(memory))
check(driver.cuMemFreeHost(host))
"""
    )


def test_kernels_and_errors(libraries: Path) -> None:
    _run(
        """
try:
    compiled(b"int main() { return missing; }")
except RuntimeError as error:
    assert "kernel.cu(1): error" in str(error)
else:
    raise AssertionError("no error")
memory, function = zeros(), load(ADD, b"add")
check(launch(function, 0, memory, 2.5))
assert floats(memory) == [2.5] * 8
config = driver.CUlaunchConfig()
config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
config.blockDimX = 4
check(driver.cuLaunchKernelEx(config, function, ((int(memory), 1.0), (ctypes.c_void_p, ctypes.c_float)), 0))
assert floats(memory) == [3.5] * 4 + [2.5] * 4
attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
assert check(driver.cuFuncGetAttribute(attribute, function)) == 1024
assert check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 256, 0)) == 8
assert driver.cuModuleLoadData(b"\\x7fELF" + bytes(100))[0] != driver.CUresult.CUDA_SUCCESS
check(launch(function, 0, 4096, 1.0))
illegal = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
assert driver.cuCtxSynchronize()[0] == illegal
assert driver.cuMemAlloc(4)[0] == illegal
"""
    )


def test_graphs_and_capture(libraries: Path) -> None:
    _run(
        """
memory, function, stream = zeros(), load(ADD, b"add"), check(driver.cuStreamCreate(1))
check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
check(launch(function, stream, memory, 1.0))
check(launch(function, stream, memory, 2.0))
status, number, graph, dependencies, edges, count = check(driver.cuStreamGetCaptureInfo(stream))
assert (int(status), count) == (1, 1)
graph = check(driver.cuStreamEndCapture(stream))
nodes, count = check(driver.cuGraphGetNodes(graph, 8))
assert count == 2
executable = check(driver.cuGraphInstantiate(graph, 0))
for _ in range(3):
    check(driver.cuGraphLaunch(executable, stream))
check(driver.cuStreamSynchronize(stream))
assert floats(memory) == [9.0] * 8

parameters = driver.CUDA_KERNEL_NODE_PARAMS()
parameters.func = function
parameters.gridDimX = parameters.gridDimY = parameters.gridDimZ = parameters.blockDimY = parameters.blockDimZ = 1
parameters.blockDimX = 8
parameters.kernelParams = ((int(memory), 10.0), (ctypes.c_void_p, ctypes.c_float))
made = check(driver.cuGraphCreate(0))
fill = driver.CUDA_MEMSET_NODE_PARAMS()
fill.dst, fill.value, fill.elementSize, fill.width, fill.height = memory, 0, 4, 8, 1
first = check(driver.cuGraphAddMemsetNode(made, [], 0, fill, context))
second = check(driver.cuGraphAddKernelNode(made, [first], 1, parameters))
executable = check(driver.cuGraphInstantiate(made, 0))
check(driver.cuGraphLaunch(executable, stream))
check(driver.cuStreamSynchronize(stream))
assert floats(memory) == [10.0] * 8
parameters.kernelParams = ((int(memory), 20.0), (ctypes.c_void_p, ctypes.c_float))
check(driver.cuGraphExecKernelNodeSetParams(executable, second, parameters))
check(driver.cuGraphLaunch(executable, stream))
check(driver.cuStreamSynchronize(stream))
assert floats(memory) == [20.0] * 8
answer = driver.cuGraphExecUpdate(executable, graph)
assert int(answer[0]) == 910
"""
    )


def test_virtual_memory_and_handles(libraries: Path) -> None:
    _run(
        """
properties = driver.CUmemAllocationProp()
properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
properties.location.id = 0
minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
size = check(driver.cuMemGetAllocationGranularity(properties, minimum))
begin = check(driver.cuMemAddressReserve(4 * size, 0, 0, 0))
handle = check(driver.cuMemCreate(size, properties, 0))
check(driver.cuMemMap(int(begin) + size, size, 0, handle, 0))
access = driver.CUmemAccessDesc()
access.location = properties.location
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
check(driver.cuMemSetAccess(int(begin) + size, size, [access], 1))
check(driver.cuMemsetD32(int(begin) + size, 0x40000000, 8))
assert floats(int(begin) + size) == [2.0] * 8
check(driver.cuMemUnmap(int(begin) + size, size))
check(driver.cuMemRelease(handle))
check(driver.cuMemAddressFree(begin, 4 * size))
memory = zeros()
exported = check(driver.cuIpcGetMemHandle(memory))
flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
assert driver.cuIpcOpenMemHandle(exported, flag)[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT  # the same process
flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING | driver.CUevent_flags.CU_EVENT_INTERPROCESS
event = check(driver.cuEventCreate(flags))
exported = check(driver.cuIpcGetEventHandle(event))
assert driver.cuIpcOpenEventHandle(exported)[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
"""
    )
