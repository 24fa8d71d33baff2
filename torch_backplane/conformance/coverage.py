"""The source of each operator's implementation on bp, read from PyTorch's dispatcher: of ATen's and other libraries'.

An operator is **required** if PyTorch's CPU backend has a kernel for it and no composite key has one: a backend without
its own kernel cannot run it. In-place and ``out=`` overloads count separately because they are registered separately
(those that PyTorch generates from another overload have a composite kernel and are not required). The quantized
recurrent cells are excluded: their parameters are CPU objects, not tensors.

Sources: native (a kernel of Backplane, or a planner on devices that run kernels); decomposition (a composite kernel of
PyTorch, which calls other operators); fallback (the CPU kernel), for all others and for those that
csrc/fallback/fallback.cpp registers in spite of a composite kernel. An operator of another library can also have none:
it has kernels for other devices only.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch

COMPOSITE_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
SOURCES = ("native", "decomposition", "fallback")
NONE = "none"  # instead of a source: bp cannot run the operator
_NOT_FOR_TENSORS = re.compile(r"aten::quantized_(lstm|gru)\b")


@dataclass(frozen=True)
class Operator:
    """An overload (``aten::add.out``) that can run on dense tensors."""

    name: str
    required: bool
    source: str  # one of SOURCES, or NONE

    @property
    def function(self) -> str:
        """The name without overload and in-place suffix: ``add`` for ``aten::add_.Tensor`` and ``aten::add.out``."""
        base = self.name.removeprefix("aten::").partition(".")[0]
        return base if base.startswith("__") else base.rstrip("_")


def _registered_in_fallback(name: str) -> bool:
    """True if the kernel registered for bp under this operator's name is the CPU fallback."""
    registrations = torch._C._dispatch_dump(name).splitlines()
    return any(line.startswith("PrivateUse1:") and "fallback.cpp" in line for line in registrations)


def _operator(name: str) -> Operator:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = has_kernel(name, "PrivateUse1")
    composite = any(has_kernel(name, key) for key in COMPOSITE_KEYS)
    on_cpu = has_kernel(name, "CPU")
    if registered and not _registered_in_fallback(name):
        source = "native"
    elif composite and not registered:
        source = "decomposition"
    else:
        source = "fallback" if on_cpu else NONE
    return Operator(name, required=on_cpu and not composite, source=source)


def operators() -> list[Operator]:
    """Return every dense ATen operator, sorted by name."""
    torch.bp.init()  # type: ignore[attr-defined]  # declares the planners if a device runs kernels
    names = (name for name in sorted(torch._C._dispatch_get_all_op_names()) if name.startswith("aten::"))
    found = (_operator(name) for name in names if not _NOT_FOR_TENSORS.match(name))
    return [operator for operator in found if operator.source != NONE]


def operators_of(modules: Collection[str]) -> list[Operator]:
    """Import modules and return the operators that exist because of them, sorted by name.

    An operator belongs to a module if the import registers it, or if its namespace has the name of the module's
    package, because the module can have been imported before.

    Raises:
        ImportError: a module cannot be imported.
    """
    torch.bp.init()  # type: ignore[attr-defined]
    before = set(torch._C._dispatch_get_all_op_names())
    for module in modules:
        importlib.import_module(module)
    packages = {module.partition(".")[0] for module in modules}
    names = torch._C._dispatch_get_all_op_names()
    return [_operator(name) for name in sorted(names) if name not in before or name.partition("::")[0] in packages]


def count(found: list[Operator]) -> dict[str, dict[str, int]]:
    """Count the required and the other operators by source, with the total and the number of distinct functions."""
    table = {}
    for title, required in (("required", True), ("other", False)):
        sources = Counter(operator.source for operator in found if operator.required == required)
        table[title] = {**{source: sources[source] for source in SOURCES}, "total": sources.total()}
        table[title]["functions"] = len({operator.function for operator in found if operator.required == required})
    return table
