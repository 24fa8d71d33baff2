"""Languages of kernels, and the source that is compiled: a prelude, the unchanged kernel source, and an entry function.

The compiler instruments each memory access (-fsanitize=thread inserts a function call before it). For accesses that it
would not instrument, a language's `before` has definitions that do, or the kernel is refused.
"""

from __future__ import annotations

import functools
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

# Declarations of runtime.cpp's functions for kernels, in C++ and OpenCL C. interpreter_place returns a global, local or
# group ID, a global size, a group size or a number of groups, in one of three dimensions.
WORDS = """\
ulong interpreter_place(uint which) __attribute__((const));  // one work item, one answer
void interpreter_barrier(uint flags);
ulong interpreter_shuffle_down(ulong value, uint offset);
ulong interpreter_shuffle_from(ulong value, uint lane, ulong mask);
void interpreter_shuffle_barrier(uint mask);
void interpreter_shuffle_all(const ulong* given, uint count, ulong* all);
void interpreter_copy_later(ulong to, ulong from, uint bytes);
void interpreter_wait_for_copies();
void interpreter_range(ulong address, ulong bytes, uint how);
void interpreter_unordered(uint begins);
uint interpreter_swap(ulong address, uint expected, uint desired);
float interpreter_from_half(ushort bits);
ushort interpreter_to_half(float value);
"""

_RUN = """
struct interpreter_argument {{ ulong memory, offset, data, bytes; }};
INTERPRETER_ENTRY __attribute__((no_sanitize("thread")))
void interpreter_run(const INTERPRETER_OWN struct interpreter_argument* given) {{
  {entry}({arguments});
}}
"""

ITEM_BYTES = {"char": 1, "short": 2, "int": 4, "long": 8, "float": 4, "double": 8, "half": 2, "bool": 1}


class NoCompiler(RuntimeError):
    """There is no compiler for a language, or it lacks a feature that the interpreter needs."""


class Language(ABC):
    """Compiles kernels of one language to libraries for the host."""

    name: ClassVar[str]
    suffix: ClassVar[str]  # of source files
    entry: ClassVar[str]  # regular expression for the beginning of a kernel, up to its name
    has_offsets: ClassVar[bool]  # whether each parameter of device memory is followed by its offset in bytes, a ulong

    @abstractmethod
    def compiler(self) -> str:
        """Return the path of the compiler.

        Raises:
            NoCompiler: there is none.
        """

    @abstractmethod
    def options(self) -> Sequence[str]:
        """Return the compiler options for kernels."""

    @abstractmethod
    def before(self, text: str) -> str:
        """Return the prelude of a kernel source: the definitions that it needs.

        For `interpreter_run`, the prelude defines the type ulong, INTERPRETER_ENTRY (declares an exported, unmangled
        function) and INTERPRETER_OWN (the address space of the work item's own memory).

        Raises:
            RuntimeError: the source has memory accesses that would not be instrumented.
        """

    def functions(self) -> Mapping[str, tuple[str, Sequence[str]]]:
        """Return the sources of the language's built-in functions: file name → (source, compiler options)."""
        return {}

    def version(self) -> str:
        """Return the version text of the compiler."""
        return _version(self.compiler())


@functools.cache
def _version(compiler: str) -> str:
    return command([compiler, "--version"]).strip()


@dataclass(frozen=True)
class Text:
    """A source to compile, with names and sizes for messages.

    Args:
        names: the parameter for each argument of a launch.
        item_bytes: for each argument, the size of the elements that it points to; 0 for numbers.
    """

    text: str
    names: tuple[str, ...]
    item_bytes: tuple[int, ...]


def translated(language: Language, text: str, entry: str) -> Text:
    """Return the source to compile, with the function `interpreter_run`, which takes the arguments of a launch.

    Raises:
        RuntimeError: there is no kernel `entry`, its parameters are not supported, or the source has memory accesses
            that would not be instrumented.
    """
    found = re.search(rf"{language.entry}\s{re.escape(entry)}\s*\(([^)]*)\)", text)
    if found is None:
        raise RuntimeError(f"the interpreter finds no kernel «void {entry}(…)» in the source")
    given: list[str] = []
    names: list[str] = []
    sizes: list[int] = []
    parameters = [" ".join(one.split()) for one in found[1].split(",") if one.strip()]
    while parameters:
        kind, name = re.fullmatch(r"(.*?[\s*])(\w+)", parameters.pop(0)).groups()  # type: ignore[union-attr]
        number = len(names)
        if "*" not in kind:
            plain = re.sub(r"\bconst\b", "", kind).strip()
            given.append(f"*(const INTERPRETER_OWN {plain}*)given[{number}].data")
            sizes.append(0)
            names.append(name)
            continue
        if language.has_offsets:
            if not re.search(r"\bglobal\b", kind) or not parameters or not re.search(r"\bulong\b", parameters[0]):
                raise RuntimeError(f"«{kind}{name}» of {entry} is not a global pointer followed by a ulong offset")
            parameters.pop(0)
            given += [f"({kind.strip()})given[{number}].memory", f"given[{number}].offset"]
        else:
            given.append(f"({kind.strip()})(given[{number}].memory + given[{number}].offset)")
        sizes.append(_item_bytes(kind))
        names.append(name.removesuffix("_base"))
    run = _RUN.format(entry=entry, arguments=", ".join(given))
    return Text(language.before(text) + text + run, tuple(names), tuple(sizes))


def _item_bytes(kind: str) -> int:
    match = re.search(r"\bu?(char|short|int|long|float|double|half|bool)(\d*)\b", kind)
    return ITEM_BYTES[match[1]] * int(match[2] or 1) if match else 1


def command(arguments: Sequence[str]) -> str:
    """Run a command and return its output.

    Raises:
        RuntimeError: it failed. The message is its error output.
    """
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr or f"{arguments[0]} failed with exit code {result.returncode}")
    return result.stdout
