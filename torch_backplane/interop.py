"""Patches for Python code of PyTorch that decides by the device's name instead of asking the device.

Each function here wraps a function of PyTorch, and forwards every call that does not involve bp.
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
from torch_backplane.accelerator.processes import ONE_PROCESS


def _refuse_for_bp(storage_method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(storage_method)
    def method(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "bp":
            raise NotImplementedError(ONE_PROCESS)
        return storage_method(self, *args, **kwargs)

    return method


def _declared_dlpack_device(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The DLPack device that the driver of a bp tensor's device declares (DeviceProperties.dlpack_device), if any."""
    index = tensor.device.index
    if _C.device_properties(index).address_space == "synthetic":  # includes hidden host memory
        return None
    return drivers.device(index).properties.dlpack_device


def _bp_dlpack_device(dlpack_device: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """PyTorch returns kDLExtDev for the type name "privateuse1", but not for "bp"."""

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
    """Exports capsules with the device that the driver declares. PyTorch would export kDLExtDev."""

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
            if stream != -1:  # the consumer's stream belongs to another runtime and cannot wait for an event of bp
                torch.accelerator.current_stream(self.device).synchronize()
            _C.set_dlpack_device(capsule, *declared)
        return capsule

    return method


class _AsExtension:
    """Exports a bp tensor to PyTorch itself as kDLExtDev, whatever device the driver declares to other libraries."""

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


def _bp_cuda_array_interface(described: property) -> property:
    """Describes bp tensors in CUDA's memory to libraries such as Numba and CuPy, as PyTorch does for those of CUDA."""

    def get(self: torch.Tensor) -> dict[str, Any]:
        from torch._tensor import _dtype_to_typestr
        from torch.utils.dlpack import DLDeviceType

        declared = _declared_dlpack_device(self) if self.device.type == "bp" else None
        if declared is None or declared[0] != DLDeviceType.kDLCUDA:
            return described.__get__(self)
        if self.requires_grad:
            raise RuntimeError("__cuda_array_interface__ of a tensor that requires grad: use tensor.detach()")
        torch.accelerator.current_stream(self.device).synchronize()  # the consumer does not wait
        return {
            "typestr": _dtype_to_typestr(self.dtype),
            "shape": tuple(self.shape),
            "strides": None if self.is_contiguous() else tuple(one * self.itemsize for one in self.stride()),
            "data": (self.data_ptr() if self.numel() else 0, False),
            "version": 2,
        }

    return property(get, doc=described.__doc__)


def _data_parallel_without_bp(available_device_type: Callable[[], str | None]) -> Callable[[], str | None]:
    """Hides bp devices from DataParallel, so that modules on the CPU run there, as without an accelerator."""

    @functools.wraps(available_device_type)
    def function() -> str | None:
        device_type = available_device_type()
        return None if device_type == "bp" else device_type

    return function


def _no_data_parallel(parallel: Callable[..., Any]) -> Callable[..., Any]:
    """Rejects modules on bp, and bp devices for modules on other devices."""

    @functools.wraps(parallel)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            given = inspect.signature(parallel).bind(*args, **kwargs).arguments
        except TypeError:
            return parallel(*args, **kwargs)  # raises its own error for wrong arguments
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
    """A scale whose `double()` stays float32. Scales are powers of two by default: their reciprocals are exact."""

    def double(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _unscale_without_float64(unscale: Callable[..., None]) -> Callable[..., None]:
    """Unscales without float64 on devices that lack it. PyTorch uses it for 1 / scale on all devices but mps:0."""

    @functools.wraps(unscale)
    def method(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        scale = getattr(self, "_scale", None)  # missing if the scaler is disabled
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
    """Replace PyTorch's functions by the wrappers above."""
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _refuse_for_bp(getattr(torch.UntypedStorage, name)))
    # Imported by name, because torch.nn.parallel.data_parallel is the function and not its module.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    for owner, name, wrap in (
        (torch.Tensor, "__dlpack_device__", _bp_dlpack_device),
        (torch, "from_dlpack", _bp_from_dlpack(torch.Tensor.__dlpack__)),  # PyTorch's: the loop replaces it later
        (torch.utils.dlpack, "from_dlpack", _bp_from_dlpack(torch.Tensor.__dlpack__)),
        (torch.Tensor, "__dlpack__", _bp_dlpack),
        (torch.Tensor, "__cuda_array_interface__", _bp_cuda_array_interface),
        (torch.amp.GradScaler, "unscale_", _unscale_without_float64),
        (data_parallel, "_get_available_device_type", _data_parallel_without_bp),
        (data_parallel.DataParallel, "__init__", _no_data_parallel),
        (torch.nn.parallel, "data_parallel", _no_data_parallel),
    ):
        setattr(owner, name, wrap(getattr(owner, name)))
