"""Accelerate: bp is the default device, has memory for `device_map="auto"`, trains in float16 and on several ranks.

Accelerate has no registry of devices; each function tests for the devices it knows. Changed, and only where
Accelerate's own answer is the CPU or CUDA's absence:

- `PartialState.default_device`: bp instead of the CPU. `cpu=True` and `ACCELERATE_USE_CPU` keep their meaning.
- `PartialState._prepare_backend` and `set_device`: with several ranks, the backend for bp, and a bp device per rank.
  The type is MULTI_GPU, because Accelerate's list of types cannot be extended.
- `FullyShardedDataParallelPlugin`: with `sync_module_states`, parameters are created on bp.
- `get_max_memory`: free memory of bp devices, as devices 0, 1, …, and limits that the caller gives for these. It counts
  the devices that have the current device's driver, because a model is spread evenly over all that are counted.
- `get_grad_scaler`: a scaler for bp, in a process whose device is bp.
- `clear_device_cache`: bp's cache, too.
- `Accelerator(mixed_precision="fp16")`: Accelerate refuses float16 for devices that it does not know.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import accelerate.utils.memory
import accelerate.utils.modeling
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.modeling import convert_file_size_to_int

from torch_backplane import accelerator as bp
from torch_backplane import distributed
from torch_backplane.integrations._overrides import replace


def _default_device(original: property) -> property:
    def default_device(self: PartialState) -> torch.device:
        found: torch.device = original.fget(self)  # type: ignore[misc]
        return torch.device("bp", bp.current_device()) if found.type == "cpu" and bp.is_available() else found

    return property(default_device, doc=original.__doc__)


def _prepared_backend(original: Any) -> Any:
    @functools.wraps(original)
    def _prepare_backend(
        self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, Any]:
        found = original(self, cpu, sagemaker_dp, backend)
        launched = int(os.environ.get("LOCAL_RANK", "-1")) != -1
        if found[1] != DistributedType.NO or cpu or not launched or not _is_default():
            return found  # type: ignore[no-any-return]
        return backend or distributed.default_backend(), DistributedType.MULTI_GPU

    return _prepare_backend


def _is_default() -> bool:
    return PartialState.default_device.fget(PartialState).type == "bp"  # type: ignore[attr-defined]


def _device_of_rank(original: Any) -> Any:
    @functools.wraps(original)
    def set_device(self: PartialState) -> None:
        if self.device is None and self.distributed_type == DistributedType.MULTI_GPU and _is_default():
            self.device = torch.device("bp", self.local_process_index % bp.device_count())
            bp.set_device(self.device)
        else:
            original(self)

    return set_device


def _with_parameters_on_bp(original: Any) -> Any:
    """Accelerate refuses `sync_module_states` in its last step, if it does not know the device."""

    @functools.wraps(original)
    def __post_init__(self: FullyShardedDataParallelPlugin) -> None:
        try:
            original(self)
        except RuntimeError as error:
            if "no available devices" not in str(error) or not _is_default():
                raise
            self.param_init_fn = lambda module: module.to_empty(device="bp", recurse=False)

    return __post_init__


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
    PartialState._prepare_backend = _prepared_backend(PartialState._prepare_backend)
    PartialState.set_device = _device_of_rank(PartialState.set_device)
    PartialState.default_device = _default_device(PartialState.default_device)
    plugin = FullyShardedDataParallelPlugin
    plugin.__post_init__ = _with_parameters_on_bp(plugin.__post_init__)
    Accelerator.__init__ = _with_float16(Accelerator.__init__)
    for module, name, wrap in (
        (accelerate.utils.modeling, "get_max_memory", _max_memory),
        (accelerate.utils.modeling, "get_grad_scaler", _grad_scaler),
        (accelerate.utils.memory, "clear_device_cache", _cleared),
    ):
        original = getattr(module, name)
        replace(original, wrap(original))


enable()
