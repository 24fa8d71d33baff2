"""C, by the system's compiler: for kernels that a dialect writes for the interpreter."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch_backplane.interpreter.language import WORDS, Language, NoCompiler

# Vectors, and stores that were several, are no instructions of the kernel's; a memset that the compiler made of a loop
# would not be seen as such.
_OPTIONS = (
    *("-x", "c", "-std=gnu11", "-O2", "-w", "-fPIC", "-fsanitize=thread"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno"),
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-builtin-memset", "-fno-builtin-memcpy"),
)
# These only GCC has.
_GCC_OPTIONS = ("-fno-tree-loop-distribute-patterns", "-fno-store-merging")

_BEFORE = """\
#include <stdbool.h>
#include <stdint.h>
#include <tgmath.h>
#define kernel __attribute__((noinline))
#define private
#define local static __attribute__((section("local_memory"), aligned(128)))
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
"""
_AFTER = """
extern char __start_local_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_local_memory[] __attribute__((weak, visibility("hidden")));
void* interpreter_local_memory(int end) { return end ? __stop_local_memory : __start_local_memory; }
"""


class HostC(Language):
    """A pointer to device memory is one parameter. `local` begins the declaration of an array in local memory, which is
    static, as groups run one after another.
    """

    name = "C"
    suffix = ".c"
    has_offsets = False

    def compiler(self) -> str:
        """What CXX names, else c++, g++ or clang++."""
        named = os.environ.get("CXX", "").strip()
        candidates = [named] if named else ["c++", "g++", "clang++"]
        for one in candidates:
            found = shutil.which(one)
            if found is not None:
                _known_options(found)
                return found
        wanted = f"CXX={named!r} names none" if named else f"there is none of {', '.join(candidates)}"
        raise NoCompiler(f"kernels are compiled with the system's C++ compiler, and {wanted}")

    def options(self) -> tuple[str, ...]:
        return _known_options(self.compiler())

    def before(self, text: str) -> str:
        return _BEFORE + WORDS

    def after(self) -> str:
        return _AFTER


@functools.cache
def _known_options(compiler: str) -> tuple[str, ...]:
    """Those that this compiler knows. NoCompiler where it knows no -fsanitize=thread."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("int nothing;\n", encoding="utf-8")

        def takes(*options: str) -> bool:
            command = [compiler, *options, "-c", str(source), "-o", str(Path(folder, "empty.o"))]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0

        if not takes(*_OPTIONS):
            raise NoCompiler(f"kernels need a compiler with -fsanitize=thread, and {compiler} refuses it")
        return (*_OPTIONS, *(one for one in _GCC_OPTIONS if takes("-Werror", *_OPTIONS, one)))
