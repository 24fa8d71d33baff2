"""The spelling of every operation, type and kernel part: what the dialects have in common.

A method named like an operation of `expression.OPERATIONS` gives its text; operands are names of variables, so that a
text may use one twice. Functions that only have another name, and infix operators, are rows of tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from torch_backplane.kernels.dialects.halves import BFLOAT16, FLOAT16
from torch_backplane.kernels.dtypes import STORAGE_ONLY, facts, integer_range, part_dtype, stored_dtype
from torch_backplane.kernels.expression import Number
from torch_backplane.kernels.kernel import Parameter
from torch_backplane.kernels.target import Target

UNSIGNED = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32, 64: torch.uint64}

INFIX = {
    "divide": "/",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}

# Operations that are a function of C's mathematics library of the same name, and those of another name.
_SAME_NAME = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc lgamma floor ceil trunc atan2 copysign hypot nextafter fmin fmax fma"
)
LIBRARY = {**{name: name for name in _SAME_NAME.split()}, "round": "rint", "power": "pow"}


# The words of hand-written kernels: of memory that all share, or a group; a work item's number in its group, and the
# group's; a statement that every item of a group gets to, and sees then what the others wrote to local memory; a swap
# of 32 bits in device memory if they are as expected, which gives what was there; the upper half of a product of uint;
# the `value`, a real number, of the item `offset` further on in the subgroup, where there is one: every item of the
# subgroup gets to it (`Dialect.subgroup_size`).
WORDS = (
    *("GLOBAL", "LOCAL", "ITEM", "GROUP", "BARRIER", "atomic_swap(at, expected, desired)", "multiply_high(a, b)"),
    "subgroup_shuffle_down(value, offset)",
)


@dataclass(frozen=True)
class Value:
    """A variable in the text: its name and dtype. Formats as its name."""

    name: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name

    @property
    def category(self) -> str:
        return facts(self.dtype).category


# A line of the text of kernels that are bounded, see `Dialect.kernel`; opencl_launcher.cpp looks for it.
BOUNDED = "// bounded"


class MissingOperation(NotImplementedError):
    """A dialect does not have what a kernel needs. Raised when that kernel is written, not before."""


class Dialect(ABC):
    """How text is spelled for one compiler, of a language like C: with `?:`, pointers, and the functions of `math.h`,
    under one name for all dtypes unless `library` says otherwise.

    Drivers may bring their own (docs/write-a-driver.md). What a dialect has no spelling for, it leaves out: a kernel
    that needs it is a MissingOperation.

    Args:
        target: what the device is that text is for, `Target()` by default. Without float64, a kernel that needs it is a
            TypeError.
    """

    name: ClassVar[str]
    types: ClassVar[Mapping[torch.dtype, str]]  # of values in registers
    words: ClassVar[Mapping[str, str]] = {}  # what WORDS are here, as macros
    missing: ClassVar[frozenset[str]] = frozenset()  # operations, and functions of the library, that there are not
    # Whether a compiler may make one rounding of the two of a * b + c. Off, as on PyTorch's CPU; formulas that want one
    # rounding say fma.
    contraction: ClassVar[bool] = False
    vectors: ClassVar[bool] = False  # whether there are OpenCL C's vectors of 2 to 16 numbers, for hand-written kernels
    buffer_bytes: ClassVar[int] = 8  # of the arguments that bring a tensor's memory

    def __init__(self, target: Target | None = None) -> None:
        self.target = Target() if target is None else target

    @property
    def compile_options(self) -> tuple[str, ...]:
        """What the compiler of this dialect is given besides the text."""
        return ()

    @property
    def tile_memory(self) -> int:
        """`Target.tile_memory`, where the dialect can spell tiles."""
        needed = ("LOCAL", "ITEM", "GROUP", "BARRIER") if self.target.simt else ("GROUP",)
        return self.target.tile_memory if all(word in self.words for word in needed) else 0

    @property
    def subgroup_size(self) -> int:
        """Work items that exchange values by `subgroup_shuffle_down`, a power of two; 1 where the target or the dialect
        does not have it, and kernels go through local memory.
        """
        has = self.target.subgroup_shuffles and "subgroup_shuffle_down(value, offset)" in self.words
        return self.target.subgroup_size if has else 1

    def argument_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Of the arguments for all `parameters` together."""
        return sum(self.buffer_bytes if one.role in ("output", "input") else one.dtype.itemsize for one in parameters)

    def lacks(self, what: str) -> NoReturn:
        """Refuses a kernel that needs what this dialect has not."""
        raise MissingOperation(f"the dialect {self.name} has no {what}")

    # Types and constants

    def type(self, dtype: torch.dtype) -> str:
        """The type of a value in a register."""
        if part_dtype(dtype) == torch.float64 and not self.target.float64:
            raise TypeError(f"this device has no {dtype}".replace("torch.", ""))
        if dtype not in self.types:
            self.lacks(f"type for {dtype}".replace("torch.", ""))
        return self.types[dtype]

    def storage_type(self, dtype: torch.dtype) -> str:
        """The type in memory."""
        return self.type(stored_dtype(dtype))

    def index_type(self, wide: bool) -> str:
        """The type of indices: unsigned, of 64 bits if wide, else 32."""
        return self.type(torch.uint64 if wide else torch.uint32)

    def constant(self, value: Number, dtype: torch.dtype) -> str:
        """`value` exactly, in parentheses where it has a sign."""
        category, bits = facts(dtype)
        if category == "bool":
            return "true" if value else "false"
        if category == "complex":
            real, imaginary = (self.constant(part, part_dtype(dtype)) for part in (value.real, value.imag))
            return self.complex(real, imaginary, dtype)
        assert not isinstance(value, complex)
        if category == "float":
            return self.float_constant(float(value), bits)
        value = int(value)
        if value == integer_range(torch.int64)[0] and category == "signed":  # -9223372036854775808 is two tokens
            return f"({self.constant(value + 1, dtype)} - 1)"
        text = f"{value}{self.integer_suffix(category, bits)}"
        return f"({text})" if value < 0 else text

    def float_constant(self, value: float, bits: int) -> str:
        if value != value:
            return self.not_a_number(bits)
        if value in (float("inf"), float("-inf")):
            return self.infinity(bits) if value > 0 else f"(-{self.infinity(bits)})"
        text = value.hex() + ("f" if bits == 32 else "")
        return f"({text})" if text.startswith("-") else text

    def integer_suffix(self, category: str, bits: int) -> str:
        return ("u" if category == "unsigned" else "") + ("ll" if bits == 64 else "")

    def not_a_number(self, bits: int) -> str:
        return "NAN" if bits == 32 else "((double)NAN)"  # the macros are floats

    def infinity(self, bits: int) -> str:
        return "INFINITY" if bits == 32 else "((double)INFINITY)"

    def library(self, name: str, dtype: torch.dtype) -> str:
        """The name of a function of C's mathematics library for `dtype`."""
        return name

    # Conversions

    def cast(self, value: Value, dtype: torch.dtype) -> str:
        """`value` as `dtype`: to bool `!= 0`, float to integer as on PyTorch's CPU through int32 or int64, else C's.

        Of a complex number, the real part becomes a real number.
        """
        if dtype == value.dtype:
            return value.name
        if "complex" in (value.category, facts(dtype).category):
            return self._cast_complex(value, dtype)
        category, bits = facts(dtype)
        if category == "bool":
            return f"{value} != 0"
        target = self.type(dtype)
        if value.category != "float" or category == "float":
            return f"({target}){value}"
        if bits == 64 and category == "unsigned":
            return f"{value} < 0 ? ({target})({self.type(torch.int64)}){value} : ({target}){value}"
        through = torch.int64 if bits == 64 or dtype == torch.uint32 else torch.int32
        return f"({target})({self.type(through)}){value}"

    def _cast_complex(self, value: Value, dtype: torch.dtype) -> str:
        part = part_dtype(dtype)
        parts = [value, Value("0", part)]
        if value.category == "complex":
            parts = [Value(one, part_dtype(value.dtype)) for one in (self.real(value), self.imaginary(value))]
        if dtype == torch.bool:
            return " || ".join(f"{one} != 0" for one in parts)
        if part == dtype:
            return self.cast(parts[0], dtype)
        real, imaginary = (self.cast(one, part) for one in parts)
        return self.complex(real, imaginary, dtype)

    def real(self, value: Value) -> str:
        return f"{value}.x"

    def imaginary(self, value: Value) -> str:
        return f"{value}.y"

    def complex(self, real: Value | str, imaginary: Value | str, dtype: torch.dtype) -> str:
        """The complex number of these parts."""
        self.lacks(f"{dtype} of two numbers".replace("torch.", ""))

    def bits(self, value: Value, dtype: torch.dtype) -> str:
        """The bits of `value` as `dtype`, which is as wide."""
        if value.category != "float" and facts(dtype).category != "float":
            return f"({self.type(dtype)}){value}"
        return self.float_bits(value, dtype)

    def float_bits(self, value: Value, dtype: torch.dtype) -> str:
        """`bits` from or to a float."""
        self.lacks(f"bits of {value.dtype} as {dtype}".replace("torch.", ""))

    def decode(self, stored: str, dtype: torch.dtype, position: int = 0) -> str:
        """What was read from memory as a value of value_dtype(dtype); `position` is that of an operand among others."""
        if dtype == torch.bool:
            return f"{stored} != 0"
        return f"{_half_name(dtype)}_to_float({stored})" if dtype in STORAGE_ONLY else stored

    def encode(self, value: str, dtype: torch.dtype) -> str:
        """A value of value_dtype(dtype) as it is written to memory."""
        return f"float_to_{_half_name(dtype)}({value})" if dtype in STORAGE_ONLY else value

    # Operations

    def spell(self, operation: str, operands: Sequence[Value], dtype: torch.dtype) -> str:
        """The text of `operation`, whose result has `dtype`."""
        if operation in self.missing:
            self.lacks(operation)
        if operation == "cast":
            return self.cast(operands[0], dtype)
        if operation == "bits":
            return self.bits(operands[0], dtype)
        if operation == "complex":
            real, imaginary = operands
            return self.complex(real, imaginary, dtype)
        if operation in INFIX:
            return f"{operands[0]} {INFIX[operation]} {operands[1]}"
        if operation in LIBRARY:
            return f"{self.library(LIBRARY[operation], dtype)}({', '.join(map(str, operands))})"
        return getattr(self, operation)(*operands)

    def where(self, condition: Value, a: Value, b: Value) -> str:
        return f"{condition} ? {a} : {b}"

    def add(self, a: Value, b: Value) -> str:
        return self._wrapping("+", a, b)

    def subtract(self, a: Value, b: Value) -> str:
        return self._wrapping("-", a, b)

    def multiply(self, a: Value, b: Value) -> str:
        return self._wrapping("*", a, b)

    def negative(self, a: Value) -> str:
        return f"-{a}" if a.category == "float" else self._wrapping("-", Value("0", a.dtype), a)

    def absolute(self, a: Value) -> str:
        if a.category == "float":
            return f"{self.library('fabs', a.dtype)}({a})"
        return f"{a} < 0 ? {self.negative(a)} : {a}" if a.category == "signed" else a.name

    def minimum(self, a: Value, b: Value) -> str:
        return self._extremum("<", a, b)

    def maximum(self, a: Value, b: Value) -> str:
        return self._extremum(">", a, b)

    def isnan(self, a: Value) -> str:
        return f"{a} != {a}"

    def isinf(self, a: Value) -> str:
        return f"{self.absolute(a)} == {self.infinity(facts(a.dtype).bits)}"

    def isfinite(self, a: Value) -> str:
        return f"{self.absolute(a)} < {self.infinity(facts(a.dtype).bits)}"

    def signbit(self, a: Value) -> str:
        return f"signbit({a}) != 0"

    def bitwise_not(self, a: Value) -> str:
        return f"!{a}" if a.category == "bool" else f"~{a}"

    def shift_left(self, a: Value, b: Value) -> str:
        """Zero where b is negative or not less than the width, as PyTorch."""
        unsigned, bits = self._arithmetic_type(a.dtype), facts(a.dtype).bits
        return f"({unsigned}){b} >= {bits} ? 0 : ({self.type(a.dtype)})(({unsigned}){a} << {b})"

    def shift_right(self, a: Value, b: Value) -> str:
        """All sign bits where b is negative or not less than the width, as PyTorch."""
        unsigned, bits = self._arithmetic_type(a.dtype), facts(a.dtype).bits
        beyond = f"{a} >> {bits - 1}" if a.category == "signed" else "0"
        return f"({unsigned}){b} >= {bits} ? {beyond} : {a} >> {b}"

    def fmod(self, a: Value, b: Value) -> str:
        if a.category == "float":
            return f"{self.library('fmod', a.dtype)}({a}, {b})"
        return f"{self._traps(b)} ? 0 : {a} % {b}"

    def trunc_divide(self, a: Value, b: Value) -> str:
        return f"{b} == 0 ? 0 : " + self._by_minus_one(a, b) + f"{a} / {b}"

    def floor_divide(self, a: Value, b: Value) -> str:
        below = f" - ({a} % {b} != 0 && {self._unlike_signs(a, b)})" if a.category == "signed" else ""
        return f"{b} == 0 ? 0 : " + self._by_minus_one(a, b) + f"{a} / {b}{below}"

    def remainder(self, a: Value, b: Value) -> str:
        if a.category == "unsigned":
            return self.fmod(a, b)
        return f"{self._traps(b)} ? 0 : {a} % {b} + (({a} % {b} != 0 && {self._unlike_signs(a, b)}) ? {b} : 0)"

    def _unlike_signs(self, a: Value, b: Value) -> str:
        # Not by two comparisons: to Mesa's compiler no int32 that was made an int64 is below zero.
        return f"({a} ^ {b}) < 0"

    def _wrapping(self, sign: str, a: Value, b: Value) -> str:
        """Arithmetic of integers in an unsigned type, as C leaves the overflow of signed ones undefined."""
        if a.category in ("float", "bool"):  # a bool variable takes the result as != 0
            return f"{a} {sign} {b}"
        unsigned = self._arithmetic_type(a.dtype)
        return f"({self.type(a.dtype)})(({unsigned}){a} {sign} ({unsigned}){b})"

    def _arithmetic_type(self, dtype: torch.dtype) -> str:
        return self.type(UNSIGNED[max(32, facts(dtype).bits)])

    def _extremum(self, sign: str, a: Value, b: Value) -> str:
        # With NaN as b, a compares false and b is taken.
        return f"({a} != {a} || {a} {sign} {b}) ? {a} : {b}" if a.category == "float" else f"{a} {sign} {b} ? {a} : {b}"

    def _traps(self, divisor: Value) -> str:
        """Where a machine's division traps: by zero, and of the least integer by -1; the remainder of -1 is zero."""
        return f"({divisor} == 0 || {divisor} == -1)" if divisor.category == "signed" else f"{divisor} == 0"

    def _by_minus_one(self, a: Value, b: Value) -> str:
        return f"{b} == -1 ? {self.negative(a)} : " if b.category == "signed" else ""

    # Kernels

    @abstractmethod
    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        """What kernels that use these dtypes need before them; `text` is that of functions and formulas.

        That is `half_functions`, and before it what these and hand-written kernels use: FUNCTION (how a function
        begins), the types uint and ushort, as_uint and as_float (the bits of a float, and back), min and max.
        """

    def float16_functions(self) -> str:
        """float16_to_float and float_to_float16: by instructions where `Target.native_float16`, if the dialect has a
        spelling for them. The spelling here is for every language.
        """
        return FLOAT16

    def half_functions(self, dtypes: frozenset[torch.dtype]) -> str:
        texts = ((torch.float16, self.float16_functions()), (torch.bfloat16, BFLOAT16))
        return "\n".join(text for dtype, text in texts if dtype in dtypes)

    def kernel(
        self, name: str, parameters: Sequence[str], group_size: int | None, body: Sequence[str], bounded: bool = False
    ) -> str:
        """A whole kernel.

        Args:
            group_size: the exact number of work items of a group, if it is fixed.
            bounded: work items beyond the last do nothing, so that launchers may add groups.
        """
        start = f"{self.entry(name, parameters, group_size)} {{"
        return "\n".join([*([BOUNDED] if bounded else []), start, *body, "}\n"])

    @abstractmethod
    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        """What a kernel begins with, up to and with its parameters."""

    def pointer_type(self, dtype: torch.dtype, written: bool) -> str:
        """Of an address in device memory."""
        return f"{'' if written else 'const '}{self.storage_type(dtype)}*"

    def buffer_parameters(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        """The kernel parameters that bring a tensor's memory, of `buffer_bytes` together."""
        return [f"{self.pointer_type(dtype, written)} {name}"]

    def buffer_pointer(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        """Statements that make the pointer `name` of these parameters."""
        return []

    @abstractmethod
    def global_index(self, wide: bool) -> str:
        """The number of the work item in a launch's first dimension, as `index_type(wide)`."""

    @abstractmethod
    def global_row(self, wide: bool) -> str:
        """The index in a launch's second dimension."""

    def beyond(self, *bounds: tuple[str, str]) -> str:
        """Whether a work item has nothing to do, by its index and their count in each dimension of the launch."""
        return " || ".join(f"{index} >= {count}" for index, count in bounds)

    def load_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        """A statement that declares the array `name` and reads `width` elements into it, from index * width on."""
        each = f"{name}[lane] = {pointer}[({index}) * {width} + lane];"
        return f"{self.declare_lanes(name, dtype, width)} for (int lane = 0; lane < {width}; ++lane) {each}"

    def declare_lanes(self, name: str, dtype: torch.dtype, width: int) -> str:
        return f"{self.storage_type(dtype)} {name}[{width}];"

    def store_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        return f"for (int lane = 0; lane < {width}; ++lane) {pointer}[({index}) * {width} + lane] = {name}[lane];"


def _half_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
