"""Compiles kernels in HIP C++ with clang for AMD's GPUs, where clang and HIP's headers are installed."""

from __future__ import annotations

import sys

import paths
import pytest

sys.path.insert(0, str(paths.ROOT / "tools"))

import hip_kernels

from torch_backplane.ptxas.collect import Kernel

try:
    hip_kernels.compiler()
except hip_kernels.Missing as error:
    pytest.skip(str(error), allow_module_level=True)

# Their kernels have products, shuffles, local memory, atomics, float16, and random numbers.
TITLES = (
    "add", "cast to float16", "sum of rows", "cumsum of a vector", "sort of rows", "index_add of rows of 64",
    "softmax of rows", "product of square matrices", "attention, causal, heads of 64", "dropout",
)  # fmt: skip


def kernel(body: str) -> Kernel:
    return Kernel("a test", "known", f'extern "C" __global__ void known(float* x) {{ {body} }}', 64)


@pytest.mark.slow
@pytest.mark.parametrize("subgroup", [32, 64])
def test_kernels_of_many_kinds_compile(subgroup: int) -> None:
    found, errors = hip_kernels.kernels(TITLES, subgroup)
    assert not errors
    assert len(found) >= len(TITLES)
    text = "".join(one.text for one in found)
    assert all(word in text for word in ("__shfl_down(", "__shared__", "atomicCAS", "_Float16"))
    for architecture, size in hip_kernels.ARCHITECTURES.items():
        if size == subgroup:
            made = hip_kernels.compile_all(found, architecture)
            assert [one.error for one in made if one.error] == []
            assert [(kernel.entry, one.figures) for kernel, one in zip(found, made, strict=True) if one.spills] == []


def test_figures_and_errors() -> None:
    good, wrong = kernel("x[threadIdx.x] = __shfl_down(x[0], 1);"), kernel("x[0] = y;")
    first, second = hip_kernels.compile_all([good, wrong], "gfx1100")
    assert first.error == ""
    assert first.figures["VGPRs"] > 0
    assert not first.spills
    assert "use of undeclared identifier 'y'" in second.error


def test_spilled_registers_are_found() -> None:
    loads = "".join(f"float v{i} = x[{i} * 64 + threadIdx.x];" for i in range(400))
    uses = "".join(f"x[{i} * 64 + threadIdx.x] = v{399 - i} * v{i};" for i in range(400))
    body = f"{loads} __syncthreads(); {uses}"
    text = f'extern "C" __global__ void __launch_bounds__(1024) known(float* x) {{ {body} }}'
    (made,) = hip_kernels.compile_all([Kernel("a test", "known", text, 1024)], "gfx90a")
    assert made.spills
