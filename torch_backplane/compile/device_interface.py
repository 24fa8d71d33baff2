"""What Dynamo and Inductor ask about bp devices: `torch._dynamo.device_interface.DeviceInterface` for bp."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import device_interface

from torch_backplane import _C, accelerator, drivers
from torch_backplane.accelerator._utils import _get_device_index


@dataclass(frozen=True)
class CompilerProperties:
    """The properties of a device that Inductor reads. The names are those of CUDA's properties.

    `regs_per_multiprocessor` is missing, because drivers do not report it. Inductor then computes no occupancy.
    """

    name: str
    total_memory: int  # bytes
    major: int
    minor: int
    dtypes: frozenset[torch.dtype]
    multi_processor_count: int  # compute units
    max_threads_per_block: int  # work items in a group
    # Twice the work items that keep a compute unit busy: Inductor divides reductions until there are half as many.
    max_threads_per_multi_processor: int
    # Work items that run in lockstep. Inductor gives each at least as many elements of a divided reduction.
    warp_size: int
    L2_cache_size: int  # bytes; 0 if unknown
    capability: str  # identifies what generated code depends on


# The warp size of devices whose groups run in one thread: Inductor's unit for dividing reductions.
_ELEMENTS_OF_THREADS = 32


def _properties(index: int) -> CompilerProperties:
    from torch_backplane.planning.launch import target_of  # imports the kernel generator, which is slow

    properties, target = drivers.device(index).properties, target_of(index)
    return CompilerProperties(
        name=properties.name,
        total_memory=properties.total_memory,
        major=properties.capability[0],
        minor=properties.capability[1],
        dtypes=frozenset(properties.dtypes),
        multi_processor_count=target.compute_units,
        max_threads_per_block=target.max_group_size,
        max_threads_per_multi_processor=2 * target.enough_groups * target.group_size // target.compute_units,
        warp_size=max(target.subgroup_size, target.group_multiple) if target.simt else _ELEMENTS_OF_THREADS,
        L2_cache_size=target.cache_bytes,
        capability=_capability(index, target),
    )


def _capability(index: int, target: Any) -> str:
    """Returns text that is equal for devices with equal driver, dialect, dtypes, target, and software.

    `_C.device_properties` has the driver's name, but would initialize the devices.
    """
    device = drivers.device(index)
    properties = device.properties
    figures = [f"{one.name}={_text(getattr(target, one.name))}" for one in fields(target)]
    dtypes = _text(frozenset(properties.dtypes))
    described = [_name(type(device)), properties.name, _name(properties.dialect), properties.software, dtypes, *figures]
    return f"bp-{hashlib.sha256(chr(10).join(described).encode()).hexdigest()[:16]}"


def _name(named: str | type) -> str:
    return named if isinstance(named, str) else f"{named.__module__}.{named.__qualname__}"


def _text(figure: object) -> str:
    """Returns text for a figure of a target that is the same in all processes, in which the order of sets differs."""
    return " ".join(sorted(map(str, figure))) if isinstance(figure, frozenset) else str(figure)


class BpInterface(device_interface.DeviceInterface):
    """Devices, streams, events and properties of bp, as Dynamo and Inductor reach them for all device types."""

    device = accelerator.device  # type: ignore[assignment]
    Event = accelerator.Event  # type: ignore[assignment]
    Stream = accelerator.Stream  # type: ignore[assignment]

    class Worker:
        """The same in compile workers, which use no device: the main process records what they ask for."""

        @staticmethod
        def set_device(device: int) -> None:
            """Set the current device of this compile worker."""
            device_interface.caching_worker_current_devices["bp"] = device

        @staticmethod
        def current_device() -> int:
            """Return the current device of this compile worker; in other processes, that of this thread."""
            recorded = device_interface.caching_worker_current_devices.get("bp")
            if recorded is not None:
                return recorded
            return accelerator.current_device() if accelerator.is_initialized() else 0

        @staticmethod
        def get_device_properties(device: Any = None) -> CompilerProperties:
            """Return the properties of a device (the current one by default), and record those of all devices.

            Raises:
                AssertionError: there is no such device.
            """
            if device is None or device == "bp" or device == torch.device("bp"):
                index = BpInterface.Worker.current_device()
            else:
                index = _get_device_index(device)
            recorded = device_interface.caching_worker_device_properties
            if "bp" not in recorded:
                recorded["bp"] = [_properties(one) for one in range(accelerator.device_count())]
            if not 0 <= index < len(recorded["bp"]):
                raise AssertionError(f"Invalid device id: {index}; the number of bp devices is {len(recorded['bp'])}")
            return recorded["bp"][index]

    current_device = staticmethod(accelerator.current_device)
    set_device = staticmethod(accelerator.set_device)
    exchange_device = staticmethod(accelerator._exchange_device)
    maybe_exchange_device = staticmethod(accelerator._maybe_exchange_device)
    device_count = staticmethod(accelerator.device_count)
    stream = staticmethod(accelerator.stream)  # type: ignore[assignment]
    current_stream = staticmethod(accelerator.current_stream)
    set_stream = staticmethod(accelerator.set_stream)
    _set_stream_by_id = staticmethod(accelerator._set_stream_by_id)
    synchronize = staticmethod(accelerator.synchronize)
    memory_allocated = staticmethod(accelerator.memory_allocated)

    @staticmethod
    def is_available() -> bool:
        """Return whether there is a bp device. In Inductor's compile workers there is none: they only compile.

        The process that forks them asks this to record properties of devices.
        """
        return not _is_compile_worker() and accelerator.is_available()

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        """Return the current stream of a device as an integer (`torch.bp.Stream.bp_stream`)."""
        stream_id, index, _ = _C.current_stream(device_idx)
        return _C.stream_handle(index, stream_id)

    @classmethod
    def get_compute_capability(cls, device: Any = None) -> str:
        """Return text that identifies the driver of a device and what generated code for it depends on."""
        return cls.Worker.get_device_properties(device).capability

    @classmethod
    def is_dtype_supported(cls, dtype: torch.dtype, including_emulation: bool = False) -> bool:
        """Return whether the current device supports the dtype. bp devices emulate none."""
        return dtype in cls.Worker.get_device_properties().dtypes

    @classmethod
    def is_bf16_supported(cls, including_emulation: bool = False) -> bool:
        """Return whether the current device supports bfloat16."""
        return cls.is_dtype_supported(torch.bfloat16)

    @classmethod
    def raise_if_triton_unavailable(cls, device: Any = None) -> None:
        """Raise RuntimeError: Inductor's templates in Triton are not for bp."""
        raise RuntimeError(
            "Inductor's Triton templates do not support bp devices. torch.compile generates kernels for them in the "
            "dialect of the device, or in Triton on request: torch.backends.bp.inductor_backend"
        )


def _is_compile_worker() -> bool:
    """Whether Inductor has started this process, or the one that this was forked from, to compile kernels."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    return program is not None and Path(program).parts[-2:] == ("compile_worker", "__main__.py")


def stream_number(index: int) -> int:
    """Return a number for the current stream of bp:`index`, which the Triton kernels of graphs get.

    It is not a handle, because a stream that is captured has none. Launches use the current stream.
    """
    return accelerator.current_stream(index).stream_id


def register() -> None:
    """Register the interface for "bp", and for "bp:0", "bp:1", … as soon as the devices are used."""
    device_interface.register_interface_for_device("bp", BpInterface)
    accelerator._lazy_call(_register_indices)


def _register_indices() -> None:
    for index in range(accelerator.device_count()):
        device_interface.register_interface_for_device(f"bp:{index}", BpInterface)
