"""Evaluates traced formulas with PyTorch's operators instead of a kernel, with the same semantics, on any device.

The operators are not fused. This is for devices that run no kernels, and a reference for comparisons. `fma` of float64
rounds twice here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_backplane.kernels.dtypes import facts
from torch_backplane.kernels.expression import OPERATIONS, Instruction, Loop, Program
from torch_backplane.kernels.target import CPU


def evaluate(program: Program, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The program's results for `arguments`, which are broadcastable tensors of the dtypes that it was traced with.

    A result can have fewer dimensions than the arguments, and can share memory with them.
    """
    device = arguments[0].device if arguments else CPU
    values: list[Tensor] = []
    loops: dict[int, list[Tensor]] = {}  # number of a loop's instruction -> its final state
    for number, instruction in enumerate(program.instructions):
        operands = [values[operand] for operand in instruction.operands]
        if instruction.operation == "argument":
            assert isinstance(instruction.value, int)
            values.append(arguments[instruction.value])
        elif instruction.operation == "index":
            raise TypeError("the position of an element is available only in pointwise kernels")
        elif instruction.operation == "constant":
            values.append(torch.full((), instruction.value, dtype=instruction.dtype, device=device))  # type: ignore[arg-type]
        elif instruction.operation == "loop":
            assert isinstance(instruction.value, Loop)
            loops[number] = _repeat(instruction.value, operands)
            values.append(loops[number][0])
        elif instruction.operation == "loop_result":
            assert isinstance(instruction.value, int)
            values.append(loops[instruction.operands[0]][instruction.value])
        else:
            values.append(_apply(instruction, operands))
    return [values[number] for number in program.results]


def _repeat(loop: Loop, state: Sequence[Tensor]) -> list[Tensor]:
    """Runs the loop; each element iterates until its own condition fails."""
    found = list(torch.broadcast_tensors(*state))
    while True:
        (goes_on,) = evaluate(loop.condition, found)
        if not bool(goes_on.any()):
            return found
        changed = evaluate(loop.body, found)
        found = [torch.where(goes_on, new, old) for new, old in zip(changed, found, strict=True)]


def _apply(instruction: Instruction, operands: list[Tensor]) -> Tensor:
    name = instruction.operation
    if name == "where":
        condition, a, b = operands
        return torch.where(condition, a, b)
    if name == "cast":
        return operands[0].to(instruction.dtype)
    if name in ("real", "imaginary"):
        return torch.real(operands[0]) if name == "real" else torch.imag(operands[0])
    if name == "complex":
        return torch.complex(*operands)
    if name == "bits":
        return operands[0].view(instruction.dtype)
    if name in _DIVISIONS and not operands[0].is_floating_point():
        return _divide(_DIVISIONS[name], *operands)
    return _FUNCTIONS[name](*operands)


def _divide(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Integer division; by zero it gives zero, as in kernels, whereas PyTorch's CPU operators raise an error."""
    none = b == 0
    return torch.where(none, torch.zeros_like(a), function(a, torch.where(none, torch.ones_like(b), b)))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).to(a.dtype)


def _absolute(a: Tensor) -> Tensor:
    return a if facts(a.dtype).category == "unsigned" else torch.abs(a)


_DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}

# Operations whose name or semantics differ from PyTorch's. All others have PyTorch's names.
_OTHERWISE: dict[str, Callable[..., Tensor]] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "divide": torch.true_divide,
    "power": torch.pow,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "trunc_divide": _DIVISIONS["trunc_divide"],
    "absolute": _absolute,
    "fma": _fma,
}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: _OTHERWISE[name] if name in _OTHERWISE else getattr(torch, name) for name in OPERATIONS
}
