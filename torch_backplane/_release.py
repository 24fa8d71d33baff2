"""Whether the compiled part fits the torch that runs. Asked before it is loaded: under another release it would write
into tensors by the members' old places.
"""

from __future__ import annotations

import re

VERSION = "0.1.0"  # Backplane's own

# Where Backplane is installed from.
COMMAND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def release(version: str) -> tuple[str, ...]:
    """What must be equal: major and minor number; of a development version, which nothing is promised of, all of it."""
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?(\+[\w.]+)?", version)
    return (found[1], found[2]) if found else (version,)


def misfit(running: str) -> str | None:
    """Why the compiled part cannot be loaded under torch `running`, and what mends that; None where it can."""
    try:
        from torch_backplane._built_for import TORCH
    except ModuleNotFoundError:
        return f"torch_backplane is not compiled; in its source folder run\n    {COMMAND}"
    if release(TORCH) == release(running):
        return None
    return (
        f"torch_backplane was compiled for torch {TORCH}, and torch {running} is running; "
        f"compile it again: in its source folder run\n    {COMMAND}"
    )
