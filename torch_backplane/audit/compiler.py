"""The system's compiler, which makes the runtime and the kernels of the audit."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

RUNTIME = Path(__file__).with_name("runtime.cpp")

# Vectors, and stores that were several, are no instructions of the kernel's; a memset that the compiler made of a loop
# would not be counted.
KERNEL_OPTIONS = (
    *("-x", "c", "-std=gnu11", "-O2", "-w", "-fPIC", "-fsanitize=thread"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"),
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-builtin-memset", "-fno-builtin-memcpy"),
)
# These only GCC has.
GCC_OPTIONS = ("-fno-tree-loop-distribute-patterns", "-fno-store-merging")
RUNTIME_OPTIONS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-pthread"]


class NoCompiler(RuntimeError):
    """There is no compiler, or it cannot do what the audit needs."""


@functools.cache
def compiler() -> str:
    """The C++ compiler: what CXX names, else c++, g++ or clang++.

    Raises:
        NoCompiler: there is none, or it knows no -fsanitize=thread.
    """
    named = os.environ.get("CXX", "").strip()
    candidates = [named] if named else ["c++", "g++", "clang++"]
    for one in candidates:
        found = shutil.which(one)
        if found is not None:
            _kernel_options(found)
            return found
    wanted = f"CXX={named!r} names none" if named else f"there is none of {', '.join(candidates)}"
    raise NoCompiler(f"the audit compiles kernels with the system's C++ compiler, and {wanted}")


@functools.cache
def _kernel_options(compiler: str) -> tuple[str, ...]:
    """Those that this compiler knows. NoCompiler where it knows no -fsanitize=thread."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("int nothing;\n", encoding="utf-8")

        def takes(*options: str) -> bool:
            command = [compiler, *options, "-c", str(source), "-o", str(Path(folder, "empty.o"))]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        if not takes(*KERNEL_OPTIONS):
            raise NoCompiler(f"the audit needs a compiler with -fsanitize=thread, and {compiler} refuses it")
        return (*KERNEL_OPTIONS, *(one for one in GCC_OPTIONS if takes("-Werror", *KERNEL_OPTIONS, one)))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The library of runtime.cpp, whose functions kernels find."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "runtime.so")
        _run([compiler(), *RUNTIME_OPTIONS, str(RUNTIME), "-o", str(library)])
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def built(text: str) -> ctypes.CDLL:
    """The library of a kernel. RuntimeError with what the compiler says, where it refuses."""
    runtime()
    with tempfile.TemporaryDirectory() as folder:
        source, object_, library = (Path(folder, f"kernel.{ending}") for ending in ("c", "o", "so"))
        source.write_text(text, encoding="utf-8")
        _run([compiler(), *_kernel_options(compiler()), "-c", str(source), "-o", str(object_)])
        # Without -fsanitize=thread, so that its library is not there.
        _run([compiler(), "-shared", str(object_), "-o", str(library), "-lm"])
        return ctypes.CDLL(str(library))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr or f"{command[0]} ended with {result.returncode}")
