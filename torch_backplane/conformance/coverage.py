"""Where each dense ATen operator's implementation on bp comes from, read off PyTorch's dispatcher.

An operator is **required** when PyTorch's CPU backend has a kernel for it and none of the composite keys has: a backend
that does not supply it cannot run it. In-place and ``out=`` overloads count on their own, as they are registered on
their own (those that PyTorch generates from another overload have a composite kernel and are not required). Left out
are the quantized recurrent cells, whose parameters are CPU objects and no tensors.

The sources: a kernel of ours, or a planner where a device runs kernels (native); a composite kernel of PyTorch's, which
runs other operators (decomposition); the CPU's kernel (fallback), for everything else and for what
csrc/fallback/fallback.cpp sends there past a composite kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch

COMPOSITE_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
SOURCES = ("native", "decomposition", "fallback")
_NOT_FOR_TENSORS = re.compile(r"aten::quantized_(lstm|gru)\b")


@dataclass(frozen=True)
class Operator:
    """One ATen overload (``aten::add.out``) that can run on dense tensors."""

    name: str
    required: bool
    source: str  # one of SOURCES

    @property
    def function(self) -> str:
        """The function that it is an overload of: ``add`` for ``aten::add_.Tensor`` as for ``aten::add.out``."""
        base = self.name.removeprefix("aten::").partition(".")[0]
        return base if base.startswith("__") else base.rstrip("_")


def _registered_in_fallback(name: str) -> bool:
    """True when the kernel for bp is the CPU fallback, registered for this very operator to save a detour."""
    registrations = torch._C._dispatch_dump(name).splitlines()
    return any(line.startswith("PrivateUse1:") and "fallback.cpp" in line for line in registrations)


def operators() -> list[Operator]:
    """Every dense ATen operator, by name."""
    torch.bp.init()  # type: ignore[attr-defined]  # planners are declared where a device that runs kernels is found
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::") or _NOT_FOR_TENSORS.match(name):
            continue
        registered = has_kernel(name, "PrivateUse1")
        native = registered and not _registered_in_fallback(name)
        composite = any(has_kernel(name, key) for key in COMPOSITE_KEYS)
        on_cpu = has_kernel(name, "CPU")
        if native or composite or on_cpu:
            source = "native" if native else "decomposition" if composite and not registered else "fallback"
            found.append(Operator(name, required=on_cpu and not composite, source=source))
    return found


def count(found: list[Operator]) -> dict[str, dict[str, int]]:
    """For required and other operators: how many come from each source, and the total; and functions required."""
    table = {}
    for title, required in (("required", True), ("other", False)):
        sources = Counter(operator.source for operator in found if operator.required == required)
        table[title] = {**{source: sources[source] for source in SOURCES}, "total": sources.total()}
        table[title]["functions"] = len({operator.function for operator in found if operator.required == required})
    return table
