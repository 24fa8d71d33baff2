"""Pluggable allocators: user-defined functions that provide the caching allocator's segments."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

# Allocators are kept forever, as memory can be freed after the last other reference to the allocator is gone.
_kept: list[PluggableAllocator] = []


class PluggableAllocator:
    """An allocator whose functions are in a shared library, like torch.cuda.memory.CUDAPluggableAllocator.

    The functions have the signatures `void* allocate(ssize_t bytes, int device, void* stream)` and
    `void free(void* memory, ssize_t bytes, int device, void* stream)`. `allocate` returns an address that is a multiple
    of 16, or NULL if there is no memory left. `free` is called when the stream has completed the work that uses the
    memory. `stream` is the value of `torch.bp.Stream.bp_stream`.

    The caching allocator requests segments of 2 MiB or more from it, and divides them among tensors. Only devices in
    host memory, such as host devices, support pluggable allocators.

    Args:
        path_to_so_file: path of the shared library.
        alloc_fn_name: name of the allocate function.
        free_fn_name: name of the free function.

    Raises:
        OSError: the library cannot be loaded.
        AttributeError: the library has no function of this name.
    """

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        self._set(getattr(library, alloc_fn_name), getattr(library, free_fn_name))

    @classmethod
    def from_functions(
        cls, allocate: Callable[[int, int, int], int | None], free: Callable[[int, int, int, int], object]
    ) -> PluggableAllocator:
        """Create an allocator from Python functions.

        If a function raises an exception, a warning is given; for `allocate` this counts as a lack of memory.

        Args:
            allocate: takes size in bytes, device index and stream as integers. Returns an address, or 0 or None if
                there is no memory left.
            free: takes address, size in bytes, device index and stream as integers.
        """

        def given(nbytes: int, device: int, stream: int | None) -> int:
            try:
                return allocate(nbytes, device, stream or 0) or 0
            except Exception as error:
                warnings.warn(f"the pluggable allocator's {allocate!r} raised {error!r}", stacklevel=1)
                return 0

        def returned(address: int | None, nbytes: int, device: int, stream: int | None) -> None:
            try:
                free(address or 0, nbytes, device, stream or 0)
            except Exception as error:
                warnings.warn(f"the pluggable allocator's {free!r} raised {error!r}", stacklevel=1)

        made = cls.__new__(cls)
        made._set(_ALLOCATE(given), _FREE(returned))
        return made

    def _set(self, allocate: Any, free: Any) -> None:
        self._functions = (allocate, free)
        self.addresses = tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in self._functions)
        _kept.append(self)

    def allocator(self) -> PluggableAllocator:
        """Return the allocator itself, which `MemPool` accepts, for compatibility with torch.cuda."""
        return self


def checked(allocator: object) -> PluggableAllocator:
    """Return the allocator. Raises TypeError if it is not a `PluggableAllocator`."""
    if not isinstance(allocator, PluggableAllocator):
        kind = type(allocator).__name__
        raise TypeError(f"allocator must be a torch.bp.memory.PluggableAllocator, but got {kind}")
    return allocator
