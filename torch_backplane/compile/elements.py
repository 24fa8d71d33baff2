"""Which variables hold the element of a loop, and the arrays that keep values from one loop of a kernel to a later one.

A softmax, for example, has three loops over the elements of a row. A later loop computes a value of an earlier one
again, under the same name, or reads it from an array of the work item, which has an element for each iteration. Work
items of GPUs keep each value that a later loop needs, in registers: memory is read once. On CPUs, where a row stays in
the cache, they keep only what takes long to compute.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.utils import DeferredLineBase

from torch_backplane.compile.variables import Variable

if TYPE_CHECKING:
    from torch_backplane.compile.kernel import GraphKernel

# Operations that take longer than reading an element from a CPU's cache.
_SLOW = (
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma "
    "atan2 hypot power"
)
SLOW = frozenset(_SLOW.split())


class _IfKept(DeferredLineBase):
    """A line of the kernel if `name` is in `kept` at the end."""

    def __init__(self, line: str, name: str, kept: set[str]) -> None:
        super().__init__(line)
        self._name, self._kept = name, kept

    def __call__(self) -> str | None:
        return self.line if self._name in self._kept else None

    def _new_line(self, line: str) -> _IfKept:
        return _IfKept(line, self._name, self._kept)


class Elements:
    """The variables that `kernel` has declared in loops over reduced elements."""

    def __init__(self, kernel: GraphKernel) -> None:
        self._kernel = kernel
        self._declared: dict[str, Variable] = {}  # in the current loop
        self._earlier: dict[str, Variable] = {}  # in earlier loops
        self._kept: set[str] = set()  # those whose array is read
        self._slow: set[str] = set()

    def add(self, var: Variable, buffer: IndentedBuffer) -> None:
        """Notes that `buffer`, a part of the current loop, declares `var`."""
        self._declared[var.name] = var
        if self._kernel.kept:
            keep = f"{var}_kept[{self._kernel.iteration}] = {var};"
            buffer.writeline(_IfKept(keep, var.name, self._kept))

    def add_slow(self, var: Variable) -> None:
        """Notes that `var` is the result of one of the SLOW operations."""
        self._slow.add(var.name)

    def has(self, var: Variable) -> bool:
        """Whether the current loop can use `var` without declaring it: it has done so already, or has its array."""
        return var.name in self._declared or (var.name in self._earlier and self._can_keep(var.name))

    def _can_keep(self, name: str) -> bool:
        return self._kernel.kept > 0 and (self._kernel.dialect.target.simt or name in self._slow)

    def end_loop(self, *parts: IndentedBuffer) -> list[str]:
        """Ends a loop that consists of `parts`. Returns the statements to begin with: they read the arrays."""
        words = {word for part in parts for word in re.findall(r"\w+", part.getvalue())}
        lines = []
        for name, var in self._earlier.items():
            is_declared = name in self._declared or var in self._kernel.outside_loops
            if name in words and not is_declared:
                kind = self._kernel.dialect.type(var.dtype)
                self._kept.add(name)
                self._kernel.variables[f"{name}_kept"] = f"{kind} {name}_kept[{self._kernel.kept}];"
                lines.append(f"const {kind} {name} = {name}_kept[{self._kernel.iteration}];")
        self._earlier |= self._declared
        self._declared.clear()
        cse = self._kernel.cse
        for buffer, var in list(cse.store_cache.items()):
            if var not in self._kernel.outside_loops and not self.has(var):  # later loops load it from the buffer
                del cse.store_cache[buffer]
                cse.invalidated_stores.add(buffer)
        return lines
