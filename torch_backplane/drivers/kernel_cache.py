"""A disk cache of compiled kernels, shared by processes.

TORCH_BACKPLANE_CACHE_DIR   the folder; if set and empty, caching is disabled. By default
                            $XDG_CACHE_HOME/torch_backplane, or ~/.cache/torch_backplane
TORCH_BACKPLANE_CACHE_SIZE  the maximum size of all entries together, 1GiB by default

An entry is a file `kernels/ab/abcdef…`, named by a digest of everything that the compiled kernel depends on. It is
written to a temporary file and renamed, so that processes can share the folder. It contains a digest of its contents:
a truncated, changed or renamed file is ignored, and the kernel is built and stored again. The folder can be deleted at
any time. `opencl/implementations.py` keeps one more kind of entry here.

The modification time of a file is the time of its last use. If the limit is exceeded, a process removes the least
recently used files until an eighth of the limit is free. It checks when it writes its first entry, and whenever it has
written another sixteenth of the limit, so each process can exceed the limit by that much. Processes that trim at the
same time remove the same files. A process that reads a file while it is removed still reads it completely.
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

FORMAT = b"torch_backplane kernel 1\n"  # change the number with the format, so that old entries are not found

ABANDONED_AFTER = 3600.0  # seconds; an older temporary file was left by a process that ended while writing it

_warned = False
_lock = threading.Lock()
_written = -1  # bytes written since this process last checked the size of the folder; -1: never checked


def folder() -> Path | None:
    """Return the folder of the entries, or None if caching is disabled."""
    chosen = os.environ.get("TORCH_BACKPLANE_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) / "kernels" if chosen.strip() else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "torch_backplane" / "kernels"


def size_limit() -> int:
    """Return the maximum size of all entries together, in bytes.

    Raises:
        SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
    """
    return parse_size(os.environ.get("TORCH_BACKPLANE_CACHE_SIZE") or "1GiB", "TORCH_BACKPLANE_CACHE_SIZE")


def key(parts: Sequence[str]) -> str:
    """Return the entry name for a kernel that depends on `parts`: device, driver version, compiler options, text."""
    digest = hashlib.sha256(FORMAT)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # the length keeps different lists distinct
    return digest.hexdigest()


def load(name: str) -> bytes | None:
    """Return the compiled kernel that was stored under `name`, or None if there is no valid entry."""
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
    """Store a compiled kernel, unless it is larger than the limit of the cache.

    Warns once if the folder cannot be written to.
    """
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
                f"torch_backplane: compiled kernels cannot be stored in {path.parent.parent}, so the next process has "
                f"to build them again: {error}. Set TORCH_BACKPLANE_CACHE_DIR to another folder",
                stacklevel=2,
            )


def trim(limit: int) -> None:
    """Remove the least recently used entries if all entries together exceed `limit` bytes."""
    root = folder()
    if root is None:
        return
    found = []  # (time of last use, bytes, path)
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
            if os.stat(path).st_mtime_ns == used:  # else it was used or written meanwhile
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
