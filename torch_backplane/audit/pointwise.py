"""A case for each pointwise operator, generated from its schema."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.audit.workloads import Body, Workload, rand, whole

# Planners in these files are pointwise.
_FILES = ("pointwise", "unary_ops", "binary_ops", "pow", "activation")
_INTEGERS = ("bitwise", "shift__", "gcd", "lcm", "shift")
_NUMBERS = {"min": 0.2, "max": 0.8, "n": 2, "p": 2, "decimals": 2}
_OPTIONAL = ("min", "max")  # passed although optional, because clamp needs one
# Operators whose arguments cannot be generated from the schema alone, and others to skip.
_SKIPPED = {
    "aten::fill.Tensor": "needs a scalar tensor",
    "aten::rrelu_with_noise": "has a separate case",
    "aten::where.self": "has a separate case, with a bool operand",
    "aten::native_dropout_backward": "needs a bool mask",
    "aten::_fill_mem_eff_dropout_mask_": "internal helper",
}


def cases() -> list[Workload]:
    """Return the cases. Tensors have n elements; Scalars are 0.5, or as in _NUMBERS."""
    import torch_backplane.operators  # noqa: F401 (declares them)
    from torch_backplane.planning import declare

    found = []
    for name, planner in sorted(declare.declared.items()):
        overload = declare.find(name.removeprefix("aten::")) if name.startswith("aten::") else None
        if overload is None or name in _SKIPPED or planner.__module__.rpartition(".")[2] not in _FILES:
            continue
        schema = overload._schema
        if any(one.is_write for one in schema.arguments) or not _can_be_made(schema):
            continue
        found.append(Workload(name.removeprefix("aten::"), _maker(overload), family="formulas"))
    return found


def _can_be_made(schema: Any) -> bool:
    kinds = {str(one.type) for one in schema.arguments if not one.has_default_value()}
    return kinds <= {"Tensor", "number", "float", "int", "bool"} and str(schema.arguments[0].type) == "Tensor"


def _maker(overload: Any) -> Any:
    integers = any(part in overload._schema.name for part in _INTEGERS)

    def value(one: Any, device: torch.device, n: int) -> Any:
        if str(one.type) in ("Tensor", "Optional[Tensor]"):
            return whole(device, 30, n).int() if integers else rand(device, n)
        if str(one.type) == "bool":
            return False
        if str(one.type) == "int" or integers:
            return int(_NUMBERS.get(one.name, 3))
        return _NUMBERS.get(one.name, 0.5)

    def make(device: torch.device, n: int) -> Body:
        wanted = [one for one in overload._schema.arguments if not one.has_default_value() or one.name in _OPTIONAL]
        given = [value(one, device, n) for one in wanted if not one.kwarg_only]
        named = {one.name: value(one, device, n) for one in wanted if one.kwarg_only}
        return lambda: overload(*given, **named)

    return make
