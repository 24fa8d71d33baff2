"""Scalar formulas as graphs: a Python function is called with traced values, which record its operations.

An `Expression` is an argument, a constant or an operation on other expressions, and has a dtype. `trace` calls a
formula with one `Expression` for each argument and numbers the expressions of its results. Equal subexpressions get one
number, so each is computed once.

Types are not promoted. Operands of an operation must have the same dtype, and a Python number takes the dtype of the
other operand. The caller that builds a kernel chooses the dtype to compute in, as PyTorch does.

Complex numbers are decomposed: an operation on them becomes operations on their real and imaginary parts
(complex_operations.py). Later stages see only the operations "real", "imaginary" and "complex".
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.dtypes import STORAGE_ONLY, facts, integer_range, part_dtype

Number = bool | int | float | complex

# Functions of modules that import this one. They register when `torch_backplane.kernels` imports them: "complex
# operation" (complex_operations.py) and "torch function" (torch_names.py).
registered: dict[str, Callable[..., Any]] = {}

_FLOAT = frozenset({"float"})
_INTEGER = frozenset({"signed", "unsigned"})
_NUMBER = _FLOAT | _INTEGER
_BITS = _INTEGER | {"bool"}
_ANY = _NUMBER | {"bool"}


class Operation(NamedTuple):
    """The number of operands, their accepted categories, and whether the result is bool or has the operands' dtype."""

    arity: int
    accepts: frozenset[str]
    gives_bool: bool = False


_FLOAT_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc lgamma floor ceil trunc round"
)
_FLOAT_BINARY = "divide power atan2 copysign hypot nextafter fmin fmax"
_COMPARISONS = "equal not_equal less less_equal greater greater_equal"

