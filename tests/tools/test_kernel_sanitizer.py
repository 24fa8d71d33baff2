"""Tests the kernel sanitizer: findings and messages for faulty kernels, none for correct ones, and full coverage."""

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

import numpy as np
import paths
import pytest
import torch
from c_argument import CArgument
from typer.testing import CliRunner

from torch_backplane import sanitizer
from torch_backplane.cli import app
from torch_backplane.interpreter import opencl_builtins
from torch_backplane.interpreter.language import NoCompiler, translated
from torch_backplane.sanitizer.device import LANGUAGE, interpreter

try:
    LANGUAGE.compiler()
except NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)



# --- test kernels, launched as the runtime launches kernels


@functools.cache
def device() -> sanitizer.SanitizerDevice:
    return sanitizer.SanitizerDevice()


def kernel(body: str, item: str = "float") -> str:
    """Returns a one-dimensional kernel with parameters `const ITEM* in, ITEM* out, const uint n`."""
    return f"""
kernel void bp_known(global const {item}* in_base, const ulong in_offset, global {item}* out_base,
                     const ulong out_offset, const uint n) {{
  global const {item}* in = (global const {item}*)((global const char*)in_base + in_offset);
  global {item}* out = (global {item}*)((global char*)out_base + out_offset);
  const int i = (int)get_global_id(0), at = (int)get_local_id(0), group = (int)get_group_id(0);
  {body}
}}
"""


def launched(
    text: str, values: Sequence[float], results: int, items: int, group: int = 8, *, first: int = 0
) -> tuple[list[sanitizer.Finding], list[float]]:
    """Launches a kernel and returns the findings and the results. `in` begins `first` elements into its memory."""
    where = device()
    built = where.compile(text, "bp_known")
    given = np.asarray(values, dtype=np.float32)
    # Allocations of exactly the needed size.
    source, out = where.allocate(given.nbytes), where.allocate(4 * results)
    where.copy_in(source, 0, memoryview(given).cast("B"), None)
    count = ctypes.c_uint(len(values) - first)
    arguments = (CArgument * 3)(
        CArgument(source.address, 4 * first, None, 0),
        CArgument(out.address, 0, None, 0),
        CArgument(None, 0, ctypes.addressof(count), 4),
    )
    sizes = [(ctypes.c_uint64 * 3)(one, 1, 1) for one in (items, group)]
    launch = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint64,
    )(where.native_launcher.functions["launch"])  # fmt: skip
    sanitizer.take()
    status = launch(None, where.native_kernel(built), *map(ctypes.addressof, sizes), arguments, 3)
    found = sanitizer.take()
    assert status == bool(found)
    there = np.zeros(results, dtype=np.float32)
    where.copy_out(out, 0, memoryview(there).cast("B"), None)
    where.free(source)
    where.free(out)
    return found, there.tolist()


VALUES = [float(i) for i in range(32)]


def only(found: list[sanitizer.Finding]) -> sanitizer.Finding:
    (one,) = found
    return one


def test_correct_kernel_has_no_findings() -> None:
    found, results = launched(kernel("out[i] = 2 * in[i];"), VALUES, 32, 32)
    assert (found, results) == ([], [2 * one for one in VALUES])


def test_read_past_the_end_is_found() -> None:
    found, results = launched(kernel("out[i] = in[i + 1];"), VALUES, 32, 32)
    one = only(found)
    assert (one.kind, one.kernel, one.argument, one.index, one.count) == ("out of bounds", "bp_known", "in", 32, 1)
    assert str(one) == (
        "bp_known: out of bounds: work item 7 of group 3 reads 4 bytes at index 32 of in, "
        "which has 32 elements of 4 bytes from there on"
    )
    assert results[:31] == VALUES[1:]  # the other work items continued


def test_read_used_only_in_a_condition_is_found() -> None:
    found, _ = launched(kernel("if (in[n + 3] > 0.f) out[i] = 1.f;"), VALUES, 32, 32)
    assert (only(found).kind, only(found).index, only(found).count) == ("out of bounds", 35, 32)


def test_write_before_the_start_is_found() -> None:
    one = only(launched(kernel("out[i - 1] = in[i];"), VALUES, 32, 32)[0])
    assert (one.kind, one.argument, one.index) == ("out of bounds", "out", -1)
    assert "work item 0 of group 0 writes 4 bytes at index -1 of out" in str(one)


