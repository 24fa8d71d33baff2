"""Loads benchmark scripts as modules, and provides a fake clock for them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import paths

FOLDER = paths.ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))  # benchmarks import shared modules of their folder


def load(name: str) -> ModuleType:
    """Returns benchmarks/NAME.py as a module."""
    known = sys.modules.get(f"benchmark_{name}")
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"benchmark_{name}"] = module
    spec.loader.exec_module(module)
    return module


class Clock:
    """Replaces the module `time`: `now` advances only when a test changes it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now