OPERATIONS: dict[str, Operation] = {
    **{name: Operation(1, _FLOAT) for name in _FLOAT_UNARY.split()},
    **{name: Operation(2, _FLOAT) for name in _FLOAT_BINARY.split()},
    **{name: Operation(2, _ANY, gives_bool=True) for name in _COMPARISONS.split()},
    **{name: Operation(1, _FLOAT, gives_bool=True) for name in ("isnan", "isinf", "isfinite", "signbit")},
    **{name: Operation(2, _BITS) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    **{name: Operation(2, _INTEGER) for name in ("shift_left", "shift_right", "floor_divide", "trunc_divide")},
    "remainder": Operation(2, _INTEGER),  # Python's %: the sign of the divisor
    "fmod": Operation(2, _NUMBER),  # C's %: the sign of the dividend
    "fma": Operation(3, _FLOAT),
    "bitwise_not": Operation(1, _BITS),
    "negative": Operation(1, _NUMBER),
    "absolute": Operation(1, _NUMBER),
    "add": Operation(2, _ANY),  # of bools: or
    "subtract": Operation(2, _NUMBER),
    "multiply": Operation(2, _ANY),  # of bools: and
    "minimum": Operation(2, _ANY),
    "maximum": Operation(2, _ANY),
}


@dataclass(frozen=True, eq=False)
class Expression:
    """A value of a formula. Supports Python's operators and `torch_backplane.kernels.functions`."""

    # A key of OPERATIONS, or "argument", "constant", "index", "where", "cast", "bits", "loop" or "loop_result"; or
    # "real", "imaginary" or "complex", which decompose and compose complex numbers.
    operation: str
    dtype: torch.dtype
    operands: tuple[Expression, ...] = ()
    # A constant's number, a loop's `Loop`, the position of an argument or of a loop's result, or an index's dimension.
    value: Number | Loop | None = None

    def to(self, dtype: torch.dtype) -> Expression:
        """Converts to `dtype`: float to integer truncates, integers wrap, and the conversion to bool is `!= 0`.

        The conversion from complex to real takes the real part.
        """
        category, _ = _check_computable(dtype)
        if dtype == self.dtype:
            return self
        if category == "complex":
            part = part_dtype(dtype)
            return join(self.real.to(part), self.imag.to(part) if self.is_complex else constant(0, part))
        if not self.is_complex:
            return Expression("cast", dtype, (self,))
        return (self != 0) if category == "bool" else self.real.to(dtype)

    def view(self, dtype: torch.dtype) -> Expression:
        """Reinterprets the bits as a dtype of the same width, 32 or 64 bits. Raises TypeError for other widths."""
        if facts(dtype).bits != facts(self.dtype).bits or facts(dtype).bits < 32:
            raise TypeError(f"cannot view {self.dtype} as {dtype}: both must have 32 bits, or both 64 bits")
        return self if dtype == self.dtype else Expression("bits", dtype, (self,))

    @property
    def is_complex(self) -> bool:
        return facts(self.dtype).category == "complex"

    @property
    def real(self) -> Expression:
        """The real part, in the dtype of the parts; a real number itself."""
        if not self.is_complex:
            return self
        return self.operands[0] if self.operation == "complex" else self._part("real")

    @property
    def imag(self) -> Expression:
        """The imaginary part, in the dtype of the parts; zero for a real number."""
        if not self.is_complex:
            return constant(False if self.dtype == torch.bool else 0, self.dtype)
        return self.operands[1] if self.operation == "complex" else self._part("imaginary")

    def _part(self, name: str) -> Expression:
        return Expression(name, part_dtype(self.dtype), (self,))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), named: Any = None
    ) -> Any:
        """Handles calls of PyTorch's functions on traced values."""
        return registered["torch function"](function, arguments, named or {})

    def __bool__(self) -> bool:
        raise TypeError("the value of a traced expression is not known yet; use functions.where(condition, a, b)")

    def __add__(self, other: Operand) -> Expression:
        return apply("add", self, other)

    def __radd__(self, other: Operand) -> Expression:
        return apply("add", other, self)

    def __sub__(self, other: Operand) -> Expression:
        return apply("subtract", self, other)

    def __rsub__(self, other: Operand) -> Expression:
        return apply("subtract", other, self)

    def __mul__(self, other: Operand) -> Expression:
        return apply("multiply", self, other)

    def __rmul__(self, other: Operand) -> Expression:
        return apply("multiply", other, self)

    def __truediv__(self, other: Operand) -> Expression:
        return apply("divide", self, other)

    def __rtruediv__(self, other: Operand) -> Expression:
        return apply("divide", other, self)

    def __pow__(self, other: Operand) -> Expression:
        return apply("power", self, other)

    def __rpow__(self, other: Operand) -> Expression:
        return apply("power", other, self)

    def __and__(self, other: Operand) -> Expression:
        return apply("bitwise_and", self, other)

    def __rand__(self, other: Operand) -> Expression:
        return apply("bitwise_and", other, self)

    def __or__(self, other: Operand) -> Expression:
        return apply("bitwise_or", self, other)

    def __ror__(self, other: Operand) -> Expression:
        return apply("bitwise_or", other, self)

    def __xor__(self, other: Operand) -> Expression:
        return apply("bitwise_xor", self, other)

    def __rxor__(self, other: Operand) -> Expression:
        return apply("bitwise_xor", other, self)

    def __lshift__(self, other: Operand) -> Expression:
        return apply("shift_left", self, other)

    def __rlshift__(self, other: Operand) -> Expression:
        return apply("shift_left", other, self)

    def __rshift__(self, other: Operand) -> Expression:
        return apply("shift_right", self, other)

    def __rrshift__(self, other: Operand) -> Expression:
        return apply("shift_right", other, self)

    def __invert__(self) -> Expression:
        return apply("bitwise_not", self)

    def __neg__(self) -> Expression:
        return apply("negative", self)

    def __abs__(self) -> Expression:
        return apply("absolute", self)

    def __eq__(self, other: object) -> Expression:  # type: ignore[override]
        return apply("equal", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Expression:  # type: ignore[override]
        return apply("not_equal", self, other)  # type: ignore[arg-type]

    def __lt__(self, other: Operand) -> Expression:
        return apply("less", self, other)

    def __le__(self, other: Operand) -> Expression:
        return apply("less_equal", self, other)

    def __gt__(self, other: Operand) -> Expression:
        return apply("greater", self, other)

    def __ge__(self, other: Operand) -> Expression:
        return apply("greater_equal", self, other)

    __hash__ = object.__hash__


Operand = Expression | bool | int | float | complex


def constant(value: Number, dtype: torch.dtype) -> Expression:
    """Returns `value` as a constant of `dtype`; rounds it if the dtype is float32.

    Raises:
        TypeError: a float for an integer dtype, a complex number for a real dtype, or a number for bool.
        OverflowError: an integer outside of the dtype's range.
    """
    category, bits = _check_computable(dtype)
    if not isinstance(value, (bool, int, float, complex)):
        raise TypeError(f"a constant must be a Python number, got {type(value).__name__}")
    if category == "complex":
        part = part_dtype(dtype)
        return join(constant(value.real, part), constant(value.imag, part))
    if isinstance(value, complex):
        raise TypeError(f"{value!r} cannot be a constant of {dtype}; convert the other operand with .to(dtype) first")
    if category == "float":
        return Expression("constant", dtype, value=_to_float32(float(value)) if bits == 32 else float(value))
    if isinstance(value, float) or (category == "bool" and not isinstance(value, bool)):
        raise TypeError(f"{value!r} cannot be a constant of {dtype}; convert the other operand with .to(dtype) first")
    if category == "bool":
        return Expression("constant", dtype, value=value)
    least, greatest = integer_range(dtype)
    if not least <= value <= greatest:
        raise OverflowError(f"{value} is out of range for {dtype}, which is {least} to {greatest}")
    return Expression("constant", dtype, value=int(value))


def join(real: Expression, imaginary: Expression) -> Expression:
    """The complex number with these parts, both float32 or both float64."""
    whole = {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(real.dtype)
    if whole is None or imaginary.dtype != real.dtype:
        raise TypeError(
            f"the parts of a complex number must both be float32 or float64, got {real.dtype}, {imaginary.dtype}"
        )
    return Expression("complex", whole, (real, imaginary))


def apply(name: str, *operands: Operand) -> Expression:
    """The result of operation `name` of OPERATIONS. Raises TypeError if it does not accept these operands."""
    operation = OPERATIONS[name]
    if len(operands) != operation.arity:
        raise TypeError(f"{name} takes {operation.arity} operands, got {len(operands)}")
    values = same_dtype(name, operands)
    dtype = values[0].dtype
    if values[0].is_complex:
        return registered["complex operation"](name, values)
    if facts(dtype).category not in operation.accepts:
        raise TypeError(f"{name} takes {', '.join(sorted(operation.accepts))} operands, got {dtype}")
    return Expression(name, torch.bool if operation.gives_bool else dtype, values)


def same_dtype(name: str, operands: Iterable[Operand]) -> tuple[Expression, ...]:
    """Converts Python numbers among `operands` to constants of the others' dtype.

    Raises:
        TypeError: the traced values have different dtypes, or there are none.
    """
    operands = tuple(operands)
    for operand in operands:
        if not isinstance(operand, (Expression, bool, int, float, complex)):
            raise TypeError(f"{name} takes traced values and Python numbers, got {type(operand).__name__}")
    dtypes = list(dict.fromkeys(operand.dtype for operand in operands if isinstance(operand, Expression)))
    if not dtypes:
        raise TypeError(f"{name} needs at least one traced value; use Python's math for plain numbers")
    if len(dtypes) > 1:
        raise TypeError(f"{name} got operands of {' and '.join(map(str, dtypes))}; convert one with .to(dtype)")
    return tuple(operand if isinstance(operand, Expression) else constant(operand, dtypes[0]) for operand in operands)


def _check_computable(dtype: torch.dtype) -> tuple[str, int]:
    if dtype in STORAGE_ONLY:
        raise TypeError(f"formulas do not compute in {dtype}: compute in float32, and let the kernel load and store it")
    return facts(dtype)


def _to_float32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:  # finite, but out of range for float32
        return float("inf") if value > 0 else float("-inf")


class Instruction(NamedTuple):
    """An operation whose operands are the numbers of earlier instructions."""

    operation: str
    dtype: torch.dtype
    operands: tuple[int, ...]
    value: Number | Loop | None


@dataclass(frozen=True)
class Program:
    """A traced formula: instructions in executable order, and the numbers of those that are the results."""

    arguments: tuple[torch.dtype, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]

    @property
    def result_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(self.instructions[number].dtype for number in self.results)

    @functools.cached_property
    def indices(self) -> tuple[int | None, ...]:
        """The dimensions along which it uses the element's position; None for the element's linear index."""
        return tuple(one.value for one in self.instructions if one.operation == "index")  # type: ignore[misc]

    @property
    def has_loops(self) -> bool:
        return any(one.operation == "loop" for one in self.instructions)


@dataclass(frozen=True, eq=False)
class Loop:
    """Repeats `body` on a state of one or more numbers while `condition`, which returns one bool, holds for it."""

    condition: Program
    body: Program


Formula = Callable[..., "Operand | Sequence[Operand]"]


def trace(formula: Formula, arguments: Sequence[torch.dtype], numbers_as: torch.dtype | None = None) -> Program:
    """Records what `formula` computes from scalars of the dtypes `arguments`.

    Args:
        formula: returns one value or a sequence of values.
        numbers_as: dtype of results that are plain numbers. Without it, a plain number raises TypeError.
    """
    for dtype in arguments:
        _check_computable(dtype)
    returned = formula(*(Expression("argument", dtype, value=position) for position, dtype in enumerate(arguments)))
    results = []
    for result in returned if isinstance(returned, (tuple, list)) else (returned,):
        if isinstance(result, (bool, int, float, complex)) and numbers_as is not None:
            result = constant(result, numbers_as)
        if not isinstance(result, Expression):
            raise TypeError(f"a formula returns traced values, and this one returned {type(result).__name__}")
        results.append(result)
    if not results:
        raise TypeError("a formula returns at least one value, and this one returned none")
    return _number(tuple(arguments), results)


def _number(arguments: tuple[torch.dtype, ...], results: list[Expression]) -> Program:
    """Value numbering: operands before users, equal instructions once. Iterative because formulas can be deep."""
    numbers: dict[int, int] = {}  # id of an expression (all live through `results`) -> number
    known: dict[tuple[object, ...], int] = {}
    instructions: list[Instruction] = []
    stack = list(reversed(results))
    while stack:
        expression = stack[-1]
        waiting = [operand for operand in reversed(expression.operands) if id(operand) not in numbers]
        if waiting and id(expression) not in numbers:
            stack.extend(waiting)
            continue
        stack.pop()
        if id(expression) in numbers:
            continue
        operands = tuple(numbers[id(operand)] for operand in expression.operands)
        value = expression.value
        # As text, because 0.0 == -0.0 and nan != nan.
        exact = value.hex() if isinstance(value, float) else value
        key = (expression.operation, expression.dtype, operands, exact)
        if key not in known:
            known[key] = len(instructions)
            instructions.append(Instruction(expression.operation, expression.dtype, operands, value))
        numbers[id(expression)] = known[key]
    return Program(arguments, tuple(instructions), tuple(numbers[id(result)] for result in results))
