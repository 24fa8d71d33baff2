"""Devices of torch.bp: counts, properties, the current device, synchronization."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torch_backplane import _C, drivers
from torch_backplane.accelerator import processes
from torch_backplane.accelerator._utils import DeviceLike, _get_device_index, device
from torch_backplane.accelerator.initialization import _lazy_init


def device_count() -> int:
    """Return the number of bp devices, of all drivers.

    It is 0, with a warning, if a setting is malformed; `torch.bp.init()` raises the error. It is also 0 in a process
    that was forked after its parent used a device, or discovered devices of a driver in Python.
    """
    if not _C.is_discovered():
        try:
            drivers.discover()
        except ValueError as error:
            warnings.warn(f"bp devices cannot be discovered: {error}", stacklevel=2)
            return 0
    return _C.device_count()


def is_available() -> bool:
    """Return whether there is a bp device."""
    return device_count() > 0


def current_device() -> int:
    """Return the index of this thread's current device."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Set this thread's current device. With a negative index this does nothing.

    Args:
        device: a torch.device with an index, a string such as "bp:1", or an index.

    Raises:
        ValueError: `device` has no index, or another type.
        RuntimeError: there is no such device.
    """
    index = _get_device_index(device)
    if index >= 0:
        _C.set_device(index)


class device_of(device):
    """Context manager that changes the current device to that of a tensor or storage.

    Args:
        obj: a tensor or storage. If it is not on a bp device, the context manager does nothing.
    """

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "bp" else -1)


def checked_index(device: DeviceLike, name: str) -> int:
    """Return the index of an existing device. `name` is what the AssertionError for another one calls it."""
    _lazy_init()
    index = _get_device_index(device, optional=True)
    count = device_count()
    if not 0 <= index < count:
        raise AssertionError(f"Invalid {name} id: {index}; the number of bp devices is {count}")
    return index


def get_device_properties(device: DeviceLike = None) -> _C.DeviceProperties:
    """Return the properties of a device.

    Args:
        device: the device; the current one by default.

    Returns:
        An object with the attributes `driver`, `kind`, `name`, `total_memory` (bytes), `address_space`,
        `host_accessible`, `compute_units` (also as torch.cuda's `multi_processor_count`), `major`, `minor`, `dtypes`
        and `dialect`.

    Raises:
        AssertionError: there is no such device.
    """
    return _C.device_properties(checked_index(device, "device"))


def native_context(device: DeviceLike = None) -> int:
    """Return the native handle of a device's context (a cl_context or CUcontext, say), for other libraries.

    Args:
        device: the device; the current one by default.

    Raises:
        AssertionError: there is no such device.
        NotImplementedError: the device's driver provides no native context.
    """
    index = checked_index(device, "device")
    context = getattr(drivers.device(index), "native_context", None)
    if context is None:
        driver = _C.device_properties(index).driver
        raise NotImplementedError(f"bp:{index} has no native context: the driver {driver} sets no native_context")
    return context


def get_device_name(device: DeviceLike = None) -> str:
    """Return the name of a device (the current one by default)."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return the (major, minor) capability of a device, as its driver defines it (the current device by default)."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether `device` can access the memory of `peer_device` without a copy through the host.

    Raises:
        AssertionError: there is no such device.
    """
    index = checked_index(device, "device")
    return _C.can_access_peer(index, checked_index(_get_device_index(peer_device), "peer device"))


SYNC_DEBUG_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Set whether operations that make the host wait for a device give warnings or raise errors.

    These are `item()`, `nonzero()`, copies to the CPU, operators that fall back to the CPU, and synchronization of a
    stream. The message names the operator that the program called. As in torch.cuda, synchronization of a device or an
    event is not reported. On host devices, where all operators run on the CPU, only reads and copies are reported.

    Args:
        debug_mode: "default" or 0 for no reports, "warn" or 1 for warnings, "error" or 2 for errors, raised before the
            host waits.

    Raises:
        ValueError: `debug_mode` is none of these.
    """
    modes = {name: number for number, name in enumerate(SYNC_DEBUG_MODES)}
    mode = modes.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in modes.values():
        raise ValueError(f"debug_mode must be 'default' (0), 'warn' (1) or 'error' (2), but got {debug_mode!r}")
    _C.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    """Return the debug mode for synchronizing operations as a number (see `set_sync_debug_mode`)."""
    return _C.sync_debug_mode()


def synchronize(device: DeviceLike = None) -> None:
    """Wait until all work in all streams of a device is completed.

    Errors that kernels and host callbacks reported are raised here.

    Args:
        device: the device; the current one by default.
    """
    _C.synchronize(_get_device_index(device, optional=True))


def ipc_collect() -> None:
    """Free memory that was sent to other processes by handle, and that no process uses any longer.

    Sending a tensor does this, too. Host devices need no collection (`torch_backplane.accelerator.processes`).
    """
    processes.collect()


def _sleep(cycles: float) -> None:
    """Keep the current stream busy for `cycles` of a 1 GHz clock: 1,000,000 cycles are a millisecond on every device.

    For tests and demonstrations. torch.cuda counts cycles of the GPU's clock.
    """
    _lazy_init()
    _C.sleep(cycles / 1_000_000)


def _exchange_device(device: int) -> int:
    return _C.exchange_device(device)


def _maybe_exchange_device(device: int) -> int:
    return _C.exchange_device(device)


def _get_device(device: int | str | torch.device) -> torch.device:
    """Convert `device` to a torch.device."""
    return torch.device("bp", device) if isinstance(device, int) else torch.device(device)
