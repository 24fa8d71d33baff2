"""Backplane: PyTorch device backends, written in Python.

Importing this package gives PyTorch the device type `bp` and the module `torch.bp`. PyTorch imports it by itself
(entry point `torch.backends`) unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_backplane.elementwise_functions import elementwise


def _autoload() -> None:
    """Called by PyTorch through the entry point `torch.backends`; importing this module does everything.

    Defined first: where this module is imported before torch, torch asks for it while it is imported here.
    """
    if _misfit is not None:
        warnings.warn(f"there is no bp in this process: {_misfit}", stacklevel=2)
        sys.modules.pop(__name__, None)  # so that whoever imports it gets the error


_misfit: str | None = None

import torch  # noqa: E402

from torch_backplane import _release  # noqa: E402

_misfit = _release.misfit(torch.__version__)
_torch_is_importing_us = getattr(torch.__spec__, "_initializing", False)
if _misfit is not None and not _torch_is_importing_us:
    raise ImportError(_misfit)
if _misfit is None:
    from torch_backplane import _install, plans  # noqa: F401

__version__ = _release.VERSION
__all__ = ["__version__", "elementwise", "plans"]


def __getattr__(name: str) -> Any:
    if name == "elementwise":  # slow to import, and not everybody's
        from torch_backplane.elementwise_functions import elementwise

        globals()[name] = elementwise
        return elementwise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
