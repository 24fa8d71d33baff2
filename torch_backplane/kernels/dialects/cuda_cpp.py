"""The dialect CUDA C++, for NVRTC: no header files, only what is built into the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# A warp multiplies 16 × 16 matrices as two products of 16 × 8 results. The interpreter has the PTX instructions as
# macros. ldmatrix loads four 8 × 8 matrices, whose rows begin at the addresses of 8 lanes each. Their order is what mma
# takes in neighbouring registers. Of a: rows 0 to 7 and 8 to 15 of depths 0 to 7, then those of depths 8 to 15. Of b:
# depths 0 to 7 and 8 to 15 of columns 0 to 7, then those of columns 8 to 15. Compute capability 7.5 multiplies 8 depths
# at a time, and has no asynchronous copies.
_MATRIX = """\
#ifndef ldmatrix_x4
FUNCTION uint shared_address(const void* at) { return (uint)__cvta_generic_to_shared(at); }
FUNCTION void ldmatrix_x4(uint* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
FUNCTION void ldmatrix_x4_trans(uint* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
FUNCTION void mma_m16n8k16_$type(float* sums, const uint* a, const uint b0, const uint b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.$type.$type.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
    "{%0, %1, %2, %3};" : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  for (int half_depth = 0; half_depth < 2; ++half_depth)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.$type.$type.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[2 * half_depth]), "r"(a[2 * half_depth + 1]), "r"(half_depth == 0 ? b0 : b1));
#endif
}
FUNCTION void cp_async_16(void* to, const void* from, const uint bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
  *(Lanes<uint, 4>*)to = bytes == 16 ? *(const Lanes<uint, 4>*)from : Lanes<uint, 4>{};
#endif
}
FUNCTION void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif
#define ALIGNED __align__(16)
struct Fragment { uint part[4]; };
struct Sums { float part[8]; };
FUNCTION int row_first(const int step) { return threadIdx.x % 16 * step + threadIdx.x % 32 / 16 * 8; }
FUNCTION int column_first(const int step) {
  return (threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8) * step + threadIdx.x % 16 / 8 * 8;
}
FUNCTION void load_fragment_a(Fragment* to, const ushort* from, const int step) {
  ldmatrix_x4(to->part, from + row_first(step));
}
FUNCTION void load_fragment_a_across(Fragment* to, const ushort* from, const int step) {
  ldmatrix_x4_trans(to->part, from + column_first(step));
}
FUNCTION void load_fragment_b(Fragment* to, const ushort* from, const int step) {
  ldmatrix_x4(to->part, from + column_first(step));
}
FUNCTION void load_fragment_b_across(Fragment* to, const ushort* from, const int step) {
  ldmatrix_x4_trans(to->part, from + row_first(step));
}
FUNCTION void multiply_fragments(Sums* sums, const Fragment* a, const Fragment* b) {
  mma_m16n8k16_$type(sums->part, a->part, b->part[0], b->part[1]);
  mma_m16n8k16_$type(sums->part + 4, a->part, b->part[2], b->part[3]);
}
FUNCTION int sum_row(const int x) { return threadIdx.x % 32 / 4 + x / 2 % 2 * 8; }
FUNCTION void store_fragment(const Sums* sums, float* to, const int step) {
  const int column = threadIdx.x % 4 * 2;
  for (int x = 0; x < 8; ++x) to[sum_row(x) * step + column + x / 4 * 8 + x % 2] = sums->part[x];
}
FUNCTION void scale_rows(Sums* sums, const float* factors) {
  for (int x = 0; x < 8; ++x) sums->part[x] *= factors[sum_row(x)];
}
FUNCTION void copy_16_bytes(ushort* to, const ushort* from, const bool inside) {
  cp_async_16(to, from, inside ? 16 : 0);
}
FUNCTION void wait_for_copies() { cp_async_wait_all(); }
"""
_MATRIX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}

_UNBOUNDED_GROUP = 256


class CudaCpp(Dialect):
    """CUDA C++. A buffer is passed as a pointer.

    Loads and stores of several lanes need a pointer that is aligned to their size, up to 16 bytes.

    Attributes:
        matrix_capabilities: the compute capability from which on `mma.sync` multiplies a dtype (PTX ISA, «Warp-level
            matrix instructions»).
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
    matrix_capabilities: ClassVar[Mapping[torch.dtype, tuple[int, int]]] = {
        torch.float16: (7, 5), torch.bfloat16: (8, 0)
    }  # fmt: skip
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

    def matrix_functions(self, dtype: torch.dtype) -> str:
        has = dtype in self.target.matrix_dtypes and dtype in self.matrix_capabilities
        if not has or self.target.subgroup_size != 32:
            return ""
        return _MATRIX.replace("$type", _MATRIX_TYPES[dtype])

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
