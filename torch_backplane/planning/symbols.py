"""Symbolic numbers of a trace: a value in the present call, and a slot on the plan's tape.

PyTorch's `SymInt`, `SymFloat` and `SymBool` delegate to a node; `Node` implements it. Arithmetic appends instructions
to the tape. Everything that needs a number's value (`int()`, a truth value, an index) gets its value in the present
call and leaves a guard: the plan is valid only for calls in which the number is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_backplane.planning import strides as layouts
from torch_backplane.planning.strides import SYMBOLS

Value = int | float | bool
Text = str  # within `Node`, `str` is a method


class Untraceable(Exception):
    """Raised in a trace for what a dynamic-shape plan cannot repeat. The message is a clause that gives the reason."""


class Tape:
    """The instructions of one plan, without duplicates. Each computes the value of a slot, or is a guard."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.slots: dict[tuple[Any, ...], int] = {}
        self.guarded: set[int] = set()

    def size(self, index: int, value: int) -> torch.SymInt:
        """A symbol for word `index` of the call's sizes, whose present value is `value`."""
        return Symbol(Node(self, value, self._instruction("size", index, 0, 0)))

    def slot_of(self, node: Node) -> int:
        if node.slot is None:
            node.slot = self._instruction("constant", 0, 0, _bits(node.value))
        return node.slot

    def compute(self, name: Text, one: Node, other: Node) -> int:
        return self._instruction(name, self.slot_of(one), self.slot_of(other), 0)

    def guard(self, node: Node) -> Value:
        if node.slot is not None and node.slot not in self.guarded:
            self.guarded.add(node.slot)
            self.builder.instruction("guard", node.slot, node.slot, _bits(node.value))
        return node.value

    def _instruction(self, name: Text, a: int, b: int, constant: int) -> int:
        key = (name, a, b, constant)
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = self.builder.instruction(name, a, b, constant)
        return slot


def _bits(value: Value) -> int:
    if isinstance(value, float):
        return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))
    return int(value)


