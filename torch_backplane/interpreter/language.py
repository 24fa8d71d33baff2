"""Languages of kernels, and the text of a kernel as it is compiled: its words before it, a function to call behind it.

Nothing of the text itself is changed. That each access is seen is the compiler's work (-fsanitize=thread calls a
function before each one); what it would not see is spelled by a language's `before`, or refused.
"""

from __future__ import annotations

import functools
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

# What runtime.cpp has for kernels, as C++ and OpenCL C declare it. A place is a global, local or group number, a global
# size, a group size or a number of groups, with three dimensions each.
WORDS = """\
ulong interpreter_place(uint which) __attribute__((const));  // one work item, one answer
void interpreter_barrier(uint flags);
ulong interpreter_shuffle_down(ulong value, uint offset);
void interpreter_range(ulong address, ulong bytes, uint writes);
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
    """There is no compiler for a language, or it cannot do what the interpreter needs."""


class Language(ABC):
    """How kernels of one language become libraries of the host."""

    name: ClassVar[str]
    suffix: ClassVar[str]  # of files
    entry: ClassVar[str]  # a regular expression for what a kernel begins with, up to its name
    has_offsets: ClassVar[bool]  # whether a ulong of bytes follows each parameter of device memory

    @abstractmethod
    def compiler(self) -> str:
        """Its path.

        Raises:
            NoCompiler: there is none.
        """

    @abstractmethod
    def options(self) -> Sequence[str]:
        """With which kernels are compiled."""

    @abstractmethod
    def before(self, text: str) -> str:
        """What spells the words of a text, and for `interpreter_run`: the type ulong, INTERPRETER_ENTRY (how a function
        begins that has its name in the library, too) and INTERPRETER_OWN (memory of the work item).

        Raises:
            RuntimeError: the text has accesses to memory that would not be seen.
        """

    def functions(self) -> Mapping[str, tuple[str, Sequence[str]]]:
        """Functions of the language: (text, options) by the names of files."""
        return {}

    def version(self) -> str:
        """What its compiler says of itself."""
        return _version(self.compiler())


@functools.cache
def _version(compiler: str) -> str:
    return command([compiler, "--version"]).strip()


@dataclass(frozen=True)
class Text:
    """A text to compile, and what messages need.

    Args:
        names: for each argument of a launch the parameter that it is.
        item_bytes: of the elements that it points to; 0 for numbers.
    """

    text: str
    names: tuple[str, ...]
    item_bytes: tuple[int, ...]


def translated(language: Language, text: str, entry: str) -> Text:
    """The text for the compiler, with the function `interpreter_run`, which takes a launch's arguments.

    Raises:
        RuntimeError: there is no kernel `entry`, or one with parameters that are not understood; or accesses to memory
            that would not be seen.
    """
    found = re.search(rf"{language.entry}\s{re.escape(entry)}\s*\(([^)]*)\)", text)
    if found is None:
        raise RuntimeError(f"the interpreter finds no kernel «void {entry}(…)» in the text")
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
                raise RuntimeError(f"«{kind}{name}» of {entry} is no device memory with an offset behind it")
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
    """What a command prints. RuntimeError with what it says where it fails."""
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(result.stderr or f"{arguments[0]} ended with {result.returncode}")
    return result.stdout
