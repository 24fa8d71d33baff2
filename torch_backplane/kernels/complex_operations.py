"""Operations on complex numbers, decomposed into operations on their real and imaginary parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.expression import Expression, join, registered
from torch_backplane.kernels.special import complex_numbers
from torch_backplane.kernels.special.complex_numbers import Parts


def apply(name: str, operands: Sequence[Expression]) -> Expression:
    """The result of operation `name` of expression.OPERATIONS, or "sign" or "angle", on operands of one complex dtype.

    Raises:
        TypeError: the operation is not defined for complex numbers, such as a comparison by order.
    """
    function = _FUNCTIONS.get(name)
    if function is None:
        raise TypeError(f"{name} does not support {operands[0].dtype}".replace("torch.", ""))
    result = function(*(Parts(one.real, one.imag) for one in operands))
    return join(*result) if isinstance(result, Parts) else result


def _part_by_part(function: Callable[..., Any], made: Callable[[Any, Any], Any] = Parts) -> Callable[..., Any]:
    """Applies `function` to the real parts and to the imaginary parts, and `made` to the two results."""
    return lambda *operands: made(*(function(*parts) for parts in zip(*operands, strict=True)))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **complex_numbers.FUNCTIONS,
    "absolute": complex_numbers.absolute,
    "angle": complex_numbers.angle,
    "add": _part_by_part(operator.add),
    "subtract": _part_by_part(operator.sub),
    "negative": _part_by_part(operator.neg),
    "equal": _part_by_part(operator.eq, operator.and_),
    "not_equal": _part_by_part(operator.ne, operator.or_),
    "isnan": _part_by_part(f.isnan, operator.or_),
    "isinf": _part_by_part(f.isinf, operator.or_),
    "isfinite": _part_by_part(f.isfinite, operator.and_),
}

registered["complex operation"] = apply