class Node:
    """The node of a SymInt, SymFloat or SymBool, with the methods that PyTorch calls. `slot` is None for a constant."""

    __slots__ = ("slot", "tape", "value")

    def __init__(self, tape: Tape, value: Value, slot: int | None = None) -> None:
        self.tape = tape
        self.value = value
        self.slot = slot

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return self.slot is None

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return None

    def nested_int(self) -> None:
        return None

    constant_int = constant_bool = nested_int

    def wrap_int(self, number: int) -> Node:
        return Node(self.tape, int(number))

    def wrap_float(self, number: float) -> Node:
        return Node(self.tape, float(number))

    def wrap_bool(self, truth: bool) -> Node:
        return Node(self.tape, bool(truth))

    def clone(self) -> Node:
        return self

    def guard_int(self, file: Text = "", line: int = 0) -> int:
        return int(self.tape.guard(self))

    def guard_bool(self, file: Text = "", line: int = 0) -> bool:
        return bool(self.tape.guard(self))

    def guard_float(self, file: Text = "", line: int = 0) -> float:
        return float(self.tape.guard(self))

    guard_size_oblivious = guard_or_false = guard_or_true = expect_true = expect_size = statically_known_true = (
        guard_bool
    )
    int_ = guard_int

    def bool_(self) -> bool:
        """Also defined for numbers: the guard is then whether the number is 0."""
        return self.guard_bool() if self.is_bool() else self.ne(self.wrap_int(0)).guard_bool()

    def str(self) -> Text:
        """Guards the number: text that contains it, such as that of a kernel, depends on its value."""
        return repr(self.tape.guard(self))

    _graph_repr = __str__ = str

    def _float(self) -> Node:
        if self.is_float():
            return self
        slot = None if self.slot is None else self.tape.compute("to_float", self, self)
        return Node(self.tape, float(self.value), slot)

    def sym_float(self) -> Node:
        return self._float()

    def neg(self) -> Node:
        return self.mul(self.wrap_float(-1.0)) if self.is_float() else self.wrap_int(0).sub(self)  # 0.0 gives -0.0

    def _made(self, name: Text, value: Value, one: Node, other: Node) -> Node:
        if one.slot is None and other.slot is None:
            return Node(self.tape, value)
        return Node(self.tape, value, self.tape.compute(name, one, other))

    def _arithmetic(self, name: Text, function: Callable[[Any, Any], Any], other: Node) -> Node:
        if self.is_float() or other.is_float():
            one, two = self._float(), other._float()
            return self._made(f"float_{name}", function(one.value, two.value), one, two)
        return self._made(name, function(self.value, other.value), self, other)

    def add(self, other: Node) -> Node:
        if self.slot is None and self.value == 0 and other.is_int():
            return other
        if other.slot is None and other.value == 0 and self.is_int():
            return self
        return self._arithmetic("add", operator.add, other)

    def sub(self, other: Node) -> Node:
        return self._arithmetic("sub", operator.sub, other)

    def mul(self, other: Node) -> Node:
        if self.slot is None and self.value == 1 and other.is_int():
            return other
        if other.slot is None and other.value == 1 and self.is_int():
            return self
        return self._arithmetic("mul", operator.mul, other)

    def _of_integers(self, name: Text, function: Callable[[Any, Any], Any], other: Node) -> Node:
        """An operation that tapes only have for integers. Floats are guarded, which makes the result a constant."""
        if self.is_float() or other.is_float():
            return Node(self.tape, function(self.tape.guard(self), self.tape.guard(other)))
        return self._made(name, function(self.value, other.value), self, other)

    def floordiv(self, other: Node) -> Node:
        return self._of_integers("floordiv", operator.floordiv, other)

    def mod(self, other: Node) -> Node:
        return self._of_integers("mod", operator.mod, other)

    int_floordiv, python_mod = floordiv, mod

    def truediv(self, other: Node) -> Node:
        if self.is_float() or other.is_float():
            return self._arithmetic("truediv", operator.truediv, other)
        return self._made("truediv", self.value / other.value, self, other)

    int_truediv = float_truediv = truediv

    def sym_min(self, other: Node) -> Node:
        return self._of_integers("min", min, other)

    def sym_max(self, other: Node) -> Node:
        return self._of_integers("max", max, other)

    def _compared(self, name: Text, function: Callable[[Any, Any], bool], other: Node) -> Node:
        """Guards immediately, so truth values are constants and can outlive the trace, for example in a cache key."""
        return self.wrap_bool(bool(self.tape.guard(self._of_integers(name, function, other))))

    def eq(self, other: Node) -> Node:
        return self._compared("eq", operator.eq, other)

    def ne(self, other: Node) -> Node:
        return self._compared("ne", operator.ne, other)

    def lt(self, other: Node) -> Node:
        return self._compared("lt", operator.lt, other)

    def le(self, other: Node) -> Node:
        return self._compared("le", operator.le, other)

    def gt(self, other: Node) -> Node:
        return other.lt(self)

    def ge(self, other: Node) -> Node:
        return other.le(self)

    def and_(self, other: Node) -> Node:
        return self.wrap_bool(bool(self.value and other.value))

    def or_(self, other: Node) -> Node:
        return self.wrap_bool(bool(self.value or other.value))

    def sym_not(self) -> Node:
        return self.wrap_bool(not self.value)

    sym_and, sym_or = and_, or_

    # Layout queries of tensors with symbolic sizes.

    def is_contiguous(self, sizes: Sequence[Node], strides: Sequence[Node]) -> Node:
        return self._query("is_contiguous", sizes, strides)

    def is_channels_last_contiguous_2d(self, sizes: Sequence[Node], strides: Sequence[Node]) -> Node:
        return self._query("is_channels_last", sizes, strides)

    is_channels_last_contiguous_3d = is_channels_last_contiguous_2d

    def is_channels_last_strides_2d(self, sizes: Sequence[Node], strides: Sequence[Node]) -> Node:
        return self._query("has_channels_last_strides", sizes, strides)

    is_channels_last_strides_3d = is_channels_last_strides_2d

    def is_non_overlapping_and_dense(self, sizes: Sequence[Node], strides: Sequence[Node]) -> Node:
        return self._query("is_dense", sizes, strides)

    def _query(self, question: Text, *numbers: Sequence[Node]) -> Node:
        """The answer is a constant, as its computation leaves guards."""
        return self.wrap_bool(getattr(layouts, question)(*([shell(one) for one in each] for each in numbers)))


class Symbol(torch.SymInt):
    """A SymInt whose arithmetic calls the node directly. PyTorch's makes several calls."""


def _at_once(name: Text, method: Text, reflected: bool = False) -> Callable[[Any, Any], Any]:
    inherited = getattr(torch.SymInt, name)

    def operation(self: Any, other: Any) -> Any:
        node = self.node
        if type(other) is int:
            given = Node(node.tape, other)
        elif isinstance(other, torch.SymInt):
            given = other.node
        else:
            return inherited(self, other)
        return shell(getattr(given, method)(node) if reflected else getattr(node, method)(given))

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Symbol, f"__{_name}__", _at_once(f"__{_name}__", _name))
    setattr(Symbol, f"__r{_name}__", _at_once(f"__r{_name}__", _name, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Symbol, f"__{_name}__", _at_once(f"__{_name}__", _name))
Symbol.__hash__ = torch.SymInt.__hash__  # type: ignore[method-assign]


def shell(node: Node) -> Any:
    """Wraps a node for Python: a plain number for a constant, else a Symbol, SymFloat or SymBool."""
    if node.slot is None:
        return node.value
    return Symbol(node) if node.is_int() else torch.SymFloat(node) if node.is_float() else torch.SymBool(node)


def as_symbol(number: Any) -> Any:
    """Converts a plain SymInt to a Symbol, whose arithmetic is faster."""
    return shell(number.node) if type(number) is torch.SymInt else number


def guarded(number: Any) -> Any:
    """The symbol's value in this call, which becomes a guard."""
    return number.node.tape.guard(number.node)


def quantity(number: Any) -> Any:
    """Converts a number for `_C.PlanBuilder`: a plain number, or (value, slot)."""
    if not isinstance(number, SYMBOLS):
        return number
    node = number.node
    return node.value if node.slot is None else (node.value, node.slot)
