"""Compares what the HIP driver assumes of HIP with HIP's headers, where they are installed: parameters and numbers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths
import pytest
import torch

from torch_backplane import _C
from torch_backplane.drivers.hip import api, library, rtc
from torch_backplane.drivers.hip.calls import Function, Stored, Text

# HIP's names of the numbers in api.py.
NUMBERS = {
    "hipDeviceAttributeComputeMode": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
    "hipDeviceAttributeL2CacheSize": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    "hipDeviceAttributeComputeCapabilityMajor": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    "hipDeviceAttributeMaxThreadsPerBlock": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    "hipDeviceAttributeComputeCapabilityMinor": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    "hipDeviceAttributeMultiprocessorCount": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    "hipDeviceAttributeMaxSharedMemoryPerBlock": (
        api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK
    ),
    "hipDeviceAttributeWarpSize": api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    "hipDeviceAttributeVirtualMemoryManagementSupported": (
        api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    ),
    "HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    "HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES": api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
    "HIP_FUNC_ATTRIBUTE_NUM_REGS": api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
    "hipComputeModeProhibited": api.CUcomputemode.CU_COMPUTEMODE_PROHIBITED,
    "hipComputeModeExclusiveProcess": api.CUcomputemode.CU_COMPUTEMODE_EXCLUSIVE_PROCESS,
    "hipMemAllocationGranularityMinimum": api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
    "hipMemAllocationTypePinned": api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
    "hipMemLocationTypeDevice": api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
    "hipMemAccessFlagsProtReadWrite": api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    "hipHostRegisterPortable": api.CU_MEMHOSTREGISTER_PORTABLE,
    "hipStreamNonBlocking": api.CUstream_flags.CU_STREAM_NON_BLOCKING,
    # In csrc/drivers/cuda/cuda_api.h, csrc/drivers/hip/hip_api.h and drivers/cuda/errors.py:
    "hipEventDisableTiming": 2,
    "hipEventInterprocess": 4,
    "hipIpcMemLazyEnablePeerAccess": 1,
    "hipStreamCaptureModeThreadLocal": 1,
    "hipStreamCaptureModeRelaxed": 2,
    "hipMemcpyDeviceToDevice": 3,
    "hipMemcpyDefault": 4,
    "hipErrorInvalidValue": 1,
    "hipErrorOutOfMemory": 2,
    "hipErrorInvalidContext": 201,
    "hipErrorNotReady": 600,
    "hipErrorIllegalAddress": 700,
    "hipErrorPeerAccessAlreadyEnabled": 704,
    "hipErrorHostMemoryAlreadyRegistered": 712,
    "hipErrorLaunchFailure": 719,
    "hipErrorNotSupported": 801,
    "hipErrorGraphExecUpdateFailure": 910,
}

TRAITS = """
#include <cstddef>
#include <hip/hip_runtime_api.h>
#include <hip/hiprtc.h>
#include "drivers/cuda/cuda_api.h"
#include "drivers/hip/hip_api.h"

template <class A, class B> constexpr bool agree = false;
template <class A, class... P, class B, class... Q>
constexpr bool agree<A(P...), B(Q...)> = [] {
  if constexpr (sizeof...(P) == sizeof...(Q)) {
    return ((sizeof(P) == sizeof(Q)) && ...);
  }
  return false;
}();
template <int bytes> struct Bytes { char all[bytes]; };

