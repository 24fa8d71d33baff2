"""Backplane: PyTorch device backends, written in Python.

Importing this package gives PyTorch the device type `bp` and the module `torch.bp`. PyTorch imports it by itself
(entry point `torch.backends`) unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_backplane.elementwise_functions import elementwise


def _autoload() -> None:
    """Called by PyTorch through the entry point `torch.backends`; importing this module does everything.

    Defined first: where this module is imported before torch, torch asks for it while it is imported here.
    """


import torch  # noqa: E402

# PyTorch's name for the device type must be set before the compiled part registers anything under it.
torch.utils.rename_privateuse1_backend("bp")

from torch_backplane import accelerator, ending, interop, plans, printing, settings  # noqa: E402

settings.apply()
ending.install()
torch._register_device_module("bp", accelerator)
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
printing.install()
interop.install()
# `import torch.bp.streams` finds the module that is there instead of loading it a second time.
for _name in ("memory", "random", "streams"):
    sys.modules[f"torch.bp.{_name}"] = getattr(accelerator, _name)

__version__ = "0.1.0"
__all__ = ["__version__", "elementwise", "plans"]


def __getattr__(name: str) -> Any:
    if name == "elementwise":  # slow to import, and not everybody's
        from torch_backplane.elementwise_functions import elementwise

        globals()[name] = elementwise
        return elementwise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
