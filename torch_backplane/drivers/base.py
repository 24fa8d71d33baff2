"""The driver contract: what a Python package implements to bring a device to PyTorch.

A driver is a class with one method, `Driver.devices()`, named in the entry-point group `torch_backplane.drivers`. Each
device it returns is a `Device`: memory, transfers and, where the hardware works asynchronously, streams and events. A
synchronous device needs four methods; `docs/write-a-driver.md` builds one from nothing.

Rules that hold for every method:

* It is called with the GIL held, from any thread, and from several threads in turn if it releases the GIL. It must not
  use bp tensors of its own device.
* What it raises comes out of the PyTorch call that needed it, as it was raised. Two exceptions have a meaning: a
  `DeviceError` says that the hardware failed, and may be lost, and a `MemoryError` of `allocate` makes the allocator
  free what it caches and ask once more.
* Handles (of segments, streams and events) are any Python objects. The runtime keeps a reference to each from the call
  that returns it to the end of the call that takes it back.
* `stream` is what `create_stream` returned. Work is done in the order of its stream.
* Host memory comes as a `memoryview` of bytes. It stays valid until the stream has passed the transfer: a method may
  return before the transfer is done if `synchronize_stream` waits for it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_backplane.drivers.libraries import Library

if TYPE_CHECKING:
    from torch_backplane.kernels import Dialect, Target

LEAST_LARGEST = 20 << 20  # bytes of the allocator's segments for large tensors
FILL_CHUNK = 1 << 20  # bytes of host memory that the default fill() copies from

ALL_DTYPES: tuple[torch.dtype, ...] = tuple(
    dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
)

FLOAT64_DTYPES = (torch.float64, torch.complex128)  # for devices without float64


# What hardware a device is, in the order in which devices are numbered.
KINDS = ("gpu", "accelerator", "cpu", "host")


# What a tensor's data_ptr() is: an address that the runtime reserves for a handle, and that nobody may dereference;
# where the CPU reads and writes the memory; or the hardware's pointer, which the CPU must not dereference. The last two
# are what Device.address() returns.
ADDRESS_SPACES = ("synthetic", "host", "device")


class SettingError(ValueError):
    """A setting of the user's (an environment variable) is malformed. Discovery passes it on and never ignores it."""


