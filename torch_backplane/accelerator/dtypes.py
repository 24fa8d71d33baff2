"""Reduced-precision dtypes that the current device supports."""

from __future__ import annotations

import torch

from torch_backplane.accelerator.devices import device_count, get_device_properties


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device supports bfloat16.

    Args:
        including_emulation: ignored.
    """
    return device_count() > 0 and torch.bfloat16 in get_device_properties().dtypes


def is_tf32_supported() -> bool:
    """Return False: bp devices do not compute float32 matrix products in TF32."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes for torch.autocast("bp", dtype): float16 and bfloat16, if the current device supports them."""
    if device_count() == 0:
        return []
    supported = get_device_properties().dtypes
    return [dtype for dtype in (torch.float16, torch.bfloat16) if dtype in supported]