#define OF_CUDA(name, parameters) using Cuda_##name = int parameters;
#define OF_HIP(name, parameters) using Hip_##name = int parameters;
namespace backplane::cuda { BACKPLANE_CUDA_FUNCTIONS(OF_CUDA) }
namespace backplane::hip { BACKPLANE_HIP_FUNCTIONS(OF_HIP) }
"""

STRUCTURES = """
#define SAME(own, member, of_hip, other) \\
  static_assert(offsetof(backplane::hip::own, member) == offsetof(of_hip, other), #of_hip "." #other);
SAME(KernelNodeParams, block, hipKernelNodeParams, blockDim)
SAME(KernelNodeParams, extra, hipKernelNodeParams, extra)
SAME(KernelNodeParams, function, hipKernelNodeParams, func)
SAME(KernelNodeParams, grid, hipKernelNodeParams, gridDim)
SAME(KernelNodeParams, arguments, hipKernelNodeParams, kernelParams)
SAME(KernelNodeParams, shared_memory, hipKernelNodeParams, sharedMemBytes)
SAME(MemsetParams, destination, hipMemsetParams, dst)
SAME(MemsetParams, element_size, hipMemsetParams, elementSize)
SAME(MemsetParams, height, hipMemsetParams, height)
SAME(MemsetParams, pitch, hipMemsetParams, pitch)
SAME(MemsetParams, value, hipMemsetParams, value)
SAME(MemsetParams, width, hipMemsetParams, width)
static_assert(sizeof(backplane::hip::KernelNodeParams) == sizeof(hipKernelNodeParams));
static_assert(sizeof(backplane::hip::MemsetParams) == sizeof(hipMemsetParams));
static_assert(sizeof(backplane::cuda::IpcHandle) == sizeof(hipIpcMemHandle_t));
static_assert(sizeof(backplane::cuda::IpcHandle) == sizeof(hipIpcEventHandle_t));
static_assert(sizeof(backplane::cuda::HostNodeParams) == sizeof(hipHostNodeParams));
"""


def includes() -> Path | None:
    """The folder of HIP's headers, or None."""
    roots = filter(None, (os.environ.get("ROCM_PATH"), "/opt/rocm", "/usr"))
    return next((Path(one, "include") for one in roots if Path(one, "include/hip/hip_runtime_api.h").exists()), None)


INCLUDES = includes()
pytestmark = [
    pytest.mark.skipif(INCLUDES is None, reason="needs HIP's headers (apt-get install libamdhip64-dev, or ROCM_PATH)"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


FILES = ("hip_runtime_api.h", "hiprtc.h", "driver_types.h")


def headers() -> str:
    assert INCLUDES is not None
    return "".join((INCLUDES / "hip" / name).read_text(encoding="utf-8") for name in FILES)


def version() -> int:
    assert INCLUDES is not None
    found = re.search(r"HIP_VERSION_MAJOR (\d+)", (INCLUDES / "hip/hip_version.h").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def sizes(function: Function) -> str:
    """The sizes of a function's parameters as types of TRAITS."""
    def each() -> Iterator[int]:
        for one in function._parameters:
            if one is Text:
                yield from (8, 4)
            elif isinstance(one, Stored) or issubclass(one, ctypes.Structure):
                yield 8
            else:
                yield ctypes.sizeof(one)

    return ", ".join(f"Bytes<{one}>" for one in each())


def assertions() -> dict[str, str]:
    """A condition for each declaration of a function of HIP, by the name of the function and the place."""
    found: dict[str, str] = {}
    own = {name.partition("_v")[0]: name for name in _C.cuda_functions()}
    adapted = set(_C.hip_adapted())
    calls: dict[str, Any] = {library.name_of(name): one for name, one in vars(api).items() if isinstance(one, Function)}
    calls |= {one.__name__: one for one in vars(rtc).values() if isinstance(one, Function)}
    for name in ADAPTED_CALLS:
        del calls[library.name_of(name)]
    for name, one in calls.items():
        found[f"{name}, in Python"] = f"agree<int({sizes(one)}), decltype({name})>"
    for name, with_version in own.items():
        if name not in ADAPTED:
            hip = library.name_of(name)
            found[f"{hip}, in C++"] = f"agree<backplane::cuda::Cuda_{with_version}, decltype({hip})>"
    for name in adapted:
        found[f"{name}, adapted"] = f"agree<backplane::hip::Hip_{name}, decltype({name})>"
    return found


# Functions of hip_functions.cpp, which differ from HIP's.
ADAPTED = {
    *("cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuStreamGetCtx"),
    *("cuCtxEnablePeerAccess", "cuLaunchKernelEx", "cuMemcpyAsync", "cuGraphAddKernelNode", "cuGraphAddMemcpyNode"),
    *("cuGraphAddMemsetNode", "cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"),
    "cuGraphExecMemsetNodeSetParams",
}
ADAPTED_CALLS = ("cuCtxPushCurrent", "cuCtxEnablePeerAccess", "cuStreamGetCtx")


def compiles(folder: Path, *lines: str) -> str:
    """Returns the compiler's errors."""
    source = folder / "check.cpp"
    source.write_text("\n".join((TRAITS, *lines)), encoding="utf-8")
    torch_headers = Path(torch.__file__).parent / "include"
    made = subprocess.run(
        [
            "c++", "-std=c++20", "-fsyntax-only", "-w", "-D__HIP_PLATFORM_AMD__", "-D__HIP_DISABLE_CPP_FUNCTIONS__",
            f"-I{paths.ROOT / 'csrc'}", f"-I{torch_headers}", f"-isystem{INCLUDES}", str(source),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "\n".join(line for line in made.stderr.splitlines() if "error" in line)


def test_parameters_and_numbers_are_those_of_the_headers(tmp_path: Path) -> None:
    text = headers()
    checks = {name: test for name, test in assertions().items() if re.search(rf"\b{name.partition(',')[0]}\(", text)}
    numbers = {name: number for name, number in NUMBERS.items() if re.search(rf"\b{name}\b", text)}
    if version() < 6:
        del numbers["hipIpcMemLazyEnablePeerAccess"]  # 0 in versions that the driver does not accept
    lines = [f'static_assert({test}, "{name}");' for name, test in checks.items()]
    lines += [f'static_assert((int){name} == {int(number)}, "{name}");' for name, number in numbers.items()]
    if version() >= 6:
        assert checks.keys() == assertions().keys()
        assert numbers.keys() == NUMBERS.keys()
        lines.append(f"static_assert(offsetof(hipDeviceProp_t, gcnArchName) == {api._ARCHITECTURE});")
        lines.append(f"static_assert(sizeof(hipDeviceProp_t) <= {api._PROPERTY_BYTES});")
        lines.append(f"static_assert(sizeof(hipMemAllocationProp) == {ctypes.sizeof(api.CUmemAllocationProp)});")
        lines.append(f"static_assert(sizeof(hipMemAccessDesc) == {ctypes.sizeof(api.CUmemAccessDesc)});")
    assert len(checks) > 60
    assert compiles(tmp_path, *lines, STRUCTURES) == ""


def test_wrong_parameters_are_found(tmp_path: Path) -> None:
    said = compiles(tmp_path, "static_assert(agree<int(void**, int), decltype(hipMalloc)>);")
    assert "static assertion failed" in said
