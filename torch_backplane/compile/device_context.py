"""`with torch.bp.device(...)` in functions that Dynamo traces."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, ImportSource
from torch._dynamo.variables import ctx_manager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate

from torch_backplane import accelerator
from torch_backplane.accelerator._utils import _get_device_index


class BpDeviceVariable(ctx_manager.GenericDeviceVariable):
    """Represents `torch.bp.device` during tracing.

    The calls that change the current device are in Dynamo's graph, but AOTAutograd drops them. Therefore the device of
    tensors that the context creates on "bp" is written into the graph with its index.
    """

    _exchange_fn = staticmethod(accelerator._exchange_device)
    _maybe_exchange_fn = staticmethod(accelerator._maybe_exchange_device)
    _get_device_index_fn = staticmethod(_get_device_index)

    def enter(self, tx: Any) -> Any:
        """Enter the context."""
        FakeTensorMode.cache_clear()  # its results for "bp" are on the device that was the current one
        return super().enter(tx)

    @classmethod
    def create(cls, tx: Any, device: Any, **kwargs: Any) -> ctx_manager.GenericDeviceVariable:
        """Create the context for a constant device."""
        if device is None or device == "bp" or device == torch.device("bp"):
            current = AttrSource(AttrSource(ImportSource("torch"), "accelerator"), "current_device_index")
            install_guard(CallFunctionNoArgsSource(current).make_guard(GuardBuilder.EQUALS_MATCH))
        return super().create(tx, device, **kwargs)

    def exit(self, tx: Any, *args: Any) -> Any:
        """Leave the context."""
        index = self.target_values[0]
        if index >= 0:
            node = self.proxy.next
            while node.op != "root":
                _name_device(node, torch.device("bp", index))
                node = node.next
        FakeTensorMode.cache_clear()
        return super().exit(tx, *args)

    def module_name(self) -> str:
        """Return the module in which code after a graph break finds the class."""
        return "torch.bp"

    def python_type(self) -> type:
        """Return the class."""
        return accelerator.device


def _name_device(node: torch.fx.Node, device: torch.device) -> None:
    """Writes `device` into a node that creates or moves tensors to "bp"."""

    def named(value: Any) -> Any:
        return device if value == torch.device("bp") else value

    node.args = map_aggregate(node.args, named)
    node.kwargs = map_aggregate(node.kwargs, named)
    if node.kwargs.get("device") == "bp":
        node.update_kwarg("device", device)
    if node.op == "call_method" and node.target == "to" and node.args[1:2] == ("bp",):
        node.update_arg(1, device)
    if node.op == "call_method" and node.target == "bp" and len(node.args) == 1 and "device" not in node.kwargs:
        node.update_kwarg("device", device)


def register() -> None:
    """Register the context with Dynamo."""
    ctx_manager.register_device_context_manager(accelerator.device, BpDeviceVariable)
