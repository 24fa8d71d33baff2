"""Accelerate: bp is the default device, has memory for `device_map="auto"`, and trains in float16.

Accelerate has no registry of devices; each function tests for the devices it knows. Changed, and only where
Accelerate's own answer is the CPU or CUDA's absence:

- `PartialState.default_device`: bp instead of the CPU. `cpu=True` and `ACCELERATE_USE_CPU` keep their meaning.
- `get_max_memory`: free memory of bp devices, as devices 0, 1, …, and limits that the caller gives for these. It counts
  the devices that have the current device's driver, because a model is spread evenly over all that are counted.
- `get_grad_scaler`: a scaler for bp, in a process whose device is bp.
- `clear_device_cache`: bp's cache, too.
- `Accelerator(mixed_precision="fp16")`: Accelerate refuses float16 for devices that it does not know.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import accelerate.utils.memory
import accelerate.utils.modeling
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils.modeling import convert_file_size_to_int

from torch_backplane import accelerator as bp
from torch_backplane.integrations._overrides import replace


def _default_device(original: property) -> property:
    def default_device(self: PartialState) -> torch.device:
        found: torch.device = original.fget(self)  # type: ignore[misc]
        return torch.device("bp", bp.current_device()) if found.type == "cpu" and bp.is_available() else found

    return property(default_device, doc=original.__doc__)


def _free_memory() -> dict[int, int]:
    """The free memory in bytes of each bp device that has the current device's driver."""
    indices = range(bp.device_count())
    drivers = [bp.get_device_properties(index).driver for index in indices]
    return {index: bp.mem_get_info(index)[0] for index in indices if drivers[index] == drivers[bp.current_device()]}


def _max_memory(original: Any) -> Any:
    @functools.wraps(original)
    def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
        known = original()
        if not bp.is_available() or any(isinstance(device, int) for device in known):
            return original(max_memory)  # type: ignore[no-any-return]
        free = _free_memory()
        if max_memory is None:
            return {**free, **known}  # Accelerate fills devices in this order
        for device, limit in max_memory.items():  # in place, as Accelerate does: transformers relies on it
            max_memory[device] = convert_file_size_to_int(limit) if isinstance(limit, str) else limit
        limits = {device: max_memory[device] for device in free if device in max_memory}
        return {**limits, **original({device: one for device, one in max_memory.items() if device not in limits})}

    return get_max_memory


def _grad_scaler(original: Any) -> Any:
    @functools.wraps(original)
    def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
        if PartialState().device.type == "bp" and distributed_type != "FSDP":
            return torch.amp.GradScaler("bp", **kwargs)
        return original(distributed_type, **kwargs)

    return get_grad_scaler


def _cleared(original: Any) -> Any:
    @functools.wraps(original)
    def clear_device_cache(garbage_collection: bool = False) -> None:
        original(garbage_collection)
        if bp.is_initialized():
            bp.empty_cache()

    return clear_device_cache


def _with_float16(original: Any) -> Any:
    """Accelerate's constructor refuses float16 on bp after it has set the state, and takes bfloat16 for any device."""

    @functools.wraps(original)
    def __init__(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
            return
        except ValueError as error:
            if "fp16 mixed precision requires a device in" not in str(error) or self.device.type != "bp":
                raise
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.arguments["mixed_precision"] = "bf16"
        state = AcceleratorState._shared_state
        state["_mixed_precision"] = "bf16"
        try:
            original(*given.args, **given.kwargs)
        finally:
            state["_mixed_precision"] = "fp16"
        options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
        self.scaler = accelerate.utils.modeling.get_grad_scaler(self.distributed_type, **options)

    return __init__


@functools.cache
def enable() -> None:
    """Makes Accelerate know bp devices."""
    PartialState.default_device = _default_device(PartialState.default_device)
    Accelerator.__init__ = _with_float16(Accelerator.__init__)
    for module, name, wrap in (
        (accelerate.utils.modeling, "get_max_memory", _max_memory),
        (accelerate.utils.modeling, "get_grad_scaler", _grad_scaler),
        (accelerate.utils.memory, "clear_device_cache", _cleared),
    ):
        original = getattr(module, name)
        replace(original, wrap(original))


enable()
