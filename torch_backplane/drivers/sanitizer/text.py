"""The text of a kernel as it is compiled to be checked: before it what spells its words, behind it a function to call.

Nothing of the text itself is changed. That each access is seen is the compiler's work (-fsanitize=thread calls a
function before each one); what it would not see is spelled here (vectors, swaps), or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_backplane.drivers.sanitizer.builtins import SCALARS, WIDTHS

_PLACES = ("get_global_id", "get_local_id", "get_group_id", "get_global_size", "get_local_size", "get_num_groups")

_WORDS = "\n".join([
    "ulong backplane_sanitizer_place(uint which) __attribute__((const));",  # one work item, one answer
    "void backplane_sanitizer_barrier(uint flags);",
    "void backplane_sanitizer_range(ulong address, ulong bytes, uint writes);",
    "void backplane_sanitizer_unordered(uint begins);",
    "uint backplane_sanitizer_swap(ulong address, uint expected, uint desired);",
    "float backplane_sanitizer_from_half(const ushort bits);",
    "ushort backplane_sanitizer_to_half(const float value);",
    *(f"#define {name}(dimension) backplane_sanitizer_place({3 * i} + (dimension))" for i, name in enumerate(_PLACES)),
    "#define get_global_offset(dimension) ((ulong)0)",
    "#define barrier(flags) backplane_sanitizer_barrier(flags)",
    "#define mem_fence(flags)",
    "#define atomic_cmpxchg(at, expected, desired) backplane_sanitizer_swap((ulong)(at), expected, desired)",
    "#define ANY_MAY_STAY(store) backplane_sanitizer_unordered(1); store; backplane_sanitizer_unordered(0)",
    # A whole access of a vector is told at once, so these functions are not looked at.
    "#define BACKPLANE_TOLD static __attribute__((overloadable, no_sanitize(\"thread\")))",
    "",
])  # fmt: skip

# float16 is converted in the item's own memory only: there is no overload for any other.
_HALVES = """\
BACKPLANE_TOLD float backplane_vload_half(const ulong at, const private half* p) {
  return backplane_sanitizer_from_half(((const private ushort*)p)[at]);
}
BACKPLANE_TOLD void backplane_vstore_half_rte(const float x, const ulong at, private half* p) {
  ((private ushort*)p)[at] = backplane_sanitizer_to_half(x);
}
#define vload_half(at, p) backplane_vload_half(at, p)
#define vstore_half_rte(x, at, p) backplane_vstore_half_rte(x, at, p)
"""

_ITEM_BYTES = {"char": 1, "short": 2, "int": 4, "long": 8, "float": 4, "double": 8, "half": 2, "bool": 1}
_SPACES = ("global", "local", "private")

# What moves more bytes at once than the compiler tells of.
MOST_BYTES = 16


@dataclass(frozen=True)
class CheckedText:
    """A text to compile, and what messages need.

    Args:
        names: for each argument of a launch the parameter that it is.
        item_bytes: of the elements that it points to; 0 for numbers.
    """

    text: str
    names: tuple[str, ...]
    item_bytes: tuple[int, ...]


def _lanes(text: str) -> str:
    """vload and vstore of the widths that the text uses."""
    lines = []
    for width in (one for one in WIDTHS if re.search(rf"\bv(?:load|store){one}\b", text)):
        for kind in SCALARS:
            for space in _SPACES:
                told = f"backplane_sanitizer_range((ulong)(p + {width} * at), {width} * sizeof({kind}),"
                lines += [
                    f"BACKPLANE_TOLD {kind}{width} backplane_vload{width}(const ulong at, const {space} {kind}* p) {{ "
                    f"{told} 0); {kind}{width} r; for (int i = 0; i < {width}; ++i) r[i] = p[{width} * at + i]; "
                    "return r; }",
                    f"BACKPLANE_TOLD void backplane_vstore{width}(const {kind}{width} x, const ulong at, "
                    f"{space} {kind}* p) {{ {told} 1); "
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
    kinds = "|".join(_ITEM_BYTES)
    pattern = rf"\b(?:global|local|GLOBAL|LOCAL)\s+(?:const\s+|volatile\s+)*u?({kinds})(\d+)\s*(?:const\s*)?\*"
    for match in re.finditer(pattern, text):
        if _ITEM_BYTES[match[1]] * int(match[2]) > MOST_BYTES:
            raise RuntimeError(
                f"the sanitizer sees no access through «{match[0]}», which moves more than {MOST_BYTES} bytes at once: "
                "use vload and vstore"
            )


def checked(text: str, entry: str) -> CheckedText:
    """The text for the compiler, with the function `backplane_sanitizer_run`, which takes a launch's arguments.

    Raises:
        RuntimeError: there is no kernel `entry`, or one with parameters that are not understood; or accesses to memory
            that would not be seen.
    """
    _refuse_wide_pointers(text)
    found = re.search(rf"\bkernel\s+void\s+{re.escape(entry)}\s*\(([^)]*)\)", text)
    if found is None:
        raise RuntimeError(f"the sanitizer finds no «kernel void {entry}(…)» in the text")
    given: list[str] = []
    names: list[str] = []
    sizes: list[int] = []
    parameters = [" ".join(one.split()) for one in found[1].split(",") if one.strip()]
    while parameters:
        kind, name = re.fullmatch(r"(.*?[\s*])(\w+)", parameters.pop(0)).groups()  # type: ignore[union-attr]
        number = len(names)
        if "*" in kind:
            if not re.search(r"\bglobal\b", kind) or not parameters or not re.search(r"\bulong\b", parameters[0]):
                raise RuntimeError(f"«{kind}{name}» of {entry} is no device memory with an offset behind it")
            parameters.pop(0)
            given += [f"({kind.strip()})given[{number}].memory", f"given[{number}].offset"]
            sizes.append(_item_bytes(kind))
            names.append(name.removesuffix("_base"))
        else:
            plain = re.sub(r"\bconst\b", "", kind).strip()
            given.append(f"*(const private {plain}*)given[{number}].data")
            sizes.append(0)
            names.append(name)
    run = (
        "\nstruct backplane_argument { ulong memory, offset, data, bytes; };\n"
        '__attribute__((no_sanitize("thread"))) void backplane_sanitizer_run(const private struct backplane_argument* '
        f"given) {{\n  {entry}({', '.join(given)});\n}}\n"
    )
    before = _WORDS + _HALVES + _lanes(text) + _half_lanes(text)
    return CheckedText(before + text + run, tuple(names), tuple(sizes))


def _item_bytes(kind: str) -> int:
    match = re.search(r"\bu?(char|short|int|long|float|double|half|bool)(\d*)\b", kind)
    return _ITEM_BYTES[match[1]] * int(match[2] or 1) if match else 1
