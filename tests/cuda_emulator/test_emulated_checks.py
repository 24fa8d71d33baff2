"""Tests CUDA_EMULATOR_CHECKS: bounds, races and barriers of kernels, with the names of NVIDIA's compute-sanitizer."""

from __future__ import annotations

import ctypes
import json
import os
import re
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import driver_api as api
import pytest

COUNT = 32  # of the elements of `in` and `out`


class Case(NamedTuple):
    """A kernel with the parameters `const float* in, float* out, int n`.

    Args:
        body: its body.
        message: a regular expression for the report; empty if the kernel is correct.
        error: the status of the launch.
        block: the threads of a block; all blocks have COUNT threads together.
        shared: bytes of dynamic shared memory.
        before: what the source has before the kernel.
    """

    body: str
    message: str = ""
    error: int = 0
    block: int = 8
    shared: int = 0
    before: str = ""


_LINES = "const int i = blockIdx.x * blockDim.x + threadIdx.x, at = threadIdx.x;"


def _out_of_bounds(body: str, message: str, **given: object) -> Case:
    return Case(body, f"memcheck: Invalid {message}", api.ILLEGAL_ADDRESS, **given)  # type: ignore[arg-type]


def _race(body: str, message: str, **given: object) -> Case:
    return Case(body, f"racecheck: {message}", api.LAUNCH_FAILED, **given)  # type: ignore[arg-type]


_THREAD = r"thread \(\d+,0,0\) in block \(\d+,0,0\)"
_SYNC = "synccheck: Divergent thread\\(s\\) in block: kernel wrong: "
_EXCHANGE = "__shared__ float part[8]; part[at] = in[i]; {barrier} out[i] = part[7 - at];"
_WARP = "__shared__ float part[32]; part[at] = in[i]; {barrier} out[i] = part[at ^ 1];"
_TREE = """__shared__ float part[8]; part[at] = in[i]; __syncthreads();
for (int half = 4; half > 0; half >>= 1) {{ if (at < half) part[at] += part[at + half]; {barrier} }}
if (at == 0) out[blockIdx.x] = part[0];"""
_TILES = """__shared__ float a[4][8], b[8][4];
float sum = 0;
for (int tile = 0; tile < 2; ++tile) {{
  a[at / 8][at % 8] = in[at]; b[at / 4][at % 4] = in[31 - at]; __syncthreads();
  for (int k = 0; k < 8; ++k) sum += a[at / 8][k] * b[k][at % 4];
  {barrier}
}}
out[at] = sum;"""
_SCAN = """__shared__ float part[2][8];
int now = 0;
part[0][at] = in[i]; __syncthreads();
for (int by = 1; by < 8; by *= 2) {{
  part[1 - now][at] = part[now][at] + (at >= by ? part[now][at - by] : 0); {barrier} now = 1 - now;
}}
out[i] = part[now][at];"""

