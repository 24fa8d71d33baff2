"""Checks whether the compiled part was built for the running torch, before it is loaded.

Under another release it would access members of PyTorch's C++ classes at wrong offsets.
"""

from __future__ import annotations

import re

VERSION = "0.1.0"  # of Backplane

# The command that builds and installs Backplane, for its source folder.
COMMAND = "pip install --no-build-isolation --force-reinstall --no-deps ."


def release(version: str) -> tuple[str, ...]:
    """The part of a torch version that must be equal: major and minor number, or all of a development version."""
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?(\+[\w.]+)?", version)
    return (found[1], found[2]) if found else (version,)


def misfit(running: str) -> str | None:
    """Returns None if the compiled part can be loaded under torch `running`, else the reason and the remedy."""
    try:
        from torch_backplane._built_for import TORCH
    except ModuleNotFoundError:
        return f"torch_backplane is not compiled; run in its source folder\n    {COMMAND}"
    if release(TORCH) == release(running):
        return None
    from torch_backplane._built_for import VERSION as installed

    reason = f"torch_backplane was compiled for torch {TORCH}, and torch {running} is running"
    public, _, local = installed.partition("+")
    if not local:
        return f"{reason}; compile it again: run in its source folder\n    {COMMAND}"
    # A wheel, whose version names its torch (tools/dist.py). Its user may have no source folder, and no compiler.
    command = COMMAND.removesuffix(" .")
    compile_it = (
        "compile the source distribution, which needs a C++ compiler:\n"
        f"    {command} --no-cache-dir torch_backplane-{public}.tar.gz"
    )
    minor = ".".join(release(running))
    if minor == running:  # a development version, for which there are no wheels
        return f"{reason}; {compile_it}"
    return (
        f"{reason}; install the wheel for torch {minor}, from the folder or address that has this one:\n"
        f'    pip install --no-deps "torch-backplane=={public}+torch{minor}" --find-links FOLDER\n'
        f"or {compile_it}"
    )