class DeviceError(RuntimeError):
    """The hardware failed. A driver's method raises it, and the user gets a `torch.AcceleratorError` that names the
    device and what it was doing.

    Args:
        message: what the hardware, or its API, said.
        code: its number for that.
        lost: nothing will work on this device any more while the process lives: it was unplugged or reset, or a fault
            destroyed its context. From then on the runtime calls no method of it, not even to give something back, and
            each use of the device raises this error again.
    """

    def __init__(self, message: str, *, code: int = 0, lost: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What a device says of itself."""

    name: str  # what the hardware calls itself
    total_memory: int  # bytes; no more than this is ever allocated
    # Bytes that allocate() can give in one piece, LEAST_LARGEST or more; a larger tensor is a torch.OutOfMemoryError.
    largest_allocation: int = 2**63 - 1
    dtypes: Sequence[torch.dtype] = ALL_DTYPES  # any other is refused with a TypeError
    address_space: str = "synthetic"  # one of ADDRESS_SPACES: what data_ptr() is
    # (type, id) that DLPack exports tensors with, such as (2, 0) for CUDA's pointers; not with synthetic addresses.
    # None: kDLExtDev and the number of the bp device.
    dlpack_device: tuple[int, int] | None = None
    compute_units: int = 1  # torch.cuda's multi_processor_count
    capability: tuple[int, int] = (0, 0)  # (major, minor), as the driver defines it
    # The language that compile() takes: one of torch_backplane.kernels.DIALECTS, or the driver's own subclass of
    # torch_backplane.kernels.Dialect. Empty: the device runs no kernels.
    dialect: str | type[Dialect] = ""
    kind: str = "accelerator"  # one of KINDS: among drivers of one priority, GPUs are numbered first
    # What kernels depend on: group sizes, local memory, limits. Without it, what a device of this kind most likely has.
    target: Target | None = None
    software: str = ""  # what drives the hardware, with versions, for people and their bug reports


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """What the compiler reports of a kernel (torch_backplane.plans.explain). None: not reported."""

    registers: int | None = None  # per work item
    spilled_bytes: int | None = None  # per work item: private memory that is not in registers
    static_shared_memory: int | None = None  # bytes per group


@dataclass(frozen=True)
class LaunchAttributes:
    """What a launch needs besides its sizes."""

    dynamic_shared_memory: int  # bytes per group, in addition to what the kernel declares
    cluster: tuple[int, int, int]  # groups per cluster, which divides the groups of each dimension; (1, 1, 1): none
    cooperative: bool  # all groups are resident at the same time


# The APIs that the runtime calls itself, and the functions that it needs of each.
# «c» is a driver's own launcher for any hardware, in functions of C, which docs/write-a-driver.md declares.
NATIVE_APIS = {
    "opencl": ("clSetKernelArg", "clEnqueueNDRangeKernel", "clEnqueueCopyBuffer", "clEnqueueFillBuffer", "clFlush"),
    "c": ("launch", "copy", "fill", "flush"),
}

# What more the runtime does itself where it has all functions of a group. Then the driver's methods for that are not
# called: copy_in() and copy_out(), or those of events (EVENT_METHODS).
HOST_COPIES, EVENTS = "copies from and to host memory", "events"
HOST_CALLBACKS = "host callbacks"
PEER_COPIES = "copies from another device"
CROSS_DEVICE_WAITS = "waits for events of another device"
INTERPROCESS = "memory and events of other processes"
GRAPHS = "graphs"
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
    },
}  # fmt: skip

# What a group is of no use without: another group, or a method of the driver's.
GROUP_NEEDS: dict[str, str] = {CROSS_DEVICE_WAITS: EVENTS, INTERPROCESS: EVENTS}
GROUP_METHODS: dict[str, str] = {PEER_COPIES: "can_access_peer", CROSS_DEVICE_WAITS: "can_wait_for_peer"}

# Functions that help by themselves. With clEnqueueNativeKernel planners may have the host work on the device's memory
# (torch_backplane.planning.host); with clFinish wider launches of a kernel wait for narrower ones, which PoCL needs.
NATIVE_EXTRAS: dict[str, tuple[str, ...]] = {"opencl": ("clEnqueueNativeKernel", "clFinish"), "c": ()}


@dataclass(frozen=True, kw_only=True)
class NativeLauncher:
    """What the runtime needs to launch kernels, copy and fill without Python, and more: addresses of functions."""

    api: str  # one of NATIVE_APIS
    # name: address, in a library that stays loaded. Those of NATIVE_APIS, and any of NATIVE_GROUPS and NATIVE_EXTRAS.
    functions: dict[str, int]

    def has(self, group: str) -> bool:
        """Whether all functions of one of NATIVE_GROUPS are there."""
        names = NATIVE_GROUPS[self.api].get(group)
        return names is not None and all(name in self.functions for name in names)


class Driver(ABC):
    """Reaches one hardware API. Made once per process, without arguments, when bp is first used."""

    # Devices of drivers with a higher priority are numbered first; among the same, the kinds of devices decide
    # (DeviceProperties.kind), then the drivers' names. Hardware keeps the default; the host driver comes last with -10.
    priority: ClassVar[int] = 0

    @abstractmethod
    def devices(self) -> Sequence[Device | NativeDevice]:
        """The devices that can be used now, in an order that stays the same.

        An empty list says that there is none. An exception makes discovery skip this driver with a warning; a
        `SettingError` ends discovery.
        """


class Device(ABC):
    """One piece of hardware, or one simulated one.

    The defaults describe a synchronous device: every method returns when its work is done. A device that works
    asynchronously overrides all of the methods under «streams and events».
    """

    properties: DeviceProperties

    # Set it where the runtime can launch this device's kernels itself, see «kernels».
    native_launcher: NativeLauncher | None = None

    # Libraries for this hardware. Of those that take a call, the first one listed computes it.
    libraries: Sequence[Library] = ()

    # What the hardware's API calls the context of this device (torch.bp.native_context); None: it has none.
    native_context: int | None = None

    # --- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """A handle of `nbytes` bytes of uninitialized device memory. The caching allocator asks for segments of 2 MiB
        and more, so this need not be fast.

        Raises:
            MemoryError: there is not enough.
        """

    @abstractmethod
    def free(self, handle: Any) -> None:
        """Give a segment back. No work that uses it is under way."""

    def address(self, handle: Any) -> int:
        """Where a segment begins: a multiple of 512, below 2**48, and in no other device's memory. Asked of devices
        whose `address_space` is "host" (where the CPU finds it) or "device" (the hardware's pointer).
        """
        raise NotImplementedError(f"{type(self).__name__} has no address() method")

    def memory_info(self) -> tuple[int, int] | None:
        """(free, total) in bytes; None for «total_memory less what was allocated here»."""
        return None

    # --- address space that memory is mapped into piecewise: all four methods, or none -------------------------------
    # With them `PYTORCH_ALLOC_CONF=expandable_segments:True` works on the device. A range is used as a segment is: it
    # has an address() and a native_segment(), if segments have, and transfers get its handle.

    def reserve(self, nbytes: int) -> Any:
        """A handle of `nbytes` bytes of address space without memory, a multiple of 2 MiB, and often more than the
        device has memory.

        Raises:
            MemoryError: there is not enough address space.
        """
        raise NotImplementedError(f"{type(self).__name__} reserves no address space")

    def unreserve(self, handle: Any) -> None:
        """Give address space back, into which no memory is mapped."""
        raise NotImplementedError(f"{type(self).__name__} reserves no address space")

    def map(self, handle: Any, offset: int, nbytes: int) -> None:
        """Back this part of a range, which has no memory, with uninitialized memory; multiples of 2 MiB.

        Raises:
            MemoryError: there is not enough.
        """
        raise NotImplementedError(f"{type(self).__name__} reserves no address space")

    def unmap(self, handle: Any, offset: int, nbytes: int) -> None:
        """Take back the memory of a part that one call of map() gave. No work that uses it is under way."""
        raise NotImplementedError(f"{type(self).__name__} reserves no address space")

    def can_reserve(self) -> bool:
        """Whether there are these methods."""
        return type(self).reserve is not Device.reserve

    # --- host memory that cannot be paged out, so that hardware transfers it by itself: both methods, or none ---------
    # They are called for the blocks of `tensor.pin_memory()`: once the device is used, that is with its first
    # allocation, for those that there are, and for each that is made from then on. Blocks are kept and used again.

    def pin(self, host_memory: memoryview) -> Any:
        """Pin whole pages of host memory; a handle for unpin(). What transfers are given may lie in them, or elsewhere.

        Raises:
            MemoryError: no more can be pinned.
        """
        raise NotImplementedError(f"{type(self).__name__} pins no host memory")

    def unpin(self, handle: Any) -> None:
        """Undo pin(). No transfer uses the memory any more, which is freed next."""
        raise NotImplementedError(f"{type(self).__name__} pins no host memory")

    def can_pin(self) -> bool:
        """Whether there are these methods."""
        return type(self).pin is not Device.pin

    # --- transfers, in stream order ----------------------------------------------------------------------------------

    @abstractmethod
    def copy_in(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        """Copy all of `host_memory` to the segment, from byte `offset` on."""

    @abstractmethod
    def copy_out(self, handle: Any, offset: int, host_memory: memoryview, stream: Any) -> None:
        """Fill `host_memory` with the segment's bytes, from byte `offset` on."""

    def copy(
        self, dst_handle: Any, dst_offset: int, src_handle: Any, src_offset: int, nbytes: int, stream: Any
    ) -> None:
        """Copy within the device. The ranges may be of one segment, and may overlap. By default through the host."""
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
        """Copy from the segment `src_handle` of `peer`, any other Python device, to one of this device's.

        The peer's work is done when `stream` gets there. False (the default) if this device cannot: then the bytes go
        through the host.
        """
        return False

    def can_access_peer(self, peer: Device) -> bool:
        """Whether `copy_from_peer` works for this peer (torch.bp.can_device_access_peer). Asked once for each peer."""
        return False

    def can_wait_for_peer(self, peer: Device) -> bool:
        """Whether this device's streams wait for events of `peer`, another device of the driver: by the launcher's
        `wait_peer_event` where events are native, else by `wait_event`. False (the default): the host waits instead.
        Asked once for each peer.
        """
        return False

    def fill(self, handle: Any, offset: int, nbytes: int, value: int, stream: Any) -> None:
        """Set `nbytes` bytes from byte `offset` on to `value`, 0 to 255. By default by copying from the host."""
        chunk = memoryview(bytes([value]) * min(nbytes, FILL_CHUNK))
        for done in range(0, nbytes, FILL_CHUNK):
            self.copy_in(handle, offset + done, chunk[: nbytes - done], stream)

    # --- kernels, on devices whose properties name a dialect ----------------------------------------------------------

    def compile(self, text: str, entry: str) -> Any:
        """The kernel called `entry` in `text`, which is written in the device's dialect. Any object.

        Called in threads of its own, several at a time: release the GIL while the compiler runs. The program goes on
        meanwhile, and launches wait in the order of their stream.

        Raises:
            Exception: it cannot be built. The message has the compiler's log; the runtime adds text and operator.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no kernels")

    def launch(
        self,
        kernel: Any,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        """Run a kernel that compile() returned. Not called where there is a native launcher.

        Args:
            items: work items in each dimension, the fastest first; multiples of `group`, and none is 0.
            group: how many of them form a group.
            arguments: in the order of the kernel's parameters: (handle of a segment, offset in bytes) for memory, with
                None as the handle where there is none, and for numbers their bytes as the device has them. In OpenCL
                C, memory is two parameters: the buffer, and the offset as a ulong.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no kernels")

    def launch_with_attributes(
        self,
        kernel: Any,
        items: tuple[int, int, int],
        group: tuple[int, int, int],
        attributes: LaunchAttributes,
        arguments: Sequence[tuple[Any, int] | bytes],
        stream: Any,
    ) -> None:
        """As launch(), with at least one attribute. Optional; not called where there is a native launcher."""
        raise NotImplementedError(f"{type(self).__name__} launches no kernels with attributes")

    def can_launch_with_attributes(self) -> bool:
        """Whether there is this method."""
        return type(self).launch_with_attributes is not Device.launch_with_attributes

    def load(self, binary: bytes, entry: str) -> Any:
        """The kernel called `entry` in a binary of the device's compiler, as compile() returns it. Optional.

        Raises:
            Exception: it is none, or one for another architecture, which the message names.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load() method, so that it takes no binaries")

    def kernel_resources(self, kernel: Any) -> KernelResources | None:
        """What the compiler reports of a kernel that compile() or load() returned. Optional."""
        return None

    def build_counts(self) -> dict[str, int]:
        """How many kernels were "built" in this process, and "loaded" from a cache on disk. For reports."""
        return {}

    def native_kernel(self, kernel: Any) -> int:
        """What the native launcher's API calls this kernel (OpenCL: the cl_kernel), valid as long as the object is."""
        raise NotImplementedError(f"{type(self).__name__} has a native_launcher and no native_kernel() method")

    def native_stream(self, stream: Any) -> int:
        """The same of a stream (OpenCL: the cl_command_queue), also for torch.bp.Stream.native_handle."""
        raise NotImplementedError(f"{type(self).__name__} has no native_stream(): its streams have no native handle")

    def adopt_stream(self, handle: int) -> Any:
        """A stream, as of create_stream(), around a queue of the hardware's API that others made and keep alive
        (torch.bp.ExternalStream). Optional. destroy_stream() must leave that queue alone.

        Raises:
            Exception: it is no queue, or one of another context or device.
        """
        raise NotImplementedError(f"{type(self).__name__} adopts no streams")

    def can_adopt_streams(self) -> bool:
        """Whether there is this method."""
        return type(self).adopt_stream is not Device.adopt_stream

    def native_segment(self, handle: Any) -> int:
        """The same of a segment (OpenCL: the cl_mem)."""
        raise NotImplementedError(f"{type(self).__name__} has a native_launcher and no native_segment() method")

    def native_error(self, call: str, status: int) -> Exception:
        """The exception for a call of the native launcher's that was answered with an error."""
        return DeviceError(f"{call} answered {status}", code=status)

    def launched_natively(self, stream: Any) -> None:  # noqa: B027
        """Work was given to `stream` past the driver: kernels, or anything on a stream whose native handle is known to
        others. Called before query_stream() or synchronize_stream(), for a driver that keeps a record of what is under
        way."""

    # --- streams and events ------------------------------------------------------------------------------------------

    def create_stream(self, priority: int) -> Any:
        """A new queue. `priority` is 0, or -1 for one whose work should go first; hardware without may ignore it."""
        return SynchronousStream()

    def destroy_stream(self, stream: Any) -> None:  # noqa: B027
        """Give a queue back."""

    def query_stream(self, stream: Any) -> bool:
        """Whether all work given to the stream is done."""
        return True

    def synchronize_stream(self, stream: Any) -> None:  # noqa: B027
        """Wait until all work given to the stream so far is done. Release the GIL while waiting."""

    def create_event(self, timing: bool) -> Any:
        """A new event, not recorded yet. `timing`: elapsed_ms() will be asked."""
        return SynchronousEvent()

    def destroy_event(self, event: Any) -> None:  # noqa: B027
        """Give an event back. Waits for it that were issued before stay in force."""

    def record_event(self, event: Any, stream: Any) -> None:
        """The event is reached when all work given to the stream so far is done. Replaces an earlier recording."""
        event.time_ns = time.perf_counter_ns()

    def wait_event(self, event: Any, stream: Any) -> None:  # noqa: B027
        """Work given to `stream` from now on starts after the event's present recording. The caller does not wait."""

    def query_event(self, event: Any) -> bool:
        """Whether the event is reached; True for one that was never recorded."""
        return True

    def synchronize_event(self, event: Any) -> None:  # noqa: B027
        """Wait until the event is reached. Release the GIL while waiting."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds from one event to the other; both are reached."""
        return (end.time_ns - start.time_ns) / 1e6

    def sleep(self, milliseconds: float, stream: Any) -> None:
        """Keep the stream busy for about this long, from when it gets there (for tests). Optional."""
        raise NotImplementedError(f"{self.properties.name} cannot keep a stream busy for a given time")


# What a device with a native launcher must bring.
NATIVE_METHODS = ("compile", "native_kernel", "native_stream", "native_segment")

# What an asynchronous device must bring itself: with only some of them its events would tell untruths.
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

# Those of them that nobody calls where a native launcher has events.
EVENT_METHODS = ("create_event", "record_event", "wait_event", "query_event", "synchronize_event", "elapsed_ms")


# What only works together.
RESERVING_METHODS = ("reserve", "unreserve", "map", "unmap")
PINNING_METHODS = ("pin", "unpin")


class SynchronousStream:
    """A queue that is always empty."""


class SynchronousEvent:
    """A point in time that has always passed."""

    time_ns = 0


class NativeDevice(ABC):
    """A device that the runtime implements in C++ (csrc/drivers/host/host_device.cpp); Python only adds it."""

    properties: DeviceProperties

    @abstractmethod
    def add(self, properties: Any, discrete: bool) -> None:
        """Add this device to the runtime's table with these `_C.DeviceProperties`.

        `discrete`: with memory that the CPU cannot reach at the addresses that tensors have.
        """