WRONG = {
    "read past the end": _out_of_bounds(
        "out[i] = in[i + 1];",
        r"__global__ read of size 4: kernel wrong: thread \(7,0,0\) in block \(3,0,0\) reads index 32 of in, which has "
        "32 elements of 4 bytes from there on$",
    ),
    "write past the end": _out_of_bounds(
        "out[i + n] = in[i];",
        r"__global__ write of size 4: kernel wrong: thread \(0,0,0\) in block \(0,0,0\) writes index 32 of out, .*"
        r"\(the first of 8 of this launch\)$",
    ),
    "write before the beginning": _out_of_bounds(
        "out[i - 1] = in[i];", r"__global__ write .* thread \(0,0,0\) in block \(0,0,0\) writes index -1 of out, "
    ),
    "one byte past the end": _out_of_bounds(
        "((char*)out)[i + 97] = 1;", "__global__ write of size 1: .*thread .7,0,0. in block .3,0,0. writes index 32 of"
    ),
    "vector past the end": _out_of_bounds(
        "((float4*)out)[i / 4 + 1] = make_float4(1, 2, 3, 4);", "__global__ write of size 4: .* index 32 of out",
        block=32,
    ),
    "atomic past the end": _out_of_bounds(
        "atomicAdd(out + i + 4, 1.0f);", "__global__ atomic of size 4: .* atomically updates index 32 of out"
    ),
    "no pointer": _out_of_bounds("*(float*)8 = 1;", "__global__ write of size 4: .* address 0x8, which is in no alloc"),
    "variable of the module": _out_of_bounds(
        "table[i] = 1;", "__global__ write of size 4: .* index 64 of table",
        before='extern "C" { __device__ int table[16]; }',
    ),
    "misaligned": Case(
        "*(int*)((char*)out + 2) = 1;", f"memcheck: Misaligned access of size 4: kernel wrong: {_THREAD}",
        api.MISALIGNED_ADDRESS,
    ),
    "static shared memory": _out_of_bounds(
        "__shared__ float part[8]; part[at + n / 32] = 1; __syncthreads(); out[i] = part[at];",
        r"__shared__ write of size 4: kernel wrong: thread \(7,0,0\) .* writes byte 32 of shared memory, which has 32",
    ),
    "before static shared memory": _out_of_bounds(
        "__shared__ float part[8]; part[at - n / 32] = 1; __syncthreads(); out[i] = part[at];",
        r"__shared__ write of size 4: kernel wrong: thread \(0,0,0\) .* writes byte -4 of shared memory",
    ),
    "dynamic shared memory": _out_of_bounds(
        "extern __shared__ float part[]; part[at + n / 32] = in[i]; __syncthreads(); out[i] = part[at];",
        "__shared__ write of size 4: .* writes byte 32 of shared memory, which has 32 bytes", shared=32,
    ),
    "two writes in a block": _race(
        "out[i / 2] = in[i];",
        r"WAW hazard: kernel wrong: thread \(1,0,0\) in block \(0,0,0\) writes and thread \(0,0,0\) in block \(0,0,0\) "
        r"writes index 0 of out, and no barrier orders them \(the first of 16 of this launch\)$",
    ),
    "read of another block's result": _race(
        "out[i] = i < 8 ? in[i] : out[i - 8];",
        r"RAW hazard: .*thread .0,0,0. in block .1,0,0. reads and thread .0,0,0. in block .0,0,0. writes index 0 of",
    ),
    "write to what another block has read": _race("out[i] = i < 24 ? out[i + 8] : 0;", "WAR hazard: .* index 8 of out"),
    "barrier between blocks": _race("out[i] = in[i]; __syncthreads(); out[31 - i] = 1;", "WAW hazard: .* of out"),
    "variable of the module, between blocks": _race(
        "if (at == 0) counter += 1;", "RAW hazard: .* index 0 of counter",
        before='extern "C" { __device__ int counter; }',
    ),
    "no barrier in shared memory": _race(
        _EXCHANGE.format(barrier=""),
        rf"WAR hazard: kernel wrong: {_THREAD} writes and {_THREAD} reads byte 16 of shared memory",
    ),
    "no barrier in dynamic shared memory": _race(
        _EXCHANGE.format(barrier="").replace("__shared__ float part[8]", "extern __shared__ float part[]"),
        "(RAW|WAR) hazard: .* of shared memory", shared=32,
    ),
    "no barrier in a reduction": _race(_TREE.format(barrier=""), "(RAW|WAR) hazard: .* of shared memory"),
    "no barrier after a tile": _race(_TILES.format(barrier=""), "(RAW|WAR) hazard: .* of shared memory", block=32),
    "no barrier in a scan": _race(_SCAN.format(barrier=""), "(RAW|WAR) hazard: .* of shared memory"),
    "no barrier in a warp": _race(_WARP.format(barrier=""), "(RAW|WAR) hazard: .* of shared memory", block=32),
    "warps without a barrier": _race(
        "__shared__ float part[64]; part[at] = in[at % 32]; __syncwarp(); out[at % 32] = part[63 - at];",
        "(RAW|WAR) hazard: .* of shared memory", block=64,
    ),
    "shuffles do not order memory": _race(
        _WARP.format(barrier="__shfl_sync(0xffffffffu, at, 0);"), "(RAW|WAR) hazard: .* of shared", block=32
    ),
    "atomic and plain write": _race("atomicAdd(out, 1.0f); if (i == 9) out[0] = 0;", "WAW hazard: .* index 0 of out"),
    "unordered and plain write": _race(
        "ANY_MAY_STAY(out[0] = in[i]); if (i == 9) out[0] = 1;", "WAW hazard: .* index 0 of out"
    ),
    "barrier in a branch": Case(
        "if (at < 5) __syncthreads(); out[i] = in[i];",
        f"{_SYNC}{_THREAD} does not reach a barrier or shuffle where others of its block wait .the first of 4",
        api.LAUNCH_FAILED,
    ),
    "barrier after an early return": Case(
        "if (at == 3) return; __syncthreads(); out[i] = in[i];", rf"{_SYNC}thread \(3,0,0\)", api.LAUNCH_FAILED
    ),
    "shuffle in a branch": Case(
        "float x = in[i]; if (at < 5) x = __shfl_down_sync(0xffffffffu, x, 1); __syncthreads(); out[i] = x;",
        rf"{_SYNC}thread \([567],0,0\)", api.LAUNCH_FAILED,
    ),
    "barrier of a warp in a branch": Case(
        "if (at < 5) __syncwarp(); else out[i] = 1; __syncthreads();", _SYNC, api.LAUNCH_FAILED
    ),
}  # fmt: skip

