"""Which devices there are, and which one is current."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torch_backplane import _C, drivers
from torch_backplane.accelerator._utils import DeviceLike, _get_device_index, device
from torch_backplane.accelerator.initialization import _lazy_init


def device_count() -> int:
    """How many bp devices there are, of all drivers.

    0, with a warning that says why, where a setting is malformed (`torch.bp.init()` raises the error), and 0 in a child
    that was forked after its parent had used devices, or found devices of a driver in Python.
    """
    if not _C.is_discovered():
        try:
            drivers.discover()
        except ValueError as error:
            warnings.warn(f"bp devices cannot be discovered: {error}", stacklevel=2)
            return 0
    return _C.device_count()


def is_available() -> bool:
    """True where there is a bp device."""
    return device_count() > 0


def current_device() -> int:
    """The index of the current device of this thread."""
    return _C.current_device()


def set_device(device: DeviceLike) -> None:
    """Make `device` the current one of this thread; a negative index changes nothing."""
    index = _get_device_index(device)
    if index >= 0:
        _C.set_device(index)


class device_of(device):
    """Context manager that makes the device of a tensor or storage the current one; nothing for one elsewhere."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "bp" else -1)


def _checked(device: DeviceLike, name: str) -> int:
    _lazy_init()
    index = _get_device_index(device, optional=True)
    count = device_count()
    if not 0 <= index < count:
        raise AssertionError(f"Invalid {name} id: {index}, where the number of bp devices is {count}")
    return index


def get_device_properties(device: DeviceLike = None) -> _C.DeviceProperties:
    """What the device says of itself: driver, name, total_memory (bytes), address_space, host_accessible, compute_units
    (also under torch.cuda's name multi_processor_count), major, minor, dtypes.

    Raises:
        AssertionError: there is no such device.
    """
    return _C.device_properties(_checked(device, "device"))


def native_context(device: DeviceLike = None) -> int:
    """The hardware API's handle of the device's context (a cl_context, a CUcontext), for other libraries.

    Raises:
        NotImplementedError: the device has none, or its driver does not tell.
    """
    index = _checked(device, "device")
    context = getattr(drivers.device(index), "native_context", None)
    if context is None:
        driver = _C.device_properties(index).driver
        raise NotImplementedError(f"bp:{index} has no native context: the driver {driver} sets no native_context")
    return context


def get_device_name(device: DeviceLike = None) -> str:
    """What the hardware calls itself."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """(major, minor), as the device's driver defines them."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """True where `device` can read the memory of `peer_device` without a copy through the host."""
    return _C.can_access_peer(_checked(device, "device"), _checked(_get_device_index(peer_device), "peer device"))


SYNC_DEBUG_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Tell what makes the host wait for a device: `item()`, `nonzero()`, copies to the CPU, operators that run there,
    and waiting for a stream. Each is named, by the operator that the program has called; what waits for a whole device
    or for an event on purpose is not, as with torch.cuda. On host devices, where operators run on the CPU anyway, only
    reads and copies are.

    Args:
        debug_mode: "default" or 0: nothing is told; "warn" or 1: each is a warning; "error" or 2: each is an error, and
            nothing waits.

    Raises:
        ValueError: another mode.
    """
    modes = {name: number for number, name in enumerate(SYNC_DEBUG_MODES)}
    mode = modes.get(debug_mode, -1) if isinstance(debug_mode, str) else debug_mode
    if mode not in modes.values():
        raise ValueError(f"debug_mode is 'default' (0), 'warn' (1) or 'error' (2), and got {debug_mode!r}")
    _C.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    """0, 1 or 2: see `set_sync_debug_mode`."""
    return _C.sync_debug_mode()


def synchronize(device: DeviceLike = None) -> None:
    """Wait for all work in all streams of the device (None: the current one)."""
    _C.synchronize(_get_device_index(device, optional=True))


def ipc_collect() -> None:
    """torch.cuda frees memory here that other processes have let go of; bp memory is never shared.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("bp tensors cannot be shared between processes, so there is nothing to collect")


def _sleep(cycles: float) -> None:
    """Keep the current stream busy for `cycles` of a 1 GHz clock: 1,000,000 are a millisecond, on every device.

    For tests and demonstrations; torch.cuda's cycles are those of the GPU's own clock.
    """
    _lazy_init()
    _C.sleep(cycles / 1_000_000)


def _exchange_device(device: int) -> int:
    return _C.exchange_device(device)


def _maybe_exchange_device(device: int) -> int:
    return _C.exchange_device(device)


def _get_device(device: int | str | torch.device) -> torch.device:
    """`device` as a torch.device."""
    return torch.device("bp", device) if isinstance(device, int) else torch.device(device)
