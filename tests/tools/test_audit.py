"""Tests the audit: its figures for kernels with known costs, its bounds for operators, and errors of invalid input."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from c_argument import CArgument
from typer.testing import CliRunner, Result

from torch_backplane.audit.driver import LANGUAGE
from torch_backplane.interpreter.language import NoCompiler

try:
    LANGUAGE.compiler()
except NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

from torch_backplane.audit.bounds import FAMILIES, KNOWN, beyond
from torch_backplane.audit.cases import cases
from torch_backplane.audit.driver import AuditDevice, Launch
from torch_backplane.audit.model import figures, moved
from torch_backplane.audit.report import summary
from torch_backplane.cli import app
from torch_backplane.interpreter.device import Segment
from torch_backplane.kernels import CudaCpp
from torch_backplane.kernels.modelled import SHIPPED, read_target

NVIDIA = read_target("nvidia-ada")

# --- known kernels -----------------------------------------------------------------------------------------------


@functools.cache
def device(name: str = "nvidia-ada") -> AuditDevice:
    return AuditDevice(read_target(name))


def segment(values: Sequence[float], on: AuditDevice) -> Segment:
    made = on.allocate(4 * len(values))
    on.copy_in(made, 0, memoryview((ctypes.c_float * len(values))(*values)).cast("B"), None)
    return made


def floats(made: Segment, count: int, on: AuditDevice) -> list[float]:
    place = (ctypes.c_float * count)()
    on.copy_out(made, 0, memoryview(place).cast("B"), None)
    return list(place)


def launched(
    body: str, values: Sequence[float], results: int, items: int, group: int, width: int = 0, on: str = "nvidia-ada"
) -> tuple[Launch, list[float]]:
    """Runs a kernel with parameters `const float* in, float* out, const int n, const int width`.

    Returns its figures and the contents of `out`.
    """
    where = device(on)
    dialect = CudaCpp(where.modelled.target)
    words = "".join(f"#define {name} {meaning}\n" for name, meaning in dialect.words.items())
    parameters = ["const float* in", "float* out", "const int n", "const int width"]
    text = dialect.header(frozenset({torch.float32}), body) + words + dialect.kernel("known", parameters, group, [body])
    kernel: Any = where.compile(text, "known")
    given, out = segment(values, where), where.allocate(4 * results)
    numbers = [ctypes.c_int(len(values)), ctypes.c_int(width)]
    arguments = (CArgument * 4)(
        *(CArgument(one.address, 0, None, 0) for one in (given, out)),
        *(CArgument(None, 0, ctypes.addressof(one), 4) for one in numbers),
    )
    sizes = [(ctypes.c_uint64 * 3)(count, 1, 1) for count in (items, group)]
    launch = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint64,
    )(where.native_launcher.functions["launch"])  # fmt: skip
    with where.watched() as found:
        assert launch(None, where.native_kernel(kernel), *map(ctypes.addressof, sizes), arguments, 4) == 0
    (one,) = found()
    result = floats(out, results, where)
    where.free(given)
    where.free(out)
    return one, result


INDEX = "const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);"
SIDE = 256
MATRIX = [float(i % 1009) for i in range(SIDE * SIDE)]
TRANSPOSED = [MATRIX[x * SIDE + y] for y in range(SIDE) for x in range(SIDE)]


def test_copy_has_minimal_traffic() -> None:
    one, result = launched(f"{INDEX} out[i] = in[i];", MATRIX, len(MATRIX), len(MATRIX), 64)
    assert result == MATRIX
    assert (one.groups, one.group, one.sampled, one.chain) == (1024, 64, 16, 2)
    assert one.sectors == one.min_sectors
    assert moved(one, NVIDIA) == pytest.approx(8 * len(MATRIX))
    assert one.accesses == pytest.approx(2 * len(MATRIX))
    assert (one.local_bytes, one.barriers, one.local_accesses) == (0, 0, 0)


def test_vectorized_copy_uses_16_byte_accesses() -> None:
    dialect = CudaCpp(NVIDIA.target)
    load = dialect.load_lanes("lanes", torch.float32, "in", "i", 4)
    store = dialect.store_lanes("lanes", torch.float32, "out", "i", 4)
    one, result = launched(f"{INDEX} {load} {store}", MATRIX, len(MATRIX), len(MATRIX) // 4, 64)
    assert result == MATRIX
    assert one.chain == 2
    assert one.sectors == one.min_sectors
    assert moved(one, NVIDIA) == pytest.approx(8 * len(MATRIX))


def test_strided_read_moves_one_sector_per_element() -> None:
    one, result = launched(f"{INDEX} out[i] = in[i * 8];", MATRIX, len(MATRIX) // 8, len(MATRIX) // 8, 64)
    assert result == MATRIX[::8]
    # A warp's reads touch 32 sectors and its writes 4. At least 4 and 4 are needed.
    assert one.sectors / one.min_sectors == pytest.approx(36 / 8)
    assert moved(one, NVIDIA) == pytest.approx(32 * len(result) + 4 * len(result))


def test_transposed_copy_reads_eight_times_the_bytes() -> None:
    body = f"{INDEX} out[i] = in[i % width * width + i / width];"
    one, result = launched(body, MATRIX, len(MATRIX), len(MATRIX), 64, SIDE)
    assert result == TRANSPOSED
    assert one.sectors / one.min_sectors == pytest.approx((8 + 1) / 2)
    large = read_target("arm-mali-g610")  # its cache holds only a few of these matrices
    read, written = sorted(each.bytes for each in one.operands)[::-1]
    assert read == pytest.approx(8 * 4 * len(MATRIX))
    assert written == pytest.approx(4 * len(MATRIX))
    assert moved(one, large) == pytest.approx(8 * len(MATRIX))  # the matrix (256 KiB) fits in half of its cache


def tiled(padding: int) -> str:
    return f"""LOCAL float tile[32][{32 + padding}];
  const int tiles = width / 32, x = GROUP % tiles * 32, y = GROUP / tiles * 32, along = ITEM % 32, down = ITEM / 32;
  for (int row = down; row < 32; row += 8) tile[row][along] = in[(y + row) * width + x + along];
  BARRIER;
  for (int row = down; row < 32; row += 8) out[(x + row) * width + y + along] = tile[along][row];"""


@pytest.mark.parametrize(("padding", "turns"), [(0, (1 + 32) / 2), (1, 1)])
def test_tiled_transposed_copy_has_minimal_traffic(padding: int, turns: float) -> None:
    one, result = launched(tiled(padding), MATRIX, len(MATRIX), SIDE * SIDE // 4, 256, SIDE)
    assert result == TRANSPOSED
    assert one.sectors == one.min_sectors
    assert moved(one, NVIDIA) == pytest.approx(8 * len(MATRIX))
    assert one.local_turns / one.min_local_turns == pytest.approx(turns)  # without padding, 32 rows share a bank
    assert (one.barriers, one.divergent, one.local_bytes) == (1, 0, 4 * 32 * (32 + padding))
    assert one.chain == 16  # 4 elements, each read and written in device memory and in the tile


def test_chain_of_a_serial_sum() -> None:
    one, result = launched(f"float sum = 0; {INDEX} if (i == 0) {{ for (int k = 0; k < n; ++k) sum += in[k];"
                           " out[0] = sum; }", [1.0] * 4096, 1, 64, 64)  # fmt: skip
    assert result == [4096]
    assert one.chain == one.chain_global == 4097
    made = figures([one], NVIDIA, 4 * 4097)
    assert made.fill < 0.01
    assert made.seconds > 4097 * 1e-8


TREE = """LOCAL float part[256];
  part[ITEM] = in[GROUP * 256 + ITEM];
  BARRIER;
  for (int half_size = 128; half_size > 0; half_size >>= 1) {
    if (ITEM < half_size) part[ITEM] += part[ITEM + half_size];
    BARRIER;
  }
  if (ITEM == 0) out[GROUP] = part[0];"""


def test_chain_of_a_tree_reduction() -> None:
    one, result = launched(TREE, [1.0] * 4096, 16, 4096, 256)
    assert result == [256.0] * 16
    assert one.barriers == 9
    assert one.chain_global == 2
    assert one.chain == 2 + 3 * 8 + 2  # two reads and a write in each of 8 steps; and one write and one read
    assert one.local_turns == one.min_local_turns


SHUFFLED = """LOCAL float part[8];
  float sum = in[GROUP * 256 + ITEM];
  for (int half_size = 16; half_size > 0; half_size >>= 1) sum += subgroup_shuffle_down(sum, half_size);
  if (ITEM % 32 == 0) part[ITEM / 32] = sum;
  BARRIER;
  if (ITEM < 32) {  // only one subgroup
    sum = ITEM < 8 ? part[ITEM] : 0;
    for (int half_size = 4; half_size > 0; half_size >>= 1) sum += subgroup_shuffle_down(sum, half_size);
  }
  BARRIER;
  if (ITEM == 0) out[GROUP] = sum;"""


def test_shuffle_reduction_has_fewer_barriers_and_accesses() -> None:
    values = [float(i % 97) for i in range(4096)]
    sums = [sum(values[begin : begin + 256]) for begin in range(0, 4096, 256)]
    tree, by_tree = launched(TREE, values, 16, 4096, 256)
    one, result = launched(SHUFFLED, values, 16, 4096, 256)
    assert (result, by_tree) == (sums, sums)
    assert (one.barriers, one.divergent) == (2, 0)
    assert one.chain == 2 + 2  # a read and a write in device memory, and in local memory
    assert one.local_accesses == 16 * 2 * 8 < tree.local_accesses


def test_divergent_shuffle_is_counted() -> None:
    body = "float x = in[ITEM]; if (ITEM < 40) x = subgroup_shuffle_down(x, 1); BARRIER; out[ITEM] = x;"
    one, _ = launched(body, MATRIX, 64, 64, 64)
    assert one.divergent == 1
    one, result = launched(body.replace("40", "32"), MATRIX, 64, 64, 64)
    assert one.divergent == 0
    assert result == [*MATRIX[1:32], MATRIX[31], *MATRIX[32:64]]


def test_passes_over_long_rows_are_counted_completely() -> None:
    body = """float most = 0;
  for (int k = ITEM; k < n; k += 64) most = max(most, in[k]);
  LOCAL float part[64];
  part[ITEM] = most;
  BARRIER;
  for (int k = ITEM; k < n; k += 64) out[k] = in[k] - part[63];"""
    row = [1.0] * (1 << 20)
    one, result = launched(body, row, len(row), 64, 64)
    assert sum(result) == 0
    assert one.chain_global == 3 * len(row) // 64
    assert one.sectors / one.min_sectors == pytest.approx(1)
    assert sum(each.bytes for each in one.operands) == pytest.approx(3 * 4 * len(row), rel=0.01)
    assert [each.extent for each in one.operands] == [4 * len(row)] * 2


def test_divergent_barrier_is_counted() -> None:
    one, _ = launched(f"{INDEX} out[i] = 0; if (ITEM < 8) BARRIER;", [0.0] * 64, 64, 64, 64)
    assert one.divergent == 1


@pytest.mark.parametrize("on", ["nvidia-ada", "arm-mali-g610"])  # the matrix fits half of the caches of the first
def test_elements_in_place_are_read_and_written(on: str) -> None:
    modelled = read_target(on)
    body = f"{INDEX} ((float*)in)[i] = in[i] + 1; if (i == 0) out[0] = 0;"
    one, _ = launched(body, MATRIX, 1, len(MATRIX), 64, on=on)
    assert moved(one, modelled) == pytest.approx(2 * 4 * len(MATRIX), rel=0.01)
    # What a work item writes twice moves once while it is in the cache, also if it was read between.
    twice = f"{INDEX} volatile float* x = out; x[i] = in[i]; x[i] = x[i] + 1;"
    one, result = launched(twice, MATRIX, len(MATRIX), len(MATRIX), 64, on=on)
    assert result == [each + 1 for each in MATRIX]
    assert moved(one, modelled) == pytest.approx(2 * 4 * len(MATRIX), rel=0.01)


def test_shared_reads_are_moved_once() -> None:
    one, result = launched(f"{INDEX} out[i] = in[i % width];", MATRIX[:64], 1 << 16, 1 << 16, 64, 64)
    assert result[:64] == MATRIX[:64]
    assert moved(one, NVIDIA) == pytest.approx(4 * (1 << 16) + 4 * 64)


def test_atomic_swap_is_counted_and_executed() -> None:
    body = f"{INDEX} out[i] = atomic_swap(in, 0u, 0u) == 0u;"
    one, result = launched(body, [0.0] * 64, 64, 64, 64)
    assert result == [1.0] * 64
    assert one.chain == 2


@pytest.mark.parametrize("name", SHIPPED)
def test_warp_size_comes_from_the_target(name: str) -> None:
    warp = read_target(name).target.subgroup_size
    one, _ = launched(f"{INDEX} out[i] = in[i];", MATRIX[:1024], 1024, 1024, 64, on=name)
    assert one.requests == 2 * 1024 / warp


# --- operators ---------------------------------------------------------------------------------------------------

# Cases of each family, all within their bounds.
SAMPLE = (
    "^(add|gelu|where|cat of 4|sum of rows|argmax of rows|cumsum of rows|softmax of rows|layer norm of rows|sort"
    r"|nonzero|gather of rows|max_pool2d\(2\)|products of 64 × 64 matrices|normal numbers"
    "|a fused step of AdamW, 8 tensors|exp|step of a recurrent layer: GRU|Fourier transform of real rows of 1,000"
    "|few sums of many products: (usual|tile=32/whole)"
    "|compiled: (softmax with a mask and a scale|GELU with bias, and gradients))$"
)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")


def audit(*options: str) -> Result:
    return CliRunner().invoke(app, ["audit", *options])


@pytest.mark.slow
def test_operators_are_within_their_bounds(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    done = audit("--match", SAMPLE, "--bytes", "1MiB", "--json", str(file), "--markdown", str(tmp_path / "audit.md"))
    assert done.exit_code == 0, done.stdout + done.stderr
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["ok"]
    assert (content["wrong"], content["unknown"]) == ([], [])
    assert {one["family"] for one in content["results"]} == set(FAMILIES)
    assert len(content["results"]) == content["cases"] * len(SHIPPED)
    assert content["targets"] == [read_target(one).name for one in SHIPPED]
    of_add = next(one for one in content["results"] if one["case"] == "add")
    assert of_add["operators"] == ["add"]
    assert of_add["figures"]["min_bytes"] == 3 << 20
    assert of_add["figures"]["traffic"] == pytest.approx(1)
    of_graph = next(one for one in content["results"] if one["case"].startswith("compiled: softmax"))
    assert of_graph["operators"] == ["backplane::compiled_graph"]
    assert of_graph["figures"]["min_bytes"] == (2 << 20) + (1 << 18)  # a float32 operand, its mask, and the result
    assert of_graph["figures"]["launches"] == 1
    of_step = next(one for one in content["results"] if one["case"].startswith("step of"))
    assert of_step["figures"]["min_bytes"] == (12 << 18) + 2 * 3 * 4096  # both results are written but not read
    page = (tmp_path / "audit.md").read_text(encoding="utf-8")
    assert "| softmax of rows | 1 |" in page


def test_exceeded_bounds_are_reported_and_fail() -> None:
    done = audit("--match", "^every second element$", "--bytes", "4MiB", "--target", "arm-mali-g610")
    finding = next(line for line in done.stdout.splitlines() if "traffic 1.50, bound 1.25" in line)
    assert done.exit_code == (0 if finding.startswith("known: ") else 1)


def result_of(**figures: float) -> dict[str, Any]:
    plain = {"fill": 1.0, "chain": 2, "traffic": 1.0, "divergent": 0}
    content = {"case": "x", "family": "copies", "target": "t", "elements": 1 << 24, "bytes": 64 << 20}
    return content | {"figures": plain | figures, "wrong": "", "fallbacks": []}


@pytest.mark.parametrize(
    ("measure", "figures"),
    [
        ("fill", {"fill": 0.99}),
        ("chain", {"chain": 4 * 4096 + 1}),
        ("traffic", {"traffic": 1.26}),
        ("barriers", {"divergent": 1}),
    ],
)
def test_each_bound_is_checked(measure: str, figures: dict[str, float]) -> None:
    assert beyond(result_of(chain=4 * 4096, traffic=1.25)) == []
    (finding,) = beyond(result_of(**figures))
    assert finding.measure == measure
    content = summary([result_of(**figures)], ["t"], 64 << 20)
    assert not content["ok"]
    assert content["unknown"][0].startswith(f"x (t): {measure} ")


def test_known_findings_name_existing_cases_and_measures() -> None:
    for one in KNOWN:
        assert one.measure in ("fill", "chain", "traffic", "fused", "barriers", "fallbacks")
        assert any(re.fullmatch(one.match, title) for title in cases()), one.match
        assert one.reason


def test_cases_cover_all_families() -> None:
    assert {one.family for one in cases().values()} == set(FAMILIES)
    assert len(cases()) > 400


def test_crashing_case_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import os, sys, threading\n"
        "if any(one.endswith('request.json') for one in sys.orig_argv):\n"
        "    from torch_backplane.audit.workloads import WORKLOADS\n"
        "    next(one for one in WORKLOADS if one.title == 'add').make = lambda device, n: os._exit(7)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    options = ("--match", "^(add|where)$", "--bytes", "64KiB", "--target", "intel-arc")
    monkeypatch.setenv("PYTHONPATH", path)
    done = audit(*options)
    assert done.exit_code == 1
    assert "wrong: add (): the process ended: (status 7)" in done.stdout
    assert "2 cases on 1 targets" in done.stdout


# --- bad input ---------------------------------------------------------------------------------------------------


def test_list_prints_cases_without_running_them() -> None:
    done = audit("--list", "--match", "^soft")
    assert done.exit_code == 0
    assert "rows: softmax of rows\n" in done.stdout
    assert "formulas: softplus\n" in done.stdout


def absurd(folder: Path, change: Any) -> str:
    content = json.loads(SHIPPED["amd-rdna3"].read_text(encoding="utf-8"))
    change(content)
    file = folder / "mine.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "nvidia-adda"], "the target nvidia-adda cannot be read: No such file or directory; the targets"),
        (["--target", "nvidia-ada", "--target", "nvidia-ada"], "two targets have the same name"),
        (["--match", "("], "malformed --match '('"),
        (["--match", "^no such case$"], "no case of the audit matches '^no such case$'"),
        (["--bytes", "many"], "--bytes='many' is not a size"),
        (["--bytes", "1KiB"], "--bytes 1KiB is less than 64 KiB"),
        (["--json", "/no/such/folder/audit.json"], "cannot write /no/such/folder/audit.json"),
        (["--markdown", "/no/such/folder/audit.md"], "cannot write /no/such/folder/audit.md"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], message: str) -> None:
    done = audit(*options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["figures"].pop("compute_units"), "figures lacks compute_units"),
        (lambda content: content["figures"].update(subgroup_size=33), "Target.subgroup_size is 33"),
        (lambda content: content.pop("bytes_per_second"), "bytes_per_second is None"),
        (lambda content: content["figures"].update(simt=False), "is no GPU"),
    ],
)
def test_invalid_targets_are_rejected(change: Any, message: str, tmp_path: Path) -> None:
    done = audit("--target", absurd(tmp_path, change))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("no-such-compiler", "CXX='no-such-compiler' is not found"),
        ("false", "kernels need a compiler with -fsanitize=thread"),
    ],
)
def test_missing_compiler_is_reported(named: str, message: str) -> None:
    command = [sys.executable, "-m", "torch_backplane", "audit", "--match", "^add$"]
    done = subprocess.run(command, env=os.environ | {"CXX": named}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
