"""OpenCL C, compiled with clang. The kernel source is exactly what an OpenCL device gets."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping, Sequence

from torch_backplane.interpreter import opencl_builtins
from torch_backplane.interpreter.language import ITEM_BYTES, WORDS, Language, NoCompiler
from torch_backplane.interpreter.opencl_builtins import SCALARS, WIDTHS

# No vectorization: the compiler instruments accesses of up to 16 bytes only.
_OPTIONS = (
    *("-x", "cl", "-cl-std=CL1.2", "-O1", "-w", "-fPIC", "-fsanitize=thread"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-fno-vectorize", "-fno-slp-vectorize"),
)
_OLDEST, _NEWEST = 14, 21

_PLACES = ("get_global_id", "get_local_id", "get_group_id", "get_global_size", "get_local_size", "get_num_groups")

_BEFORE = """\
#define INTERPRETER_ENTRY
#define INTERPRETER_OWN private
#define get_global_offset(dimension) ((ulong)0)
#define barrier(flags) interpreter_barrier(flags)
#define mem_fence(flags)
#define atomic_cmpxchg(at, expected, desired) interpreter_swap((ulong)(at), expected, desired)
#define ANY_MAY_STAY(store) interpreter_unordered(1); store; interpreter_unordered(0)
// These functions report the access of a whole vector themselves, so they are not instrumented.
#define BACKPLANE_TOLD static __attribute__((overloadable, no_sanitize("thread")))
""" + "".join(f"#define {name}(dimension) interpreter_place({3 * i} + (dimension))\n" for i, name in enumerate(_PLACES))

# float16 can be converted in private memory only: there are no overloads for other address spaces.
_HALVES = """\
BACKPLANE_TOLD float backplane_vload_half(const ulong at, const private half* p) {
  return interpreter_from_half(((const private ushort*)p)[at]);
}
BACKPLANE_TOLD void backplane_vstore_half_rte(const float x, const ulong at, private half* p) {
  ((private ushort*)p)[at] = interpreter_to_half(x);
}
#define vload_half(at, p) backplane_vload_half(at, p)
#define vstore_half_rte(x, at, p) backplane_vstore_half_rte(x, at, p)
"""

_SPACES = ("global", "local", "private")

# The largest access in bytes that the compiler instruments.
MAX_BYTES = 16


def _shuffles() -> str:
    lines = []
    for kind in SCALARS:
        bits = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong"}[ITEM_BYTES[kind.removeprefix("u")]]
        lines.append(
            f"BACKPLANE_TOLD {kind} backplane_shuffle_down(const {kind} value, const uint offset) {{ "
            f"return as_{kind}(({bits})interpreter_shuffle_down(as_{bits}(value), offset)); }}"
        )
    return "\n".join([*lines, "#define sub_group_shuffle_down(value, offset) backplane_shuffle_down(value, offset)\n"])


class OpenCLC(Language):
    name = "OpenCL C"
    suffix = ".cl"
    entry = r"\bkernel\s+void"
    has_offsets = True

    def compiler(self) -> str:
        """Return the path of clang, or of clang-21 to clang-14, the newest first."""
        names = ["clang", *(f"clang-{version}" for version in range(_NEWEST, _OLDEST - 1, -1))]
        for one in names:
            if found := shutil.which(one):
                return found
        raise NoCompiler("the interpreter needs clang to compile OpenCL C: install clang (PoCL's packages include it)")

    def options(self) -> tuple[str, ...]:
        return _OPTIONS

    def before(self, text: str) -> str:
        _refuse_wide_pointers(text)
        shuffles = _shuffles() if "sub_group_shuffle_down(" in text else ""
        return WORDS + _BEFORE + _HALVES + _lanes(text) + _half_lanes(text) + shuffles

    def functions(self) -> Mapping[str, tuple[str, Sequence[str]]]:
        return _functions()


@functools.cache
def _functions() -> Mapping[str, tuple[str, Sequence[str]]]:
    return {
        "scalars.c": (opencl_builtins.scalars(), ["-fsigned-char"]),
        "vectors.cl": (opencl_builtins.vectors(), ["-cl-std=CL1.2"]),
    }


def _lanes(text: str) -> str:
    """Return definitions of vload and vstore for the widths that the source uses."""
    lines = []
    for width in (one for one in WIDTHS if re.search(rf"\bv(?:load|store){one}\b", text)):
        for kind in SCALARS:
            for space in _SPACES:
                check = f"interpreter_range((ulong)(p + {width} * at), {width} * sizeof({kind}),"
                lines += [
                    f"BACKPLANE_TOLD {kind}{width} backplane_vload{width}(const ulong at, const {space} {kind}* p) {{ "
                    f"{check} 0); {kind}{width} r; for (int i = 0; i < {width}; ++i) r[i] = p[{width} * at + i]; "
                    "return r; }",
                    f"BACKPLANE_TOLD void backplane_vstore{width}(const {kind}{width} x, const ulong at, "
                    f"{space} {kind}* p) {{ {check} 1); "
                    f"for (int i = 0; i < {width}; ++i) p[{width} * at + i] = x[i]; }}",
                ]
        lines.append(f"#define vload{width}(at, p) backplane_vload{width}(at, p)")
        lines.append(f"#define vstore{width}(x, at, p) backplane_vstore{width}(x, at, p)")
    return "\n".join(lines) + "\n"


def _half_lanes(text: str) -> str:
    lines = []
    for width in (one for one in WIDTHS if re.search(rf"\bv(?:load_half|store_half){one}(?:_rte)?\b", text)):
        lines += [
            f"BACKPLANE_TOLD float{width} backplane_vload_half{width}(const ulong at, const private half* p) {{ "
            f"float{width} r; for (int i = 0; i < {width}; ++i) r[i] = backplane_vload_half({width} * at + i, p); "
            "return r; }",
            f"BACKPLANE_TOLD void backplane_vstore_half{width}_rte(const float{width} x, const ulong at, "
            f"private half* p) {{ for (int i = 0; i < {width}; ++i) "
            f"backplane_vstore_half_rte(x[i], {width} * at + i, p); }}",
            f"#define vload_half{width}(at, p) backplane_vload_half{width}(at, p)",
            f"#define vstore_half{width}_rte(x, at, p) backplane_vstore_half{width}_rte(x, at, p)",
        ]
    return "\n".join(lines) + "\n"


def _refuse_wide_pointers(text: str) -> None:
    kinds = "|".join(ITEM_BYTES)
    pattern = rf"\b(?:global|local|GLOBAL|LOCAL)\s+(?:const\s+|volatile\s+)*u?({kinds})(\d+)\s*(?:const\s*)?\*"
    for match in re.finditer(pattern, text):
        if ITEM_BYTES[match[1]] * int(match[2]) > MAX_BYTES:
            raise RuntimeError(
                f"the interpreter cannot instrument accesses through «{match[0]}», which move more than {MAX_BYTES} "
                "bytes: use vload and vstore"
            )
