"""The dialect HIP C++, for hiprtc and clang: CUDA C++, except for what names instructions of NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch_backplane.kernels.dialects.cuda_cpp import CudaCpp

# Functions of the names that CUDA C++ uses. The kernel interpreter defines them as macros instead.
_FLOAT16 = """\
#ifndef cvt_f32_f16
FUNCTION float cvt_f32_f16(const ushort half_bits) { return (float)__builtin_bit_cast(_Float16, half_bits); }
FUNCTION ushort cvt_rn_f16_f32(const float value) { return __builtin_bit_cast(ushort, (_Float16)value); }
#endif
#define float16_to_float cvt_f32_f16
#define float_to_float16 cvt_rn_f16_f32
"""


class HipCpp(CudaCpp):
    """HIP C++. What is not here is as in CUDA C++.

    Subgroups are wavefronts: of 64 work items on CDNA, and of 32 on RDNA.
    """

    name = "HIP C++"
    words: ClassVar = {
        **CudaCpp.words,
        "subgroup_shuffle_down(value, offset)": "__shfl_down(value, offset)",
    }
    matrix_capabilities: ClassVar = {}  # AMD's matrix instructions are not used
    float16_conversions: ClassVar = _FLOAT16

    @property
    def compile_options(self) -> tuple[str, ...]:
        return "-std=c++17", f"-ffp-contract={'fast' if self.contraction else 'off'}"

    def entry(self, name: str, parameters: Sequence[str], group_size: int | None) -> str:
        # Without bounds, clang leaves registers for groups of 1,024 work items.
        bounds = f"__launch_bounds__({group_size}) " if group_size else ""
        return f'extern "C" __global__ void {bounds}{name}({", ".join(parameters)})'
