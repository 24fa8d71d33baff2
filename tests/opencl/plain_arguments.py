"""Arguments that most operators accept, generated from their schemas, and the outcome of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

# The CPU kernels of operators with these words in their names crash or read out of bounds if tensors do not match. No
# other operators do: this was checked with each tensor of these calls placed directly before an inaccessible page.
CRASHES = (
    "_cholesky_solve_helper", "_compute_linear_combination", "_fused_", "_log_softmax_backward_data", "_masked_softmax",
    "_pad", "_weight_norm_interface", "batch_norm", "dist_backward", "grid_sampler",
)  # fmt: skip

# For these, our planners refuse tensors that do not match. The CPU kernels return what they read out of bounds.
REFUSED = ("_compute_linear_combination", "_log_softmax_backward_data")


def outcome(function: Any, arguments: list[Any]) -> tuple[str, str]:
    try:
        function(*arguments)
        torch.accelerator.synchronize()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "", ""


def plain_value(argument: Any, tensor: torch.Tensor, number: float) -> Any:
    """Returns a value of the argument's type that most operators accept."""
    kind = str(argument.type)
    if argument.has_default_value() and "Tensor" not in kind and "number" not in kind and "float" not in kind:
        return argument.default_value
    if kind == "Tensor":
        return tensor.clone() if argument.name not in ("mask", "condition") else tensor > 0.6
    values = {
        "List[Tensor]": [tensor.clone(), tensor.clone()],
        "number": number,
        "Optional[number]": number,
        "float": 0.5,
        "Optional[float]": 0.5,
        "List[number]": [number, number],
        "List[float]": [0.5, 0.5],
        "int": 1,
        "bool": False,
        "List[int]": [0],
    }
    return values.get(kind)


def plain_arguments(overload: OpOverload, dtype: torch.dtype) -> list[Any]:
    """Returns a value for each argument of the schema, with small tensors of the dtype."""
    tensor = (torch.tensor([[1, 2, 3], [4, 5, 6]]) / (8 if dtype.is_floating_point else 1)).to(dtype)
    number = 0.5 if dtype.is_floating_point else 2
    return [plain_value(one, tensor, number) for one in overload._schema.arguments]


def by_position(overload: OpOverload) -> Callable[..., Any]:
    """Returns the overload as a function that takes all arguments by position, in the schema's order."""
    schema = overload._schema.arguments

    def call(*values: Any) -> Any:
        named = {one.name: value for one, value in zip(schema, values, strict=True) if one.kwarg_only}
        return overload(*(value for one, value in zip(schema, values, strict=True) if not one.kwarg_only), **named)

    return call


def fresh(arguments: list[Any]) -> list[Any]:
    return tree_map_only(torch.Tensor, torch.clone, arguments)