RIGHT = {
    "elements": Case("if (i < n) out[i] = 2 * in[i];"),
    "vectors": Case("if (i < 8) { float4 x = ((const float4*)in)[i]; x.y = 0; ((float4*)out)[i] = x; }", block=32),
    "bytes": Case("((char*)out)[i + 96] = (char)in[i];"),
    "exchange in shared memory": Case(_EXCHANGE.format(barrier="__syncthreads();")),
    "exchange in global memory": Case(
        "out[i] = in[i]; __syncthreads(); const float x = out[i ^ 1]; __syncthreads(); out[i] = x;"
    ),
    "static and dynamic shared memory": Case(
        "extern __shared__ float more[]; __shared__ float part[8]; part[at] = more[at] = in[i]; __syncthreads();"
        "out[i] = part[7 - at] + more[7 - at];", shared=32,
    ),
    "reduction": Case(_TREE.format(barrier="__syncthreads();")),
    "reduction with shuffles": Case(
        "__shared__ float part[2]; float x = in[at % 32];"
        "for (int by = 16; by > 0; by /= 2) x += __shfl_down_sync(0xffffffffu, x, by);"
        "if (at % 32 == 0) part[at / 32] = x; __syncthreads(); if (at == 0) out[0] = part[0] + part[1];", block=64,
    ),
    "shuffles of a part of a warp": Case(
        "float x = in[i]; if (at < 4) x += __shfl_down_sync(0xfu, x, 2); __syncthreads(); out[i] = x;"
    ),
    "shuffle after an early return": Case(
        "if (at >= 24) return; out[i] = __shfl_xor_sync(0xffffffffu, in[i], 1);", block=32
    ),
    "votes": Case("out[i] = __ballot_sync(0xffffffffu, in[i] > 3) + __any_sync(0xffffffffu, i == 3);", block=32),
    "tiled product": Case(_TILES.format(barrier="__syncthreads();"), block=32),
    "scan": Case(_SCAN.format(barrier="__syncthreads();")),
    "warps": Case(_WARP.format(barrier="__syncwarp();"), block=32),
    "warps, again and again": Case(
        "__shared__ float part[32]; part[at] = in[i]; for (int k = 0; k < 9; ++k) { __syncwarp();"
        "const float x = part[at ^ 1]; __syncwarp(); part[at] = x + 1; } out[i] = part[at];", block=32,
    ),
    "atomics": Case("atomicAdd(out, in[i]); atomicMax((int*)out + 1, i); atomicCAS((unsigned*)out + 2, 0u, 1u);"),
    "atomics in shared memory": Case(
        "__shared__ int bins[4]; if (at < 4) bins[at] = 0; __syncthreads(); atomicAdd(bins + at % 4, 1);"
        "__syncthreads(); if (at < 4) atomicAdd((int*)out + at, bins[at]);"
    ),
    "stores of which any may stay": Case("ANY_MAY_STAY(out[i % 3] = in[i]);"),
    "variables of the module": Case(
        "atomicAdd(&counter, 1); out[i] = table[at];",
        before='extern "C" { __device__ int counter; __constant__ float table[8]; }',
    ),
    "constants and own arrays": Case(
        "static const float table[3] = {1, 2, 3}; float own[4]; for (int k = 0; k < 4; ++k) own[k] = in[(i + k) % n];"
        "out[i] = own[i % 4] + table[i % 3];"
    ),
}  # fmt: skip
CASES = {**WRONG, **RIGHT}


