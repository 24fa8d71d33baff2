"""The dialect CUDA C++, for NVRTC: no header files, only what is built into the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import facts

_HEADER = """\
#define FUNCTION static __device__ inline
typedef unsigned int uint;
typedef unsigned short ushort;
FUNCTION uint as_uint(const float value) { return __float_as_uint(value); }
FUNCTION float as_float(const uint bits) { return __uint_as_float(bits); }
// n elements, aligned so that one memory instruction moves up to 16 bytes of them.
template <class T, int n> struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Lanes { T lane[n]; };
"""

# PTX instructions as functions of the same names. The kernel interpreter defines them as macros instead.
_FLOAT16 = """\
#ifndef cvt_f32_f16
FUNCTION float cvt_f32_f16(const ushort half_bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half_bits));
  return value;
}
FUNCTION ushort cvt_rn_f16_f32(const float value) {
  ushort half_bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half_bits) : "f"(value));
  return half_bits;
}
#endif
#define float16_to_float cvt_f32_f16
#define float_to_float16 cvt_rn_f16_f32
"""

_UNBOUNDED_GROUP = 256


class CudaCpp(Dialect):
    """CUDA C++. A buffer is passed as a pointer.

    Loads and stores of several lanes need a pointer that is aligned to their size, up to 16 bytes.
    """

    name = "CUDA C++"
    types: ClassVar = {
        torch.bool: "bool",
        torch.int8: "signed char",
        torch.int16: "short",
        torch.int32: "int",
        torch.int64: "long long",
        torch.uint8: "unsigned char",
        torch.uint16: "unsigned short",
        torch.uint32: "unsigned int",
        torch.uint64: "unsigned long long",
        torch.float32: "float",
        torch.float64: "double",
        torch.complex64: "float2",
        torch.complex128: "double2",
    }
    words: ClassVar = {
        "GLOBAL": "",
        "LOCAL": "__shared__",
        "ITEM": "((int)threadIdx.x)",
        "GROUP": "blockIdx.x",
        "BARRIER": "__syncthreads()",
        "atomic_swap(at, expected, desired)": "atomicCAS((uint*)(at), expected, desired)",
        "multiply_high(a, b)": "__umulhi(a, b)",
        "subgroup_shuffle_down(value, offset)": "__shfl_down_sync(0xffffffffu, value, offset)",
    }

    float16_conversions: ClassVar[str] = _FLOAT16  # by instructions

    @property
    def compile_options(self) -> tuple[str, ...]:
        return "--std=c++17", f"--fmad={'true' if self.contraction else 'false'}"

    def not_a_number(self, bits: int) -> str:
        return "__int_as_float(0x7fc00000)" if bits == 32 else "__longlong_as_double(0x7ff8000000000000ll)"

    def infinity(self, bits: int) -> str:
        return "__int_as_float(0x7f800000)" if bits == 32 else "__longlong_as_double(0x7ff0000000000000ll)"

    def complex(self, real: Value | str, imaginary: Value | str, dtype: torch.dtype) -> str:
        return f"make_{self.type(dtype)}({real}, {imaginary})"

    def float_bits(self, value: Value, dtype: torch.dtype) -> str:
        wide, to_float = facts(dtype).bits == 64, facts(dtype).category == "float"
        integer, number = ("longlong", "double") if wide else ("int", "float")
        source, target = (integer, number) if to_float else (number, integer)
        return f"({self.type(dtype)})__{source}_as_{target}({value})"

    def library(self, name: str, dtype: torch.dtype) -> str:
        return f"{name}f" if dtype == torch.float32 else name

    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        return _HEADER + self.half_functions(dtypes)

    def float16_functions(self) -> str:
        return self.float16_conversions if self.target.native_float16 else super().float16_functions()

    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        # With bounds, ptxas spills registers to make room for one more group. Only large groups need them: 256 work
        # items can have 255 registers each.
        bounds = f"__launch_bounds__({group_size}) " if group_size and group_size > _UNBOUNDED_GROUP else ""
        return f'extern "C" __global__ void {bounds}{name}({", ".join(parameters)})'

    def global_index(self, wide: bool) -> str:
        index = self.index_type(wide)
        return f"({index})blockIdx.x * ({index})blockDim.x + threadIdx.x"

    def global_row(self, wide: bool) -> str:
        index = self.index_type(wide)
        return f"({index})blockIdx.y * ({index})blockDim.y + threadIdx.y"

    def declare_lanes(self, name: str, dtype: torch.dtype, width: int) -> str:
        return f"alignas(16) {self.storage_type(dtype)} {name}[{width}];"

    def load_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        lanes = f"Lanes<{self.storage_type(dtype)}, {width}>"
        return f"{self.declare_lanes(name, dtype, width)} *({lanes}*){name} = ((const {lanes}*){pointer})[{index}];"

    def store_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        lanes = f"Lanes<{self.storage_type(dtype)}, {width}>"
        return f"(({lanes}*){pointer})[{index}] = *({lanes}*){name};"
