"""Compiled kernels on disk, so that the next process need not compile them.

TORCH_BACKPLANE_CACHE_DIR   the folder; set and empty: nothing is kept. By default $XDG_CACHE_HOME/torch_backplane, or
                            ~/.cache/torch_backplane

An entry is a file of its own, `kernels/ab/abcdef…`, named for the digest of all that the compiled kernel depends on. It
is written to a temporary file that is renamed, so processes may share the folder, and begins with a digest of its
contents: what was cut off, changed or renamed is no entry, and gets built and written again. The folder may be deleted
at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

FORMAT = b"torch_backplane kernel 1\n"  # another number for another format: entries of the old one are not found

_warned = False


def folder() -> Path | None:
    """Where entries are; None where nothing is to be kept."""
    chosen = os.environ.get("TORCH_BACKPLANE_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) / "kernels" if chosen.strip() else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "torch_backplane" / "kernels"


def key(parts: Sequence[str]) -> str:
    """The name of the entry for what these say: the device, its driver's version, the options, the text."""
    digest = hashlib.sha256(FORMAT)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # no two lists are one sequence of bytes
    return digest.hexdigest()


def load(name: str) -> bytes | None:
    """The compiled kernel that `store` was given for this key; None where there is none that is whole."""
    path = _path(name)
    if path is None:
        return None
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    payload = entry[len(FORMAT) + 32 :]
    return payload if payload and entry == _entry(name, payload) else None


def store(name: str, payload: bytes) -> None:
    """Keep a compiled kernel. A folder that cannot be written to is a warning, the first time."""
    global _warned
    path = _path(name)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name[:8]}")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_entry(name, payload))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"torch_backplane: compiled kernels cannot be kept in {path.parent.parent}, and will be built again by "
                f"the next process: {error}. TORCH_BACKPLANE_CACHE_DIR names another folder",
                stacklevel=2,
            )


def _path(name: str) -> Path | None:
    root = folder()
    return None if root is None else root / name[:2] / name


def _entry(name: str, payload: bytes) -> bytes:
    return FORMAT + hashlib.sha256(name.encode() + payload).digest() + payload
