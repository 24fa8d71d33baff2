"""What dialects spell differently for different devices: float contraction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_runners import compile_cuda, opencl
from template_runners import run

from torch_backplane.kernels import CudaCpp, Dialect, OpenCLC, Target
from torch_backplane.kernels.templates.source import Launch, LaunchSpec


def contracting(dialect: type[Dialect]) -> type[Dialect]:
    return type(f"Contracting{dialect.__name__}", (dialect,), {"contraction": True})


# --- float contraction


def multiply_add(dialect: Dialect, out: torch.Tensor, *operands: torch.Tensor) -> Launch:
    return LaunchSpec(
        "multiply_add",
        dialect,
        outputs={"out": out},
        inputs=dict(zip("abc", operands, strict=True)),
        integers={},
        value=torch.float32,
        items=out.numel(),
        body="store_out(item, load_a(item) * load_b(item) + load_c(item));",
    ).launch()


def operands() -> tuple[torch.Tensor, ...]:
    """a, b and c with c = -round(a * b): contracted, a * b + c is what the product's rounding lost."""
    a, b = torch.rand(2, 1000) + 1
    return a, b, -(a * b)


@pytest.mark.parametrize("contract", [False, True])
def test_opencl_c_contracts_where_the_dialect_says_so(contract: bool) -> None:
    target = Target.of_kind("cpu", float64=opencl()[2])
    dialect = (contracting(OpenCLC) if contract else OpenCLC)(target)
    a, b, c = operands()
    out = torch.empty_like(a)
    launch = multiply_add(dialect, out, a, b, c)
    assert launch.kernel.text.count(f"#pragma OPENCL FP_CONTRACT {'ON' if contract else 'OFF'}\n") == 1
    run(launch)
    assert out.count_nonzero() == 0 or contract
    lost = (a.double() * b.double() + c.double()).float()
    assert lost.count_nonzero() > 900
    # Contraction is a permission, which a processor without the instruction does not use.
    assert torch.equal(out, lost) or not out.any()


def test_functions_of_processors_leave_contraction_as_it_was() -> None:
    for dialect, word in ((OpenCLC, "OFF"), (contracting(OpenCLC), "ON")):
        header = dialect(Target.of_kind("cpu")).header(frozenset({torch.float32}), "cpu_exp(x)")
        pragmas = [line for line in header.splitlines() if "FP_CONTRACT" in line]
        assert pragmas == [f"#pragma OPENCL FP_CONTRACT {one}" for one in (word, "ON", word)]


@pytest.mark.parametrize(("contract", "option"), [(False, "--fmad=false"), (True, "--fmad=true")])
def test_cuda_cpp_contracts_where_the_dialect_says_so(contract: bool, option: str) -> None:
    dialect: Any = (contracting(CudaCpp) if contract else CudaCpp)()
    assert dialect.compile_options == ("--std=c++17", option)
    a, b, c = operands()
    text = multiply_add(dialect, torch.empty_like(a), a, b, c).kernel.text
    assert ("fma.rn.f32" in compile_cuda(text, dialect.compile_options)) == contract
