"""The dialect OpenCL C, for version 1.2 and later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from torch_backplane.kernels.cpu.functions import BRANCHLESS, definitions, needs_float64
from torch_backplane.kernels.cpu.halves import FLOAT16_BY_INSTRUCTIONS
from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import part_dtype

# vload_half and vstore_half_rte exist on every device, also without cl_khr_fp16, and do not flush subnormal numbers.
# They access memory; compilers eliminate the variable.
_FLOAT16 = """\
FUNCTION float float16_to_float(const ushort half_bits) { return vload_half(0, (const half*)&half_bits); }

FUNCTION ushort float_to_float16(const float value) {
  ushort half_bits;
  vstore_half_rte(value, 0, (half*)&half_bits);
  return half_bits;
}
"""

# The extensions that subgroup_shuffle_down needs.
SUBGROUP_SHUFFLES = ("cl_khr_subgroups", "cl_khr_subgroup_shuffle_relative")


class OpenCLC(Dialect):
    """OpenCL C. A buffer is passed as a handle and an offset in bytes: the host cannot add to a `cl_mem` handle."""

    name = "OpenCL C"
    vectors = True
    buffer_bytes = 16
    types: ClassVar = {
        torch.bool: "bool",
        torch.int8: "char",
        torch.int16: "short",
        torch.int32: "int",
        torch.int64: "long",
        torch.uint8: "uchar",
        torch.uint16: "ushort",
        torch.uint32: "uint",
        torch.uint64: "ulong",
        torch.float32: "float",
        torch.float64: "double",
        torch.complex64: "float2",
        torch.complex128: "double2",
    }
    words: ClassVar = {
        "GLOBAL": "global",
        "LOCAL": "local",
        "ITEM": "((int)get_local_id(0))",
        "GROUP": "get_group_id(0)",
        "BARRIER": "barrier(CLK_LOCAL_MEM_FENCE)",
        "atomic_swap(at, expected, desired)": "atomic_cmpxchg((volatile global uint*)(at), expected, desired)",
        "multiply_high(a, b)": "mul_hi(a, b)",
        "subgroup_shuffle_down(value, offset)": "sub_group_shuffle_down(value, offset)",
    }

    def integer_suffix(self, category: str, bits: int) -> str:
        return ("u" if category == "unsigned" else "") + ("L" if bits == 64 else "")

    def complex(self, real: Value | str, imaginary: Value | str, dtype: torch.dtype) -> str:
        return f"({self.type(dtype)})({real}, {imaginary})"

    def float_bits(self, value: Value, dtype: torch.dtype) -> str:
        return f"as_{self.type(dtype)}({value})"

    def library(self, name: str, dtype: torch.dtype) -> str:
        ours = not self.target.simt and dtype == torch.float32 and name in BRANCHLESS
        return f"cpu_{name}" if ours and (self.target.float64 or not needs_float64(name)) else name

    def header(self, dtypes: frozenset[torch.dtype], text: str) -> str:
        contract = f"#pragma OPENCL FP_CONTRACT {'ON' if self.contraction else 'OFF'}"
        # CPU compilers vectorize over work items only if every call is inlined. GPU compilers inline all calls.
        inlined = "" if self.target.simt else " __attribute__((always_inline))"
        lines = [contract, f"#define FUNCTION static inline{inlined}"]
        dtypes |= {part_dtype(dtype) for dtype in dtypes}
        functions = definitions(text)
        if torch.float64 in dtypes or any("double" in function for function in functions):
            lines.insert(0, "#pragma OPENCL EXTENSION cl_khr_fp64 : enable")
        if "subgroup_shuffle_down" in text:
            lines = [f"#pragma OPENCL EXTENSION {one} : enable" for one in SUBGROUP_SHUFFLES] + lines
        if functions:
            lines += ["#pragma OPENCL FP_CONTRACT ON", *functions, contract]
        return "\n".join([*lines, self.half_functions(dtypes)])

    def decode(self, stored: str, dtype: torch.dtype, position: int = 0) -> str:
        text = super().decode(stored, dtype, position)
        by_turns = self.target.native_float16 and not self.target.simt
        return f"odd_{text}" if dtype == torch.float16 and by_turns and position % 2 else text

    def float16_functions(self) -> str:
        if not self.target.native_float16:
            return super().float16_functions()
        return _FLOAT16 if self.target.simt else FLOAT16_BY_INSTRUCTIONS

    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        attribute = f"__attribute__((reqd_work_group_size({group_size}, 1, 1))) " if group_size else ""
        return f"{attribute}kernel void {name}({', '.join(parameters)})"

    def buffer_parameters(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        return [f"{self.pointer_type(dtype, written)} {name}_base", f"const ulong {name}_offset"]

    def buffer_pointer(self, name: str, dtype: torch.dtype, written: bool) -> list[str]:
        pointer, bytes_ = self.pointer_type(dtype, written), self.pointer_type(torch.int8, written)
        return [f"  {pointer} {name} = ({pointer})(({bytes_}){name}_base + {name}_offset);"]

    def pointer_type(self, dtype: torch.dtype, written: bool) -> str:
        return f"global {'' if written else 'const '}{self.storage_type(dtype)}*"

    def global_index(self, wide: bool) -> str:
        return f"({self.index_type(wide)})get_global_id(0)"

    def global_row(self, wide: bool) -> str:
        return f"({self.index_type(wide)})get_global_id(1)"

    def beyond(self, *bounds: tuple[str, str]) -> str:
        beyond = super().beyond(*bounds)
        if self.target.simt:
            return beyond
        # Only the last groups have items out of bounds. `last` is uniform in a group, so CPU compilers hoist it out of
        # the loop over work items, which then needs no masks; AVX2 has none for 8 and 16 bits. There is one condition
        # for all dimensions because clang 14 hoists only one.
        last = " || ".join(
            f"((ulong)get_group_id({dimension}) + 1) * get_local_size({dimension}) > {count}"
            for dimension, (_, count) in enumerate(bounds)
        )
        return f"({last}) && ({beyond})"

    def load_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        declaration = self.declare_lanes(name, dtype, width)
        return f"{declaration} vstore{width}(vload{width}({index}, {pointer}), 0, {name});"

    def store_lanes(self, name: str, dtype: torch.dtype, pointer: str, index: str, width: int) -> str:
        return f"vstore{width}(vload{width}(0, {name}), {index}, {pointer});"