def test_bounds_are_those_of_the_memory_not_of_the_argument() -> None:
    assert launched(kernel("out[i] = in[i - 4];"), VALUES, 8, 8, first=4)[0] == []
    one = only(launched(kernel("out[i] = in[i - 5];"), VALUES, 8, 8, first=4)[0])
    assert (one.argument, one.index) == ("in", -5)
    assert "28 elements of 4 bytes from there on and 16 bytes before" in str(one)


def test_wild_addresses_are_found_without_a_crash() -> None:
    one = only(launched(kernel("out[i] = in[(long)i + (1l << 33)];"), VALUES, 8, 8)[0])
    assert (one.kind, one.argument) == ("out of bounds", "")
    one = only(launched(kernel("out[i] = ((global const float*)(ulong)(i * 4))[2];"), VALUES, 8, 8)[0])
    assert (one.kind, one.index) == ("out of bounds", 8)
    assert "at 0x8, which is in the memory of no argument" in str(one)


def test_vector_access_across_the_end_is_found() -> None:
    body = "vstore4(vload4(i, in) + 1.f, i, out);"
    assert launched(kernel(body), VALUES, 32, 8) == ([], [one + 1 for one in VALUES])
    one = only(launched(kernel(body), VALUES[:31], 32, 8)[0])
    assert (one.argument, one.index) == ("in", 28)
    assert "reads 16 bytes" in str(one)
    one = only(launched(kernel("vstore16(vload16(i, in), i, out);"), VALUES, 31, 2, 2)[0])
    assert (one.argument, one.index) == ("out", 16)
    assert "writes 64 bytes" in str(one)


def test_non_temporal_stores_are_checked() -> None:
    body = """__builtin_nontemporal_store((float4)(in[i]), (global float4*)(out + 4 * i));"""
    assert launched(kernel(body), VALUES[:8], 32, 8)[0] == []
    assert only(launched(kernel(body), VALUES[:8], 31, 8)[0]).argument == "out"


def test_two_writes_in_one_group_are_a_race() -> None:
    one = only(launched(kernel("out[i / 2] = in[i];"), VALUES, 32, 32)[0])
    assert (one.kind, one.argument, one.index, one.count) == ("race", "out", 0, 16)
    assert str(one).startswith(
        "bp_known: race: work item 1 of group 0 writes and work item 0 of group 0 writes index 0 of out, "
        "and no barrier orders them"
    )


def test_read_and_write_of_two_groups_are_a_race_in_any_order() -> None:
    one = only(launched(kernel("out[i] = i < 8 ? in[i] : out[i - 8];"), VALUES, 32, 32)[0])
    assert (one.kind, one.argument, one.index) == ("race", "out", 0)
    assert "work item 0 of group 1 reads and work item 0 of group 0 writes index 0 of out" in str(one)
    one = only(launched(kernel("out[i] = i + 8 < 32 ? out[i + 8] : 0;"), VALUES, 32, 32)[0])
    assert "work item 0 of group 1 writes and work item 0 of group 0 reads index 8 of out" in str(one)


def test_reads_of_several_groups_are_remembered() -> None:
    reads = "float x = in[0]; if (group == 0) x += out[9]; if (group == 1 && at != 3) x += out[9];"
    found = launched(kernel(f"{reads} if (i == 11) out[9] = x; else if (i != 9) out[i] = x;"), VALUES, 32, 16)[0]
    assert (only(found).kind, only(found).index) == ("race", 9)


GLOBAL_EXCHANGE = "out[i] = in[i]; {barrier} const float x = out[i ^ 1]; {barrier} out[i] = x;"


def test_exchange_through_device_memory_needs_a_global_barrier() -> None:
    right = GLOBAL_EXCHANGE.format(barrier="barrier(CLK_GLOBAL_MEM_FENCE);")
    found, results = launched(kernel(right), VALUES, 32, 32)
    assert (found, results) == ([], [VALUES[i ^ 1] for i in range(32)])
    for wrong in ("", "barrier(CLK_LOCAL_MEM_FENCE);"):
        found = launched(kernel(GLOBAL_EXCHANGE.format(barrier=wrong)), VALUES, 32, 32)[0]
        assert [one.kind for one in found] == ["race"]


LOCAL_EXCHANGE = "local float part[8]; part[at] = in[i]; {barrier} out[i] = part[7 - at];"


