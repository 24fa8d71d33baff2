"""Tests kernels of the CUDA dialect on emulated devices that check bounds, races and barriers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import paths
import pytest

Result = Callable[..., "subprocess.CompletedProcess[str]"]

START = f"""
import json, re, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {[str(paths.TESTS / one) for one in ("cuda_emulator", "opencl", "support")]!r}
import emulator
import torch
from torch.utils._pytree import tree_leaves
from test_small_kernels import KERNELS, TOLERANCES

torch.manual_seed(0)
"""

# Runs kernels of every family, or some; prints whether the results agree with the CPU's.
FAMILIES = START + """
emulator.check_blocks()
said = {}
for name, (function, arguments) in KERNELS.items():
    if name in SOME or not SOME:
        given = arguments()
        found = [one.cpu() for one in tree_leaves(function(*(one.to("bp") for one in given)))]
        said[name] = all(
            torch.allclose(one, other, rtol=TOLERANCES[name], atol=TOLERANCES[name])
            for one, other in zip(found, tree_leaves(function(*given)))
        )
print(json.dumps(said))
"""
_LIBRARIES = ("CUBLAS", "CUBLASLT", "CUDNN", "CUSOLVER", "CUFFT")
_WITHOUT_LIBRARIES = {f"TORCH_BACKPLANE_{name}_LIBRARY": "none" for name in _LIBRARIES}


def _families(result: Result, *some: str) -> dict[str, bool]:
    code = FAMILIES.replace("SOME", repr(some))
    finished = result(code, CUDA_EMULATOR_CHECKS="1", **_WITHOUT_LIBRARIES)
    assert "CUDA emulator" not in finished.stderr, finished.stderr
    assert finished.returncode == 0, finished.stderr[-3000:]
    return dict(json.loads(finished.stdout))


def test_typical_kernels_have_no_findings(result: Result) -> None:
    names = ("elementwise", "sum", "cumsum", "softmax", "product", "index_put, adding", "scatter_reduce")
    assert _families(result, *names) == dict.fromkeys(names, True)


def test_kernels_of_every_family_have_no_findings(result: Result) -> None:
    said = _families(result)
    assert len(said) > 35
    assert all(said.values()), said


# Products and convolutions of whole numbers: aligned operands and others, transposed ones, several sizes.
HALVES = START + """
from torch_backplane.planning.launch import dialect_of

emulator.check_blocks()
for dtype in (torch.float16, torch.bfloat16):
    a, b, images, weights = (
        torch.randint(-3, 4, shape).to(dtype) for shape in ((3, 73, 43), (3, 43, 72), (2, 9, 8, 8), (20, 9, 3, 3))
    )
    mine = [one.to("bp") for one in (a, b, images, weights)]
    for rows, depth, first in ((73, 43, 0), (64, 40, 0), (70, 40, 3), (32, 8, 0)):
        x, of_x = (one[:, :rows, first:depth] for one in (a, mine[0]))
        y, of_y = (one[:, first:depth] for one in (b, mine[1]))
        assert torch.equal((of_x @ of_y).cpu(), x @ y)
        assert torch.equal((of_x.contiguous() @ of_y.contiguous()).cpu(), x @ y)
        assert torch.equal((of_y.mT @ of_x.mT).cpu(), (x @ y).mT)
    found = torch.nn.functional.conv2d(mine[2], mine[3], padding=1)
    assert torch.equal(found.cpu(), torch.nn.functional.conv2d(images, weights, padding=1))
print(json.dumps(sorted(str(one) for one in dialect_of(0).target.matrix_dtypes)))
"""


@pytest.mark.parametrize(
    ("architecture", "dtypes"), [("75", ["torch.float16"]), ("80", ["torch.bfloat16", "torch.float16"])]
)
def test_products_by_tensor_cores_have_no_findings(result: Result, architecture: str, dtypes: list[str]) -> None:
    settings = {"CUDA_EMULATOR_CHECKS": "1", "CUDA_EMULATOR_ARCHITECTURE": architecture}
    finished = result(HALVES, **settings, **_WITHOUT_LIBRARIES)
    assert "CUDA emulator" not in finished.stderr, finished.stderr
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert json.loads(finished.stdout) == dtypes


# Makes every kernel wrong in one way; prints the names of all kernels.
ALL_WRONG = START + """
from torch_backplane.drivers.cuda.device import CUDADevice
from torch_backplane.sanitizer.device import RESOLVE, Extent, Resolve

kernels = set()
build = CUDADevice.compile
{way}
for function, arguments in KERNELS.values():
    function(*(one.to("bp") for one in arguments()))
    torch.bp.synchronize()
print(json.dumps(sorted(kernels)))
"""

WITHOUT_BARRIERS = """
def compiled(self, text, entry):
    if b"interpreter_barrier" in self._compiler.get(text, lambda program: program):
        kernels.add(entry)
        text = re.sub(r"#define BARRIER .*", "#define BARRIER", text)
    return build(self, text, entry)

CUDADevice.compile = compiled
emulator.check_blocks()
"""

LESS_MEMORY = """
def compiled(self, text, entry):
    kernels.add(entry)
    return build(self, text, entry)

def less(address, extent):
    known = RESOLVE(address, extent)
    if known:
        extent[0] = Extent(extent[0].begin, extent[0].bytes - 1, extent[0].fixed)
    return known

CUDADevice.compile = compiled
resolve = Resolve(less)
emulator.check_blocks(resolve)
"""


def _all_wrong(result: Result, way: str, kind: str, least: int) -> None:
    # The builds of kernels are not kept: they are wrong.
    finished = result(ALL_WRONG.format(way=way), CUDA_EMULATOR_CHECKS="report", **_WITHOUT_LIBRARIES)
    assert finished.returncode == 0, finished.stderr[-3000:]
    kernels = json.loads(finished.stdout)
    assert len(kernels) >= least
    reports = [line for line in finished.stderr.splitlines() if line.startswith(f"CUDA emulator: {kind}: ")]
    assert [name for name in kernels if not any(f"kernel {name}: " in one for one in reports)] == []


def test_missing_barriers_are_found_in_every_kernel(result: Result) -> None:
    _all_wrong(result, WITHOUT_BARRIERS, "racecheck", 15)


def test_accesses_out_of_bounds_are_found_in_every_kernel(result: Result) -> None:
    _all_wrong(result, LESS_MEMORY, "memcheck", 45)


def test_findings_are_errors_of_the_device(result: Result) -> None:
    finished = result("""
import struct, torch
from torch_backplane import _C
text = '''
extern "C" __global__ void same(float* x, int to) {
  __shared__ float part[8];
  part[threadIdx.x] = x[threadIdx.x];
  x[to] = part[7 - threadIdx.x];
}'''
handle = _C.compile_kernel(0, text, "same", "test")
x = torch.ones(8, device="bp")
_C.launch_kernel(0, handle, (8, 1, 1), (8, 1, 1), [x, struct.pack("i", 3)])
try:
    torch.bp.synchronize()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
""", CUDA_EMULATOR_CHECKS="1")
    assert finished.returncode == 0, finished.stderr
    assert "racecheck: WAR hazard: kernel same: thread (4,0,0) in block (0,0,0) writes" in finished.stderr
    assert "writes index 3 of x, and no barrier orders them (the first of" in finished.stderr
    assert finished.stdout.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while waiting for a")
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in finished.stdout
