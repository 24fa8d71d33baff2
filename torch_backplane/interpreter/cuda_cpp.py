"""CUDA C++, by the system's C++ compiler: thread blocks, `__shared__` arrays, `__syncthreads()`, `atomicCAS`."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product

from torch_backplane.interpreter.language import WORDS, Language, NoCompiler
from torch_backplane.interpreter.opencl_builtins import BINARY, UNARY

# No vectorization and no merging of stores, which would change the accesses that the kernel makes. No memset or memcpy
# calls in place of loops, which would not be instrumented.
_OPTIONS = (
    *("-x", "c++", "-std=gnu++17", "-O2", "-w", "-fPIC", "-fsanitize=thread", "-fno-exceptions"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-tree-sra"),
    *("-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-builtin-memset", "-fno-builtin-memcpy"),
)
# Options that only GCC has.
_GCC_OPTIONS = ("-fno-tree-loop-distribute-patterns", "-fno-store-merging")

# Groups run one after another, so `__shared__` arrays can be static.
_TYPES = """\
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
"""
_BEFORE = """\
#define __global__ __attribute__((noinline))
#define __device__
#define __launch_bounds__(items)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((aligned(128)))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
struct interpreter_uint3 { uint x, y, z; };
#define INTERPRETER_UINT3(number) \\
  (interpreter_uint3{(uint)interpreter_place(number), (uint)interpreter_place(number + 1), \\
                     (uint)interpreter_place(number + 2)})
#define threadIdx INTERPRETER_UINT3(3)
#define blockIdx INTERPRETER_UINT3(6)
#define blockDim INTERPRETER_UINT3(12)
#define gridDim INTERPRETER_UINT3(15)
#define __syncthreads() interpreter_barrier(3)
#define atomicCAS(at, expected, desired) interpreter_swap((ulong)(at), expected, desired)
#define __umulhi(a, b) ((uint)((ulong)(a) * (b) >> 32))
#define cvt_f32_f16 interpreter_from_half
#define cvt_rn_f16_f32 interpreter_to_half
#define signbit(x) __builtin_signbit(x)
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define rsqrt(x) (1 / sqrt(x))
#define rsqrtf(x) (1 / sqrtf(x))
struct float2 { float x, y; };
struct double2 { double x, y; };
#define make_float2(x, y) (float2{x, y})
#define make_double2(x, y) (double2{x, y})
template <class To, class From> static inline To interpreter_bits(const From value) {
  union { From from; To to; } both = {value};
  return both.to;
}
template <class T> static inline T interpreter_shuffled(const T value, const uint offset) {
  union { ulong bits; T value; } given = {0}, got;
  given.value = value;
  got.bits = interpreter_shuffle_down(given.bits, offset);
  return got.value;
}
#define __shfl_down_sync(mask, value, offset) interpreter_shuffled(value, offset)
#define __float_as_uint(x) interpreter_bits<uint, float>(x)
#define __uint_as_float(x) interpreter_bits<float, uint>(x)
#define __float_as_int(x) interpreter_bits<int, float>(x)
#define __int_as_float(x) interpreter_bits<float, int>(x)
#define __double_as_longlong(x) interpreter_bits<long long, double>(x)
#define __longlong_as_double(x) interpreter_bits<double, long long>(x)
// Warp-level matrix instructions, as the PTX ISA describes their registers: lane 4 g + t of ldmatrix has the elements
// 2 t and 2 t + 1 of row g of each 8 × 8 matrix, whose rows are at the addresses of 8 lanes; with .trans, of column g.
// Lane 4 g + t of mma.m16n8k16 has the elements in rows g and g + 8 of a, in column g of b, and in columns 2 t and
// 2 t + 1 of the sums.
#define INTERPRETER_MATRIX static __attribute__((noinline, no_sanitize("thread"))) void
INTERPRETER_MATRIX ldmatrix_x4_of(uint* to, const void* row, const bool transposed) {
  ulong address = (ulong)row, all[32];
  interpreter_range(address, 16, 0);
  interpreter_shuffle_all(&address, 1, all);
  const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (uint matrix = 0; matrix < 4; ++matrix) {
    uint both[2];
    for (uint x = 0; x < 2; ++x) {
      const uint of_row = transposed ? 2 * t + x : g, of_column = transposed ? g : 2 * t + x;
      const ushort* from = (const ushort*)all[8 * matrix + of_row];
      both[x] = from ? from[of_column] : 0; // a lane that a finding has ended gave no address
    }
    to[matrix] = both[0] | both[1] << 16;
  }
}
template <class Decode>
INTERPRETER_MATRIX mma_m16n8k16_of(float* sums, const uint* a, const uint b0, const uint b1, const Decode decode) {
  const ulong given[3] = {a[0] | (ulong)a[1] << 32, a[2] | (ulong)a[3] << 32, b0 | (ulong)b1 << 32};
  ulong all[32 * 3];
  interpreter_shuffle_all(given, 3, all);
  const uint lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (uint k = 0; k < 16; ++k) {
    const uint of_k = k % 8 / 2, shift = k % 2 * 16;
    float of_a[2], of_b[2];
    for (uint x = 0; x < 2; ++x) {
      of_a[x] = decode((ushort)(all[(4 * g + of_k) * 3 + k / 8] >> (32 * x + shift)));
      of_b[x] = decode((ushort)(all[(4 * (2 * t + x) + of_k) * 3 + 2] >> (32 * (k / 8) + shift)));
    }
    for (uint x = 0; x < 4; ++x) sums[x] += of_a[x / 2] * of_b[x % 2];
  }
}
#define ldmatrix_x4(to, row) ldmatrix_x4_of(to, row, false)
#define ldmatrix_x4_trans(to, row) ldmatrix_x4_of(to, row, true)
#define mma_m16n8k16_f16(sums, a, b0, b1) mma_m16n8k16_of(sums, a, b0, b1, interpreter_from_half)
#define mma_m16n8k16_bf16(sums, a, b0, b1) \\
  mma_m16n8k16_of(sums, a, b0, b1, [](const ushort bits) { return interpreter_bits<float, uint>((uint)bits << 16); })
