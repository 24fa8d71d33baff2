"""Replacing a function of a library where the library has no hook."""

from __future__ import annotations

import sys
from typing import Any

import torch


def replace(original: Any, replacement: Any) -> None:
    """Replaces a function or class in all loaded modules: `from library import function` copies the reference."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)


def is_bp(device: object) -> bool:
    """Whether `device` (a device, its name, or an index among the devices of the accelerator) is a bp device."""
    try:
        return torch.device(device).type == "bp"  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError):  # "disk", or a device of another release
        return False
