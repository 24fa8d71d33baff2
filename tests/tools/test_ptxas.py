"""Tests `ptxas`, which compiles kernels for NVIDIA's GPUs: figures, findings, recorded programs, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from template_runners import machine_code
from typer.testing import CliRunner

from torch_backplane.audit.processes import AuditError
from torch_backplane.cli import app
from torch_backplane.kernels import CudaCpp, Layout, Target, pointwise
from torch_backplane.kernels.templates import sort
from torch_backplane.ptxas import cases, nvrtc, sass
from torch_backplane.ptxas.collect import Kernel, collect
from torch_backplane.ptxas.measure import measure, measure_all
from torch_backplane.ptxas.nvrtc import CompileError, Missing, compile_text, resources
from torch_backplane.ptxas.occupancy import ARCHITECTURES, occupancy
from torch_backplane.ptxas.report import findings, report

try:
    nvrtc.library()
    nvrtc.find("*/bin/nvdisasm", "nvidia-cuda-nvdisasm")
except Missing as error:
    pytest.skip(str(error), allow_module_level=True)

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def kernel(body: str, group: int = 64, before: str = "", bounds: str = "") -> Kernel:
    head = f'{before}extern "C" __global__ void {bounds} known(float* out, const float* in, int n)'
    return Kernel("a test", "known", f"{head} {{ {body} }}", group)


def found(of: Kernel, architecture: str) -> list[tuple[str, str]]:
    (measured,) = measure([of], [architecture])
    return [(one.what, one.detail) for one in findings(of, measured)]


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "group", "registers", "shared", "expected"),
    [
        ("sm_80", 256, 32, 0, 1.0),
        ("sm_80", 256, 33, 0, 0.75),  # 40 registers are allocated: 12 warps for each scheduler
        ("sm_80", 256, 64, 0, 0.5),
        ("sm_80", 256, 255, 0, 0.125),
        ("sm_75", 256, 64, 0, 1.0),
        ("sm_80", 32, 16, 0, 0.5),  # 32 groups
        ("sm_75", 32, 16, 0, 0.5),  # 16 groups of at most 1,024 work items
        ("sm_80", 40, 16, 0, 1.0),  # 2 warps
        ("sm_75", 64, 16, 32 << 10, 0.125),  # 2 groups in 64 KiB
        ("sm_80", 64, 16, 41 << 10, 0.09375),  # 3 groups in 164 KiB, with 1 KiB more for each
        ("sm_90", 256, 16, 48 << 10, 0.5),
        ("sm_100", 1024, 64, 0, 0.5),
        ("sm_100", 1024, 65, 0, 0.0),
        ("sm_90", 64, 16, 228 << 10, 0.0),
    ],
)
def test_occupancy(architecture: str, group: int, registers: int, shared: int, expected: float) -> None:
    assert occupancy(ARCHITECTURES[architecture], group, registers, shared) == expected


@architectures
def test_figures_of_a_known_kernel(architecture: str) -> None:
    body = """__shared__ float part[96];
    part[threadIdx.x] = in[threadIdx.x]; __syncthreads(); out[threadIdx.x] = part[95 - threadIdx.x];"""
    (measured,) = measure([kernel(body, group=96)], [architecture])
    one = measured[architecture]
    assert (one.error, one.warning, one.stack, one.spilled, one.shared) == ("", "", 0, 0, 384)
    assert 4 <= one.registers <= 32
    limit = min(ARCHITECTURES[architecture].groups, ARCHITECTURES[architecture].items // 96)
    assert one.occupancy == limit * 96 / ARCHITECTURES[architecture].items


def test_resources_of_several_kernels() -> None:
    text = "".join(f'extern "C" __global__ void k{n}(int* x) {{ __shared__ int a[{n}]; a[*x % {n}] = 1; '
                   f'__syncthreads(); *x = a[x[1] % {n}]; }}' for n in (8, 64))  # fmt: skip
    log = compile_text(text, ["--ptxas-options=-v"], "sm_80").log
    assert [resources(log, f"k{n}").shared for n in (8, 64)] == [32, 256]
    with pytest.raises(ValueError, match="nothing about k6"):
        resources(log, "k6")


# --- findings --------------------------------------------------------------------------------------------------------


@architectures
def test_findings(architecture: str) -> None:
    fine = kernel("out[threadIdx.x] = in[threadIdx.x];")
    assert found(fine, architecture) == []
    ((what, detail),) = found(kernel("out[0] = missing;"), architecture)
    assert what == "error"
    assert 'identifier "missing" is undefined' in detail
    ((what, detail),) = found(kernel("float unused; unused = in[0]; out[0] = 1;"), architecture)
    assert what == "warning"
    assert "set but never used" in detail
    too_large = kernel("__shared__ float x[4096]; x[threadIdx.x] = in[0]; __syncthreads(); out[0] = x[n];", 2080)
    assert found(too_large, architecture) == [("too large", "no compute unit holds a group of 2080")]


@architectures
def test_spilled_registers_are_found(architecture: str) -> None:
    """128 values are alive at the same time, and 1,024 work items can have 64 registers each."""
    body = """float x[128];
    #pragma unroll
    for (int i = 0; i < 128; ++i) x[i] = in[i * n + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 128; ++i) out[i * n + threadIdx.x] = x[i] * x[127 - i];"""
    ((what, detail),) = found(kernel(body, 1024, bounds="__launch_bounds__(1024)"), architecture)
    assert what == "spill"
    assert int(detail.split()[0]) >= 128
    assert found(kernel(body, 64), architecture) == []


LANES = """
template <class T, int n> struct {attribute} Lanes {{ T lane[n]; }};
"""


@architectures
def test_missing_vector_loads_are_found(architecture: str) -> None:
    body = """alignas(16) float lanes[4]; *(Lanes<float, 4>*)lanes = ((const Lanes<float, 4>*)in)[threadIdx.x];
    ((Lanes<float, 4>*)out)[threadIdx.x] = *(Lanes<float, 4>*)lanes;"""
    aligned, others = (LANES.format(attribute=one) for one in ("alignas(sizeof(T) * n)", ""))
    assert found(kernel(body, before=aligned), architecture) == []
    assert found(kernel(body, before=others), architecture) == [("lacks", f"{sass.LOADS}, {sass.STORES}")]
    unused = "const float lane = ((const Lanes<float, 4>*)in)[threadIdx.x].lane[0]; (void)lane;"
    assert found(kernel(unused, before=others), architecture) == []


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_matrix_instructions_are_found(architecture: str) -> None:
    body = """unsigned a = n, b = n; float c[4] = {0, 0, 0, 0};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a), "r"(a), "r"(b));
    out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];"""
    assert sass.meant(kernel(body).text) == {sass.PRODUCTS}
    assert found(kernel(body), architecture) == []
    assert found(kernel("/* mma.sync */ out[0] = in[0] * in[1];"), architecture) == [("lacks", sass.PRODUCTS)]


def test_kernels_with_newer_instructions_are_not_compiled() -> None:
    body = """unsigned a = n; float c[4] = {0, 0, 0, 0};
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a));
    out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];"""
    first, last = measure([kernel(body), kernel("out[0] = in[0];")], ["sm_75", "sm_80"])
    assert [*first] == ["sm_80"]
    assert [*last] == ["sm_75", "sm_80"]
    assert not first["sm_80"].error


def test_kernels_are_not_confused_when_disassembled_together() -> None:
    body = "((Lanes<float, {n}>*)out)[threadIdx.x] = *(const Lanes<float, {n}>*)in;"
    good, bad = (LANES.format(attribute=one) for one in ("alignas(sizeof(T) * n)", ""))
    given = [kernel(body.format(n=4), before=bad if number % 3 else good) for number in range(70)]
    measured = [*measure_all(given, ["sm_75", "sm_100"], 2)]
    for name in ("sm_75", "sm_100"):
        assert [bool(one[name].lacking) for one in measured] == [number % 3 > 0 for number in range(70)]


TITLES = (
    "op: nn.functional.pdist float32",  # its kernel for the largest difference has had a warning
    "op: scatter_reduce.amin int64",
    "op: nonzero float32",
    "op: polygamma.polygamma_n_1 float32",
    "audit: attention of one query and 16,384 keys",
    "op: linalg.cholesky float32",
    "model: LSTM, compiled, bfloat16",
    "audit: sort of rows of 64",
)


@pytest.fixture(scope="module")
def collected() -> tuple[list[Kernel], dict[str, str]]:
    return collect([*TITLES, "op: sparse.mm.reduce float32"])


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*CudaCpp.types, torch.float16, torch.bfloat16], ids=str)
def test_vector_loads_of_every_dtype(dtype: torch.dtype) -> None:
    """A formula over contiguous tensors reads and writes 4 elements together; of 1 byte each, they are no vector."""
    text = pointwise("same", lambda a: a, inputs=[dtype], outputs=[dtype], layout=Layout(0, 4), dialect=CudaCpp()).text
    assert sass.meant(text) == ({sass.LOADS, sass.STORES} if dtype.itemsize > 1 else set())
    machine_code(text, "bp_same", 64)


@architectures
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("k", [5, 40])
def test_short_runs_are_sorted_in_registers(architecture: str, dtype: torch.dtype, k: int) -> None:
    x = torch.empty(3, 40, dtype=dtype)
    launch = sort.sort_runs(CudaCpp(), sort.first_runs(x, k), x, k == 5)
    assert machine_code(launch.kernel.text, launch.kernel.name, launch.group_size, architecture).stack == 0


@architectures
def test_only_functions_of_the_library_have_private_memory(
    architecture: str, collected: tuple[list[Kernel], dict[str, str]]
) -> None:
    """Arrays are in registers: the lanes of formulas with loops (polygamma), the sums of attention."""
    names = set()
    for one in collected[0]:
        if one.entry in ("bp_polygamma", "bp_attention_parts"):
            in_memory = machine_code(one.text, one.entry, one.group, architecture).stack
            assert in_memory <= (32 if "sinf(" in one.text else 0), one.text
            names.add((one.entry, "for (;;)" in one.text))
    assert names == {("bp_polygamma", True), ("bp_attention_parts", False)}


def test_only_large_groups_have_launch_bounds() -> None:
    """With bounds, ptxas spills registers in order to hold one group more."""
    dialect = CudaCpp(Target(max_group_size=1024))
    assert "__launch_bounds__" not in dialect.entry("k", ["int* x"], None) + dialect.entry("k", ["int* x"], 256)
    assert "__launch_bounds__(512) k(int* x)" in dialect.entry("k", ["int* x"], 512)


NARROW = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32]


@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_known_findings_have_a_reason(narrow: torch.dtype) -> None:
    dtypes = {"inputs": [torch.int64], "outputs": [narrow]}
    made = pointwise("copy", lambda a: a.to(narrow), **dtypes, layout=Layout(0, 4), dialect=CudaCpp())
    given = Kernel("a test", made.name, made.text, 64)
    (measured,) = measure([given], ["sm_80"])
    assert [one.reason for one in findings(given, measured)] == ["only the low part of each int64 is read"]
    renamed = Kernel("a test", "bp_other", made.text.replace("bp_copy", "bp_other"), 64)
    (measured,) = measure([renamed], ["sm_80"])
    assert [one.reason for one in findings(renamed, measured)] == [""]
    assert not report([renamed], [measured], 1, {})["ok"]


# --- programs --------------------------------------------------------------------------------------------------------


def test_programs_are_recorded(collected: tuple[list[Kernel], dict[str, str]]) -> None:
    kernels, errors = collected
    assert {one.case for one in kernels} >= set(TITLES)
    assert len({(one.text, one.entry) for one in kernels}) == len(kernels)
    assert all(0 < one.group <= 1024 and f" {one.entry}(" in one.text for one in kernels)
    names = {one.entry for one in kernels}
    assert {"bp_cdist_inf", "bp_nonzero"} <= names  # the latter is launched when nonzero has read a number
    assert [*errors] == ["op: sparse.mm.reduce float32"]
    assert "NotImplementedError" in errors["op: sparse.mm.reduce float32"]


def test_recorded_kernels_compile(collected: tuple[list[Kernel], dict[str, str]]) -> None:
    kernels, errors = collected
    measured = [*measure_all(kernels, ["sm_80"], 1)]
    made = report(kernels, measured, 7, errors)
    assert made["findings"] == []
    assert made["ok"]
    assert made["early"] == errors
    assert all(len(one["sm_80"]) == len(made["figures"]) for one in made["kernels"])


def test_all_programs_have_titles() -> None:
    titles = [*cases.programs()]
    kinds = {title.partition(":")[0] for title in titles}
    assert kinds == {"audit", "op", "model"}
    assert len(titles) > 3000
    assert "op: add bfloat16" in titles


def test_the_worker_needs_known_programs() -> None:
    with pytest.raises(AuditError, match="KeyError"):
        collect(["no such program"])


# --- the command -----------------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["ptxas", *words])


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    ended = run("--match", "^audit: (sigmoid|gelu)$", "--arch", "sm_75", "--arch", "sm_90", "--json", str(file))
    assert ended.exit_code == 0, ended.output
    made = json.loads(file.read_text(encoding="utf-8"))
    assert made["programs"] == 2
    assert {one["kernel"] for one in made["kernels"]} == {"bp_sigmoid", "bp_gelu"}
    assert all({"sm_75", "sm_90"} == {key for key in one if key.startswith("sm_")} for one in made["kernels"])
    assert "sm_90" in ended.output


def test_no_kernels_are_no_success() -> None:
    """This program ends early."""
    ended = run("--match", "^op: sparse.mm.reduce float32$", "--arch", "sm_80")
    assert ended.exit_code == 1
    assert "ended early: op: sparse.mm.reduce float32: NotImplementedError" in ended.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_70"], "unknown architecture 'sm_70'; use one of sm_75, sm_80, sm_90, sm_100"),
        (["--match", "("], "malformed --match '('"),
        (["--match", "^nothing$"], "no program matches '^nothing$'"),
        (["--match", "^audit: add$", "--json", "/missing/file"], "cannot write /missing/file"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    ended = run(*words)
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import nvidia

    monkeypatch.setattr(nvidia, "__path__", [])
    with pytest.raises(Missing, match="pip install nvidia-cuda-nvdisasm"):
        sass.disassemble([b""], "sm_80")
    ended = run("--match", "^audit: add$")
    assert ended.exit_code == 2
    assert "nvidia-cuda-nvdisasm is not installed" in ended.output


def test_errors_of_the_compiler() -> None:
    with pytest.raises(CompileError, match="expected a"):
        compile_text("this is no C++", [], "sm_80")
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_text("int x;", [], "sm_1")
    with pytest.raises(ValueError, match="no kernel other"):
        sass.machine_code(compile_text(kernel("out[0] = 1;").text, [], "sm_80").code, "other")
