"""What PyTorch decides by the device's name in Python, without asking the device: answers for bp.

Each function here stands in front of one of PyTorch's, and hands every call that is not about bp on to it.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from torch_backplane import _C, drivers

_ONE_PROCESS = (
    "bp memory belongs to the process that allocated it and cannot be shared with another one: "
    "send tensor.cpu(), or share a CPU tensor and copy it to bp there"
)


def _refuse_for_bp(storage_method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(storage_method)
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "bp":
            raise NotImplementedError(_ONE_PROCESS)
        return storage_method(self, *args, **kwargs)

    return method


def _declared_dlpack_device(tensor: torch.Tensor) -> tuple[int, int] | None:
    """What the driver of a bp tensor's device declares (DeviceProperties.dlpack_device)."""
    index = tensor.device.index
    if _C.device_properties(index).address_space == "synthetic":  # also where the user hides host memory
        return None
    return drivers.device(index).properties.dlpack_device


def _bp_dlpack_device(dlpack_device: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """PyTorch knows kDLExtDev for the device type by its original name only, not by the name that it was given."""

    @functools.wraps(dlpack_device)
    def method(self: torch.Tensor) -> tuple[enum.IntEnum | int, int]:
        if self.device.type != "bp":
            return dlpack_device(self)
        from torch.utils.dlpack import DLDeviceType

        declared = _declared_dlpack_device(self)
        if declared is None:
            return DLDeviceType.kDLExtDev, self.device.index
        known = declared[0] in list(DLDeviceType)
        return DLDeviceType(declared[0]) if known else declared[0], declared[1]

    return method


def _bp_dlpack(dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """A capsule with the device that the driver declares, where PyTorch has kDLExtDev."""

    @functools.wraps(dlpack)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_bp = isinstance(self, torch.Tensor) and self.device.type == "bp"
        declared = _declared_dlpack_device(self) if is_bp else None
        if declared is None:
            return dlpack(self, *args, **kwargs)
        if kwargs.get("dl_device") == declared:
            del kwargs["dl_device"]
        stream = kwargs.pop("stream", None)
        capsule = dlpack(self, *args, **kwargs)
        if kwargs.get("dl_device") is None:
            if stream != -1:  # the consumer's stream is one of another runtime's, which cannot wait for an event of bp
                torch.accelerator.current_stream(self.device).synchronize()
            _C.set_dlpack_device(capsule, *declared)
        return capsule

    return method


class _AsExtension:
    """A bp tensor as PyTorch itself imports it, whatever device the driver declares to others."""

    def __init__(self, tensor: torch.Tensor, dlpack: Callable[..., Any]) -> None:
        self._tensor, self._dlpack = tensor, dlpack

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._dlpack(self._tensor, **kwargs)

    def __dlpack_device__(self) -> tuple[enum.IntEnum, int]:
        from torch.utils.dlpack import DLDeviceType

        return DLDeviceType.kDLExtDev, self._tensor.device.index


def _bp_from_dlpack(dlpack: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(from_dlpack)
        def function(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = args[0] if args else kwargs.get("ext_tensor")
            if isinstance(given, torch.Tensor) and given.device.type == "bp":
                kwargs.pop("ext_tensor", None)
                args = (_AsExtension(given, dlpack), *args[1:])
            return from_dlpack(*args, **kwargs)

        return function

    return wrap


def _data_parallel_without_bp(available_device_type: Callable[[], str | None]) -> Callable[[], str | None]:
    """DataParallel has nothing to spread modules over: those of the CPU run there, as without an accelerator."""

    @functools.wraps(available_device_type)
    def function() -> str | None:
        device_type = available_device_type()
        return None if device_type == "bp" else device_type

    return function


def _no_data_parallel(parallel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses modules on bp, and bp's devices for modules that are elsewhere."""

    @functools.wraps(parallel)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            given = inspect.signature(parallel).bind(*args, **kwargs).arguments
        except TypeError:
            return parallel(*args, **kwargs)  # says so in its own words
        module = given["module"]
        devices = [*(given.get("device_ids") or ()), given.get("output_device")]
        if isinstance(module, torch.nn.Module):
            devices += [tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())]
        if any(str(one).partition(":")[0] == "bp" for one in devices):
            raise NotImplementedError(
                "torch.nn.DataParallel is not supported on bp: it needs CUDA's broadcast and gather. "
                "Use torch.nn.parallel.DistributedDataParallel, one process per device"
            )
        return parallel(*args, **kwargs)

    return function


class _Float32Scale(torch.Tensor):
    """A scale whose float64 is float32. The reciprocal of a power of two, which a scale is, is exact in both."""

    def double(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _unscale_without_float64(unscale: Callable[..., None]) -> Callable[..., None]:
    """PyTorch takes the reciprocal of the scale in float64, except on mps:0, which it knows to have none."""

    @functools.wraps(unscale)
    def method(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scale = getattr(self, "_scale", None)  # one that is not enabled has none
        if (
            scale is None
            or scale.device.type != "bp"
            or torch.float64 in _C.device_properties(scale.device.index).dtypes
        ):
            unscale(self, optimizer)
            return
        self._scale = scale.as_subclass(_Float32Scale)
        try:
            unscale(self, optimizer)
        finally:
            self._scale = scale

    return method


def install() -> None:
    """Put the functions above in front of PyTorch's."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _refuse_for_bp(getattr(torch.UntypedStorage, name)))
    # By name: torch.nn.parallel.data_parallel is the function, not its module.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    for owner, name, wrap in (
        (torch.Tensor, "__dlpack_device__", _bp_dlpack_device),
        (torch, "from_dlpack", _bp_from_dlpack(torch.Tensor.__dlpack__)),  # before that is replaced
        (torch.utils.dlpack, "from_dlpack", _bp_from_dlpack(torch.Tensor.__dlpack__)),
        (torch.Tensor, "__dlpack__", _bp_dlpack),
        (torch.amp.GradScaler, "unscale_", _unscale_without_float64),
        (data_parallel, "_get_available_device_type", _data_parallel_without_bp),
        (data_parallel.DataParallel, "__init__", _no_data_parallel),
        (torch.nn.parallel, "data_parallel", _no_data_parallel),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))
