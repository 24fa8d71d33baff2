"""The call in the last line of a program, and its operands: some differences are accepted only for some operands."""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuzz.programs import NAME, namespace


class LastCall:
    """The call in the last of a program's lines.

    Args:
        lines: the program.
        on: the driver of its devices.
    """

    def __init__(self, lines: Sequence[str], on: str) -> None:
        self.lines = lines
        self.on = on
        self._names: dict[str, Any] | None = None

    @property
    def written(self) -> list[Any]:
        """The names of the tensors in `out=`; for `t0[…] = …`, the name of the tensor."""
        (statement,) = ast.parse(self.lines[-1].strip()).body
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Subscript):
            return [ast.unparse(target.value)]
        found = [word.value for word in self._call.keywords if word.arg == "out"]
        places = found[0].elts if found and isinstance(found[0], (ast.Tuple, ast.List)) else found
        return [ast.unparse(place) for place in places]

    def operands(self) -> list[Any]:
        """Returns the positional arguments on the CPU before the call; for methods, the tensor comes first."""
        call = self._call
        called = call.func
        of_tensor = isinstance(called, ast.Attribute) and NAME.search(ast.unparse(called.value))
        return [self.value(ast.unparse(one)) for one in [*([called.value] if of_tensor else []), *call.args]]

    def value(self, expression: str) -> Any:
        """Evaluates an expression on the CPU before the call; None if that raises an error."""
        try:
            return eval(expression, dict(self._before()))
        except Exception:
            return None

    @property
    def _call(self) -> ast.Call:
        (statement,) = ast.parse(self.lines[-1].strip()).body
        value = getattr(statement, "value", None)
        return value if isinstance(value, ast.Call) else ast.Call(ast.Name("none"), [], [])

    def _before(self) -> dict[str, Any]:
        if self._names is None:
            self._names = namespace("cpu", "cpu")
            for line in self.lines[:-1]:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        exec(line, self._names)
                except Exception:
                    continue  # the line raises on both sides
        return self._names


# Conditions of known differences


def one_tensor_for_all_results(call: LastCall) -> bool:
    return len(set(call.written)) < len(call.written)


def of_one_element(call: LastCall) -> bool:
    """Whether one element is written: the tensor has one element, or its diagonal has."""
    (tensor, *_) = call.operands() or [None]
    return isinstance(tensor, torch.Tensor) and (tensor.numel() == 1 or (tensor.dim() > 1 and 1 in tensor.shape))


def several_nans(call: LastCall) -> bool:
    (tensor, *_) = call.operands() or [None]
    return isinstance(tensor, torch.Tensor) and int((tensor != tensor).sum()) > 1


def after_elu_or_hardswish(call: LastCall) -> bool:
    return any(re.search(r"\b([cs]?elu|hardswish)_?\(", line) for line in call.lines)


def of_nan(call: LastCall) -> bool:
    tensors = [one for one in call.operands() if isinstance(one, torch.Tensor)]
    return any(bool((one != one).any()) for one in tensors)


def converts_an_expanded(call: LastCall) -> bool:
    """Whether an expanded operand has another dtype than the promoted dtype of the operands."""
    tensors = [one for one in call.operands() if isinstance(one, torch.Tensor)]
    together = functools.reduce(torch.promote_types, [one.dtype for one in tensors], torch.bool)
    return any(
        one.dtype != together and any(size > 1 and not step for size, step in zip(one.shape, one.stride(), strict=True))
        for one in tensors
    )


def of_results_of_lists_with_a_size_of_one(call: LastCall) -> bool:
    """Whether an operand with a size of 1 comes from a foreach operator."""
    lists = {name for line in call.lines[:-1] for name in re.findall(r"(\bt\d+) = torch\._foreach_", line)}
    used = {name for name in re.findall(r"\bt\d+\b", call.lines[-1]) if name in lists}
    tensors = [one for name in used for one in tree_leaves(call.value(name)) if isinstance(one, torch.Tensor)]
    return any(1 in one.shape for one in tensors)


def far_below_zero(call: LastCall) -> bool:
    (tensor, *_) = call.operands() or [None]
    return isinstance(tensor, torch.Tensor) and bool((tensor < -1000).any())


def is_infinite_beside_zeros(call: LastCall) -> bool:
    """Whether a whole tensor has a zero, and the product of its elements above one overflows float32."""
    (tensor, *rest) = call.operands() or [None]
    if rest or "dim" in call.lines[-1]:
        return False
    if not isinstance(tensor, torch.Tensor) or not bool((tensor == 0).any()):
        return False
    return tensor.detach().abs().double().clamp(min=1).log2().sum().item() > 127


def of_an_order_near_zero(call: LastCall) -> bool:
    return any(isinstance(one, float) and 0 < abs(one) < 0.1 for one in call.operands()[1:2])


def of_halves(call: LastCall) -> bool:
    (tensor, *_) = call.operands() or [None]
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)


def normalizes_zeros(call: LastCall) -> bool:
    """Whether a line calls F.normalize on a tensor with zeros."""
    found = [part for line in call.lines for part in re.findall(r"F\.normalize\((t\d+)", line)]
    return any(bool((call.value(name) == 0).any()) for name in found if isinstance(call.value(name), torch.Tensor))


def written_overlaps_itself(call: LastCall) -> bool:
    """Whether a tensor in `out=` overlaps itself; without `out=`, the tensor of the method."""
    return any(map(overlaps_itself, map(call.value, call.written) if call.written else call.operands()[:1]))


def writes_batches_with_gaps_on_the_host(call: LastCall) -> bool:
    return call.on == "host" and any(has_batches_apart(call.value(name)) for name in call.written)


def overlaps_itself(tensor: Any) -> bool:
    """Whether two elements have the same address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return False
    at = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at.unsqueeze(-1) + stride * torch.arange(size)
    return at.unique().numel() < at.numel()


def has_batches_apart(tensor: Any) -> bool:
    """Whether the distance between a tensor's matrices varies. PyTorch's triu and tril on the CPU assume that it is
    constant.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 4:
        return False
    try:
        tensor.view(-1, *tensor.shape[-2:])
    except RuntimeError:
        return True
    return False
