"""Compares products and convolutions by matrix instructions (tensor cores) with PyTorch on the CPU.

The kernel interpreter runs the CUDA C++ text, with the registers of each work item as the PTX ISA describes them.
"""

from __future__ import annotations

import math

import pytest
import torch
from template_runners import interpret, random
from test_templates_convolution import CASES as CONVOLUTIONS
from test_templates_convolution import calls, close

from torch_backplane.kernels import CudaCpp, OpenCLC, Target
from torch_backplane.kernels.templates.convolution import gathered
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.kernels.templates.matmul import ProductParams, forms, matmul
from torch_backplane.kernels.templates.source import LaunchSpec
from torch_backplane.ptxas import nvrtc, sass

HALVES = [torch.float16, torch.bfloat16]
FIGURES = {
    "max_group_size": 1024,
    "subgroup_size": 32,
    "subgroup_shuffles": True,
    "local_memory": 48 << 10,
    "native_float16": True,
    "matrix_dtypes": frozenset(HALVES),
}
BOTH = frozenset("ab")
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


def dialect(units: int = 64, **figures) -> CudaCpp:
    return CudaCpp(Target(compute_units=units, **{**FIGURES, **figures}))


def whole(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, so that sums are exact and each wrong element shows."""
    if layout == "column":
        return whole((*shape[:-2], shape[-1], shape[-2]), "row", dtype).mT
    if layout == "gaps":
        return whole((*shape[:-1], 2 * shape[-1]), "row", dtype)[..., ::2]
    return torch.randint(-3, 4, shape).to(dtype)


def computed(made) -> list[str]:
    interpret(made)
    return [one.kernel.name.removeprefix("bp_matmul_") for one in made]


# --- products --------------------------------------------------------------------------------------------------------

LAYOUTS = [("row", "row"), ("column", "row"), ("row", "column"), ("column", "column"), ("gaps", "gaps")]


@halves
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "shape", [(64, 64, 64), (70, 67, 65), (1, 8, 3), (72, 40, 136), (3, 1, 130), (2, 0, 3)], ids=str
)
def test_every_element_is_exact(shape, layouts, dtype):
    rows, depth, columns = shape
    a, b = whole((rows, depth), layouts[0], dtype), whole((depth, columns), layouts[1], dtype)
    for aligned in (BOTH, frozenset("a"), frozenset()):
        out = torch.full((rows, columns), 99).to(dtype)
        assert computed(matmul(dialect(), out, a, b, params=ProductParams(aligned=aligned))) == ["by_matrices"]
        assert torch.equal(out, (a.double() @ b.double()).to(dtype))


@pytest.mark.parametrize("layouts", LAYOUTS[:4], ids=str)
def test_large_tiles(layouts):
    a, b = whole((152, 72), layouts[0], torch.float16), whole((72, 264), layouts[1], torch.float16)
    out = torch.empty(152, 264, dtype=torch.float16)
    (made,) = matmul(dialect(1), out, a, b, params=ProductParams("tile=128", aligned=BOTH))
    assert (made.group_size, made.global_size // made.group_size) == (256, 6)
    assert made.kernel.text.count("copy_16_bytes(&") == 2
    interpret(made)
    assert torch.equal(out, a @ b)


@halves
def test_batches_with_any_strides(dtype):
    """Heads as attention has them, a batch that is expanded, and results with rows that are not contiguous."""
    a = whole((2, 19, 3, 24), "row", dtype).transpose(1, 2)
    b = whole((2, 21, 3, 24), "row", dtype).permute(0, 2, 3, 1)
    c = whole((24, 16), "row", dtype).expand(2, 3, 24, 16)
    for first, second in ((a, b), (a, c), (b.mT, c), (a[:, :1].expand(2, 3, 19, 24), b)):
        out = torch.empty(2, first.shape[2], 3, second.shape[3], dtype=dtype).transpose(1, 2)
        assert computed(matmul(dialect(), out, first, second, params=ProductParams(aligned=BOTH))) == ["by_matrices"]
        assert torch.equal(out, (first.double() @ second.double()).to(dtype))
    out = torch.empty(3, 21, 19, dtype=dtype).mT
    assert computed(matmul(dialect(), out, a[0], b[0], params=ProductParams(aligned=frozenset("b")))) == ["by_matrices"]
    assert torch.equal(out, (a[0].double() @ b[0].double()).to(dtype))


def test_operands_are_copied_by_16_bytes_where_that_is_possible():
    def copies(a, b, aligned=BOTH):
        out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        made = matmul(dialect(), out, a, b, params=ProductParams(divides=False, aligned=frozenset(aligned)))
        text = made[0].kernel.text
        return {one for one in "ab" if f"copy_16_bytes(&{one}_tile" in text}

    def full(*shape):
        return torch.empty(shape, dtype=torch.float16)

    assert copies(full(64, 64), full(64, 64)) == {"a", "b"}
    assert copies(full(64, 64), full(64, 64), "b") == {"b"}
    assert copies(full(64, 68), full(68, 64)) == {"b"}  # rows of a, 136 bytes
    assert copies(full(64, 72)[:, :68], full(68, 64)) == {"b"}  # the last copy of a row would be partly inside
    assert copies(full(61, 64), full(61, 64).mT) == {"a", "b"}
    assert copies(full(61, 64).mT, full(61, 64)) == {"a", "b"}
    assert copies(full(64, 61).mT, full(64, 61)) == set()
    assert copies(full(5, 64, 64), full(64, 64).expand(5, 64, 64)) == {"a", "b"}
    assert copies(full(5, 65 * 64)[:, : 64 * 64].view(5, 64, 64), full(5, 64, 64)) == {"a", "b"}
    assert copies(full(5 * 4100).as_strided((5, 64, 64), (4100, 64, 1)), full(5, 64, 64)) == {"b"}
    assert copies(full(64).as_strided((1, 64), (3, 1)), full(64, 64)) == {"a", "b"}  # one row has no stride


@halves
def test_bias_factors_and_transposed_results(dtype):
    a, b = whole((70, 40), "row", dtype), whole((40, 50), "row", dtype)
    bias, transposed = whole((50,), "row", dtype).expand(70, 50), whole((70, 50), "column", dtype)
    for added, scales in ((bias, (2, 3)), (transposed, (-1, 1))):
        out = torch.empty(70, 50, dtype=dtype)
        interpret(matmul(dialect(), out, a, b, added, scales, ProductParams(aligned=BOTH)))
        exact = scales[1] * added.double() + scales[0] * (a.double() @ b.double())
        assert torch.equal(out, exact.to(dtype))
    out = torch.empty(50, 70, dtype=dtype).t()
    interpret(matmul(dialect(), out, a, b, params=ProductParams(aligned=BOTH)))
    assert torch.equal(out, (a.double() @ b.double()).to(dtype))


@halves
@pytest.mark.parametrize("reduced", [False, True])
def test_long_sums_of_few_results_are_split(dtype, reduced):
    torch.manual_seed(0)
    for batch, rows, depth, columns in ((1, 70, 1000, 65), (2, 9, 2051, 20), (1, 3, 9000, 8)):
        a, b = random((batch, rows, depth), dtype), random((batch, depth, columns), dtype)
        out = torch.empty(batch, rows, columns, dtype=dtype)
        made = matmul(dialect(), out, a, b, params=ProductParams(reduced=reduced, aligned=BOTH))
        assert made[0].kernel.name == "bp_matmul_parts"
        sums, *operands = made[0].tensors  # no rounding errors of the sums
        assert [one.data_ptr() for one in operands] == [a.data_ptr(), b.data_ptr()]
        assert sums.dtype == (dtype if reduced else torch.float32)
        interpret(made)
        exact = a.double() @ b.double()
        expected = torch.finfo(dtype).eps * (2 if reduced else 0.5) * math.sqrt(exact.numel() * depth)
        assert (out - exact).norm() < expected * (1 + 3 / math.sqrt(exact.numel()))


def test_infinity_and_nan_stay_in_their_rows_and_columns():
    a, b = torch.ones(70, 40, dtype=torch.bfloat16), torch.ones(40, 72, dtype=torch.bfloat16)
    a[4, 7], a[66, 0], b[2, 3], b[39, 70] = math.nan, math.inf, -math.inf, math.inf
    out = torch.empty(70, 72, dtype=torch.bfloat16)
    interpret(matmul(dialect(), out, a, b, params=ProductParams(aligned=BOTH)))
    torch.testing.assert_close(out, (a.double() @ b.double()).to(out.dtype), equal_nan=True)


def test_the_largest_and_the_smallest_numbers():
    """Products beyond the range of float16 are added in float32; subnormal numbers are not flushed."""
    a = torch.full((16, 16), 60000.0, dtype=torch.float16)
    a[:, 1] = -60000
    b = torch.zeros(16, 8, dtype=torch.float16)
    b[0], b[1] = 40000, 39968
    out = torch.empty(16, 8, dtype=torch.float16)
    interpret(matmul(dialect(), out, a, b, scales=(2**-6, 1)))
    assert torch.equal(out, torch.full_like(out, 60000 * 32 / 64))
    a, b = torch.full((1, 1), 2**-24, dtype=torch.float16), torch.full((1, 1), 2.0, dtype=torch.float16)
    out = torch.empty(1, 1, dtype=torch.float16)
    interpret(matmul(dialect(), out, a, b))
    assert out.item() == 2**-23


def operations(text: str, **tensors) -> Operations:
    return Operations(text, True, torch.int32, "", frozenset(), tensors, {}, {})


@halves
@pytest.mark.parametrize("layout", ["row", "column"])
def test_prologues_and_epilogues(layout, dtype):
    """The operands are not in memory. What a prologue computes is rounded, as if it had been stored."""
    for rows, depth, columns in ((33, 67, 65), (70, 5003, 3)):
        a, b = (whole(shape, layout, torch.int8) for shape in ((rows, depth), (depth, columns)))
        out = torch.full((rows, columns), 9).to(dtype)
        params = ProductParams(
            epilogue=Operations("store_kept(place, product + load_more(place));", True, torch.int32, "", frozenset(),
                                {"more": out.clone()}, {"kept": out}, {}),
            prologues={
                "a": operations("operand = load_a_stored(place) + 0.001f;", a_stored=a),
                "b": operations("operand = load_b_stored(place) * 0.5f;", b_stored=b),
            },
        )  # fmt: skip
        described = (torch.empty_strided(one.shape, one.stride(), device="meta") for one in (a, b))
        made = matmul(dialect(), out, *described, params=params)
        assert "multiply_fragments" in made[0].kernel.text
        interpret(made)
        exact = (a.float() + 0.001).to(dtype).double() @ (b * 0.5).double() + 9
        torch.testing.assert_close(out, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


# --- convolutions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 64])
@halves
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_match_float64(case, dtype, units):
    by_matrices = 0
    for arguments, exact in calls(case, dtype, dialect(units)):
        made = gathered(dialect(units), *arguments)
        by_matrices += "multiply_fragments" in made[0].kernel.text.partition('extern "C"')[2]
        assert ("alone" in made[0].kernel.name) == ("mma.sync" not in made[0].kernel.text)
        interpret(made)
        assert close(arguments[0], exact, arguments[2].k.count)
    assert by_matrices > 0 or case == "depthwise"


# --- which devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "uses"),
    [
        ({}, {torch.float16, torch.bfloat16}),
        ({"matrix_dtypes": frozenset({torch.float16})}, {torch.float16}),
        ({"matrix_dtypes": frozenset()}, set()),
        ({"subgroup_size": 16}, set()),
        ({"max_group_size": 64, "local_memory": 48 << 10}, set()),
        ({"local_memory": 16 << 10}, set()),
        ({"local_memory": 24 << 10}, {torch.float16, torch.bfloat16}),
    ],
    ids=["both", "float16 only", "none", "subgroups of 16", "groups of 64", "16 KiB", "24 KiB"],
)
def test_other_targets_and_dtypes_multiply_elements(figures, uses):
    for dtype in (*HALVES, torch.float32, torch.float64, torch.int32):
        a = torch.ones(9, 9, dtype=dtype)
        (made,) = matmul(dialect(**figures), torch.empty_like(a), a, a)
        assert made.kernel.name.startswith("bp_matmul_by_matrices") == (dtype in uses)
        assert ("mma.sync" in made.kernel.text) == (dtype in uses)
        assert made.kernel.local_bytes <= figures.get("local_memory", FIGURES["local_memory"])
    a = torch.ones(9, 9, dtype=torch.float16)
    assert "tiled" in matmul(OpenCLC(Target(**{**FIGURES, **figures})), a, a, a)[0].kernel.name


def test_tiles_by_size():
    def group(units, rows, form=""):
        a = torch.empty(1, 1, dtype=torch.float16).expand(rows, 64)
        out = torch.empty(1, 1, dtype=torch.float16).expand(rows, rows)
        (made,) = matmul(dialect(units), out, a, a.mT, params=ProductParams(form))
        return made.group_size

    assert [group(8, rows) for rows in (100, 256, 1024)] == [128, 128, 256]
    assert group(8, 1024, "tile=64") == 128
    found = forms(dialect(), torch.float16)
    assert found == ["tile=128", "tile=64", "tile=128/whole", "tile=64/whole"]
    assert forms(dialect(local_memory=24 << 10), torch.float16) == ["tile=64", "tile=64/whole"]
    assert forms(dialect(), torch.float32)[0] == "tile=32"


def test_invalid_matrix_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"matrix_dtypes is .*float64.*must be a frozenset of torch.float16 and"):
        Target(matrix_dtypes=frozenset({torch.float64}))
    with pytest.raises(ValueError, match="matrix_dtypes"):
        Target(matrix_dtypes={torch.float16})


# --- registers, as the PTX ISA describes them ------------------------------------------------------------------------


def in_a_warp(body: str, dtype: torch.dtype, inputs: dict[str, torch.Tensor], out: torch.Tensor, after: str = ""):
    made = LaunchSpec(
        "registers", dialect(), outputs={"out": out}, inputs=inputs, integers={}, value=torch.float32, groups=1,
        group_size=32, types={"element_t": dtype}, functions=dialect().matrix_functions(dtype),
        body=f"{body}\nBARRIER;\n{after}",
    ).launch()  # fmt: skip
    interpret(made)


@halves
def test_mma_registers(dtype):
    """«Matrix fragments for mma.m16n8k16 with floating point type» in the PTX ISA."""
    a, b, c = (whole(shape, "row", dtype) for shape in ((16, 16), (16, 8), (16, 8)))
    of_a, of_b, sums = torch.empty(32, 8, dtype=dtype), torch.empty(32, 4, dtype=dtype), torch.empty(32, 4)
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(8):
            row, column = group + (0 if i < 2 or 4 <= i < 6 else 8), thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            of_a[lane, i] = a[row, column]
        for i in range(4):
            of_b[lane, i] = b[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group]
            sums[lane, i] = c[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)]
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    found = torch.empty(32, 4)
    body = f"""float sums[4]; uint of_a[4], of_b[2];
    for (int i = 0; i < 4; ++i) {{ sums[i] = load_c(ITEM * 4 + i); of_a[i] = (uint)a[ITEM * 4 + i]; }}
    for (int i = 0; i < 2; ++i) of_b[i] = (uint)b[ITEM * 2 + i];
    mma_m16n8k16_{name}(sums, of_a, of_b[0], of_b[1]);
    for (int i = 0; i < 4; ++i) store_out(ITEM * 4 + i, sums[i]);"""
    in_a_warp(body, dtype, {"a": of_a.view(torch.int32), "b": of_b.view(torch.int32), "c": sums}, found)
    exact = c.double() + a.double() @ b.double()
    for lane in range(32):
        group, thread = divmod(lane, 4)
        for i in range(4):
            assert found[lane, i] == exact[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)]


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_registers(transposed):
    """«ldmatrix» in the PTX ISA: 8 lanes each have the addresses of the rows of a matrix, in any order of rows."""
    tile = torch.arange(32 * 8, dtype=torch.int16).view(32, 8)
    order = torch.randperm(32).to(torch.int32)
    out = torch.empty(32, 8, dtype=torch.int16)
    body = f"""LOCAL ALIGNED element_t rows[32][8];
    for (int i = 0; i < 8; ++i) rows[ITEM][i] = (ushort)tile[ITEM * 8 + i];
    BARRIER;
    uint found[4]; ldmatrix_x4{"_trans" if transposed else ""}(found, &rows[order[ITEM]][0]);
    for (int i = 0; i < 8; ++i) out[ITEM * 8 + i] = (short)(found[i / 2] >> i % 2 * 16);"""
    in_a_warp(body, torch.float16, {"tile": tile, "order": order}, out)
    for matrix in range(4):
        rows = tile[order[8 * matrix : 8 * matrix + 8].long()]
        rows = rows.mT if transposed else rows
        for lane in range(32):
            group, thread = divmod(lane, 4)
            assert out[lane, 2 * matrix : 2 * matrix + 2].tolist() == rows[group, 2 * thread : 2 * thread + 2].tolist()


@pytest.mark.parametrize("waits", [True, False])
def test_copies_arrive_when_they_are_waited_for(waits):
    given, out = torch.arange(32 * 8, dtype=torch.int16), torch.empty(32 * 8, dtype=torch.int16)
    body = """LOCAL ALIGNED element_t line[32][8];
    for (int i = 0; i < 8; ++i) line[ITEM][i] = 9;
    copy_16_bytes(line[ITEM], (const ushort*)given + ITEM * 8, ITEM != 3);"""
    after = "for (int i = 0; i < 8; ++i) out[ITEM * 8 + i] = (short)line[31 - ITEM][i];"
    in_a_warp(body + (" wait_for_copies();" if waits else ""), torch.float16, {"given": given}, out, after)
    expected = given.view(32, 8).clone()
    expected[3] = 0
    assert torch.equal(out.view(32, 8).flip(0), expected if waits else torch.full_like(expected, 9))


# --- machine code ----------------------------------------------------------------------------------------------------


def listing(made, architecture: str) -> str:
    try:
        code = nvrtc.compile_text(made.kernel.text, dialect().compile_options, architecture).code
        return sass.disassemble([sass.machine_code(code, made.kernel.name)], architecture)[0]
    except nvrtc.Missing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("architecture", "dtypes", "product", "copies"),
    [
        ("sm_75", [torch.float16], "HMMA.1688.F32", ["LDG.E.128", "STS.128"]),
        ("sm_80", HALVES, "HMMA.16816.F32", ["LDGSTS.E.BYPASS.128"]),
        ("sm_90", HALVES, "HMMA.16816.F32", ["LDGSTS.E.BYPASS.128"]),
        ("sm_100", HALVES, "HMMA.16816.F32", ["LDGSTS.E.BYPASS.128"]),
    ],
)
@pytest.mark.parametrize("layouts", [("row", "row"), ("column", "column")], ids=str)
def test_machine_code(architecture, dtypes, product, copies, layouts):
    for dtype in dtypes:
        a, b = whole((64, 64), layouts[0], dtype), whole((64, 64), layouts[1], dtype)
        for form in ("tile=128", "tile=64"):
            (made,) = matmul(dialect(1), torch.empty_like(a), a, b, params=ProductParams(form, aligned=BOTH))
            found = listing(made, architecture)
            fragments = int(form[5:]) // 32 * 2  # of a subgroup
            assert found.count(product) == fragments * 2 * 2 * (2 if architecture == "sm_75" else 1)
            assert found.count("LDSM.16.") == (int(form[5:]) // 32 + 2) * 2
            assert all(one in found for one in copies)
            assert "FFMA" not in found.partition("BAR.SYNC")[0]
            assert sass.meant(made.kernel.text) == {sass.LOADS, sass.PRODUCTS, sass.FRAGMENTS}
            assert not sass.lacking(sass.meant(made.kernel.text), found)
            scalar = found.replace("LDSM", "LDS").replace("HMMA", "FFMA").replace(".128", "")
            assert len(sass.lacking(sass.meant(made.kernel.text), scalar)) == 3
