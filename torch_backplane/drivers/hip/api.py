"""The names of cuda.bindings.driver that the CUDA driver uses, for functions of HIP.

Numbers and structures are those of HIP's headers (hip_runtime_api.h, versions 6 and 7).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from enum import IntEnum
from functools import partial
from typing import Any

from torch_backplane.drivers.hip import library
from torch_backplane.drivers.hip.calls import Function, Stored, Text

CU_MEMHOSTREGISTER_PORTABLE = 1  # hipHostRegisterPortable

_ARCHITECTURE = 1160  # the offset of gcnArchName in hipDeviceProp_tR0600, which has 1,472 bytes
_PROPERTY_BYTES = 4096


class CUdevice_attribute(IntEnum):
    """hipDeviceAttribute_t."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 6
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 19
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 23
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 56
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 61
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 63
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 74
    CU_DEVICE_ATTRIBUTE_WARP_SIZE = 87
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 89


class CUfunction_attribute(IntEnum):
    """hipFunction_attribute."""

    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUcomputemode(IntEnum):
    """hipComputeMode."""

    CU_COMPUTEMODE_PROHIBITED = 2
    CU_COMPUTEMODE_EXCLUSIVE_PROCESS = 3


class CUmemAllocationGranularity_flags(IntEnum):
    """hipMemAllocationGranularity_flags."""

    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAllocationType(IntEnum):
    """hipMemAllocationType."""

    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    """hipMemLocationType."""

    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(IntEnum):
    """hipMemAccessFlags."""

    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUstream_flags(IntEnum):
    """Flags of hipStreamCreateWithFlags."""

    CU_STREAM_NON_BLOCKING = 1


class CUmemLocation(ctypes.Structure):
    """hipMemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class CUmemAllocationProp(ctypes.Structure):
    """hipMemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleType", c_int),
        ("location", CUmemLocation),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", ctypes.c_ubyte * 4),
    )


class CUmemAccessDesc(ctypes.Structure):
    """hipMemAccessDesc."""

    _fields_ = (("location", CUmemLocation), ("flags", c_int))


class CUresult(int):
    """hipError_t."""

    @property
    def name(self) -> str:
        """Its name."""
        return _text("hipGetErrorName", self)


def cuGetErrorString(status: int) -> tuple[int, bytes]:
    """Return 0 and what a status means."""
    return 0, _text("hipGetErrorString", status).encode()


def _text(function: str, status: int) -> str:
    described = getattr(library.hip(), function)
    described.restype = ctypes.c_char_p
    return (described(c_int(status)) or b"").decode(errors="replace")


def architecture(device: int) -> str:
    """Return the architecture of a device as compilers name it, such as "gfx90a:sramecc+:xnack-".

    Raises:
        RuntimeError: HIP failed.
    """
    properties = ctypes.create_string_buffer(_PROPERTY_BYTES)
    status = CUresult(library.hip().hipGetDevicePropertiesR0600(properties, c_int(device)))
    if status != 0:
        raise RuntimeError(f"hipGetDevicePropertiesR0600 answered {status.name} ({status})")
    return properties.raw[_ARCHITECTURE:].partition(b"\0")[0].decode()


def version_of(number: int) -> tuple[int, int]:
    """Return the version that hipRuntimeGetVersion returned as a number."""
    return number // 10_000_000, number // 100_000 % 100


def _function(name: str, *parameters: Any) -> Function:
    return Function(name, partial(library.function, name), CUresult, *parameters)


_INT, _SIZE, _HANDLE = Stored(c_int), Stored(c_size_t), Stored(c_void_p)
_ADDRESS, _STREAM = c_uint64, c_void_p

cuInit = _function("cuInit", c_uint)
cuDriverGetVersion = _function("cuDriverGetVersion", _INT)
cuDeviceGetCount = _function("cuDeviceGetCount", _INT)
cuDeviceGet = _function("cuDeviceGet", _INT, c_int)
cuDeviceGetName = _function("cuDeviceGetName", Text, c_int)
cuDeviceGetPCIBusId = _function("cuDeviceGetPCIBusId", Text, c_int)
cuDeviceTotalMem = _function("cuDeviceTotalMem", _SIZE, c_int)
cuDeviceGetAttribute = _function("cuDeviceGetAttribute", _INT, c_int, c_int)
cuDeviceCanAccessPeer = _function("cuDeviceCanAccessPeer", _INT, c_int, c_int)
cuCtxPushCurrent = _function("cuCtxPushCurrent", c_void_p)
cuCtxPopCurrent = _function("cuCtxPopCurrent", _HANDLE)
cuCtxEnablePeerAccess = _function("cuCtxEnablePeerAccess", c_void_p, c_uint)
cuCtxGetStreamPriorityRange = _function("cuCtxGetStreamPriorityRange", _INT, _INT)
cuMemAlloc = _function("cuMemAlloc", Stored(_ADDRESS), c_size_t)
cuMemFree = _function("cuMemFree", _ADDRESS)
cuMemGetInfo = _function("cuMemGetInfo", _SIZE, _SIZE)
cuMemHostRegister = _function("cuMemHostRegister", _ADDRESS, c_size_t, c_uint)
cuMemHostUnregister = _function("cuMemHostUnregister", _ADDRESS)
cuMemGetAllocationGranularity = _function("cuMemGetAllocationGranularity", _SIZE, CUmemAllocationProp, c_int)
cuMemAddressReserve = _function(
    "cuMemAddressReserve", Stored(_ADDRESS), c_size_t, c_size_t, _ADDRESS, ctypes.c_ulonglong
)
cuMemAddressFree = _function("cuMemAddressFree", _ADDRESS, c_size_t)
cuMemCreate = _function("cuMemCreate", _HANDLE, c_size_t, CUmemAllocationProp, ctypes.c_ulonglong)
cuMemRelease = _function("cuMemRelease", c_void_p)
cuMemMap = _function("cuMemMap", _ADDRESS, c_size_t, c_size_t, c_void_p, ctypes.c_ulonglong)
cuMemUnmap = _function("cuMemUnmap", _ADDRESS, c_size_t)
cuMemSetAccess = _function("cuMemSetAccess", _ADDRESS, c_size_t, CUmemAccessDesc, c_size_t)
cuMemcpyHtoDAsync = _function("cuMemcpyHtoDAsync", _ADDRESS, c_void_p, c_size_t, _STREAM)
cuMemcpyDtoHAsync = _function("cuMemcpyDtoHAsync", c_void_p, _ADDRESS, c_size_t, _STREAM)
cuMemcpyDtoDAsync = _function("cuMemcpyDtoDAsync", _ADDRESS, _ADDRESS, c_size_t, _STREAM)
cuStreamCreateWithPriority = _function("cuStreamCreateWithPriority", _HANDLE, c_uint, c_int)
cuStreamDestroy = _function("cuStreamDestroy", _STREAM)
cuStreamGetCtx = _function("cuStreamGetCtx", _STREAM, _HANDLE)
cuStreamQuery = _function("cuStreamQuery", _STREAM)
cuStreamSynchronize = _function("cuStreamSynchronize", _STREAM)
cuModuleLoadData = _function("cuModuleLoadData", _HANDLE, c_void_p)
cuModuleUnload = _function("cuModuleUnload", c_void_p)
cuModuleGetFunction = _function("cuModuleGetFunction", _HANDLE, c_void_p, c_void_p)
cuFuncGetAttribute = _function("cuFuncGetAttribute", _INT, c_int, c_void_p)
