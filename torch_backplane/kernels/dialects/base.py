"""The base class of dialects: the text of every operation, type and kernel part in a language like C.

A method named like an operation of `expression.OPERATIONS` returns its text. Operands are variable names, so the text
can use an operand twice. Infix operators, and functions that differ only in their name, are entries of tables.
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

# Operations that are functions of C's math library, under the same name or another one.
_SAME_NAME = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc lgamma floor ceil trunc atan2 copysign hypot nextafter fmin fmax fma"
)
LIBRARY = {**{name: name for name in _SAME_NAME.split()}, "round": "rint", "power": "pow"}


# Macros that hand-written kernels use:
# - GLOBAL and LOCAL: the address spaces of device memory and of local memory.
# - ITEM and GROUP: the work item's index in its group, and the group's index.
# - BARRIER: a statement that every item of the group reaches; afterwards it sees what the others wrote to local memory.
# - atomic_swap: a compare-and-swap of 32 bits in device memory, which returns the previous value.
# - multiply_high: the upper half of the product of two uint.
# - subgroup_shuffle_down: the real number `value` of the item `offset` positions further in the subgroup, if there is
#   one. Every item of the subgroup reaches it (see `Dialect.subgroup_size`).
WORDS = (
    *("GLOBAL", "LOCAL", "ITEM", "GROUP", "BARRIER", "atomic_swap(at, expected, desired)", "multiply_high(a, b)"),
    "subgroup_shuffle_down(value, offset)",
)


@dataclass(frozen=True)
class Value:
    """A variable in the text, with its dtype. `str()` returns its name."""

    name: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name

    @property
    def category(self) -> str:
        return facts(self.dtype).category


# A line in the text of bounded kernels (see `Dialect.kernel`). opencl_launcher.cpp searches for it.
BOUNDED = "// bounded"


class MissingOperation(NotImplementedError):
    """A dialect cannot express something that a kernel needs. Raised only when that kernel is generated."""


class Dialect(ABC):
    """Writes kernel text for one compiler.

    The language is like C: it has `?:`, pointers, and the functions of `math.h`, under one name for all dtypes unless
    `library` is overridden. Drivers can define their own dialect (docs/write-a-driver.md). A dialect leaves out what it
    cannot express; generating a kernel that needs it raises MissingOperation.

    Args:
        target: the target of the kernels, `Target()` by default. If it has no float64, generating a kernel that needs
            float64 raises TypeError.
    """

    name: ClassVar[str]
    types: ClassVar[Mapping[torch.dtype, str]]  # of values in registers
    words: ClassVar[Mapping[str, str]] = {}  # macro definitions for WORDS
    missing: ClassVar[frozenset[str]] = frozenset()  # operations and library functions that the language lacks
    # Whether compilers may contract a * b + c into one operation with a single rounding. Off, as on PyTorch's CPU;
    # formulas that want a single rounding use fma.
    contraction: ClassVar[bool] = False
    vectors: ClassVar[bool] = False  # whether the language has OpenCL C's vector types of 2 to 16 elements
    buffer_bytes: ClassVar[int] = 8  # size of the arguments that pass the memory of one tensor

    def __init__(self, target: Target | None = None) -> None:
        self.target = Target() if target is None else target

    @property
    def compile_options(self) -> tuple[str, ...]:
        """Options for the compiler."""
        return ()

    @property
    def tile_memory(self) -> int:
        """`Target.tile_memory`; 0 where the dialect lacks the words that tiles need."""
        needed = ("LOCAL", "ITEM", "GROUP", "BARRIER") if self.target.simt else ("GROUP",)
        return self.target.tile_memory if all(word in self.words for word in needed) else 0

    @property
    def subgroup_size(self) -> int:
        """The number of work items that can exchange values with `subgroup_shuffle_down`, a power of two.

        1 where the target or the dialect does not support it; kernels then exchange values through local memory.
        """
        has = self.target.subgroup_shuffles and "subgroup_shuffle_down(value, offset)" in self.words
        return self.target.subgroup_size if has else 1

    def matrix_functions(self, dtype: torch.dtype) -> str:
        """The text of functions that multiply matrices of 16 × 16 elements of `dtype` in subgroups of 32 work items.

        It is empty where the target (`Target.matrix_dtypes`) or the dialect does not have matrix instructions for
        `dtype`; kernels then compute products element by element. Elements are in the form in which memory has them
        (`storage_type`). The text defines:

        - ALIGNED: a word behind LOCAL, for an array that begins at a multiple of 16 bytes.
        - Fragment: a type, the part of a factor that a work item holds. Sums: likewise, of float32 results.
        - load_fragment_a(fragment, from, step): loads a factor from local memory, where elements of a row are together;
          rows begin `step` elements apart, each at a multiple of 16 bytes.
        - load_fragment_a_across(fragment, from, step): likewise, where elements of a column are together.
        - load_fragment_b, load_fragment_b_across: of the second factor, where elements of a column, or of a row, are
          together.
        - multiply_fragments(sums, a, b): adds the products.
        - scale_rows(sums, factors): multiplies each row by one of 16 float in local memory.
        - store_fragment(sums, to, step): stores the results in local memory; rows begin `step` float apart.
        - copy_16_bytes(to, from, inside): begins to copy 16 bytes from device memory to local memory, or zeros if not
          `inside`. Both addresses are multiples of 16.
        - wait_for_copies(): waits for the copies that this work item has begun. Others see them after a barrier.

        `fragment`, `sums`, `a` and `b` are pointers. Except for the last two functions, every item of the subgroup
        reaches a call.
        """
        return ""

    def argument_bytes(self, parameters: Iterable[Parameter]) -> int:
        """The total size of the arguments for `parameters`."""
        return sum(self.buffer_bytes if one.role in ("output", "input") else one.dtype.itemsize for one in parameters)

    def lacks(self, what: str) -> NoReturn:
        """Raises MissingOperation for `what`, which this dialect cannot express."""
        raise MissingOperation(f"the dialect {self.name} has no {what}")

    # Types and constants

    def type(self, dtype: torch.dtype) -> str:
        """The type of a value of `dtype` in a register.

        Raises:
            TypeError: the dtype needs float64 and the target has none.
            MissingOperation: the dialect has no type for the dtype.
        """
        if part_dtype(dtype) == torch.float64 and not self.target.float64:
            raise TypeError(f"this device has no {dtype}".replace("torch.", ""))
        if dtype not in self.types:
            self.lacks(f"type for {dtype}".replace("torch.", ""))
        return self.types[dtype]

    def storage_type(self, dtype: torch.dtype) -> str:
        """The type of an element of `dtype` in memory."""
        return self.type(stored_dtype(dtype))

    def index_type(self, wide: bool) -> str:
        """The type of indices: unsigned, of 64 bits if `wide`, else of 32."""
        return self.type(torch.uint64 if wide else torch.uint32)

    def constant(self, value: Number, dtype: torch.dtype) -> str:
        """The exact text of `value`, in parentheses if it has a sign."""
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
        if value == integer_range(torch.int64)[0] and category == "signed":  # the magnitude overflows
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
        return "NAN" if bits == 32 else "((double)NAN)"  # the macros have type float

    def infinity(self, bits: int) -> str:
        return "INFINITY" if bits == 32 else "((double)INFINITY)"

    def library(self, name: str, dtype: torch.dtype) -> str:
        """The name of the function `name` of C's math library for operands of `dtype`."""
        return name

    # Conversions

    def cast(self, value: Value, dtype: torch.dtype) -> str:
        """`value` converted to `dtype`.

        To bool: `!= 0`. Float to integer: through int32 or int64, as on PyTorch's CPU. Complex to real: the real part.
        Otherwise C's conversion.
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
        """The complex number with these parts."""
        self.lacks(f"{dtype} of two numbers".replace("torch.", ""))

    def bits(self, value: Value, dtype: torch.dtype) -> str:
        """The bits of `value` reinterpreted as `dtype`, which has the same width."""
        if value.category != "float" and facts(dtype).category != "float":
            return f"({self.type(dtype)}){value}"
        return self.float_bits(value, dtype)

    def float_bits(self, value: Value, dtype: torch.dtype) -> str:
        """`bits` where one of the dtypes is floating-point."""
        self.lacks(f"bits of {value.dtype} as {dtype}".replace("torch.", ""))

    def decode(self, stored: str, dtype: torch.dtype, position: int = 0) -> str:
        """Converts `stored`, which was read from memory, to value_dtype(dtype). `position`: the operand's position."""
        if dtype == torch.bool:
            return f"{stored} != 0"
        return f"{_half_name(dtype)}_to_float({stored})" if dtype in STORAGE_ONLY else stored

    def encode(self, value: str, dtype: torch.dtype) -> str:
        """Converts `value`, of value_dtype(dtype), to what is written to memory."""
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
        """Zero where b is negative or at least the width in bits, as in PyTorch."""
        unsigned, bits = self._arithmetic_type(a.dtype), facts(a.dtype).bits
        return f"({unsigned}){b} >= {bits} ? 0 : ({self.type(a.dtype)})(({unsigned}){a} << {b})"

    def shift_right(self, a: Value, b: Value) -> str:
        """Only sign bits where b is negative or at least the width in bits, as in PyTorch."""
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
        # Not by two comparisons: Mesa's compiler treats an int32 that was converted to int64 as non-negative.
        return f"({a} ^ {b}) < 0"

    def _wrapping(self, sign: str, a: Value, b: Value) -> str:
        """Integer arithmetic in an unsigned type, because signed overflow is undefined in C."""
        if a.category in ("float", "bool"):  # assigning the result to a bool variable converts it as != 0
            return f"{a} {sign} {b}"
        unsigned = self._arithmetic_type(a.dtype)
        return f"({self.type(a.dtype)})(({unsigned}){a} {sign} ({unsigned}){b})"

    def _arithmetic_type(self, dtype: torch.dtype) -> str:
        return self.type(UNSIGNED[max(32, facts(dtype).bits)])

    def _extremum(self, sign: str, a: Value, b: Value) -> str:
        # If b is NaN, the comparison is false and b is selected.
        return f"({a} != {a} || {a} {sign} {b}) ? {a} : {b}" if a.category == "float" else f"{a} {sign} {b} ? {a} : {b}"

    def _traps(self, divisor: Value) -> str:
        """Whether a division can trap: by zero, or of the least integer by -1. The remainder by -1 is zero."""
        return f"({divisor} == 0 || {divisor} == -1)" if divisor.category == "signed" else f"{divisor} == 0"

    def _by_minus_one(self, a: Value, b: Value) -> str:
        return f"{b} == -1 ? {self.negative(a)} : " if b.category == "signed" else ""

    # Kernels

    @abstractmethod
    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        """The text before kernels that use `dtypes`; `text` is the text of their functions and formulas.

        It ends with `half_functions`. Before it, it provides what these and hand-written kernels use: FUNCTION (the
        qualifiers of a device function), the types uint and ushort, as_uint and as_float (the bits of a float, and
        back), min and max.
        """

    def float16_functions(self) -> str:
        """The definitions of float16_to_float and float_to_float16.

        This portable version uses integer arithmetic. A dialect that can express conversion instructions overrides it
        and uses them where `Target.native_float16` holds.
        """
        return FLOAT16

    def half_functions(self, dtypes: frozenset[torch.dtype]) -> str:
        """The conversion functions for float16 and bfloat16, where `dtypes` contains them."""
        texts = ((torch.float16, self.float16_functions()), (torch.bfloat16, BFLOAT16))
        return "\n".join(text for dtype, text in texts if dtype in dtypes)

    def kernel(
        self, name: str, parameters: Sequence[str], group_size: int | None, body: Sequence[str], bounded: bool = False
    ) -> str:
        """The text of a whole kernel.

        Args:
            group_size: the exact number of work items in a group, if it is fixed.
            bounded: work items beyond the last one do nothing, so the launcher can add work items.
        """
        start = f"{self.entry(name, parameters, group_size)} {{"
        return "\n".join([*([BOUNDED] if bounded else []), start, *body, "}\n"])

    @abstractmethod
    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        """The beginning of a kernel, up to and including its parameter list."""

    def pointer_type(self, dtype: torch.dtype, written: bool) -> str:
        """The type of a pointer to device memory."""
        return f"{'' if written else 'const '}{self.storage_type(dtype)}*"

    def buffer_parameters(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        """The kernel parameters that pass a tensor's memory, of `buffer_bytes` in total."""
        return [f"{self.pointer_type(dtype, written)} {name}"]

    def buffer_pointer(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        """Statements that declare the pointer `name`, computed from `buffer_parameters`."""
        return []

    @abstractmethod
    def global_index(self, wide: bool) -> str:
        """The work item's global index in the first dimension of the launch, as `index_type(wide)`."""

    @abstractmethod
    def global_row(self, wide: bool) -> str:
        """The work item's global index in the second dimension of the launch."""

    def beyond(self, *bounds: tuple[str, str]) -> str:
        """The condition that a work item is out of bounds. `bounds`: (index, count) in each dimension of the launch."""
        return " || ".join(f"{index} >= {count}" for index, count in bounds)

    def load_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        """A statement that declares the array `name` and loads `width` elements from index * width on into it."""
        each = f"{name}[lane] = {pointer}[({index}) * {width} + lane];"
        return f"{self.declare_lanes(name, dtype, width)} for (int lane = 0; lane < {width}; ++lane) {each}"

    def declare_lanes(self, name: str, dtype: torch.dtype, width: int) -> str:
        return f"{self.storage_type(dtype)} {name}[{width}];"

    def store_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        return f"for (int lane = 0; lane < {width}; ++lane) {pointer}[({index}) * {width} + lane] = {name}[lane];"


def _half_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
