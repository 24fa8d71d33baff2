"""C as the interpreter compiles it (interpreter/host_c.py), which has its words of C and functions of work items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from torch_backplane.kernels.dialects import Dialect
from torch_backplane.kernels.dialects.base import Value

HEADER = """\
#define FUNCTION static inline
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define rsqrt(x) (1 / sqrt(x))
typedef struct { float x, y; } float2;
typedef struct { double x, y; } double2;
typedef unsigned __int128 bytes16_t;
typedef uint64_t bytes8_t;
typedef uint32_t bytes4_t;
typedef uint16_t bytes2_t;
typedef uint8_t bytes1_t;
FUNCTION uint as_uint(const float value) { return ((union { float number; uint bits; }){value}).bits; }
FUNCTION float as_float(const uint bits) { return ((union { uint bits; float number; }){bits}).number; }
FUNCTION uint64_t as_ulong(const double value) { return ((union { double number; uint64_t bits; }){value}).bits; }
FUNCTION double as_double(const uint64_t bits) { return ((union { uint64_t bits; double number; }){bits}).number; }
"""


class AuditC(Dialect):
    """What is read at once is one read of 16 bytes, or several."""

    name = "C of the audit"
    types: ClassVar = {
        torch.bool: "bool", torch.float32: "float", torch.float64: "double",
        torch.complex64: "float2", torch.complex128: "double2",
        torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
        torch.uint8: "uint8_t", torch.uint16: "uint16_t", torch.uint32: "uint32_t", torch.uint64: "uint64_t",
    }  # fmt: skip
    words: ClassVar = {
        "GLOBAL": "",
        "LOCAL": "local",
        "ITEM": "((int)get_local_id(0))",
        "GROUP": "get_group_id(0)",
        "BARRIER": "barrier(3)",
        "atomic_swap(at, expected, desired)": "atomic_cmpxchg(at, expected, desired)",
        "multiply_high(a, b)": "((uint)((uint64_t)(a) * (b) >> 32))",
    }

    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        return HEADER + self.half_functions(dtypes)

    def complex(self, real: Value | str, imaginary: Value | str, dtype: torch.dtype) -> str:
        return f"(({self.type(dtype)}){{{real}, {imaginary}}})"

    def float_bits(self, value: Value, dtype: torch.dtype) -> str:
        if dtype.is_floating_point:
            return f"as_{'float' if dtype.itemsize == 4 else 'double'}({value})"
        return f"({self.type(dtype)}){'as_uint' if dtype.itemsize == 4 else 'as_ulong'}({value})"

    def global_index(self, wide: bool) -> str:
        return f"({self.index_type(wide)})get_global_id(0)"

    def global_row(self, wide: bool) -> str:
        return f"({self.index_type(wide)})get_global_id(1)"

    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        return f"kernel void {name}({', '.join(parameters)})"

    def load_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        return f"{self.declare_lanes(name, dtype, width)} {self._moves(dtype, width, name, '0', pointer, index)}"

    def declare_lanes(self, name: str, dtype: torch.dtype, width: int) -> str:
        return f"{self.storage_type(dtype)} {name}[{width}] __attribute__((aligned(16)));"

    def store_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        return self._moves(dtype, width, pointer, index, name, "0")

    def _moves(self, dtype: torch.dtype, width: int, to: str, to_index: str, source: str, index: str) -> str:
        """What moves `width` elements, 16 bytes at once where there are as many."""
        total = width * dtype.itemsize
        each = min(16, total)
        count = total // each
        kind = f"bytes{each}_t"
        return " ".join(
            f"(({kind}*)({to}))[({to_index}) * {count} + {i}] = ((const {kind}*)({source}))[({index}) * {count} + {i}];"
            for i in range(count)
        )
