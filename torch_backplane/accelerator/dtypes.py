"""Which reduced-precision dtypes the current device computes in."""

from __future__ import annotations

import torch

from torch_backplane.accelerator.devices import device_count, get_device_properties


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True where the current device computes in bfloat16; `including_emulation` is of no matter here."""
    return device_count() > 0 and torch.bfloat16 in get_device_properties().dtypes


def is_tf32_supported() -> bool:
    """False: no driver computes float32 matrix products in TF32."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that torch.autocast("bp", dtype) takes: float16 and bfloat16, where the current device has them."""
    if device_count() == 0:
        return []
    supported = get_device_properties().dtypes
    return [dtype for dtype in (torch.float16, torch.bfloat16) if dtype in supported]
