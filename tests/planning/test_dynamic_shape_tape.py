"""Tapes compute what Python computes, or do not hold.

Tests each operation, and expressions of symbols that are evaluated at sizes other than the traced ones.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_backplane import _C
from torch_backplane.planning.strides import number_now
from torch_backplane.planning.symbols import Symbol, Tape, quantity

LEAST, MOST = -(2**63), 2**63 - 1
EXTREMES = (
    LEAST, LEAST + 1, -(2**53) - 1, -(2**53), -(2**31), -7, -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**53, 2**53 + 1,
    MOST - 1, MOST,
)  # fmt: skip

words = st.integers(LEAST, MOST) | st.sampled_from(EXTREMES) | st.integers(-9, 9)
doubles = st.floats() | st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, 1.7e308, math.inf, -math.inf, math.nan])

INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "min": min, "max": max, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
}  # fmt: skip
FLOATS: dict[str, Callable[[float, float], float]] = {
    "float_add": operator.add, "float_sub": operator.sub, "float_mul": operator.mul, "float_truediv": operator.truediv,
}  # fmt: skip


def bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def computed(operation: str, a: int, b: int) -> int | None:
    """Returns what a tape computes from its two sizes, or None if it does not hold."""
    slots = _C.run_tape([("size", 0, 0, 0), ("size", 1, 0, 0), (operation, 0, 1, 0)], [a, b])
    return None if slots is None else slots[2]


@pytest.mark.parametrize("operation", sorted(INTEGERS))
@settings(max_examples=60, deadline=None)
@given(a=words, b=words)
@example(a=LEAST, b=-1)
@example(a=7, b=-2)
@example(a=-7, b=2)
@example(a=-6, b=3)
@example(a=5, b=0)
def test_integer_operations_match_python_or_do_not_hold(operation: str, a: int, b: int) -> None:
    try:
        expected = int(INTEGERS[operation](a, b))
    except ZeroDivisionError:
        expected = None
    if expected is not None and not LEAST <= expected <= MOST:
        expected = None
    if operation == "mod" and (a, b) == (LEAST, -1):  # the result is 0, but the quotient overflows
        expected = None
    assert computed(operation, a, b) == expected


@pytest.mark.parametrize("operation", sorted(FLOATS))
@settings(max_examples=60, deadline=None)
@given(a=doubles, b=doubles)
def test_float_operations_match_python_bit_for_bit(operation: str, a: float, b: float) -> None:
    found = computed(operation, bits(a), bits(b))
    try:
        expected = FLOATS[operation](a, b)
    except ZeroDivisionError:
        assert found is None
        return
    assert found is not None
    assert math.isnan(number(found)) if math.isnan(expected) else found == bits(expected)


@settings(max_examples=100, deadline=None)
@given(a=words, b=words)
def test_division_and_conversion_match_python_or_do_not_hold(a: int, b: int) -> None:
    assert computed("to_float", a, b) == bits(float(a))
    found = computed("truediv", a, b)
    if b != 0 and max(abs(a), abs(b)) <= 2**53:
        assert found == bits(a / b)
    else:
        assert found is None


@settings(max_examples=100, deadline=None)
@given(value=words, wanted=words)
def test_a_guard_holds_for_one_number(value: int, wanted: int) -> None:
    for constant in (value, wanted):
        slots = _C.run_tape([("size", 0, 0, 0), ("guard", 0, 0, constant), ("constant", 0, 0, wanted)], [value])
        assert slots == ([value, value, wanted] if value == constant else None)


def test_invalid_instructions_raise() -> None:
    with pytest.raises(ValueError, match="unknown tape operation power"):
        _C.run_tape([("power", 0, 0, 0)], [])
    with pytest.raises(ValueError, match="has no slots 0 and 5"):
        _C.run_tape([("constant", 0, 0, 1), ("add", 0, 5, 0)], [])
    with pytest.raises(ValueError, match="has no slots"):
        _C.run_tape([("add", 0, 0, 0)], [])  # nor its own slot
    with pytest.raises(IndexError, match="there are 1 sizes, but got index 1"):
        _C.run_tape([("size", 1, 0, 0)], [4])


# --- symbols


class Instructions(list[tuple[str, int, int, int]]):
    """The part of `_C.PlanBuilder` that tapes use."""

    def instruction(self, operation: str, a: int, b: int, constant: int) -> int:
        self.append((operation, a, b, constant))
        return len(self) - 1


def at_other_sizes(function: Callable[..., Any], made_of: list[int], others: list[int]) -> tuple[Any, Any, Any]:
    """Calls `function`, which returns a list of numbers or raises, with symbols.

    Returns:
        (its results at `made_of`; results of its tape at `others`, None if it does not hold; its results at `others`).
    """
    instructions = Instructions()
    tape = Tape(instructions)
    found = function(*(tape.size(index, value) for index, value in enumerate(made_of)))
    found = [bool(one) if isinstance(one, torch.SymBool) else one for one in found]
    now = [number_now(one) for one in found]
    slots = _C.run_tape(list(instructions), others)
    if slots is None:
        return now, None, None

    def then(one: Any) -> Any:
        known = quantity(one)
        if not isinstance(known, tuple):
            return known
        return number(slots[known[1]]) if isinstance(known[0], float) else slots[known[1]]

    return now, [then(one) for one in found], function(*others)


def test_negated_zero_is_negative() -> None:
    def negated(size: Any) -> list[Any]:
        return [math.copysign(1.0, number_now(one)) for one in (-torch.sym_float(size), -(torch.sym_float(size) * 0.5))]

    assert at_other_sizes(negated, [0], [0])[0] == negated(0) == [-1.0, -1.0]
    now, then, expected = at_other_sizes(lambda size: [-torch.sym_float(size)], [3], [0])
    assert now == [-3.0]
    assert [math.copysign(1.0, one) for one in then] == [math.copysign(1.0, one) for one in expected] == [-1.0]


BINARY = ("+", "-", "*", "//", "%", "/", "<", "<=", "==", "!=", ">", ">=", "min", "max", "divmod")


def evaluated(expression: Any, values: tuple[Any, ...]) -> Any:
    """Evaluates a tree of operations on values. An "if" reads a value, which records a guard."""
    if isinstance(expression, int):
        return expression
    kind, *parts = expression
    if kind == "size":
        return values[parts[0]]
    if kind == "if":
        return evaluated(parts[1] if evaluated(parts[0], values) else parts[2], values)
    one, other = (evaluated(part, values) for part in parts)
    if kind == "min":
        return min(one, other)
    if kind == "max":
        return torch.sym_max(one, other)
    if kind == "divmod":
        return one // other + one % other
    symbol = {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod", "/": "truediv", "<": "lt", "<=": "le",
              "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}[kind]  # fmt: skip
    found = getattr(operator, symbol)(one, other)
    return (1 if found else 0) if isinstance(found, (bool, torch.SymBool)) else found


trees = st.recursive(
    st.tuples(st.just("size"), st.integers(0, 2)) | st.integers(-3, 9) | st.sampled_from([2**31, 2**62]),
    lambda inner: (
        st.tuples(st.sampled_from([kind for kind in BINARY if kind != "/"]), inner, inner)
        | st.tuples(st.just("if"), inner, inner, inner)
    ),
    max_leaves=12,
)
sizes = st.lists(st.integers(-4, 9) | st.sampled_from([0, 1, 2**31, 2**62, MOST]), min_size=3, max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    tree=st.tuples(st.just("/"), trees, trees) | trees, made_of=sizes, others=st.lists(sizes, min_size=1, max_size=4)
)
def test_symbolic_expressions_match_or_do_not_hold(tree: Any, made_of: list[int], others: list[list[int]]) -> None:
    def function(*values: Any) -> list[Any]:
        return [evaluated(tree, values)]

    try:
        expected = function(*made_of)
    except (ZeroDivisionError, OverflowError):
        return
    for other in [made_of, *others]:
        try:
            now, then, there = at_other_sizes(function, made_of, other)
        except (OverflowError, TypeError):  # constants that do not fit 64 bits: there is no plan
            continue
        assert now == expected
        assert then is None or then == there


@settings(max_examples=60, deadline=None)
@given(made_of=sizes, others=sizes)
def test_uses_of_a_symbols_value_record_a_guard(made_of: list[int], others: list[int]) -> None:
    ways: list[Callable[[Any], Any]] = [
        int, bool, str, repr, list(range(-4, 10)).index, lambda n: f"{n}", lambda n: operator.index(n),
        lambda n: [*range(min(n, 12))], lambda n: "x" * min(n, 12), lambda n: n.bit_length(), lambda n: float(n / 1),
        lambda n: n and 1, lambda n: not n, lambda n: n in (1, 3), lambda n: [1, 2, 3].count(n), lambda n: [n] == [3],
        lambda n: (n, 2) < (3, 1), lambda n: sorted([n, 3, 1])[0] == n, lambda n: hash(n / 1), lambda n: math.gcd(n, 6),
    ]  # fmt: skip
    for way in ways:

        def function(*values: Any, way: Callable[[Any], Any] = way) -> list[Any]:
            return [way(values[0])]

        try:
            expected = function(*made_of)
        except (ValueError, OverflowError, MemoryError):
            continue
        now, then, there = at_other_sizes(function, made_of, others)
        assert now == expected
        assert then is None or then == there


@pytest.mark.parametrize(
    "way", [hash, lambda n: {n: 1}, lambda n: n**2, lambda n: n << 1, lambda n: n & 3, lambda n: math.ceil(n / 2)]
)
def test_unsupported_operations_raise(way: Callable[[Any], Any]) -> None:
    """Such calls keep exact plans; symbols must not compute something else."""
    with pytest.raises((TypeError, AttributeError)):
        at_other_sizes(lambda n: [way(n)], [5], [6])


SHORT_CUTS = (
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.eq, operator.ne, operator.lt,
    operator.le, operator.gt, operator.ge,
)  # fmt: skip


@pytest.mark.parametrize("function", SHORT_CUTS, ids=lambda function: function.__name__)
def test_symbols_compute_like_pytorchs(function: Callable[[Any, Any], Any]) -> None:
    """With integers, floats and symbols of both classes, on either side: equal values and equal instructions."""
    found = []
    for kind in (Symbol, torch.SymInt):
        instructions = Instructions()
        tape = Tape(instructions)
        one, other = (kind(tape.size(i, value).node) for i, value in enumerate((7, 3)))
        values: list[Any] = []
        for operand in (other, torch.SymInt(other.node), 2, -5, True, 2.5):
            for a, b in ((one, operand), (operand, one)):
                try:
                    result = function(a, b)
                    values.append((number_now(result), isinstance(result, torch.SymInt)))
                except (AssertionError, AttributeError) as error:  # floats, which are not supported
                    values.append(str(error))
        found.append((values, list(instructions)))
    assert found[0] == found[1]


def test_symbols_are_unhashable() -> None:
    """A lookup by symbol would depend on the value of this call."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(Tape(Instructions()).size(0, 7))
