"""Calls of torch.bp in functions that Dynamo traces.

Dynamo has rules for the functions of torch.cuda and torch.accelerator. It inlines those of torch.bp, as of any package,
and breaks the graph where they call the runtime (`_C`). The functions below replace them during tracing: they have the
same results and consist of what Dynamo has rules for. Dynamo installs guards for what they read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, ImportSource
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ctx_manager
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from torch_backplane import _C, accelerator
from torch_backplane.accelerator import devices, streams
from torch_backplane.accelerator._utils import DeviceLike, _get_device_index


def is_available() -> bool:
    return torch.accelerator.is_available()


def is_initialized() -> bool:
    return torch.accelerator.is_available()  # Dynamo asks for the current stream before it traces anything


def current_device() -> int:
    return torch.accelerator.current_device_index()


@torch.compiler.assume_constant_result
def _device_count() -> int:
    return accelerator.device_count()


def device_count() -> int:
    return _device_count()


@torch.compiler.assume_constant_result
def _device_properties(index: int) -> _C.DeviceProperties:
    return accelerator.get_device_properties(index)


def get_device_properties(device: DeviceLike = None) -> _C.DeviceProperties:
    return _device_properties(_get_device_index(device, optional=True))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    if _get_device_index(device, optional=True) != torch.accelerator.current_device_index():
        torch._dynamo.graph_break("torch.bp.current_stream of another device than the current one")
    return torch.accelerator.current_stream()


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_get_device_index(device, optional=True))


SUBSTITUTES = {
    accelerator.is_available: is_available,
    accelerator.is_initialized: is_initialized,
    accelerator.device_count: device_count,
    accelerator.get_device_properties: get_device_properties,
    accelerator.current_stream: current_stream,
    accelerator.synchronize: synchronize,
    _C.current_device: current_device,
}


def register() -> None:
    """Register with Dynamo how it traces functions and classes of torch.bp."""
    for function, substitute in SUBSTITUTES.items():
        torch.compiler.substitute_in_graph(function, skip_signature_check=function is _C.current_device)(substitute)
    torch.compiler.allow_in_graph(accelerator.stream)  # traced as the device interface's `stream`
    # PyTorch has no public hook for such classes: it lists torch.cuda's, torch.xpu's and torch.hpu's.
    UserDefinedClassVariable._in_graph_classes().update({accelerator.Stream, accelerator.Event})
    if hasattr(ctx_manager, "register_device_context_manager"):
        ctx_manager.register_device_context_manager(accelerator.device, BpDeviceVariable)


class BpDeviceVariable(ctx_manager.GenericDeviceVariable):
    _exchange_fn = staticmethod(accelerator._exchange_device)
    _maybe_exchange_fn = staticmethod(accelerator._maybe_exchange_device)
    _get_device_index_fn = staticmethod(_get_device_index)

    def module_name(self) -> str:
        return "torch.bp"

    def python_type(self) -> type:
        return accelerator.device
