"""Memory from functions of one's own, in place of the device's."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

# Memory may have to go back when nobody has the allocator any more.
_kept: list[PluggableAllocator] = []


class PluggableAllocator:
    """Two functions of a shared library, as torch.cuda.memory.CUDAPluggableAllocator has them.

    A pool of memory takes its segments from the first, and gives them back by the second, when the stream that used
    one has done its work: `void* allocate(ssize_t bytes, int device, void* stream)`, which returns NULL where there is
    no more memory, else a multiple of 16, and `void free(void* memory, ssize_t bytes, int device, void* stream)`.
    `stream` is what `torch.bp.Stream.bp_stream` is. Segments are 2 MiB and more; tensors share them, as they share the
    device's.

    Only devices in host memory take memory from elsewhere (host devices do).

    Args:
        path_to_so_file: the library.
        alloc_fn_name, free_fn_name: what the functions are called there.

    Raises:
        OSError: there is no such library, or it cannot be loaded.
        AttributeError: it has no function of this name.
    """

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        self._set(getattr(library, alloc_fn_name), getattr(library, free_fn_name))

    @classmethod
    def from_functions(
        cls, allocate: Callable[[int, int, int], int | None], free: Callable[[int, int, int, int], object]
    ) -> PluggableAllocator:
        """The same of Python's functions, with addresses and streams as integers; `allocate` returns 0 or None where
        there is no more memory. What one of them raises is a warning, and of `allocate` the end of the memory.
        """

        def given(nbytes: int, device: int, stream: int | None) -> int:
            try:
                return allocate(nbytes, device, stream or 0) or 0
            except Exception as error:
                warnings.warn(f"the pluggable allocator's {allocate!r} has raised {error!r}", stacklevel=1)
                return 0

        def returned(address: int | None, nbytes: int, device: int, stream: int | None) -> None:
            try:
                free(address or 0, nbytes, device, stream or 0)
            except Exception as error:
                warnings.warn(f"the pluggable allocator's {free!r} has raised {error!r}", stacklevel=1)

        made = cls.__new__(cls)
        made._set(_ALLOCATE(given), _FREE(returned))
        return made

    def _set(self, allocate: Any, free: Any) -> None:
        self._functions = (allocate, free)
        self.addresses = tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions)
        _kept.append(self)

    def allocator(self) -> PluggableAllocator:
        """Itself: what `MemPool` takes, as torch.cuda's."""
        return self


def checked(allocator: object) -> PluggableAllocator:
    """Raises TypeError for what is no `PluggableAllocator`."""
    if not isinstance(allocator, PluggableAllocator):
        kind = type(allocator).__name__
        raise TypeError(f"a pluggable allocator is a torch.bp.memory.PluggableAllocator, and got {kind}")
    return allocator
