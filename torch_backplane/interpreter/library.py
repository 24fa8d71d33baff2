"""Compiles and loads the runtime with an observer, and the kernels that call it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch_backplane.drivers import kernel_cache
from torch_backplane.interpreter.language import Language, Text, command, translated

_HERE = Path(__file__).parent
_SOURCE, _HEADER = _HERE / "runtime.cpp", _HERE / "interpreter.h"
RUNTIME_OPTIONS = ("-std=c++17", "-U_FORTIFY_SOURCE")
_LIBRARY_OPTIONS = ("-O2", "-w", "-fPIC", "-c")
_LIBRARIES = ("-lstdc++", "-lm", "-lpthread", "-lc")
# Link only the listed libraries: calls of functions that are not instrumented fail to link, and the library of
# -fsanitize=thread is not added.
LINK_OPTIONS = ("-shared", "-nostdlib", "-Wl,-z,defs", "-s")
# Local memory is the zero-initialized data of a kernel's library. The script defines symbols for its bounds, and leaves
# kLocalGuard bytes before it (interpreter.h).
LINK_SCRIPT = """\
SECTIONS {
  interpreter_local (NOLOAD) : {
    . = . + 256; interpreter_local_begin = .; *(.bss .bss.* COMMON) interpreter_local_end = .;
  }
} INSERT BEFORE .bss;
"""


def integers(*names: str) -> list[tuple[str, Any]]:
    """Return uint64 fields for a ctypes.Structure."""
    return [(name, ctypes.c_uint64) for name in names]


class NativeKernel(ctypes.Structure):
    """The kernel structure that the launcher takes; `Kernel` in interpreter.h."""

    _fields_: ClassVar = integers("run", "has_barriers", "number", "image_begin", "local_begin", "local_end")


class Interpreter:
    """The runtime with an observer, compiled and loaded.

    Args:
        name: name of the observer, unique in the process.
        observer: the observer's header file, see interpreter.h.
        prototypes: (result, arguments) of the observer's functions that Python calls.
    """

    def __init__(
        self, name: str, observer: Path, language: Language, prototypes: Mapping[str, tuple[Any, Any]]
    ) -> None:
        self.language = language
        self.kernels: list[Kernel] = []
        self._name, self._observer = f"libbackplane_{name}.so", observer
        self._by_text: dict[tuple[str, str], Kernel] = {}
        self._lock = threading.Lock()
        # The file is kept because kernels are linked with it.
        self._folder = tempfile.TemporaryDirectory(prefix="backplane-interpreter-")
        self.path = os.path.join(self._folder.name, self._name)
        Path(self.path).write_bytes(self._build_runtime())
        self.functions = ctypes.CDLL(self.path)
        pointer = ctypes.c_void_p
        own = {
            "interpreter_allocate": (pointer, [ctypes.c_uint64]),
            "interpreter_free": (None, [pointer]),
            "interpreter_image": (ctypes.c_uint64, [pointer]),
        }
        for function, (result, arguments) in {**own, **prototypes}.items():
            known = getattr(self.functions, function)
            known.restype, known.argtypes = result, arguments
        self.launcher = {
            one: address_of(self.functions[f"interpreter_{one}"]) for one in ("launch", "copy", "fill", "flush")
        }

    def build(self, text: str, entry: str) -> Kernel:
        """Compile a kernel, or return the one compiled earlier from the same source.

        Raises:
            RuntimeError: compiling failed. The message has the compiler's errors.
        """
        with self._lock:
            if (known := self._by_text.get((text, entry))) is not None:
                return known
        made = translated(self.language, text, entry)
        payload = self._build_kernel(made.text)
        with self._lock:
            kernel = Kernel(self, made, entry, payload, len(self.kernels) + 1)
            self.kernels.append(kernel)
            return self._by_text.setdefault((text, entry), kernel)

    def kernel(self, number: int) -> Kernel:
        return self.kernels[number - 1]

    def _build_runtime(self) -> bytes:
        observer = f'-DOBSERVER="{self._observer}"'
        runtime = _SOURCE.read_text(encoding="utf-8"), (*RUNTIME_OPTIONS, f"-I{_HERE}", observer)
        sources = {"runtime.cpp": runtime, **self.language.functions()}
        headers = [_HEADER, *sorted(self._observer.parent.glob("*.h"))]
        included = [one.read_text(encoding="utf-8") for one in headers]

        def build(folder: Path, made: str) -> None:
            objects = []
            for name, (text, options) in sources.items():
                (folder / name).write_text(text, encoding="utf-8")
                objects.append(str(folder / f"{name}.o"))
                command([self.language.compiler(), *_LIBRARY_OPTIONS, *options, str(folder / name), "-o", objects[-1]])
            linked = ["-shared", f"-Wl,-soname,{self._name}", *objects, "-o", made, *_LIBRARIES]
            command([self.language.compiler(), *linked])

        return self._built(["interpreter", *included, *(text for text, _ in sources.values())], build)

    def _build_kernel(self, text: str) -> bytes:
        options = [*self.language.options(), *LINK_OPTIONS]

        def build(folder: Path, made: str) -> None:
            source, script = folder / f"kernel{self.language.suffix}", folder / "link"
            source.write_text(text, encoding="utf-8")
            script.write_text(LINK_SCRIPT, encoding="utf-8")
            linked = [str(source), "-x", "none", self.path, "-lm", "-lc", "-o", made]
            try:
                command([self.language.compiler(), *options, f"-Wl,-T,{script}", *linked])
            except RuntimeError as error:
                lines = [line for line in str(error).splitlines() if re.search(r"error|undefined|in function", line)]
                raise RuntimeError("\n".join(lines[:20]) or str(error)) from None

        return self._built(["interpreted kernel", self._name, *options, LINK_SCRIPT, text], build)

    def _built(self, depends_on: Sequence[str], build: Callable[[Path, str], None]) -> bytes:
        """Return a library from the cache on disk, or build it with `build(folder, path of the library)`."""
        key = kernel_cache.key([self.language.version(), *depends_on])
        if (known := kernel_cache.load(key)) is not None:
            return known
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made.so")
            build(Path(folder), str(made))
            payload = made.read_bytes()
        kernel_cache.store(key, payload)
        return payload


class Kernel:
    """A compiled and loaded kernel."""

    def __init__(self, interpreter: Interpreter, made: Text, entry: str, payload: bytes, number: int) -> None:
        self.entry, self.names, self.item_bytes = entry, made.names, made.item_bytes
        with _on_disk(payload) as path:
            # RTLD_DEEPBIND: functions with the same names elsewhere in the process do not take precedence.
            self._library = library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
        run = address_of(library.interpreter_run)
        # The symbol table contains only functions that are called.
        waits = b"interpreter_barrier" in payload or b"interpreter_shuffle" in payload
        image = interpreter.functions.interpreter_image(run)
        local = (ctypes.c_char.in_dll(library, f"interpreter_local_{name}") for name in ("begin", "end"))
        self.native = NativeKernel(run, waits, number, image, *map(ctypes.addressof, local))

    @property
    def local_bytes(self) -> int:
        return self.native.local_end - self.native.local_begin


@contextlib.contextmanager
def _on_disk(payload: bytes) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.so")
        path.write_bytes(payload)
        yield str(path)


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
