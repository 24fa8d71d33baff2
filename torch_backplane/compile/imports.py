"""Running a function right after a module has been imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[[types.ModuleType], object]

_waiting: dict[str, list[Function]] = {}  # by the name of a module that is not imported yet
_lock = threading.Lock()


def when_imported(module_name: str, function: Function) -> None:
    """Call `function(module)` right after the module is imported, or now if it is imported already.

    The function runs in the thread that imports the module, before the `import` statement ends. An exception in it
    makes this import fail.

    Args:
        module_name: the full name of a module, such as "torch._dynamo.device_interface".
        function: a function of the module.

    Raises:
        RuntimeError: this thread is importing the module at the moment.
    """
    # The lock of the module's import: waits for another thread that is importing it, or looking for it.
    with importlib._bootstrap._ModuleLockManager(module_name):  # type: ignore[attr-defined]
        module = sys.modules.get(module_name)
        if module is None:
            _register(module_name, function)
            return
    if getattr(module.__spec__, "_initializing", False):
        raise RuntimeError(f"when_imported was called while this thread imports {module_name}")
    function(module)


def _register(module_name: str, function: Function) -> None:
    with _lock:
        _waiting.setdefault(module_name, []).append(function)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def _run(module: types.ModuleType) -> None:
    with _lock:
        functions = _waiting.pop(module.__name__, [])
        if not _waiting and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
    for function in functions:
        function(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that functions wait for, by asking the other finders. It is in sys.meta_path meanwhile."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in specs if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, then runs the functions that wait for it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # runpy, say, asks for more than importing needs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # The module sees its own loader, which can have more methods (reading resources, say).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run(module)


_finder = _Finder()
