"""What dialects spell differently for different devices: float contraction, conversions of float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_runners import compile_cuda, opencl
from template_runners import interpret, run

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


# --- float16


def copied(dialect: Dialect, out: torch.Tensor, x: torch.Tensor) -> Launch:
    return LaunchSpec(
        "copied",
        dialect,
        outputs={"out": out},
        inputs={"x": x},
        integers={},
        value=torch.float32,
        items=out.numel(),
        body="store_out(item, load_x(item));",
    ).launch()


def float16_texts() -> list[Any]:
    """(what runs a launch, dialect): both dialects, both kinds of targets, with and without instructions."""
    float64 = opencl()[2]
    made = [
        (run, OpenCLC(Target.of_kind(kind, float64=float64, native_float16=native)))
        for kind in ("gpu", "cpu")
        for native in (True, False)
    ]
    return [*made, *((interpret, CudaCpp(Target(native_float16=native))) for native in (True, False))]


TEXTS = pytest.mark.parametrize("which", range(6))


@TEXTS
def test_every_float16_is_read_exactly(which: int) -> None:
    runs, dialect = float16_texts()[which]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    out = torch.empty(len(halves))
    runs(copied(dialect, out, halves))
    number = ~halves.isnan()
    assert torch.equal(out[number].view(torch.int32), halves[number].float().view(torch.int32))
    assert torch.equal(out.isnan(), ~number)


@TEXTS
def test_floats_are_rounded_to_the_nearest_float16_ties_to_even(which: int) -> None:
    runs, dialect = float16_texts()[which]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = halves[halves.isfinite()].double()
    step = (halves.view(torch.int16) + 1).view(torch.float16)[halves.isfinite()].double()
    ties = ((finite + step) / 2)[step.isfinite()].float()
    infinite = torch.tensor(float("inf"))
    around = [ties, ties.nextafter(infinite), ties.nextafter(-infinite)]
    others = torch.randint(-(2**31), 2**31, (1 << 18,)).to(torch.int32).view(torch.float32)
    edges = torch.tensor([65519.0, 65519.996, 65520.0, 65536.0, 3.4e38, float("inf"), 1e-45, 2.0**-25, 2.0**-24, 0.0])
    values = torch.cat([*around, others, halves.float(), edges, -edges])
    out = torch.empty(len(values), dtype=torch.float16)
    runs(copied(dialect, out, values))
    number = ~values.isnan()
    assert torch.equal(out[number].view(torch.int16), values[number].half().view(torch.int16))
    assert torch.equal(out.isnan(), ~number)


def test_float16_is_converted_as_the_target_says() -> None:
    halves = torch.empty(4, dtype=torch.float16)
    for dialect, word in ((OpenCLC, "vload_half"), (CudaCpp, "cvt.rn.f16.f32")):
        texts = [copied(dialect(Target(native_float16=one)), halves, halves).kernel.text for one in (True, False)]
        assert [word in text for text in texts] == [True, False]
    for native in (True, False):
        processor = OpenCLC(Target.of_kind("cpu", native_float16=native))
        assert ("__F16C__" in copied(processor, halves, halves).kernel.text) == native
    cuda = CudaCpp(Target(native_float16=True))
    instructions = compile_cuda(copied(cuda, halves, halves).kernel.text, cuda.compile_options)
    assert "cvt.f32.f16" in instructions
    assert "cvt.rn.f16.f32" in instructions