def run_case(case: Case) -> tuple[int, str]:
    """Launch the kernel of a case in a new context. Return the status, and what was reported."""
    api.call("cuInit", 0)
    api.call("cuDevicePrimaryCtxReset_v2", 0)
    api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
    begin = 'extern "C" __global__ void wrong(const float* in, float* out, int n)'
    text = f"{case.before}\n{begin} {{ {_LINES} {case.body} }}"
    function, given, out = api.kernel(text, "wrong"), api.allocate(4 * COUNT), api.allocate(4 * COUNT)
    grid = (max(1, COUNT // case.block),)
    with tempfile.TemporaryFile() as report:
        kept = os.dup(2)
        os.dup2(report.fileno(), 2)
        assert api.launch(function, grid, (case.block,), given, out, ctypes.c_int(COUNT), shared=case.shared) == 0
        status = api.status("cuCtxSynchronize")
        os.dup2(kept, 2)
        os.close(kept)
        report.seek(0)
        return status, report.read().decode()


@pytest.fixture(scope="module")
def outcomes(run_apart: Callable[..., str]) -> dict[str, tuple[int, str]]:
    """The status and the report of each case. They run in one process, because the setting is read once."""
    script = (
        "import json, test_emulated_checks as checks\n"
        "print(json.dumps({name: checks.run_case(one) for name, one in checks.CASES.items()}))\n"
    )
    return dict(json.loads(run_apart(script, CUDA_EMULATOR_CHECKS="1")))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    status, report = outcomes[name]
    assert status == WRONG[name].error, report
    assert re.search(rf"^CUDA emulator: {WRONG[name].message}", report, re.MULTILINE), report


@pytest.mark.parametrize("name", RIGHT)
def test_correct_kernels_have_no_findings(outcomes: dict[str, tuple[int, str]], name: str) -> None:
    assert outcomes[name] == [0, ""]


def test_without_the_setting_nothing_else_is_checked() -> None:
    for name in ("two writes in a block", "barrier in a branch", "one byte past the end"):
        assert run_case(WRONG[name]) == (0, "")


FREED = """
import ctypes
api.call("cuInit", 0)
api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
function = api.kernel('extern "C" __global__ void late(int* out) { *out = 1; }', "late")
memory = api.allocate(64)
api.call("cuMemFree_v2", memory)
other = [api.allocate(64) for _ in range(9)]
assert memory not in other
assert api.launch(function, (1,), (1,), memory) == 0
print(api.status("cuCtxSynchronize"))
"""


def test_freed_memory_is_found(run_apart: Callable[..., str]) -> None:
    said = run_apart(f"import os; os.dup2(1, 2)\n{FREED}", CUDA_EMULATOR_CHECKS="1")
    assert "memcheck: Invalid __global__ write of size 4: kernel late: thread (0,0,0) in block (0,0,0) writes" in said
    assert "which is in freed memory" in said
    assert said.split()[-1] == str(api.ILLEGAL_ADDRESS)


BLOCKS = """
import ctypes
api.call("cuInit", 0)
api.call("cuCtxSetCurrent", api.result("cuDevicePrimaryCtxRetain", 0))
source = 'extern "C" __global__ void put(int* a, int* b, int at) { b[at] = a[0]; }'
function = api.kernel(source, "put")
memory = api.allocate(512)

class Extent(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "bytes", "fixed")]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(Extent))
def resolve(address, extent):
    # Blocks of 128 bytes, of which 100 were requested.
    extent[0] = Extent(address // 128 * 128, 100, 0)
    return int(memory <= address < memory + 512)

for at in (24, 25):
    for known in (None, resolve):
        api.emulator.load().emulator_resolve_bounds(known)
        assert api.launch(function, (1,), (1,), memory, memory + 256, ctypes.c_int(at)) == 0
        print(api.status("cuCtxSynchronize"), flush=True)
"""


def test_blocks_that_the_program_tells_have_bounds(run_apart: Callable[..., str]) -> None:
    said = run_apart(f"import os; os.dup2(1, 2)\n{BLOCKS}", CUDA_EMULATOR_CHECKS="1")
    *before, report, status = said.splitlines()
    assert before == ["0", "0", "0"]
    assert "writes index 25 of b, which has 25 elements of 4 bytes from there on" in report
    assert status == str(api.ILLEGAL_ADDRESS)
