"""The device of the CUDA driver: its primary context, which CuPy and torch.cuda share.

Addresses are CUDA's, so segments and address ranges are integers. A native launcher (csrc/drivers/cuda/) launches,
copies, fills, records events and runs graphs; what is here is called less often. The context is made at first use.

The driver (driver.py) imports this module if libcuda and cuda-bindings are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch_backplane import _C
from torch_backplane.drivers.base import (
    Device,
    DeviceError,
    DeviceProperties,
    KernelResources,
    NativeLauncher,
    TritonTarget,
)
from torch_backplane.drivers.cuda import platforms, sensors
from torch_backplane.drivers.cuda.compiler import Compiler
from torch_backplane.drivers.cuda.errors import (
    ALREADY_ACCESSIBLE,
    ALREADY_PINNED,
    NOT_READY,
    allocated,
    checked,
    error,
    failed_call,
)
from torch_backplane.drivers.cuda.target import target
from torch_backplane.kernels.dialects.cuda_cpp import CudaCpp

if TYPE_CHECKING:
    from cuda.bindings import driver as cuda
else:
    from torch_backplane.drivers.cuda.platforms import driver as cuda

DLPACK_CUDA = 2  # kDLCUDA
LEGACY_STREAM = 1  # CU_STREAM_LEGACY, CUDA's default stream
LEAST_ADDRESS = 1 << 16  # no memory is mapped below it
MOST_NAME_BYTES = 256
RANGE_UNIT = 2 << 20  # bytes: the parts of an address range are multiples of it

# What Triton's own driver returns from get_device_properties(), and the attribute of CUDA (CU_DEVICE_ATTRIBUTE_…).
_TRITON_PROPERTIES = {
    "max_shared_mem": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "max_num_regs": "MAX_REGISTERS_PER_BLOCK",
    "multiprocessor_count": "MULTIPROCESSOR_COUNT",
    "warpSize": "WARP_SIZE",
    "sm_clock_rate": "CLOCK_RATE",
    "mem_clock_rate": "MEMORY_CLOCK_RATE",
    "mem_bus_width": "GLOBAL_MEMORY_BUS_WIDTH",
}

# Statuses of a binary that does not fit the device: invalid image or PTX, no code for it, newer PTX, no such kernel.
_NOT_LOADABLE = (200, 209, 218, 222, 500)

# The call that a function of the native launcher makes, for messages if the one that has failed is not known.
CALLS = {
    "launch": "cuLaunchKernel",
    "launch_with_attributes": "cuLaunchKernelEx",
    "copy": "cuMemcpyDtoDAsync",
    "fill": "cuMemsetD8Async",
    "copy_in": "cuMemcpyHtoDAsync",
    "copy_out": "cuMemcpyDtoHAsync",
    "create_event": "cuEventCreate",
    "record_event": "cuEventRecord",
    "wait_event": "cuStreamWaitEvent",
    "query_event": "cuEventQuery",
    "synchronize_event": "cuEventSynchronize",
    "elapsed": "cuEventElapsedTime",
    "host_callback": "cuLaunchHostFunc",
    "copy_from_peer": "cuMemcpyAsync",
    "wait_peer_event": "cuStreamWaitEvent",
    "export_memory": "cuIpcGetMemHandle",
    "import_memory": "cuIpcOpenMemHandle",
    "close_memory": "cuIpcCloseMemHandle",
    "create_shared_event": "cuEventCreate",
    "export_event": "cuIpcGetEventHandle",
    "import_event": "cuIpcOpenEventHandle",
    "graph_create": "cuGraphInstantiateWithFlags, or a call that adds a node,",
    "graph_update": "cuGraphExec…NodeSetParams",
    "graph_launch": "cuGraphLaunch",
    "begin_capture": "cuStreamCreate or cuStreamBeginCapture",
    "end_capture": "cuStreamEndCapture or cuStreamDestroy",
}


@dataclass(frozen=True)
class Stream:
    """A CUstream."""

    handle: int
    is_adopted: bool = False


@dataclass(frozen=True, eq=False)
class Kernel:
    """A CUfunction. Its module is unloaded with the object."""

    function: int


@dataclass
class Range:
    """A reserved address range: its size, and the size and the memory of each mapped part, by address."""

    nbytes: int
    parts: dict[int, tuple[int, cuda.CUmemGenericAllocationHandle]] = field(default_factory=dict)


class CUDADevice(Device):
    """A CUDA device, or a HIP device (drivers/hip/).

    Attributes:
        bus: its PCI bus id.
        dialect: of its kernels.
        dlpack_type: as in dlpack.h.

    Args:
        index: its number in CUDA.
        functions: the addresses of the functions of libcuda in `_C.cuda_functions()`.
        software: see `DeviceProperties`.

    Raises:
        UnsupportedArchitecture: NVRTC cannot compile for it.
        DeviceError: a query failed.
    """

    dialect: ClassVar[type[CudaCpp]] = CudaCpp
    dlpack_type: ClassVar[int] = DLPACK_CUDA

    def __init__(self, index: int, functions: Mapping[str, int], software: str) -> None:
        self.index = index
        self.handle = checked(cuda.cuDeviceGet, index)
        self.properties = self._describe(software)
        self.bus = _string(cuda.cuDeviceGetPCIBusId, MOST_NAME_BYTES, self.handle)
        self._compiler = self._make_compiler()
        platforms.keep()
        launcher = _C.cuda_launcher(dict(functions), index, int(self.handle))
        self.native_launcher = NativeLauncher(api="c", functions=launcher)
        self._can_reserve = self._maps_parts()
        self._ranges: dict[int, Range] = {}
        self._accessors = [index]  # the devices that can access the memory of this one
        self._lock = threading.Lock()

    def _make_compiler(self, named: str = "") -> Compiler:
        """Return the compiler. `named`: as in `Compiler`."""
        return Compiler(self.properties.capability, self.dialect(self.properties.target).compile_options, named)

    def _describe(self, software: str) -> DeviceProperties:
        figures = target(self.attribute, self.dialect.matrix_capabilities)
        capability = (
            self.attribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self.attribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        return DeviceProperties(
            name=_string(cuda.cuDeviceGetName, MOST_NAME_BYTES, self.handle),
            total_memory=checked(cuda.cuDeviceTotalMem, self.handle),
            address_space="device",
            dlpack_device=(self.dlpack_type, self.index),
            compute_units=figures.compute_units,
            capability=capability,
            dialect=self.dialect.name,
            kind="gpu",
            target=figures,
            software=software,
        )

    def attribute(self, name: cuda.CUdevice_attribute) -> int:
        """Return an attribute of the device."""
        return int(checked(cuda.cuDeviceGetAttribute, name, self.handle))

    @property
    def architecture(self) -> str:
        """Its architecture, such as "sm_90" or "gfx90a"."""
        major, minor = self.properties.capability
        return f"sm_{major}{minor}"

    @property
    def native_context(self) -> int:  # type: ignore[override]
        """The primary context. The first use makes it, which can take seconds."""
        status, context = _C.cuda_context(self.index)
        if status != 0:
            raise error("cuDevicePrimaryCtxRetain", status)
        return int(context)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current in this thread, and then the previous one again, which can be another library's."""
        checked(cuda.cuCtxPushCurrent, self.native_context)
        try:
            yield
        finally:
            checked(cuda.cuCtxPopCurrent)

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        with self.current():
            return int(allocated(cuda.cuMemAlloc, nbytes))

    def free(self, handle: int) -> None:
        with self.current():
            checked(cuda.cuMemFree, handle)

    def address(self, handle: int) -> int:
        return handle

    def memory_info(self) -> tuple[int, int]:
        with self.current():
            free, total = checked(cuda.cuMemGetInfo)
        return int(free), int(total)

    def can_reserve(self) -> bool:
        return self._can_reserve

    def _maps_parts(self) -> bool:
        """Return whether the device has address ranges whose parts can be as small as the runtime's."""
        if not self.attribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED):
            return False
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return RANGE_UNIT % int(checked(cuda.cuMemGetAllocationGranularity, self._memory_of_device(), least)) == 0

    def reserve(self, nbytes: int) -> int:
        with self.current():
            address = int(allocated(cuda.cuMemAddressReserve, nbytes, RANGE_UNIT, 0, 0))
        with self._lock:
            self._ranges[address] = Range(nbytes)
        return address

    def unreserve(self, handle: int) -> None:
        with self._lock:
            found = self._ranges.pop(handle)
        with self.current():
            checked(cuda.cuMemAddressFree, handle, found.nbytes)

    def map(self, handle: int, offset: int, nbytes: int) -> None:
        start = handle + offset
        with self.current():
            memory = allocated(cuda.cuMemCreate, nbytes, self._memory_of_device(), 0)
            try:
                allocated(cuda.cuMemMap, start, nbytes, 0, memory, 0)
                try:
                    with self._lock:
                        self._let_access(start, nbytes, self._accessors)
                        self._ranges[handle].parts[start] = (nbytes, memory)
                except BaseException:
                    checked(cuda.cuMemUnmap, start, nbytes)
                    raise
            except BaseException:
                checked(cuda.cuMemRelease, memory)
                raise

    def unmap(self, handle: int, offset: int, nbytes: int) -> None:
        start = handle + offset
        with self._lock:
            size, memory = self._ranges[handle].parts.pop(start)
        with self.current():
            checked(cuda.cuMemUnmap, start, size)
            checked(cuda.cuMemRelease, memory)

    def _memory_of_device(self) -> cuda.CUmemAllocationProp:
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        return properties

    @staticmethod
    def _let_access(start: int, nbytes: int, devices: list[int]) -> None:
        accesses = []
        for index in devices:
            access = cuda.CUmemAccessDesc()
            access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = index
            access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            accesses.append(access)
        allocated(cuda.cuMemSetAccess, start, nbytes, accesses, len(accesses))

    def pin(self, host_memory: memoryview) -> int:
        start = ctypes.addressof(ctypes.c_char.from_buffer(host_memory))
        with self.current():
            return _pinned.pin(start, len(host_memory))

    def unpin(self, handle: int) -> None:
        with self.current():
            _pinned.unpin(handle)

    # --- transfers that the native launcher does not make ------------------------------------------------------------

    def copy_in(self, handle: int, offset: int, host_memory: memoryview, stream: Stream) -> None:
        with self.current():
            checked(cuda.cuMemcpyHtoDAsync, handle + offset, host_memory, len(host_memory), stream.handle)

    def copy_out(self, handle: int, offset: int, host_memory: memoryview, stream: Stream) -> None:
        with self.current():
            checked(cuda.cuMemcpyDtoHAsync, host_memory, handle + offset, len(host_memory), stream.handle)

    def copy(
        self, dst_handle: int, dst_offset: int, src_handle: int, src_offset: int, nbytes: int, stream: Stream
    ) -> None:
        between = self.allocate(nbytes)  # CUDA copies only between ranges that do not overlap
        try:
            with self.current():
                checked(cuda.cuMemcpyDtoDAsync, between, src_handle + src_offset, nbytes, stream.handle)
                checked(cuda.cuMemcpyDtoDAsync, dst_handle + dst_offset, between, nbytes, stream.handle)
                checked(cuda.cuStreamSynchronize, stream.handle)
        finally:
            self.free(between)

    def can_access_peer(self, peer: Device) -> bool:
        if not isinstance(peer, CUDADevice):
            return False
        if not checked(cuda.cuDeviceCanAccessPeer, self.handle, peer.handle):
            return True  # CUDA copies through the host
        with self.current():
            try:
                checked(cuda.cuCtxEnablePeerAccess, peer.native_context, 0)
            except DeviceError as failure:
                if failure.code != ALREADY_ACCESSIBLE:
                    raise
        peer.open_ranges(self.index)
        return True

    def open_ranges(self, accessor: int) -> None:
        """Let another device access the address ranges of this one, also what is mapped later."""
        with self.current(), self._lock:
            self._accessors.append(accessor)
            for reserved in self._ranges.values():
                for start, (nbytes, _) in reserved.parts.items():
                    self._let_access(start, nbytes, [accessor])

    def can_wait_for_peer(self, peer: Device) -> bool:
        return isinstance(peer, CUDADevice)

    # --- kernels -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def triton_target(self) -> TritonTarget:  # type: ignore[override]
        """Triton's target: "cuda", with the compute capability as a number."""
        major, minor = self.properties.capability
        names = cuda.CUdevice_attribute
        figures = {
            name: self.attribute(getattr(names, f"CU_DEVICE_ATTRIBUTE_{attribute}"))
            for name, attribute in _TRITON_PROPERTIES.items()
        }
        return TritonTarget(
            backend="cuda", architecture=10 * major + minor, warp_size=figures["warpSize"], properties=figures
        )

    def compile(self, text: str, entry: str) -> Kernel:
        return self._compiler.get(text, lambda program: self._load(program, entry))

    def load(self, binary: bytes, entry: str) -> Kernel:
        kernel = self._load(binary, entry)
        most = self.attribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        static, limit = (
            cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        )
        with self.current():  # without this, launches have at most 48 KiB of shared memory
            declared = int(checked(cuda.cuFuncGetAttribute, static, kernel.function))
            checked(cuda.cuFuncSetAttribute, kernel.function, limit, most - declared)
        return kernel

    def _load(self, binary: bytes, entry: str) -> Kernel:
        with self.current():
            try:
                module = checked(cuda.cuModuleLoadData, binary + b"\0")
                function = checked(cuda.cuModuleGetFunction, module, entry.encode())
            except DeviceError as failure:
                if failure.code not in _NOT_LOADABLE:
                    raise
                raise ValueError(
                    f"the binary is for {architecture_of(binary)}, and {self.properties.name} is {self.architecture}; "
                    f"or it has no kernel {entry}: {failure}"
                ) from failure
        kernel = Kernel(int(function))
        weakref.finalize(kernel, self._unload, module).atexit = False
        return kernel

    def _unload(self, module: cuda.CUmodule) -> None:
        with contextlib.suppress(DeviceError), self.current():  # the context is lost
            cuda.cuModuleUnload(module)

    def kernel_resources(self, kernel: Kernel) -> KernelResources:
        with self.current():
            registers, local, shared, threads, dynamic = (
                int(checked(cuda.cuFuncGetAttribute, name, kernel.function))
                for name in (
                    cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
                    cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                    cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                    cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                    cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                )
            )
        return KernelResources(
            registers=registers,
            spilled_bytes=local,
            static_shared_memory=shared,
            max_group_size=threads,
            max_dynamic_shared_memory=dynamic,
        )

    def build_counts(self) -> dict[str, int]:
        return dict(self._compiler.counts)

    def native_kernel(self, kernel: Kernel) -> int:
        return kernel.function

    def native_stream(self, stream: Stream) -> int:
        return stream.handle

    def native_segment(self, handle: int) -> int:
        return handle

    def native_error(self, call: str, status: int) -> Exception:
        return error(failed_call(status) or CALLS.get(call, call), status)

    # --- streams; the native launcher has the events -----------------------------------------------------------------

    def create_stream(self, priority: int) -> Stream:
        with self.current():
            _, greatest = checked(cuda.cuCtxGetStreamPriorityRange)
            flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = checked(cuda.cuStreamCreateWithPriority, int(flags), max(priority, greatest))
        return Stream(int(stream))

    def adopt_stream(self, handle: int) -> Stream:
        platform = platforms.chosen().name
        if handle != LEGACY_STREAM and (handle < LEAST_ADDRESS or handle % ctypes.sizeof(ctypes.c_void_p)):
            raise ValueError(f"{handle} is not a {platform} stream")  # CUDA would read at that address
        with self.current():
            status, context = cuda.cuStreamGetCtx(handle)
        if int(status) != 0:
            raise ValueError(f"{handle} is not a {platform} stream: {error('cuStreamGetCtx', int(status))}")
        if int(context) != self.native_context:
            raise ValueError(
                f"the stream {handle} does not belong to the primary context of {self.properties.name}: "
                "create it in torch.bp.native_context()"
            )
        return Stream(handle, is_adopted=True)

    def destroy_stream(self, stream: Stream) -> None:
        if not stream.is_adopted:
            with self.current():
                checked(cuda.cuStreamDestroy, stream.handle)

    def query_stream(self, stream: Stream) -> bool:
        with self.current():
            (status,) = cuda.cuStreamQuery(stream.handle)
        if int(status) not in (0, NOT_READY):
            raise error("cuStreamQuery", int(status))
        return int(status) == 0

    def synchronize_stream(self, stream: Stream) -> None:
        with self.current():
            checked(cuda.cuStreamSynchronize, stream.handle)

    def sleep(self, milliseconds: float, stream: Stream) -> None:
        status = _C.cuda_sleep(self.index, stream.handle, milliseconds)
        if status != 0:
            raise error("cuLaunchHostFunc", status)

    # --- sensors -----------------------------------------------------------------------------------------------------

    sensors = tuple(sensors.READERS)

    def read_sensor(self, name: str) -> int:
        return sensors.read(name, self.bus)


