"""The driver contract: what a Python package implements to bring a device to PyTorch.

A driver is a subclass of `Driver`, registered in the entry-point group `torch_backplane.drivers`. Its `devices()`
method returns `Device` objects. A `Device` implements memory, transfers and, if the hardware works asynchronously,
streams and events. A synchronous device needs four methods; `docs/write-a-driver.md` builds one step by step.

Rules for all methods:

* The runtime calls a method with the GIL held, from any thread. If the method releases the GIL, other threads can enter
  any method in the meantime.
* A method must not use bp tensors of the same device.
* The PyTorch call that needed the method raises its exceptions unchanged. Two exceptions have a special meaning: a
  `DeviceError` reports a hardware failure and becomes a `torch.AcceleratorError`. A `MemoryError` from `allocate` makes
  the allocator free its cached segments and try once more.
* Handles of segments, streams and events can be any Python objects. The runtime keeps a reference to each until the
  method that releases it, such as `free` or `destroy_event`, returns.
* `stream` is an object that `create_stream` or `adopt_stream` returned. The commands of a stream execute in order.
* Offsets and sizes are in bytes.
* Host memory is passed as a `memoryview` of bytes. It stays valid until the stream has executed the transfer, so a
  transfer can be asynchronous if `synchronize_stream` waits for it. Keep a reference to the memoryview until then.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_backplane.drivers.libraries import Library

if TYPE_CHECKING:
    from torch_backplane.kernels import Dialect, Target

LEAST_LARGEST = 20 << 20  # bytes: the minimum of largest_allocation, and the allocator's segment size for large tensors
FILL_CHUNK = 1 << 20  # bytes of host memory that the default fill() copies from

ALL_DTYPES: tuple[torch.dtype, ...] = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
)

FLOAT64_DTYPES = (torch.float64, torch.complex128)  # for devices without float64


# Sensors that a device can have, and what they read. The function of torch.bp with the name of a sensor returns it.
SENSORS = {
    "temperature": "degrees Celsius",
    "power_draw": "milliwatts",
    "clock_rate": "megahertz, of the compute units",
    "utilization": "percent of the time in which kernels ran",
    "memory_usage": "percent of the time in which device memory was read or written",
    "device_memory_used": "bytes, of all processes",
}

# Kinds of hardware, in the order in which devices are numbered.
KINDS = ("gpu", "accelerator", "cpu", "host")


# What data_ptr() of a tensor is:
# - "synthetic": an address that the runtime reserves for a handle; it must not be dereferenced.
# - "host": an address that the CPU can read and write; Device.address() returns it.
# - "device": a pointer of the hardware, which the CPU must not dereference; Device.address() returns it.
ADDRESS_SPACES = ("synthetic", "host", "device")


class SettingError(ValueError):
    """Raised for a malformed user setting, such as an environment variable.

    Discovery fails with this error; it does not skip the driver.
    """


class DeviceError(RuntimeError):
    """Raised by a device method when the hardware fails.

    The user gets a `torch.AcceleratorError` that names the device and the failed operation.

    Args:
        message: the error text of the hardware or its API.
        code: the error code of the hardware or its API.
        lost: True if the device cannot be used again in this process: it was unplugged or reset, or a fault destroyed
            its context. The runtime then calls no method but read_sensor() any more, not even to release resources, and
            each use of the device raises this error again.
    """

    def __init__(self, message: str, *, code: int = 0, lost: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


@dataclass(frozen=True)
class Finding:
    """One thing that a driver looked for. The commands `devices`, `info` and `doctor` and error messages show it."""

    what: str  # what the driver looked for: "PyOpenCL"
    ok: bool  # whether it is there and works; also True if it is optional and missing
    found: str  # what was found, or what is wrong: "version 2026.1", "not installed"
    remedy: str = ""  # a command or a setting that helps: "pip install pyopencl"


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """Properties of a device. Discovery checks them and skips the driver with a warning if one is invalid."""

    name: str  # the name of the hardware
    total_memory: int  # bytes; the runtime never allocates more
    # The largest size in bytes that allocate() accepts, at least LEAST_LARGEST. A larger tensor raises
    # torch.OutOfMemoryError.
    largest_allocation: int = 2**63 - 1
    dtypes: Sequence[torch.dtype] = ALL_DTYPES  # supported dtypes; tensors of other dtypes raise TypeError
    address_space: str = "synthetic"  # one of ADDRESS_SPACES
    # The DLPack device (type, id) of exported tensors, for example (2, 0) for CUDA pointers. Must be None with
    # synthetic addresses. None exports kDLExtDev and the index of the bp device.
    dlpack_device: tuple[int, int] | None = None
    compute_units: int = 1  # multi_processor_count in torch.cuda
    capability: tuple[int, int] = (0, 0)  # (major, minor), as the driver defines it
    # The kernel language that compile() accepts: one of torch_backplane.kernels.DIALECTS, or a subclass of
    # torch_backplane.kernels.Dialect. Empty: the device runs no kernels.
    dialect: str | type[Dialect] = ""
    kind: str = "accelerator"  # one of KINDS; among drivers of equal priority, it decides the order of the devices
    # Properties that kernels depend on: group sizes, local memory, limits. None: the defaults for devices of this kind.
    target: Target | None = None
    software: str = ""  # the software behind the device, with versions, for bug reports


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """Resource usage of a compiled kernel, as torch_backplane.plans.explain shows it. None: not reported."""

    registers: int | None = None  # per work item
    spilled_bytes: int | None = None  # per work item: private memory outside registers
    static_shared_memory: int | None = None  # bytes per work group
    max_group_size: int | None = None  # work items per work group that the kernel can be launched with
    # Bytes per work group that a launch can add. None: Target.local_memory less the static shared memory.
    max_dynamic_shared_memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class TritonTarget:
    """What Triton compiles for. `Device.load` loads the binaries that it makes."""

    backend: str  # Triton's name for the kind of hardware (GPUTarget.backend), such as "cuda"
    architecture: int | str  # GPUTarget.arch, such as 90 for sm_90
    warp_size: int  # work items
    # What Triton's drivers return from get_device_properties(): at least max_shared_mem (bytes per work group).
    properties: Mapping[str, int]


@dataclass(frozen=True)
class LaunchAttributes:
    """Optional attributes of a kernel launch."""

    dynamic_shared_memory: int  # bytes per work group, in addition to what the kernel declares
    cluster: tuple[int, int, int]  # work groups per cluster; divides the number of groups; (1, 1, 1): no clusters
    cooperative: bool  # all work groups must be resident at the same time


# The APIs that the runtime can call directly, with the functions that each requires. "c" is a launcher that the driver
# implements as C functions; docs/driver-contract.md declares them.
NATIVE_APIS = {
    "opencl": ("clSetKernelArg", "clEnqueueNDRangeKernel", "clEnqueueCopyBuffer", "clEnqueueFillBuffer", "clFlush"),
    "c": ("launch", "copy", "fill", "flush"),
}

# Optional groups of functions. The runtime uses a group if the launcher has all its functions. It then does not call
# the corresponding methods of the driver: copy_in() and copy_out() for HOST_COPIES, EVENT_METHODS for EVENTS.
HOST_COPIES, EVENTS = "copies from and to host memory", "events"
HOST_CALLBACKS = "host callbacks"
PEER_COPIES = "copies from another device"
CROSS_DEVICE_WAITS = "waits for events of another device"
INTERPROCESS = "memory and events of other processes"
GRAPHS = "graphs"
CAPTURES = "captures of library calls"
LAUNCH_ATTRIBUTES = "launches with attributes"
NATIVE_GROUPS = {
    "opencl": {
        HOST_COPIES: ("clEnqueueWriteBuffer", "clEnqueueReadBuffer"),
        EVENTS: (
            "clEnqueueMarkerWithWaitList", "clEnqueueBarrierWithWaitList", "clWaitForEvents", "clGetEventInfo",
            "clGetEventProfilingInfo", "clReleaseEvent",
        ),
    },
    "c": {
        LAUNCH_ATTRIBUTES: ("launch_with_attributes",),
        HOST_COPIES: ("copy_in", "copy_out"),
        EVENTS: (
            "create_event", "destroy_event", "record_event", "wait_event", "query_event", "synchronize_event",
            "elapsed",
        ),
        HOST_CALLBACKS: ("host_callback",),
        PEER_COPIES: ("copy_from_peer",),
        CROSS_DEVICE_WAITS: ("wait_peer_event",),
        INTERPROCESS: (
            "export_memory", "import_memory", "close_memory", "create_shared_event", "export_event", "import_event",
        ),
        GRAPHS: ("graph_create", "graph_update", "graph_launch", "graph_destroy"),
        CAPTURES: ("begin_capture", "end_capture", "destroy_captured"),
    },
}  # fmt: skip

# What a group requires: another group, or a method of the device.
GROUP_NEEDS: dict[str, str] = {CROSS_DEVICE_WAITS: EVENTS, INTERPROCESS: EVENTS, CAPTURES: GRAPHS}
GROUP_METHODS: dict[str, str] = {PEER_COPIES: "can_access_peer", CROSS_DEVICE_WAITS: "can_wait_for_peer"}

# Optional single functions. With clEnqueueNativeKernel, planners can submit host callbacks that work on device memory
# (torch_backplane.planning.host). With clFinish, a wider launch of a kernel waits for narrower ones, which PoCL needs.
NATIVE_EXTRAS: dict[str, tuple[str, ...]] = {"opencl": ("clEnqueueNativeKernel", "clFinish"), "c": ()}


@dataclass(frozen=True, kw_only=True)
class NativeLauncher:
    """Function addresses with which the runtime launches kernels, copies and fills without Python."""

    api: str  # one of NATIVE_APIS
    # Function addresses by name: all of NATIVE_APIS[api], and any whole groups of NATIVE_GROUPS[api] and functions of
    # NATIVE_EXTRAS[api]. The library that contains them must stay loaded.
    functions: dict[str, int]

    def has(self, group: str) -> bool:
        """Return whether the launcher has all functions of `group`, a key of NATIVE_GROUPS[api]."""
        names = NATIVE_GROUPS[self.api].get(group)
        return names is not None and all(name in self.functions for name in names)


class Driver(ABC):
    """Provides the devices of one hardware API.

    Discovery instantiates the class without arguments, once per process, when bp is first used.
    """

    # Devices are numbered by descending driver priority, then by DeviceProperties.kind, then by driver name. Drivers
    # for hardware keep the default; the host driver comes last with -10.
    priority: ClassVar[int] = 0

    @abstractmethod
    def devices(self) -> Sequence[Device | NativeDevice]:
        """Return the available devices, in a stable order.

        Return an empty list if the hardware or its library is missing. Must not use bp tensors.

        Raises:
            SettingError: a setting of the driver is malformed. Discovery fails with this error.
            Exception: discovery skips this driver with a warning.
        """

    def diagnose(self) -> Sequence[Finding]:
        """Return what `devices` looked for, in the order in which it is needed, and what is missing. Optional.

        Called after `devices`, whether it returned devices, none, or raised an exception. The first finding that is not
        ok is the reason that errors give if there are no devices. Can take seconds. Must not use bp tensors.
        """
        return ()


class Device(ABC):
    """A hardware device, or a simulated one.

    The defaults implement a synchronous device: every method returns when its work is done. An asynchronous device
    overrides all of ASYNCHRONOUS_METHODS.
    """

    properties: DeviceProperties  # required; set it in __init__

    # Optional. With it, the runtime launches kernels, copies within the device and fills without Python methods.
    native_launcher: NativeLauncher | None = None

    # Optional; requires a native_launcher. The first library whose routine accepts a call computes it.
    libraries: Sequence[Library] = ()

    # Optional. The library of torch.distributed's collectives (csrc/devices/communicator.h), such as NCCL.
    communication: Any = None

    # Optional. The native context handle, which torch.bp.native_context() returns (OpenCL: the cl_context).
    native_context: int | None = None

    # Optional; requires load(), launches with attributes, and the address space "device". Triton kernels can run.
    triton_target: TritonTarget | None = None

    # Optional; requires read_sensor(). The keys of SENSORS that the device reports.
    sensors: Collection[str] = ()

    # --- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Allocate a segment of uninitialized device memory and return its handle.

        The caching allocator requests 2 MiB or more at a time, so this method need not be fast.

        Args:
            nbytes: the size of the segment.

        Raises:
            MemoryError: the device does not have enough memory.
        """

    @abstractmethod
    def free(self, handle: Any) -> None:
        """Free a segment. No pending work uses it."""

    def address(self, handle: Any) -> int:
        """Return the start address of a segment. Required if `address_space` is "host" or "device".

        Args:
            handle: a segment, or an address range from `reserve`.

        Returns:
            The address at which the CPU accesses the segment ("host"), or the hardware's pointer ("device"). It must
            be a multiple of 512, below 2**48, and unique among all devices of the process.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement address()")

    def memory_info(self) -> tuple[int, int] | None:
        """Return (free, total) memory in bytes. Optional.

        If it returns None, the default, the runtime reports `total_memory` and subtracts its own allocations.
        """
        return None

    # --- expandable segments: implement all four methods, or none ----------------------------------------------------
    # They enable `PYTORCH_ALLOC_CONF=expandable_segments:True`: the allocator reserves an address range and maps memory
    # into it as needed. The handle of a range is used like the handle of a segment, in transfers, address() and
    # native_segment().

    def reserve(self, nbytes: int) -> Any:
        """Reserve an address range without memory and return its handle.

        Args:
            nbytes: the size of the range, a multiple of 2 MiB. It can exceed the memory of the device.

        Raises:
            MemoryError: there is not enough address space.
        """
        raise NotImplementedError(f"{type(self).__name__} does not reserve address space")

    def unreserve(self, handle: Any) -> None:
        """Release an address range. No memory is mapped into it."""
        raise NotImplementedError(f"{type(self).__name__} does not reserve address space")

    def map(self, handle: Any, offset: int, nbytes: int) -> None:
        """Map uninitialized memory into an unmapped part of an address range.

        Args:
            handle: the address range, from `reserve`.
            offset: the start of the part, a multiple of 2 MiB.
            nbytes: the size of the part, a multiple of 2 MiB.

        Raises:
            MemoryError: the device does not have enough memory.
        """
        raise NotImplementedError(f"{type(self).__name__} does not reserve address space")

    def unmap(self, handle: Any, offset: int, nbytes: int) -> None:
        """Unmap the memory of exactly one `map` call. No pending work uses it."""
        raise NotImplementedError(f"{type(self).__name__} does not reserve address space")

    def can_reserve(self) -> bool:
        """Return whether the device supports expandable segments. By default: whether `reserve` is overridden."""
        return type(self).reserve is not Device.reserve

    # --- pinned host memory: implement both methods, or none ---------------------------------------------------------
    # For hardware that transfers page-locked host memory by itself. The runtime pins the blocks of
    # `tensor.pin_memory()` for each device in use: existing blocks at the device's first allocation, later blocks when
    # they are allocated. Blocks are cached and reused.

    def pin(self, host_memory: memoryview) -> Any:
        """Page-lock whole pages of host memory and return a handle for `unpin`.

        Transfers are not limited to pinned memory.

        Raises:
            MemoryError: no more memory can be pinned.
        """
        raise NotImplementedError(f"{type(self).__name__} does not pin host memory")

    def unpin(self, handle: Any) -> None:
        """Undo `pin`, before the memory is freed. No transfer uses it. Exceptions are printed, not raised."""
        raise NotImplementedError(f"{type(self).__name__} does not pin host memory")

    def can_pin(self) -> bool:
        """Return whether the device pins host memory. By default: whether `pin` is overridden."""
        return type(self).pin is not Device.pin

    # --- transfers, in stream order ----------------------------------------------------------------------------------

    @abstractmethod
    def copy_in(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        """Copy all of `host_memory` to the segment, starting at byte `offset`.

        Not called if the native launcher has HOST_COPIES.
        """

    @abstractmethod
    def copy_out(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        """Copy the segment's bytes, starting at byte `offset`, to `host_memory` until it is full.

        Not called if the native launcher has HOST_COPIES.
        """

    def copy(
        self, dst_handle: Any, dst_offset: int, src_handle: Any, src_offset: int, nbytes: int, stream: Any
    ) -> None:
        """Copy within the device. Optional; the default copies through host memory and blocks.

        The ranges can be in the same segment, and can overlap. With a native launcher, called only for ranges that
        overlap.
        """
        staging = memoryview(bytearray(nbytes))
        self.copy_out(src_handle, src_offset, staging, stream)
        self.synchronize_stream(stream)
        self.copy_in(dst_handle, dst_offset, staging, stream)
        self.synchronize_stream(stream)

    def copy_from_peer(
        self,
        dst_handle: Any,
        dst_offset: int,
        peer: Device,
        src_handle: Any,
        src_offset: int,
        nbytes: int,
        stream: Any,
    ) -> bool:
        """Copy from a segment of another device to a segment of this device. Optional.

        The peer's earlier work on the source is complete when `stream` reaches the copy. Not called if the native
        launcher has PEER_COPIES, the peer has the same driver and `can_access_peer` returns True.

        Args:
            dst_handle: a segment of this device.
            dst_offset: the start of the destination in it.
            peer: a device of this driver, or of any other Python driver.
            src_handle: a segment of `peer`.
            src_offset: the start of the source in it.
            nbytes: the number of bytes to copy.
            stream: a stream of this device.

        Returns:
            False, the default, if this device cannot copy from `peer`. The runtime then copies through host memory.
        """
        return False

    def can_access_peer(self, peer: Device) -> bool:
        """Return whether `copy_from_peer` works for `peer`. Called once for each peer.

        `torch.bp.can_device_access_peer` returns this value.
        """
        return False

    def can_wait_for_peer(self, peer: Device) -> bool:
        """Return whether streams of this device can wait for events of `peer`. Called once for each peer.

        If True, the runtime calls `wait_peer_event` of the native launcher (with native events) or `wait_event`. If
        False, the default, the host waits for the event instead.

        Args:
            peer: another device of the same driver.
        """
        return False

    def fill(self, handle: Any, offset: int, nbytes: int, value: int, stream: Any) -> None:
        """Set `nbytes` bytes, starting at byte `offset`, to `value` (0 to 255).

        Optional; the default copies from host memory. Not called with a native launcher.
        """
        chunk = memoryview(bytes([value]) * min(nbytes, FILL_CHUNK))
        for done in range(0, nbytes, FILL_CHUNK):
            self.copy_in(handle, offset + done, chunk[: nbytes - done], stream)

    def collectives(self, options: Any) -> Any:
        """Create the c10d backend of a process group whose ranks use this device. Optional.

        Args:
            options: c10d's DistributedBackendOptions: store, group_rank, group_size, timeout, group_id.

        Returns:
            A `torch._C._distributed_c10d.Backend` for tensors of this device, or None, the default: `communication`
            does the communication, or an engine for CPU tensors (`torch_backplane/distributed.py`).
        """
        return None

    # --- kernels, on devices whose properties name a dialect ----------------------------------------------------------

    def compile(self, text: str, entry: str) -> Any:
        """Compile a kernel and return it, as any object. Required if `properties.dialect` is set.

        Called in background threads, several at a time. Release the GIL while the compiler runs. The program continues
        meanwhile; launches of the kernel, and later commands of their streams, wait for the build.

        Args:
            text: a program in the device's dialect.
            entry: the name of the kernel in it.

        Raises:
            Exception: the build failed. Put the compiler's log into the message. The runtime adds the operator and the
                kernel text, and raises a RuntimeError at a later launch or synchronization.
        """
        raise NotImplementedError(f"{type(self).__name__} does not run kernels")

    def launch(
        self,
        kernel: Any,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        """Launch a kernel. Required if `properties.dialect` is set; not called with a native launcher.

        Args:
            kernel: an object that `compile` or `load` returned.
            items: the global size: work items in each dimension. Dimension 0 varies fastest. Each is at least 1, and a
                multiple of the group size.
            group: the group size: work items per work group in each dimension.
            arguments: the kernel's arguments in order. Memory is a pair (segment handle, offset); the handle is None
                for a null pointer. A number is its bytes in the device's representation. In OpenCL C, memory is two
                kernel parameters: the buffer, and the offset as a ulong.
            stream: the stream to launch on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not run kernels")

    def launch_with_attributes(
        self,
        kernel: Any,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        attributes: LaunchAttributes,
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        """Launch a kernel with attributes. Optional; without it, such a launch raises NotImplementedError.

        The arguments are those of `launch`, and at least one attribute differs from its default. The runtime has
        checked that clusters divide the groups and that shared memory does not exceed `Target.local_memory`. Not called
        with a native launcher.
        """
        raise NotImplementedError(f"{type(self).__name__} does not launch kernels with attributes")

    def can_launch_with_attributes(self) -> bool:
        """Return whether the device supports launch attributes. By default: whether the method above is overridden."""
        return type(self).launch_with_attributes is not Device.launch_with_attributes

    def load(self, binary: bytes, entry: str) -> Any:
        """Load a kernel from a binary and return it as `compile` does. Optional; without it, binaries are an error.

        Args:
            binary: a compiled program.
            entry: the name of the kernel in it.

        Raises:
            Exception: the binary is invalid, has no such kernel, or is for another architecture. The message should
                name that architecture.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement load(), so it cannot load binaries")

    def kernel_resources(self, kernel: Any) -> KernelResources | None:
        """Return the resource usage that the compiler reports for a kernel, or None. Optional."""
        return None

    def build_counts(self) -> dict[str, int]:
        """Return the counts of kernels "built" in this process and "loaded" from a disk cache. Optional."""
        return {}

    def native_kernel(self, kernel: Any) -> int:
        """Return the native handle of a kernel (OpenCL: the cl_kernel). Required with a native launcher.

        Called once for each kernel. The handle must stay valid as long as the kernel object exists.
        """
        raise NotImplementedError(f"{type(self).__name__} has a native_launcher but no native_kernel() method")

    def native_stream(self, stream: Any) -> int:
        """Return the native handle of a stream (OpenCL: the cl_command_queue). Required with a native launcher.

        Called once for each stream. `torch.bp.Stream.native_handle` returns the handle, also without a native launcher.
        """
        raise NotImplementedError(f"{type(self).__name__} has no native_stream(): its streams have no native handle")

    def adopt_stream(self, handle: int) -> Any:
        """Wrap an existing native queue in a stream, for `torch.bp.ExternalStream`. Optional.

        The user owns the queue and keeps it alive; `destroy_stream` must not destroy it.

        Args:
            handle: the native handle of the queue.

        Returns:
            A stream, like those of `create_stream`.

        Raises:
            Exception: the handle is not a queue, or belongs to another context or device.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement adopt_stream()")

    def can_adopt_streams(self) -> bool:
        """Return whether the device adopts native queues. By default: whether `adopt_stream` is overridden."""
        return type(self).adopt_stream is not Device.adopt_stream

    def native_segment(self, handle: Any) -> int:
        """Return the native handle of a segment (OpenCL: the cl_mem). Required with a native launcher.

        Called once for each segment, and not if `address_space` is "device".
        """
        raise NotImplementedError(f"{type(self).__name__} has a native_launcher but no native_segment() method")

    def native_error(self, call: str, status: int) -> Exception:
        """Return the exception for a native launcher function that returned an error.

        Args:
            call: the name of the function, with details of the call if there are any.
            status: the status that it returned.
        """
        return DeviceError(f"{call} answered {status}", code=status)

    def launched_natively(self, stream: Any) -> None:  # noqa: B027
        """Notify the driver that `stream` has received commands that the driver has not seen. Optional.

        For drivers that track pending work. Called before `query_stream` and `synchronize_stream`, if the native
        launcher has submitted commands since the last call, or if the native handle of the stream was given out.
        """

    # --- streams and events ------------------------------------------------------------------------------------------

    def create_stream(self, priority: int) -> Any:
        """Create a stream and return its handle.

        Args:
            priority: 0, or -1 for a stream whose commands should run first. Hardware without priorities can ignore it.
        """
        return SynchronousStream()

    def destroy_stream(self, stream: Any) -> None:  # noqa: B027
        """Destroy a stream. Exceptions are printed, not raised."""

    def query_stream(self, stream: Any) -> bool:
        """Return whether all commands submitted to the stream are complete."""
        return True

    def synchronize_stream(self, stream: Any) -> None:  # noqa: B027
        """Wait until all commands submitted to the stream so far are complete. Release the GIL while waiting.

        Raises:
            Exception: a command of the stream has failed.
        """

    def create_event(self, timing: bool) -> Any:
        """Create an event that is not yet recorded and return its handle.

        Args:
            timing: whether `elapsed_ms` will be called for it.
        """
        return SynchronousEvent()

    def destroy_event(self, event: Any) -> None:  # noqa: B027
        """Destroy an event. Earlier waits for it stay in effect. Exceptions are printed, not raised."""

    def record_event(self, event: Any, stream: Any) -> None:
        """Record an event: it is reached when all commands submitted to the stream so far are complete.

        An event can be recorded repeatedly. A recording replaces the previous one for later waits and queries.
        """
        event.time_ns = time.perf_counter_ns()

    def wait_event(self, event: Any, stream: Any) -> None:  # noqa: B027
        """Make later commands of `stream` wait for the latest recording of the event. Returns immediately.

        The event belongs to this device, or to a peer for which `can_wait_for_peer` returns True.
        """

    def query_event(self, event: Any) -> bool:
        """Return whether the event is reached. True for an event that was never recorded."""
        return True

    def synchronize_event(self, event: Any) -> None:  # noqa: B027
        """Wait until the latest recording of the event is reached. Release the GIL while waiting."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two events. Both have timing and are reached."""
        return (end.time_ns - start.time_ns) / 1e6

    def sleep(self, milliseconds: float, stream: Any) -> None:
        """Keep the stream busy for about `milliseconds`, in stream order. Optional, for tests."""
        raise NotImplementedError(f"{self.properties.name} cannot keep a stream busy for a given time")

    # --- sensors -----------------------------------------------------------------------------------------------------

    def read_sensor(self, name: str) -> int:
        """Return the reading of a sensor in the unit of SENSORS. Required with `sensors`.

        Also called after the device was lost.

        Args:
            name: one of `sensors`.

        Raises:
            NotImplementedError: this hardware does not have the sensor.
            Exception: the sensor cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sensors")


# Methods that a device with a native launcher must override.
NATIVE_METHODS = ("compile", "native_kernel", "native_stream", "native_segment")

# Methods that an asynchronous device must override, all or none: a mix would report wrong event states.
ASYNCHRONOUS_METHODS = (
    "create_stream",
    "query_stream",
    "synchronize_stream",
    "create_event",
    "record_event",
    "wait_event",
    "query_event",
    "synchronize_event",
    "elapsed_ms",
)

# Methods among these that are not called, and not required, if the native launcher has EVENTS.
EVENT_METHODS = ("create_event", "record_event", "wait_event", "query_event", "synchronize_event", "elapsed_ms")


# Methods that must be overridden together.
RESERVING_METHODS = ("reserve", "unreserve", "map", "unmap")
PINNING_METHODS = ("pin", "unpin")


class SynchronousStream:
    """A stream that is always empty."""


class SynchronousEvent:
    """An event that is always reached."""

    time_ns = 0


class NativeDevice(ABC):
    """A device that is implemented in C++ (csrc/drivers/host/host_device.cpp). Not for drivers outside of Backplane."""

    properties: DeviceProperties
    triton_target: None = None

    @abstractmethod
    def add(self, properties: Any, discrete: bool) -> None:
        """Add this device to the runtime's device table.

        Args:
            properties: its `_C.DeviceProperties`.
            discrete: hide the memory from the CPU, so that tensors have synthetic addresses.
        """
