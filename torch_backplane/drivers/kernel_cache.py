"""Compiled kernels on disk, so that the next process need not compile them.

TORCH_BACKPLANE_CACHE_DIR   the folder; set and empty: nothing is kept. By default $XDG_CACHE_HOME/torch_backplane, or
                            ~/.cache/torch_backplane
TORCH_BACKPLANE_CACHE_SIZE  how large all entries together may get, 1GiB by default

An entry is a file of its own, `kernels/ab/abcdef…`, named for the digest of all that the compiled kernel depends on. It
is written to a temporary file that is renamed, so processes may share the folder, and begins with a digest of its
contents: what was cut off, changed or renamed is no entry, and gets built and written again. The folder may be deleted
at any time.

A file's time of modification is when it was last used. A process that finds more than the limit removes the files that
were not used for the longest time, until an eighth of the limit is free again. It looks when it writes its first entry,
and after each sixteenth of the limit that it has written: by so much may each process pass the limit. Two that remove
files at the same time remove the same ones, and who reads a file that is removed meanwhile has it whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch_backplane.drivers.sizes import parse_size

FORMAT = b"torch_backplane kernel 1\n"  # another number for another format: entries of the old one are not found

ABANDONED_AFTER = 3600.0  # seconds after which a temporary file belongs to a process that ended while it wrote

_warned = False
_lock = threading.Lock()
_written = -1  # bytes since this process last looked how large the folder is; -1: never did


def folder() -> Path | None:
    """Where entries are; None where nothing is to be kept."""
    chosen = os.environ.get("TORCH_BACKPLANE_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) / "kernels" if chosen.strip() else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "torch_backplane" / "kernels"


def size_limit() -> int:
    """Bytes that all entries together may take.

    Raises:
        SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
    """
    return parse_size(os.environ.get("TORCH_BACKPLANE_CACHE_SIZE") or "1GiB", "TORCH_BACKPLANE_CACHE_SIZE")


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
    if not payload or entry != _entry(name, payload):
        return None
    with contextlib.suppress(OSError):  # removed meanwhile, or the folder is another user's
        os.utime(path)
    return payload


def store(name: str, payload: bytes) -> None:
    """Keep a compiled kernel, unless it is larger than all may be together. A folder that cannot be written to is a
    warning, the first time."""
    global _warned
    path = _path(name)
    entry = _entry(name, payload)
    if path is None or len(entry) > size_limit():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name[:8]}")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(entry)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _note_written(len(entry))
    except OSError as error:
        if not _warned:
            _warned = True
            warnings.warn(
                f"torch_backplane: compiled kernels cannot be kept in {path.parent.parent}, and will be built again by "
                f"the next process: {error}. TORCH_BACKPLANE_CACHE_DIR names another folder",
                stacklevel=2,
            )


def trim(limit: int) -> None:
    """Remove the entries that were not used for the longest time, if all together are larger than `limit` bytes."""
    root = folder()
    if root is None:
        return
    found = []  # (when it was used, bytes, path)
    abandoned = time.time() - ABANDONED_AFTER
    for place, _, names in os.walk(root):
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):  # another process removed it
                status = os.stat(path)
                if not name.startswith("."):
                    found.append((status.st_mtime_ns, status.st_size, path))
                elif status.st_mtime < abandoned:
                    os.unlink(path)
    total = sum(size for _, size, _ in found)
    if total <= limit:
        return
    for used, size, path in sorted(found):
        if total <= limit - limit // 8:
            return
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime_ns == used:  # else it was used or written just now
                os.unlink(path)
        total -= size


def _note_written(nbytes: int) -> None:
    global _written
    limit = size_limit()
    with _lock:
        due = _written < 0 or _written + nbytes > limit // 16
        _written = 0 if due else _written + nbytes
    if due:
        trim(limit)


def _path(name: str) -> Path | None:
    root = folder()
    return None if root is None else root / name[:2] / name


def _entry(name: str, payload: bytes) -> bytes:
    return FORMAT + hashlib.sha256(name.encode() + payload).digest() + payload
