"""Backplane: PyTorch device backends, written in Python.

Importing this package adds the device type `bp` and the modules `torch.bp` and `torch.backends.bp` to PyTorch.
`import torch` imports it (entry point `torch.backends`) unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_backplane.elementwise_functions import elementwise


def _autoload() -> None:
    """Called by PyTorch through the entry point `torch.backends`, after it has imported this module.

    Defined before the import of torch: if this module is imported first, `import torch` below calls it.
    """
    if _misfit is not None:
        warnings.warn(f"the device type bp is not available: {_misfit}", stacklevel=2)
        sys.modules.pop(__name__, None)  # so that a later import of this package raises the error


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
    if name == "elementwise":  # imported on first access, as the import is slow
        from torch_backplane.elementwise_functions import elementwise

        globals()[name] = elementwise
        return elementwise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
