"""`torch.compile` on bp devices.

`device_interface` describes the devices to Dynamo and Inductor. Nothing of `torch._dynamo` or `torch._inductor` is
imported before the program does so: `imports` runs what belongs to a module of PyTorch after that module is imported.
"""

from __future__ import annotations

import types

from torch_backplane.compile.imports import when_imported


def install() -> None:
    """Register bp with Dynamo as soon as it is imported."""
    when_imported("torch._dynamo", _register_with_dynamo)


def _register_with_dynamo(module: types.ModuleType) -> None:
    from torch_backplane.compile import device_interface, traced_calls

    device_interface.register()
    traced_calls.register()
