"""Device arguments, as torch.cuda takes them. PyTorch's own code looks for `_get_device_index` under this name."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from torch_backplane import _C

# Forward reference to torch.bp.device, which the functions below take as well.
DeviceLike: TypeAlias = "torch.device | str | int | None"


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index that `device` means.

    Args:
        device: a torch.device, a string such as "bp:1", an index, a `torch.bp.device`, or None.
        optional: where no index is given, answer the current device's instead of raising an error.
        allow_cpu: accept the CPU too, and answer -1 for it.

    Raises:
        ValueError: a device of another type, or no index where one is needed.
        TypeError: none of these.
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
        raise TypeError(f"a device is a torch.device, a string, an index or None, and got {type(device).__name__}")
    if not optional:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
    return _C.current_device()


class device:
    """Context manager that makes a device the current one.

    Args:
        device: a torch.device, a string, an index or None (the current device). A negative index changes nothing.
    """

    def __init__(self, device: Any) -> None:
        self.idx = _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        _C.exchange_device(self.prev_idx)


_DeviceContext = device  # functions have an argument of that name
