"""Device arguments as torch.cuda accepts them. PyTorch's own code looks up `_get_device_index` in this module."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from torch_backplane import _C

# The functions also accept a torch.bp.device.
DeviceLike: TypeAlias = "torch.device | str | int | None"


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """Return the index of a device.

    Args:
        device: a torch.device, a string such as "bp:1", an index, a `torch.bp.device`, or None.
        optional: whether to return the current device's index if `device` has none, instead of raising an error.
        allow_cpu: whether to accept the CPU, for which -1 is returned.

    Raises:
        ValueError: the device has another type, or no index although one is required.
        TypeError: `device` has another type than these.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, _DeviceContext):
        return device.idx
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type == "cpu" and allow_cpu:
            return -1
        if device.type != "bp":
            raise ValueError(f"Expected a bp{' or cpu' if allow_cpu else ''} device, but got: {device}")
        if device.index is not None:
            return device.index
    elif device is not None:
        raise TypeError(f"device must be a torch.device, a string, an index or None, but got {type(device).__name__}")
    if not optional:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
    return _C.current_device()


class device:
    """Context manager that changes the current device.

    Args:
        device: a torch.device, a string, an index, or None for the current device. With a negative index it does
            nothing.
    """

    def __init__(self, device: Any) -> None:
        self.idx = _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        _C.exchange_device(self.prev_idx)


_DeviceContext = device  # alias for functions that have an argument named `device`
