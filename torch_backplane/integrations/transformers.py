"""transformers: `Trainer` and `TrainingArguments` use bp, `device_map="auto"` counts its memory.

transformers asks Accelerate for the device and for memory, so this enables `integrations.accelerate`, too. Changed:

- `TrainingArguments.device`: bp where Accelerate's device is bp. transformers tests for the devices that it knows and
  otherwise takes the CPU. `use_cpu=True` keeps its meaning.
- `is_torch_bf16_gpu_available`: True if bp is the accelerator and supports bfloat16. `TrainingArguments(bf16=True)`
  asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers.training_args
import transformers.utils.import_utils
from transformers import TrainingArguments

from torch_backplane import accelerator as bp
from torch_backplane.integrations import accelerate
from torch_backplane.integrations._overrides import replace


def _devices(original: Any) -> Any:
    @functools.wraps(original)
    def _setup_devices(self: TrainingArguments) -> torch.device:
        device: torch.device = original(self)
        state = self.distributed_state
        if device.type != "cpu" or self.use_cpu or state is None or state.device.type != "bp":
            return device
        self._n_gpu = 1  # several devices in one process need DataParallel, which is CUDA's
        bp.set_device(state.device)
        return state.device

    return _setup_devices


def _has_bfloat16(original: Any) -> Any:
    @functools.wraps(original)
    def is_torch_bf16_gpu_available() -> bool:
        return original() or (bp.is_available() and torch.bfloat16 in bp.get_amp_supported_dtype())

    return is_torch_bf16_gpu_available


@functools.cache
def enable() -> None:
    """Makes transformers know bp devices."""
    accelerate.enable()
    TrainingArguments._setup_devices.func = _devices(TrainingArguments._setup_devices.func)
    original = transformers.utils.import_utils.is_torch_bf16_gpu_available
    replace(original, _has_bfloat16(original))


enable()