class PinnedMemory:
    """Host memory that is page-locked for all devices, with the number of devices that have asked for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, int] = {}
        self._others: set[int] = set()  # pinned by another library, which unpins it

    def pin(self, start: int, nbytes: int) -> int:
        """Page-lock memory, if it is not yet, and return its address.

        Raises:
            MemoryError: no more memory can be pinned.
        """
        with self._lock:
            if start not in self._users:
                try:
                    allocated(cuda.cuMemHostRegister, start, nbytes, cuda.CU_MEMHOSTREGISTER_PORTABLE)
                except DeviceError as failure:
                    if failure.code != ALREADY_PINNED:
                        raise
                    self._others.add(start)
            self._users[start] = self._users.get(start, 0) + 1
        return start

    def unpin(self, start: int) -> None:
        """Undo a `pin`."""
        with self._lock:
            self._users[start] -= 1
            if self._users[start] == 0:
                del self._users[start]
                if start in self._others:
                    self._others.remove(start)
                else:
                    checked(cuda.cuMemHostUnregister, start)


_pinned = PinnedMemory()


def _string(function: Callable[..., Any], *arguments: Any) -> str:
    """Call a function of cuda-bindings that returns a zero-terminated string."""
    return checked(function, *arguments).partition(b"\0")[0].decode()


def architecture_of(binary: bytes) -> str:
    """Return the architecture of a binary, such as "sm_90", "PTX for sm_80" or "gfx90a"; "no GPU" if there is none."""
    target_id = re.search(rb"amdgcn-amd-amdhsa-+(gfx\w+)", binary)  # in code objects of HIP, and in bundles of them
    if target_id:
        return target_id[1].decode()
    if binary.startswith(b"\x7fELF") and len(binary) >= 52:
        (flags,) = struct.unpack_from("<I", binary, 48)
        return f"sm_{flags >> 8 & 255 if binary[8] >= 8 else flags & 255}"
    ptx = re.search(rb"^\.target (\w+)", binary, re.MULTILINE)
    return f"PTX for {ptx[1].decode()}" if ptx else "no GPU"
