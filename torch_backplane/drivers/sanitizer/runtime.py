"""The library that checked kernels call, and building these: with clang, which PoCL needs, too."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.sanitizer import builtins
from torch_backplane.drivers.sanitizer.text import CheckedText

SOURCE = Path(__file__).with_name("runtime.cpp")

# No vectors that the text does not have: the compiler tells of accesses to 16 bytes at most.
KERNEL_OPTIONS = (
    *("-x", "cl", "-cl-std=CL1.2", "-O1", "-w", "-fPIC", "-shared", "-nostdlib", "-Wl,-z,defs", "-s"),
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0", "-fno-vectorize", "-fno-slp-vectorize"),
)
_OLDEST, _NEWEST = 14, 21
NAME = "libbackplane_sanitizer.so"  # by which kernels find it once it is loaded
_LANGUAGE = {
    "runtime.cpp": ["-std=c++17", "-U_FORTIFY_SOURCE"],
    "scalars.c": ["-fsigned-char"],
    "vectors.cl": ["-cl-std=CL1.2"],
}
_LIBRARIES = ("-lstdc++", "-lm", "-lpthread", "-lc")


class NoCompiler(RuntimeError):
    """There is no clang, or it cannot make OpenCL C or C++ libraries."""


def _integers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_uint64) for name in names]


class Kernel(ctypes.Structure):
    _fields_: ClassVar = _integers("run", "has_barriers", "number", "image_begin", "local_begin", "image_end")


class RawFinding(ctypes.Structure):
    _fields_: ClassVar = [
        *_integers("kernel", "kind", "access", "other_access", "argument"),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        *_integers("item", "group", "other_item", "other_group", "count"),
    ]


class Extent(ctypes.Structure):
    _fields_: ClassVar = _integers("begin", "bytes", "fixed")


Resolve = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(Extent))


@functools.cache
def compiler() -> str:
    """clang, of any version that PATH or Debian's folders have.

    Raises:
        NoCompiler: there is none.
    """
    names = ["clang", *(f"clang-{version}" for version in range(_NEWEST, _OLDEST - 1, -1))]
    for one in names:
        if found := shutil.which(one):
            return found
    raise NoCompiler("the sanitizer of kernels compiles them with clang (PoCL's packages bring one), and there is none")


@functools.cache
def version() -> str:
    return _run([compiler(), "--version"]).strip()


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr or f"{command[0]} ended with {result.returncode}")
    return result.stdout


@contextlib.contextmanager
def _on_disk(name: str, contents: bytes) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(contents)
        yield str(path)


def _library_bytes() -> bytes:
    sources = {"runtime.cpp": SOURCE.read_text(encoding="utf-8"), "scalars.c": builtins.scalars()}
    sources["vectors.cl"] = builtins.vectors()
    key = kernel_cache.key(["sanitizer's library", version(), *sources.values()])
    if (known := kernel_cache.load(key)) is not None:
        return known
    options = ["-O2", "-w", "-fPIC", "-c"]
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for name, text in sources.items():
            Path(folder, name).write_text(text, encoding="utf-8")
            objects.append(str(Path(folder, f"{name}.o")))
            _run([compiler(), *options, *_LANGUAGE[name], str(Path(folder, name)), "-o", objects[-1]])
        made = Path(folder, "sanitizer.so")
        _run([compiler(), "-shared", f"-Wl,-soname,{NAME}", *objects, "-o", str(made), *_LIBRARIES])
        payload = made.read_bytes()
    kernel_cache.store(key, payload)
    return payload


class Library:
    """The runtime, loaded; one for each process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="backplane-sanitizer-")
        self.path = os.path.join(self._folder.name, NAME)
        Path(self.path).write_bytes(_library_bytes())
        self.functions = library = ctypes.CDLL(self.path)
        library.backplane_sanitizer_allocate.restype = ctypes.c_void_p
        library.backplane_sanitizer_allocate.argtypes = [ctypes.c_uint64]
        library.backplane_sanitizer_free.argtypes = [ctypes.c_void_p]
        library.backplane_sanitizer_free.restype = None
        library.backplane_sanitizer_configure.argtypes = [Resolve, ctypes.c_uint64]
        library.backplane_sanitizer_configure.restype = None
        library.backplane_sanitizer_image.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)]
        library.backplane_sanitizer_image.restype = None
        library.backplane_sanitizer_take.argtypes = [ctypes.POINTER(RawFinding), ctypes.c_uint64]
        library.backplane_sanitizer_take.restype = ctypes.c_uint64
        library.backplane_sanitizer_count.argtypes = [ctypes.c_uint64]
        library.backplane_sanitizer_count.restype = ctypes.c_uint64
        for which, structure in ((2, Kernel), (3, RawFinding)):
            assert library.backplane_sanitizer_count(which) == ctypes.sizeof(structure)

    def address(self, name: str) -> int:
        return address_of(self.functions[f"backplane_sanitizer_{name}"])

    @property
    def launches(self) -> int:
        """Launches that were checked in this process."""
        return self.functions.backplane_sanitizer_count(0)

    @property
    def accesses(self) -> int:
        """Accesses to device memory in them, a vector's as one."""
        return self.functions.backplane_sanitizer_count(1)


@functools.cache
def _library() -> Library:
    return Library()


_lock = threading.Lock()


def library() -> Library:
    """The runtime, built and loaded when it is first asked for."""
    with _lock:
        return _library()


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class CheckedKernel:
    """A kernel that is built: what the launcher is given of it, and what messages need."""

    def __init__(self, checked: CheckedText, entry: str, number: int) -> None:
        self.entry, self.names, self.item_bytes = entry, checked.names, checked.item_bytes
        payload = _kernel_bytes(checked.text)
        with _on_disk("kernel.so", payload) as path:
            # Whoever else in the process has functions of these names is not asked.
            self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        run = address_of(self._library.backplane_sanitizer_run)
        image = (ctypes.c_uint64 * 3)()
        library().functions.backplane_sanitizer_image(run, image)
        # Its table of names has those that are called only.
        waits = b"backplane_sanitizer_barrier" in payload
        self.native = Kernel(run, waits, number, *image)


def _kernel_bytes(text: str) -> bytes:
    key = kernel_cache.key(["sanitizer's kernel", version(), *KERNEL_OPTIONS, text])
    if (known := kernel_cache.load(key)) is not None:
        return known
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.cl"), Path(folder, "kernel.so")
        source.write_text(text, encoding="utf-8")
        try:
            linked = ["-x", "none", library().path, "-lm", "-lc", "-o", str(made)]
            _run([compiler(), *KERNEL_OPTIONS, str(source), *linked])
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if re.search(r"error|undefined|in function", line)]
            raise RuntimeError("\n".join(lines[:20]) or str(error)) from None
        payload = made.read_bytes()
    kernel_cache.store(key, payload)
    return payload