def test_missing_local_memory_barrier_is_found() -> None:
    right = LOCAL_EXCHANGE.format(barrier="barrier(CLK_LOCAL_MEM_FENCE);")
    found, results = launched(kernel(right), VALUES, 32, 32)
    assert (found, results) == ([], [VALUES[i // 8 * 8 + 7 - i % 8] for i in range(32)])
    one = only(launched(kernel(LOCAL_EXCHANGE.format(barrier="")), VALUES, 32, 32)[0])
    assert (one.kind, one.argument) == ("race", "")
    assert "of local memory, and no barrier orders them" in str(one)


def test_missing_barrier_in_a_tree_reduction_is_found() -> None:
    tree = """local float part[8]; part[at] = in[i]; barrier(CLK_LOCAL_MEM_FENCE);
  for (int half_size = 4; half_size > 0; half_size >>= 1) {
    if (at < half_size) part[at] += part[at + half_size];
    BARRIER;
  }
  if (at == 0) out[group] = part[0];"""
    right = kernel(tree.replace("BARRIER", "barrier(CLK_LOCAL_MEM_FENCE)"))
    assert launched(right, VALUES, 4, 32) == ([], [28.0, 92.0, 156.0, 220.0])
    assert only(launched(kernel(tree.replace("BARRIER", "")), VALUES, 4, 32)[0]).kind == "race"


def test_divergent_barrier_is_found() -> None:
    one = only(launched(kernel("out[i] = in[i]; if (at < 5) barrier(CLK_LOCAL_MEM_FENCE);"), VALUES, 32, 32)[0])
    assert one.kind == "barrier"
    assert one.count == 4


def test_atomic_swaps_race_only_with_plain_writes() -> None:
    add = """uint old = 0, found;
  while (true) {
    found = atomic_cmpxchg((volatile global uint*)out, old, as_uint(as_float(old) + in[i]));
    if (found == old) break;
    old = found;
  }"""
    found, results = launched(kernel(add), VALUES, 1, 32)
    assert (found, results) == ([], [sum(VALUES)])
    one = only(launched(kernel(f"{add} if (i == 9) out[0] = 0;"), VALUES, 1, 32)[0])
    assert "work item 1 of group 1 writes and work item 7 of group 0 swaps index 0 of out" in str(one)
    one = only(launched(kernel("atomic_cmpxchg((volatile global uint*)(out + i), 0u, 1u);"), VALUES, 31, 32)[0])
    assert (one.kind, one.argument, one.index) == ("out of bounds", "out", 31)


def test_unordered_stores_race_only_with_other_accesses() -> None:
    found, results = launched(kernel("ANY_MAY_STAY(out[i % 2] = in[i]);"), VALUES, 2, 32)
    assert found == []
    assert results[0] in VALUES[::2]
    assert only(launched(kernel("out[i % 2] = in[i];"), VALUES, 2, 32)[0]).kind == "race"
    mixed = "ANY_MAY_STAY(out[0] = in[i]); if (i == 9) out[0] = 1;"
    assert only(launched(kernel(mixed), VALUES, 2, 32)[0]).kind == "race"
    one = only(launched(kernel("ANY_MAY_STAY(out[i] = in[i]); if (i < 9) out[i + 1] = 1;"), VALUES, 32, 32, 4)[0])
    assert one.kind == "race"
    one = only(launched(kernel("ANY_MAY_STAY(out[2] = in[i]);"), VALUES, 2, 32)[0])
    assert (one.kind, one.index, one.count) == ("out of bounds", 2, 32)


def test_accesses_are_checked_by_byte() -> None:
    body = "((global uchar*)out)[i] = (uchar)in[i];"
    assert launched(kernel(body), VALUES, 8, 32)[0] == []
    one = only(launched(kernel(body.replace("[i] =", "[i + 1] =")), VALUES, 8, 32)[0])
    assert (one.kind, one.index) == ("out of bounds", 8)
    one = only(launched(kernel("((global ushort*)((global uchar*)out + i))[0] = 1;"), VALUES, 9, 32)[0])
    assert one.kind == "race"


def test_helper_functions_and_private_arrays() -> None:
    body = "float own[9]; for (int k = 0; k < 9; ++k) own[k] = in[(i + k) % 32]; out[i] = last(own, n % 9);"
    helper = "static float last(const float* of, const uint at) { return of[at]; }\n"
    assert launched(helper + kernel(body), VALUES, 32, 32)[0] == []
    helper = "static float last(global const float* of, const uint at) { return of[at]; }\n"
    one = only(launched(helper + kernel("out[i] = last(in, i + n);"), VALUES, 32, 32)[0])
    assert (one.kind, one.argument, one.index, one.count) == ("out of bounds", "in", 32, 32)


# --- coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("out[i] = ((global const float8*)in)[i].s0;", "cannot instrument accesses through «global const float8\\*»"),
        ("out[i] = ((global const double4*)in)[i].s0;", "cannot instrument accesses through"),
        ("atomic_add((volatile global int*)out, 1);", "undefined reference.*atomic_add"),
        ("out[i] = fract(in[i], out);", "undefined reference.*fract"),
        ("prefetch(in, 4);", "undefined reference.*prefetch"),
        ("out[i] = vload_half(i, (global const half*)in);", "error"),
    ],
)
def test_accesses_that_cannot_be_checked_are_rejected(body: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        device().compile(kernel(body), "bp_known")


def test_unsupported_kernel_parameters_are_rejected() -> None:
    with pytest.raises(RuntimeError, match="not a global pointer followed by a ulong offset"):
        translated(LANGUAGE, "kernel void bp_x(global float* a) {}", "bp_x")
    with pytest.raises(RuntimeError, match="finds no kernel «void bp_y"):
        translated(LANGUAGE, "kernel void bp_x(const uint a) {}", "bp_y")


def test_built_in_functions_match_pytorch() -> None:
    body = """float8 x = (float8)(in[i]); x = exp(x) + fmin(x, (float8)(3)); const int8 whole = convert_int8(x);
  double2 wide = sqrt((double2)(in[i]));
  ushort4 halves; vstore_half4_rte(x.lo, 0, (half*)&halves); const float4 back = vload_half4(0, (const half*)&halves);
  out[i] = x.s7; out[32 + i] = (float)whole.s3 + (float)wide.y + (isnan(x).s0 != 0); out[64 + i] = back.s2;"""
    values = [i / 8 for i in range(32)]
    found, results = launched(kernel(body), values, 96, 32)
    x = torch.tensor(values)
    wanted = x.exp() + x.clamp(max=3)
    assert found == []
    assert torch.allclose(torch.tensor(results[:32]), wanted)
    assert torch.allclose(torch.tensor(results[32:64]), wanted.int() + x.sqrt())
    assert results[64:] == wanted.half().float().tolist()


def test_float16_conversions_match_pytorch() -> None:
    functions = interpreter().functions
    to_float, to_half = functions.interpreter_from_half, functions.interpreter_to_half
    to_float.restype, to_float.argtypes = ctypes.c_float, [ctypes.c_ushort]
    to_half.restype, to_half.argtypes = ctypes.c_ushort, [ctypes.c_float]
    bits = torch.arange(0, 1 << 16, 7).to(torch.uint16)
    halves = bits.view(torch.float16)
    found = torch.tensor([to_float(one) for one in bits.tolist()])
    assert torch.equal(found.nan_to_num(), halves.float().nan_to_num())
    assert [to_half(one) for one in found[~found.isnan()].tolist()] == bits[~halves.isnan()].tolist()
    between = torch.tensor([1e-8, 3e-8, 5.96e-8, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 1e9, 6.1e-5])
    assert [to_half(one) for one in between.tolist()] == between.half().view(torch.uint16).tolist()


def test_mangled_names_of_built_in_functions_exist() -> None:
    names = {name for name, *_ in opencl_builtins._scalar_functions()}
    assert {"exp", "fma", "mul_hi", "convert_uchar", "isnan"} <= names
    assert interpreter().functions._Z3expDv16_f
    assert interpreter().functions._Z6mul_hijj


# --- programs in separate processes ----------------------------------------------------------------------------------


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_")}
    cache = {name: value for name, value in os.environ.items() if name == "TORCH_BACKPLANE_CACHE_DIR"}
    environment = {**kept, **cache, "TORCH_BACKPLANE_SANITIZE_KERNELS": "1", **variables}
    command = [sys.executable, "-W", "error", "-c", program]
    folder = paths.TESTS / "opencl"
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=folder)


FAMILIES = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from torch.utils._pytree import tree_leaves
from test_small_kernels import KERNELS, TOLERANCES
from torch_backplane import sanitizer

torch.manual_seed(0)
said = {}
for name, (function, arguments) in KERNELS.items():
    given = arguments()
    with sanitizer.collected():
        before = sanitizer.counts()[0]
        found = [one.cpu() for one in tree_leaves(function(*(one.to("bp") for one in given)))]
    right = all(
        torch.allclose(one, other, rtol=TOLERANCES[name], atol=TOLERANCES[name])
        for one, other in zip(found, tree_leaves(function(*given)))
    )
    said[name] = [right, sanitizer.counts()[0] - before, [str(one) for one in sanitizer.take()]]
print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["", "nvidia-ada"])
def test_kernels_of_every_family_have_no_findings(target: str) -> None:
    ended = run(FAMILIES, TORCH_BACKPLANE_TARGET=target)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads(ended.stdout)
    assert len(said) > 35
    assert {name: found for name, (right, _, found) in said.items() if found or not right} == {}
    without = ["attention", "attention, float16"] if target == "" else []  # its kernels are for SIMT targets
    assert [name for name, (_, launches, _) in said.items() if launches == 0] == without