#define cp_async_16(to, from, bytes) interpreter_copy_later((ulong)(to), (ulong)(from), bytes)
#define cp_async_wait_all() interpreter_wait_for_copies()
#define INTERPRETER_ENTRY extern "C"
#define INTERPRETER_OWN
"""


def _mathematics() -> Iterator[str]:
    """Yield declarations of math functions. The headers would also declare names that kernels use."""
    for count, names in enumerate((UNARY, BINARY, "fma"), 1):
        for name, (kind, ending) in product(names.split(), (("float", "f"), ("double", ""))):
            yield f"{kind} {name}{ending}({', '.join([kind] * count)});\n"


class CudaCpp(Language):
    name = "CUDA C++"
    suffix = ".cu"
    has_offsets = False
    entry = r"\b__global__\s+void(?:\s+__launch_bounds__\(\d+\))?"

    def compiler(self) -> str:
        """Return the path of the compiler: the one in CXX, else c++, g++ or clang++."""
        named = os.environ.get("CXX", "").strip()
        candidates = [named] if named else ["c++", "g++", "clang++"]
        for one in filter(None, map(shutil.which, candidates)):
            _known_options(one)
            return one
        wanted = f"CXX={named!r} is not found" if named else f"none of {', '.join(candidates)} is found"
        raise NoCompiler(f"kernels are compiled with the system's C++ compiler, but {wanted}")

    def options(self) -> tuple[str, ...]:
        return _known_options(self.compiler())

    def before(self, text: str) -> str:
        return f'{_TYPES}extern "C" {{\n{WORDS}{"".join(_mathematics())}}}\n{_BEFORE}'


@functools.cache
def _known_options(compiler: str) -> tuple[str, ...]:
    """Return the options that the compiler supports.

    Raises:
        NoCompiler: it does not support -fsanitize=thread.
    """

    def takes(*options: str) -> bool:
        command = [compiler, *options, "-fsyntax-only", os.devnull]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not takes(*_OPTIONS):
        raise NoCompiler(f"kernels need a compiler with -fsanitize=thread, which {compiler} does not support")
    return (*_OPTIONS, *(one for one in _GCC_OPTIONS if takes("-Werror", *_OPTIONS, one)))
