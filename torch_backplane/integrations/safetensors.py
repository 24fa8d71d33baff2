"""safetensors: `device="bp"` and `device="bp:1"` for `load_file`, `load_model` and `safe_open`.

The names of devices are a list in safetensors' compiled part, without a hook. An index, however, is passed to PyTorch,
where it means a device of the accelerator. Changed: `safetensors.safe_open`, which the other functions call, gets the
index instead of the name. Reading, with its memory mapping and slices, remains safetensors'.
"""

from __future__ import annotations

import functools
from typing import Any

import safetensors
import safetensors.torch
import torch

from torch_backplane.integrations._overrides import is_bp, replace


def _opened(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        if not isinstance(device, int) and is_bp(device):
            device = torch.empty(0, device=device).device.index  # without an index: the current device
        return original(filename, framework, device, **options)

    return safe_open


@functools.cache
def enable() -> None:
    """Makes safetensors accept bp devices by name."""
    replace(safetensors.safe_open, _opened(safetensors.safe_open))


enable()