def test_missing_clang_is_reported() -> None:
    ended = run('import torch; torch.empty(1, device="bp")', PATH="")
    assert ended.returncode == 1
    words = r"SettingError: TORCH_BACKPLANE_SANITIZE_KERNELS=1: .* needs clang to compile OpenCL C: install clang"
    assert re.search(words, ended.stderr), ended.stderr[-2000:]


def test_sanitizer_is_the_only_device_and_caches_no_memory() -> None:
    program = """
import torch
x = torch.ones(1000, device="bp")
x = None
print(torch.bp.device_count(), torch.bp.get_device_name(0), torch.bp.memory_reserved())
"""
    ended = run(program, TORCH_BACKPLANE_DRIVERS="host", TORCH_BACKPLANE_HOST_DEVICES="3")
    assert ended.stdout == "1 kernel sanitizer 0\n", ended.stderr[-2000:]


# Makes every kernel faulty in one way; prints the names of all kernels, and of those with findings.
ALL_WRONG = """
import json, re, warnings
warnings.simplefilter("ignore")
import torch
from test_small_kernels import KERNELS
from torch_backplane import sanitizer
from torch_backplane.sanitizer import device
from torch_backplane.sanitizer.device import Extent, Resolve

kernels, found = set(), set()
build, requested = device.SanitizerDevice.compile, device._requested
{way}
torch.manual_seed(0)
for function, arguments in KERNELS.values():
    given = [one.to("bp") for one in arguments()]
    with sanitizer.collected():
        function(*given)
        torch.bp.synchronize()
    found |= {{one.kernel for one in sanitizer.take()}}
print(json.dumps([sorted(kernels), sorted(found)]))
"""

