"""Makes other libraries know bp where they hard-code the names of devices.

One file for each library. Each says what it changes, and through which hook. Nothing here is active by installation:

    import torch_backplane.integrations.accelerate  # one library

    from torch_backplane import integrations
    integrations.enable()  # all that are installed
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil


def enable() -> None:
    """Enables the integration of each library that is installed."""
    for name in (one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(f"{__name__}.{name}").enable()
