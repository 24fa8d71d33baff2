"""Calls of torch.bp in functions that Dynamo traces.

Dynamo has rules for the functions of torch.cuda and torch.accelerator. It inlines those of torch.bp, as of any package,
and breaks the graph where they call the runtime (`_C`). The functions below replace them during tracing: they have the
same results and consist of what Dynamo has rules for. Dynamo installs guards for what they read.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import decorators, trace_rules
from torch._dynamo.variables import SkipFunctionVariable, ctx_manager
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from torch_backplane import _C, accelerator
from torch_backplane.accelerator import dtypes, legacy
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


def get_device_name(device: DeviceLike = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


@torch.compiler.assume_constant_result
def _has_tf32(index: int) -> bool:
    return dtypes.has_tf32(index)


def is_tf32_supported() -> bool:
    return device_count() > 0 and _has_tf32(current_device())


def current_stream(device: DeviceLike = None) -> torch.Stream:
    if _get_device_index(device, optional=True) != torch.accelerator.current_device_index():
        torch._dynamo.graph_break("torch.bp.current_stream of another device than the current one")
    return torch.accelerator.current_stream()


def stream(stream: torch.Stream | None) -> torch.Stream | contextlib.nullcontext[None]:
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_get_device_index(device, optional=True))


def autocast(enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
    return torch.autocast("bp", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


SUBSTITUTES: dict[Callable[..., Any], Callable[..., Any]] = {
    _C.current_device: current_device,
    accelerator.current_device: current_device,
    accelerator.is_available: is_available,
    accelerator.is_initialized: is_initialized,
    accelerator.device_count: device_count,
    accelerator.get_device_properties: get_device_properties,
    accelerator.get_device_name: get_device_name,
    accelerator.get_device_capability: get_device_capability,
    accelerator.is_tf32_supported: is_tf32_supported,
    accelerator.current_stream: current_stream,
    accelerator.stream: stream,
    accelerator.synchronize: synchronize,
}


# Modules whose functions Dynamo inlines; the audit compiles some. It neither inlines nor compiles those of other
# modules: a planner that runs between two graphs, for example.
INLINED = {
    "torch_backplane": {"accelerator", "audit", "backends", "compile", "elementwise_functions"},
    "torch_backplane.accelerator": {"_utils", "amp", "dtypes"},
}


def register() -> None:
    """Register with Dynamo how it traces functions and classes of Backplane."""
    for package, inlined in INLINED.items():
        for module in pkgutil.iter_modules(sys.modules[package].__path__):
            if module.name not in inlined:
                trace_rules.add(f"{package}.{module.name}")
    for function, substitute in SUBSTITUTES.items():
        torch.compiler.substitute_in_graph(function, skip_signature_check=function is _C.current_device)(substitute)
    if trace_rules.lookup(torch.set_autocast_enabled) is SkipFunctionVariable:  # until torch 2.11
        decorators.substitute_in_graph(accelerator.amp.autocast, is_embedded_type=True)(autocast)
    # PyTorch has no public hook for such classes: it lists torch.cuda's, torch.xpu's and torch.hpu's.
    UserDefinedClassVariable._in_graph_classes().update({accelerator.Stream, accelerator.Event})
    for name in legacy.TENSORS:  # calls of torch.bp.FloatTensor break the graph: Dynamo would not call its metaclass
        typed = getattr(accelerator, f"{name}Tensor")
        torch._dynamo.disallow_in_graph(torch.compiler.allow_in_graph(typed))
    if hasattr(ctx_manager, "register_device_context_manager"):  # since torch 2.13
        from torch_backplane.compile import device_context

        device_context.register()