WITHOUT_BARRIERS = """
def compiled(self, text, entry):
    built = build(self, text, entry)
    if built.native.has_barriers:
        kernels.add(entry)
        built = build(self, re.sub(r"#define BARRIER .*", "#define BARRIER", text), entry)
    return built

device.SanitizerDevice.compile = compiled
"""

LESS_MEMORY = """
def compiled(self, text, entry):
    kernels.add(entry)
    return build(self, text, entry)

def less(address, extent):
    known = requested(address, extent)
    if known:
        extent[0] = Extent(extent[0].begin, extent[0].bytes - 1, extent[0].fixed)
    return known

device.SanitizerDevice.compile = compiled
device.RESOLVE = Resolve(less)
"""


@pytest.mark.parametrize(
    ("way", "target", "least"),
    [(WITHOUT_BARRIERS, "nvidia-ada", 20), (LESS_MEMORY, "nvidia-ada", 45), (LESS_MEMORY, "", 45)],
    ids=["no barrier", "a byte less memory", "a byte less memory, processors"],
)
@pytest.mark.slow
def test_faults_are_found_in_every_kernel(way: str, target: str, least: int) -> None:
    ended = run(ALL_WRONG.format(way=way), TORCH_BACKPLANE_TARGET=target)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels, found = json.loads(ended.stdout)
    assert len(kernels) >= least
    assert set(kernels) - set(found) == set()


