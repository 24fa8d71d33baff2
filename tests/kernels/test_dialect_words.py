"""Tests kernel text that depends on the target: float contraction, float16 conversion, and subgroup shuffles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_runners import compile_cuda, opencl
from template_runners import interpret, run

from torch_backplane.kernels import CudaCpp, Dialect, OpenCLC, Reduction, Target, reduction, reduction_geometry
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.templates.norms import Affine, Sets, Statistics, norm
from torch_backplane.kernels.templates.reduce import Form, Options
from torch_backplane.kernels.templates.softmax import softmax
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
    """Returns a, b and c = -round(a * b). With contraction, a * b + c is the rounding error of the product."""
    a, b = torch.rand(2, 1000) + 1
    return a, b, -(a * b)


@pytest.mark.parametrize("contract", [False, True])
def test_opencl_c_contraction(contract: bool) -> None:
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
    # Contraction is optional: a CPU without an fma instruction does not contract.
    assert torch.equal(out, lost) or not out.any()


def test_cpu_functions_restore_the_contraction_setting() -> None:
    for dialect, word in ((OpenCLC, "OFF"), (contracting(OpenCLC), "ON")):
        header = dialect(Target.of_kind("cpu")).header(frozenset({torch.float32}), "cpu_exp(x)")
        pragmas = [line for line in header.splitlines() if "FP_CONTRACT" in line]
        assert pragmas == [f"#pragma OPENCL FP_CONTRACT {one}" for one in (word, "ON", word)]


@pytest.mark.parametrize(("contract", "option"), [(False, "--fmad=false"), (True, "--fmad=true")])
def test_cuda_cpp_contraction(contract: bool, option: str) -> None:
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
    """Returns (function that runs a launch, dialect) pairs, with and without native float16."""
    float64 = opencl()[2]
    made = [
        (run, OpenCLC(Target.of_kind(kind, float64=float64, native_float16=native)))
        for kind in ("gpu", "cpu")
        for native in (True, False)
    ]
    return [*made, *((interpret, CudaCpp(Target(native_float16=native))) for native in (True, False))]


TEXTS = pytest.mark.parametrize("which", range(6))


@TEXTS
def test_float16_values_are_read_exactly(which: int) -> None:
    runs, dialect = float16_texts()[which]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    out = torch.empty(len(halves))
    runs(copied(dialect, out, halves))
    number = ~halves.isnan()
    assert torch.equal(out[number].view(torch.int32), halves[number].float().view(torch.int32))
    assert torch.equal(out.isnan(), ~number)


@TEXTS
def test_float16_values_are_rounded_to_nearest_even(which: int) -> None:
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


def test_native_float16_selects_the_conversion() -> None:
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


# --- subgroup shuffles

F32, F64, I64 = torch.float32, torch.float64, torch.int64
REDUCTIONS = {
    "sums": ([F32], Reduction([F32], [0.0], lambda x, at: x, lambda a, b: a + b, lambda s, count: s)),
    "sums of float64": (
        [F64],
        Reduction([F64], [0.0], lambda x, at: x.to(F64), lambda a, b: a + b, lambda s, n: s),
    ),
    "sums of int64": (
        [I64],
        Reduction([I64], [0], lambda x, at: (x * 1e12).to(I64), lambda a, b: a + b, lambda s, n: s),
    ),
    "any": ([torch.bool], Reduction([torch.bool], [False], lambda x, at: x > 2.5, lambda a, b: a | b, lambda s, n: s)),
    "greatest and where": (
        [F32, I64],
        Reduction(
            [F32, I64],
            [float("-inf"), 2**63 - 1],
            lambda x, at: (x, at),
            lambda a, i, b, j: (
                f.where(b > a, b, a),
                f.where(b > a, j, f.where(a > b, i, f.minimum(i, j))),
            ),
            lambda a, i, count: (a, i),
        ),
    ),
}
# (work items per result, results per work group, whether neighbouring work items have different results)
FORMS = [(64, 1, False), (16, 4, False), (4, 16, True), (2, 32, True), (32, 2, True)]
DIALECTS = pytest.mark.parametrize("dialect", [CudaCpp, OpenCLC])


def local_and_barriers(launches: list[Launch]) -> tuple[int, int]:
    text = "".join(one.kernel.text.partition("bp_")[2] for one in launches)
    return sum(one.kernel.local_bytes for one in launches), text.count("BARRIER;")


@DIALECTS
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reductions_with_shuffles_equal_those_with_local_memory(
    dialect: type[Dialect], name: str, form: tuple[int, int, bool]
) -> None:
    dtypes, definition = REDUCTIONS[name]
    x = torch.randn(37, 131)
    dims = (0,) if form[2] else (1,)
    shape = [size for d, size in enumerate(x.shape) if d not in dims]
    results = []
    for figures in ({}, *({"subgroup_size": size, "subgroup_shuffles": True} for size in (8, 32))):
        target = Target(compute_units=1, **figures)
        outputs = [torch.empty(shape, dtype=dtype) for dtype in dtypes]
        where = reduction_geometry(x.shape, dims, [one.stride() for one in outputs], [x.stride()])
        options = Options(form=Form(*form))
        launches = reduction(dialect(target), "tested", definition, outputs, [x], where, options)
        interpret(launches)
        apart = form[1] if form[2] else 1
        meet = max(1, figures.get("subgroup_size", 1) // apart)  # work items of a result in one subgroup
        local, barriers = local_and_barriers(launches)
        assert (local == 0, barriers == 0) == (form[0] <= meet,) * 2
        assert any("subgroup_shuffle_down(state" in one.kernel.text for one in launches) == (meet > 1)
        results.append(outputs)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))  # the same tree, so the same rounding
    if name == "sums":
        torch.testing.assert_close(results[0][0], x.sum(dims), atol=1e-5, rtol=1e-5)
    elif name == "greatest and where":
        assert torch.equal(results[0][1], x.argmax(dims[0]))


def test_complex_reductions_use_local_memory() -> None:
    sums = Reduction([torch.complex64], [0j], lambda x, at: x, lambda a, b: a + b, lambda s, count: s)
    x = torch.randn(9, 70, dtype=torch.complex64)
    out = torch.empty(9, dtype=torch.complex64)
    where = reduction_geometry(x.shape, (1,), [out.stride()], [x.stride()])
    for dialect in (CudaCpp, OpenCLC):
        target = Target(subgroup_size=32, subgroup_shuffles=True)
        (launch,) = reduction(dialect(target), "tested", sums, [out], [x], where, Options(form=Form(64, 1, False)))
        assert launch.kernel.local_bytes == 64 * 8
        interpret(launch)
        torch.testing.assert_close(out, x.sum(1))


@DIALECTS
@pytest.mark.parametrize("most", [256, 32])
def test_row_kernels_with_shuffles_equal_those_with_local_memory(dialect: type[Dialect], most: int) -> None:
    """Computes softmax and layer norm of rows shared by teams of 64 or 32 work items."""
    x = torch.randn(9, 150)
    results = []
    for figures in ({}, *({"subgroup_size": size, "subgroup_shuffles": True} for size in (8, 32))):
        spelled = dialect(Target(max_group_size=most, **figures))
        outputs = [torch.empty_like(x) for _ in range(3)]
        mean, rstd = torch.empty(9), torch.empty(9)
        launches = [softmax(spelled, out, x, 1, log) for out, log in zip(outputs, (False, True), strict=False)]
        norms = norm(spelled, Sets.layer(9, 150), outputs[2], x, Affine(None, None), Statistics(mean, rstd), 1e-5)
        launches += [norms] if isinstance(norms, Launch) else norms
        interpret(launches)
        results.append((*outputs, mean, rstd, local_and_barriers(launches)))
    plain, eights, warps = results
    for other in (eights, warps):
        assert all(map(torch.equal, plain[:-1], other[:-1]))
    torch.testing.assert_close(plain[0], x.softmax(1))
    torch.testing.assert_close(plain[2], torch.nn.functional.layer_norm(x, [150]), atol=1e-5, rtol=1e-5)
    # Local memory is needed if a team is larger than one subgroup.
    assert plain[-1][0] == eights[-1][0]
    assert warps[-1][0] < plain[-1][0] or most > 32


@pytest.mark.parametrize(("figures", "has"), [({"subgroup_shuffles": True}, 32), ({}, 1)])
def test_subgroups_need_a_shuffle_word_and_target_support(figures: Any, has: int) -> None:
    class Wordless(CudaCpp):
        words = {word: text for word, text in CudaCpp.words.items() if "shuffle" not in word}  # noqa: RUF012

    target = Target(subgroup_size=32, **figures)
    assert [one(target).subgroup_size for one in (CudaCpp, OpenCLC, Wordless)] == [has, has, 1]


def test_opencl_c_enables_shuffle_extensions_if_used() -> None:
    out, x = torch.empty(9, 70), torch.randn(9, 70)
    for shuffles in (True, False):
        dialect = OpenCLC(Target(subgroup_size=32, subgroup_shuffles=shuffles))
        text = softmax(dialect, out, x, 1, False).kernel.text
        for one in ("cl_khr_subgroups", "cl_khr_subgroup_shuffle_relative"):
            assert (f"#pragma OPENCL EXTENSION {one} : enable\n" in text) == shuffles


def test_cuda_cpp_shuffles_compile_to_instructions() -> None:
    out, x = torch.empty(9, 70), torch.randn(9, 70)
    dialect = CudaCpp(Target(subgroup_size=32, subgroup_shuffles=True))
    assert "shfl.sync.down" in compile_cuda(softmax(dialect, out, x, 1, False).kernel.text, dialect.compile_options)
