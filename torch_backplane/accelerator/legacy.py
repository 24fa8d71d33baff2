"""Legacy typed tensors and storages, such as torch.bp.FloatTensor and FloatStorage, created on first access."""

from __future__ import annotations

from typing import Any

import torch
from torch.storage import _LegacyStorage, _warn_typed_storage_removal

TENSORS = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}
STORAGES = TENSORS | {"ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64}
NAMES = [f"{name}Tensor" for name in TENSORS] + [f"{name}Storage" for name in STORAGES]


class _StorageOfBp(_LegacyStorage):
    """Base class of typed storages. PyTorch derives their device from the name of their module, torch.bp."""

    @classmethod
    def from_buffer(cls, *args: Any, **kwargs: Any) -> Any:
        _warn_typed_storage_removal()
        raise RuntimeError("from_buffer: Not available for bp storage")

    @classmethod
    def _new_with_weak_ptr(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("_new_with_weak_ptr: Not available for bp storage")

    @classmethod
    def _new_shared_filename(cls, manager: Any, obj: Any, size: Any, *, device: Any = None, dtype: Any = None) -> Any:
        raise RuntimeError("_new_shared_filename: Not available for bp storage")


class _ClassProperty:
    def __init__(self, value: Any, warn: bool) -> None:
        self._value = value
        self._warn = warn

    def __get__(self, instance: Any, owner: Any) -> Any:
        if self._warn:
            _warn_typed_storage_removal()
        return self._value


class _TensorType(type):
    """Metaclass of torch.bp.FloatTensor and the like. They only support isinstance checks and calls."""

    dtype: torch.dtype
    is_sparse = False

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == "bp"
            and instance.layout == torch.strided
            and instance.dtype == cls.dtype
        )

    def __call__(cls, *args: Any, device: Any = "bp", **kwargs: Any) -> torch.Tensor:
        if torch.device(device).type != "bp":
            raise RuntimeError(f"legacy constructor expects device type: bp but device type: {device} was passed")
        if not args:
            return torch.empty(0, dtype=cls.dtype, device=device, **kwargs)
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device=device, **kwargs)
        return torch.empty(*args, dtype=cls.dtype, device=device, **kwargs)


def named(name: str) -> Any:
    """Create the typed tensor or storage with one of `NAMES`, such as "FloatTensor"."""
    if name.endswith("Tensor"):
        # The qualified name, as `tensor.type(torch.bp.FloatTensor)` reads only `__name__`.
        whole = f"torch.bp.{name}"
        body = {"dtype": TENSORS[name.removesuffix("Tensor")], "__module__": "torch.bp"}
        return _TensorType(whole, (), body)
    dtype = STORAGES[name.removesuffix("Storage")]
    body = {"dtype": _ClassProperty(dtype, True), "_dtype": _ClassProperty(dtype, False), "__module__": "torch.bp"}
    metaclass: Any = type(_StorageOfBp)
    return metaclass(name, (_StorageOfBp,), body)
