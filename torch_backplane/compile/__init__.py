"""`torch.compile` on bp devices.

`device_interface` describes the devices to Dynamo and Inductor. `traced_calls` and `device_context` say how Dynamo
traces torch.bp. Nothing of `torch._dynamo` or `torch._inductor` is imported before the program does so: `imports` runs
what belongs to a module of PyTorch after that module is imported.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable

from torch_backplane.compile.imports import when_imported


def install() -> None:
    """Register bp with Dynamo and AOTAutograd as soon as they are imported."""
    when_imported("torch._dynamo", _register_with_dynamo)
    when_imported("torch._functorch._aot_autograd.utils", _register_generators)


def _register_with_dynamo(module: types.ModuleType) -> None:
    def register() -> None:
        from torch_backplane.compile import device_interface, traced_calls

        device_interface.register()
        traced_calls.register()

    _call(register)


def _register_generators(aot_utils: types.ModuleType) -> None:
    """Let checkpoints repeat random numbers: each pass gets a generator with the same state."""
    if hasattr(aot_utils, "register_graphsafe_rng_device_type"):  # since torch 2.13
        _call(functools.partial(aot_utils.register_graphsafe_rng_device_type, "bp"))


def _call(register: Callable[[], object]) -> None:
    """Calls `register`. An error is a warning, because torch.compile must stay usable for other devices."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"torch.compile does not know bp devices: {type(error).__name__}: {error}", stacklevel=2)