IN_ONE_PLACE = """
import torch
from torch_backplane.sanitizer import device

kernels, build = [], device.SanitizerDevice.compile
device.SanitizerDevice.compile = lambda self, text, entry: kernels.append(entry) or build(self, text, entry)
places = torch.tensor([1, 0, 1, 1], device="bp")
for dtype in (torch.float32, torch.complex64):
    values = torch.tensor([1, 2, 3, 4], device="bp").to(dtype) * (1 if dtype == torch.float32 else 1 + 1j)
    result = torch.zeros(3, dtype=dtype, device="bp")
    result[places] = values
    assert result[0].item() == values[1].item() and result[1].item() in values[[0, 2, 3]].tolist(), result
print(*(name for name in kernels if "indexed_assign" in name))
"""


def test_duplicate_indices_do_not_mix_complex_parts() -> None:
    """The kernel writes real and imaginary parts separately, so unordered writes could mix the parts of two numbers."""
    ended = run(IN_ONE_PLACE, TORCH_BACKPLANE_TARGET="nvidia-ada")
    assert ended.returncode == 0, ended.stderr[-3000:]
    of_floats, of_complex = ended.stdout.split()
    assert of_floats.endswith("_anyhow")
    assert not of_complex.endswith("_anyhow")


TOO_FAR = """
import sys
sys.path.insert(0, "../support")
import conformance_too_far
import torch
from torch_backplane.sanitizer import KernelSanitizerError

x = torch.ones(70, device="bp")
right = (x + 1).sum().item()
try:
    wrong = x[::2] + 1
    torch.bp.synchronize()
except KernelSanitizerError as error:
    print(right, error)
"""


def test_out_of_bounds_operator_kernel_raises_an_error() -> None:
    ended = run(TOO_FAR, TORCH_BACKPLANE_TARGET="nvidia-ada", TORCH_BACKPLANE_LAUNCH_BLOCKING="1")
    assert ended.returncode == 0, ended.stderr[-3000:]
    words = r"^140.0 .*bp_add: out of bounds: work item \d+ of group \d+ reads 4 bytes at index 70 of in0, which has"
    assert re.search(words, ended.stdout, re.DOTALL), ended.stdout


def conformance(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Runs `conformance --sanitize`; returns the exit code, the report, and the output."""
    file = folder / "report.json"
    path = os.pathsep.join([str(paths.SUPPORT), os.environ.get("PYTHONPATH", "")])
    shown = CliRunner(env={"PYTHONPATH": path}).invoke(
        app, ["conformance", "--sanitize", "--jobs", "1", "--json", str(file), *options]
    )
    return shown.exit_code, json.loads(file.read_text(encoding="utf-8")), shown.output


def test_conformance_counts_launches_of_correct_kernels(tmp_path: Path) -> None:
    match = "^(cumsum|index_put|nn.functional.layer_norm|mm)$"
    code, report, shown = conformance(tmp_path, "--match", match, "--samples", "2", "--grad")
    assert code == 0, shown
    totals = report["totals"]
    assert totals["entries"] == 4
    assert totals["launches"] >= 8
    assert totals["accesses"] > totals["launches"]
    assert (totals["out_of_bounds"], totals["race"], totals["barrier"]) == (0, 0, 0)
    assert all(entry["launches"] > 0 for entry in report["entries"])
    assert f"{totals['launches']:,} launches sanitized" in " ".join(shown.split())


def test_conformance_fails_entries_with_out_of_bounds_kernels(tmp_path: Path) -> None:
    options = ("--database", "conformance_too_far:OPS", "--target", "nvidia-ada", "--samples", "4")
    code, report, shown = conformance(tmp_path, *options)
    assert code == 1
    (entry,) = report["entries"]
    found = [one for one in entry["findings"] if one["kind"] == "out of bounds"]
    assert found, shown
    assert found[0]["variant"].endswith(", bp_add")
    assert found[0]["sample"].startswith("sample ")
    assert "bp_add: out of bounds: work item" in found[0]["message"]
    assert report["totals"]["out_of_bounds"] >= len(found)
    assert entry["status"] == "failed"


@pytest.mark.parametrize("option", [["--driver", "opencl"], ["--numbers"], ["--accuracy"]])
def test_incompatible_options_are_rejected(option: list[str]) -> None:
    shown = CliRunner().invoke(app, ["conformance", "--sanitize", *option])
    assert shown.exit_code == 2
    assert "sanitize" in shown.output
