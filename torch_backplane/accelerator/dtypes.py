"""Reduced-precision dtypes that the current device supports."""

from __future__ import annotations

import torch

from torch_backplane import drivers
from torch_backplane.accelerator.devices import device_count, get_device_properties
from torch_backplane.drivers.libraries import routines_of


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device supports bfloat16.

    Args:
        including_emulation: ignored.
    """
    return device_count() > 0 and torch.bfloat16 in get_device_properties().dtypes


def is_tf32_supported() -> bool:
    """Return whether a library computes float32 matrix products in TF32 on the current device, if that is allowed."""
    return device_count() > 0 and has_tf32(torch.accelerator.current_device_index())


def has_tf32(index: int) -> bool:
    """Return whether a library computes float32 matrix products in TF32 on a device."""
    return any(routine.tf32 for _, routine in routines_of(drivers.device(index), "matmul"))


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes for torch.autocast("bp", dtype): float16 and bfloat16, if the current device supports them."""
    if device_count() == 0:
        return []
    supported = get_device_properties().dtypes
    return [dtype for dtype in (torch.float16, torch.bfloat16) if dtype in supported]
