"""Adapts libraries that hard-code the names of devices to bp.

One file for each library, with the library's name. It says what it changes and through which hook, and has a function
`enable()`. Nothing here is active by installation:

    import torch_backplane.integrations.accelerate  # one library

    from torch_backplane import integrations
    integrations.enable()  # all of them; `python -m torch_backplane run` does this
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import pkgutil
import sys
import types
from collections.abc import Sequence


def enable() -> None:
    """Enables the integration of each library: now if the library is imported, else when it is."""
    libraries = {one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")}
    for library in libraries & set(sys.modules):
        _enable(library)
    if not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport(libraries))


def _enable(library: str) -> None:
    module = importlib.import_module(f"{__name__}.{library}")
    # Without the function, the file is being imported further up the stack, and imported its library itself.
    getattr(module, "enable", lambda: None)()


class _AtImport(importlib.abc.MetaPathFinder):
    """Enables the integration of a library when the library is imported."""

    def __init__(self, libraries: set[str]) -> None:
        self._libraries = libraries

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._libraries:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((one for one in specs if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a library, then enables its integration."""

    def __init__(self, loader: importlib.abc.Loader, library: str) -> None:
        self._loader, self._library = loader, library

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # The library sees its own loader, which can have more methods (reading resources, say).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _enable(self._library)
