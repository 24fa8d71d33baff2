"""OpenCL C's built-in functions for kernels that run on the host, implemented with C's math library.

Clang declares them, and calls them by mangled names. A kernel that uses a function that is missing here, such as those
that access device memory, fails to link with a `RuntimeError` that has the linker's message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

WIDTHS = (2, 4, 8, 16)
INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
FLOATS = ("float", "double")
SCALARS = (*INTEGERS, *FLOATS)
_C_NAMES = {
    "char": "char", "uchar": "unsigned char", "short": "short", "ushort": "unsigned short",
    "int": "int", "uint": "unsigned int", "long": "long", "ulong": "unsigned long",
    "float": "float", "double": "double",
}  # fmt: skip
_WIDER = {"int": "long", "uint": "unsigned long", "long": "__int128", "ulong": "unsigned __int128"}
_SIGNED = {"uchar": "char", "ushort": "short", "uint": "int", "ulong": "long", "float": "int", "double": "long"}

# Functions of one and of two arguments.
UNARY = (
    "exp exp2 exp10 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc lgamma tgamma floor ceil trunc rint round fabs cbrt"
)
BINARY = "fmin fmax fmod pow atan2 hypot copysign nextafter fdim remainder"
_TESTS = ("isnan", "isinf", "isfinite", "signbit")


def _scalar_functions() -> Iterator[tuple[str, str, Sequence[str], str]]:
    """Yield (name, result type, argument types, C expression of a, b, c) for each scalar function."""
    for kind in FLOATS:
        c_name = "{}f" if kind == "float" else "{}"
        for name in UNARY.split():
            yield name, kind, (kind,), f"{c_name.format(name)}(a)"
        yield "rsqrt", kind, (kind,), f"1 / {c_name.format('sqrt')}(a)"
        for name in BINARY.split():
            yield name, kind, (kind, kind), f"{c_name.format(name)}(a, b)"
        yield "ldexp", kind, (kind, "int"), f"{c_name.format('ldexp')}(a, b)"
        for name in ("fma", "mad"):
            yield name, kind, (kind,) * 3, f"{c_name.format('fma')}(a, b, c)"
        yield "min", kind, (kind, kind), "b < a ? b : a"
        yield "max", kind, (kind, kind), "a < b ? b : a"
        yield "clamp", kind, (kind,) * 3, "a < b ? b : a > c ? c : a"
        for name in _TESTS:
            yield name, "int", (kind,), f"__builtin_{name}(a) != 0"
    for kind in INTEGERS:
        yield "min", kind, (kind, kind), "b < a ? b : a"
        yield "max", kind, (kind, kind), "a < b ? b : a"
        yield "clamp", kind, (kind,) * 3, "a < b ? b : a > c ? c : a"
        yield "abs", f"u{kind.removeprefix('u')}", (kind,), "a < 0 ? -a : a" if kind[0] != "u" else "a"
    for kind, wide in _WIDER.items():
        bits = 32 if "int" in kind else 64
        yield "mul_hi", kind, (kind, kind), f"({wide})a * ({wide})b >> {bits}"
        yield "popcount", kind, (kind,), f"__builtin_popcount{'' if bits == 32 else 'l'}(a)"
        yield "clz", kind, (kind,), f"a == 0 ? {bits} : __builtin_clz{'' if bits == 32 else 'l'}(a)"
    for to, source in product(SCALARS, SCALARS):
        yield f"convert_{to}", to, (source,), "a"


def scalars() -> str:
    """Return the C source of the scalar functions."""
    lines = ["#define _GNU_SOURCE", "#include <math.h>"]  # glibc declares exp10 for GNU sources only
    for name, result, kinds, body in _scalar_functions():
        given = ", ".join(f"{_C_NAMES[kind]} {letter}" for kind, letter in zip(kinds, "abc", strict=False))
        lines.append(f"__attribute__((overloadable)) {_C_NAMES[result]} cl_{name}({given}) {{ return {body}; }}")
    return "\n".join([*lines, ""])


def vectors() -> str:
    """Return the OpenCL C source of all functions, scalar and vector, under OpenCL C's names."""
    lines = ["#pragma OPENCL EXTENSION cl_khr_fp64 : enable", "#define OVERLOAD __attribute__((overloadable))"]
    for name, result, kinds, _ in _scalar_functions():
        letters = "abc"[: len(kinds)]
        given = ", ".join(f"{kind} {letter}" for kind, letter in zip(kinds, letters, strict=True))
        lines.append(f"OVERLOAD {result} cl_{name}({given});")
        lines.append(f"OVERLOAD {result} {name}({given}) {{ return cl_{name}({', '.join(letters)}); }}")
        for width in WIDTHS:
            # Tests of vectors return integers as wide as the elements, with all bits set for true.
            is_test = name in _TESTS
            to = f"{_SIGNED[kinds[0]] if is_test else result}{width}"
            title = f"{name}{width}" if name.startswith("convert_") else name
            vector_given = ", ".join(f"{kind}{width} {letter}" for kind, letter in zip(kinds, letters, strict=True))
            call = f"cl_{name}({', '.join(f'{letter}[i]' for letter in letters)})"
            lines.append(
                f"OVERLOAD {to} {title}({vector_given}) {{ {to} r; "
                f"for (int i = 0; i < {width}; ++i) r[i] = {f'{call} ? -1 : 0' if is_test else call}; return r; }}"
            )
    return "\n".join([*lines, ""])
