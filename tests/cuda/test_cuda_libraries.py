"""Tests cuBLAS and cuFFT on emulated CUDA devices: what they compute, when they are used, and how failures are handled.

The libraries are the emulator's. They check their arguments, and spoil their workspace and what they may overwrite.
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from torch_backplane.drivers.cuda.libraries import cublas, cublaslt, cufft, cusolver
from torch_backplane.drivers.cuda.libraries.loading import Product, load

Result = Callable[..., "subprocess.CompletedProcess[str]"]
Run = Callable[..., str]

PREAMBLE = """
import math, threading, time, warnings
import torch
from library_programs import HALVES, called, close, error_of
from functools import partial
from torch_backplane import drivers, plans
warnings.simplefilter("error")
torch.manual_seed(0)
bp = torch.backends.bp
"""


def test_products_and_transforms_call_the_libraries(run: Run) -> None:
    """Each dtype, on two devices, and a graph."""
    code = """
a, b = torch.randn(5, 7), torch.randn(7, 3)
for dtype in (torch.float32, torch.float64, *HALVES, torch.complex64, torch.complex128):
    close(torch.mm, a.to(dtype), b.to(dtype))
    assert called("cuBLAS matmul", torch.mm, a.to(dtype), b.to(dtype))
torch.testing.assert_close((a.to("bp:3") @ b.to("bp:3")).cpu(), a @ b)
for dtype in (torch.complex64, torch.complex128):
    x = torch.randn(3, 12, dtype=dtype)
    for function in (torch.fft.fft, torch.fft.ifft, torch.fft.irfft, lambda x: torch.fft.rfft(x.real)):
        close(function, x)
        assert called("cuFFT fft", function, x)
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
graph = torch.bp.Graph()
torch.bp.synchronize()
with torch.bp.graph(graph):
    y = torch.fft.rfft(x @ w)
for _ in range(2):
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y.cpu(), torch.fft.rfft(x.cpu() @ w.cpu()), rtol=1e-5, atol=1e-4)
print(drivers.device(0).properties.software.partition("cuBLAS")[2])
"""
    assert run(PREAMBLE + code) == " 13.0, cuBLASLt 13.0, cuDNN 9.0, cuFFT 12.0, cuSOLVER 12.0, NCCL 2.29\n"


def test_products_of_any_layout(run: Run) -> None:
    code = """
def into(make, a, b):
    out = make(a)
    return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)

for dtype in (torch.float32, torch.float64, *HALVES, torch.complex64, torch.complex128):
    alpha, beta = (0.5 - 2j, 1 + 0.25j) if dtype.is_complex else (0.5, -2)
    for rows, depth, columns in ((3, 4, 5), (1, 7, 1), (1, 3, 6), (6, 3, 1), (17, 33, 9)):
        a, b, c = (torch.randn(one, dtype=dtype) for one in ((rows, depth), (depth, columns), (rows, columns)))
        close(torch.mm, a, b)
        close(lambda a, b: a.t() @ b, a.t().contiguous(), b)
        close(lambda a, b: a @ b.t(), a, b.t().contiguous())
        close(lambda a, b: a.conj() @ b.mH.mT, a, b)
        close(torch.addmm, c[0], a, b)
        close(partial(torch.addmm, alpha=alpha, beta=beta), c, a, b)
        close(partial(torch.addmm, alpha=alpha, beta=beta), c.t().contiguous().t(), a, b)
        close(partial(torch.addmm, beta=0), torch.full_like(c, math.nan), a, b)
        close(lambda a, b: torch.mv(a, b[:, 0]), a, b)
        x, y, z = (torch.stack([one, one * 2, -one]) for one in (a, b, c))
        close(torch.bmm, x, y)
        close(lambda x, y: x.mT @ y, x.mT.contiguous(), y)
        close(lambda a, y: torch.bmm(a.expand(3, -1, -1), y), a, y)
        close(partial(torch.baddbmm, alpha=alpha, beta=beta), z, x, y)
        close(torch.baddbmm, c, x, y)
    wide, tall = torch.zeros(40, 40, dtype=dtype), torch.zeros(3, 20, 30, dtype=dtype)
    wide[:] = (torch.arange(1600).view(40, 40) % 7) - 3
    tall[:] = (torch.arange(1800).view(3, 20, 30) % 5) - 2
    close(lambda w: w[3:9, 5:16] @ w[20:31, 1:4], wide)  # rows with gaps
    close(lambda w: w[::2, ::3] @ w[:14, ::4], wide)  # neither rows nor columns are contiguous
    close(lambda t: t[:, 2:9, 3:8] @ t[:, 4:9, 1:7], tall)
    close(lambda t: t[::2, :9, :8] @ t[1:, :8, 6:], tall)
    nan = lambda *shape: lambda a: torch.full(shape, math.nan, dtype=a.dtype, device=a.device)
    close(lambda w: into(nan(6, 3), w[3:9, 5:16], w[20:31, 1:4]), wide)
    close(lambda w: into(lambda a: nan(3, 6)(a).t(), w[3:9, 5:16], w[20:31, 1:4]), wide)
    close(lambda w: into(lambda a: nan(6, 6)(a)[:, ::2], w[3:9, 5:16], w[20:31, 1:4]), wide)
    close(lambda w: into(lambda a: nan(9, 9)(a)[2:8, 3:6], w[3:9, 5:16], w[20:31, 1:4]), wide)
    close(lambda w: w[:, :0] @ w[:0, :5], wide)
    close(lambda w: w[:0] @ w[:, :5], wide)
x, w, bias = torch.randn(2, 3, 8), torch.randn(6, 8), torch.randn(6)
close(torch.nn.functional.linear, x, w, bias)
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_replays_with_other_values_and_shapes(run: Run) -> None:
    code = """
plans.set_mode("check")
for n in (4, 7, 0, 12, 31, 5, 64, 0, 3):
    for a, b in ((torch.randn(n, 3), torch.randn(3, n)), (torch.randn(2, n, 5), torch.randn(2, 5, 4))):
        close(torch.matmul, a, b)
        close(lambda a, b: torch.baddbmm(a @ b, a, b, alpha=n) if a.dim() == 3 else torch.addmm(a @ b, a, b), a, b)
for rows in (2, 5, 3, 1, 4, 2):
    for n in (8, 12):
        x = torch.randn(rows, n, dtype=torch.complex64)
        close(torch.fft.fft, x)
        close(lambda x: torch.fft.irfft(x, n), x)
        close(torch.fft.rfft, x.real)
for name in ("mm", "addmm", "bmm", "_fft_c2c"):
    found = plans.stats()[f"aten::{name}"]
    assert found.get("replays", 0) + found.get("dynamic_shape_replays", 0) > 0, (name, found)
print(plans.stats()["aten::mm"].get("dynamic_shape_classes"))
"""
    assert run(PREAMBLE + code) == "1\n"


def test_transforms_of_every_kind(run: Run) -> None:
    code = """
for dtype in (torch.complex64, torch.complex128):
    for n in (2, 3, 7, 8, 60, 97, 128):
        x = torch.randn(3, n, dtype=dtype)
        for norm in ("backward", "ortho", "forward"):
            close(partial(torch.fft.fft, norm=norm), x)
            close(partial(torch.fft.ifft, norm=norm), x)
            close(partial(torch.fft.irfft, n=n, norm=norm), x)
            close(partial(torch.fft.hfft, n=n, norm=norm), x)
            close(partial(torch.fft.rfft, norm=norm), x.real)
            close(partial(torch.fft.ihfft, norm=norm), x.real)
            close(partial(torch.fft.fft, norm=norm), x.real.contiguous())
    x = torch.randn(4, 6, 10, dtype=dtype)
    for dim in ((0,), (1,), (0, 1), (1, 2), (2, 0), (0, 1, 2), (-2, 0, 2)):
        close(lambda x: torch.fft.fftn(x, dim=dim).contiguous(), x)
        close(lambda x: torch.fft.ifftn(x.transpose(0, 2), dim=dim).contiguous(), x)
        close(lambda x: torch.fft.rfftn(x.real, dim=dim).contiguous(), x)
        close(lambda x: torch.fft.irfftn(x, dim=dim).contiguous(), x)
    assert called("cuFFT fft", partial(torch.fft.irfftn, dim=(0, 1, 2)), x)
    real = torch.randn(100, dtype=x.real.dtype)  # cuFFT needs operands and results that are aligned as complex numbers
    close(lambda real: torch.fft.rfft(real[3:63].view(3, 20)), real)

    def to_unaligned(real):
        out = real.clone()
        torch.fft.irfft(torch.view_as_complex(real[:66].view(3, 11, 2)), 20, out=out[3:63].view(3, 20))
        return out

    close(to_unaligned, real)
    close(lambda x: torch.fft.fft(x.flatten()[3:63].view(3, 20)), x)
    assert torch.fft.fft(x[:0].to("bp")).shape == (0, 6, 10)
    close(torch.fft.fft, x[:, :, :1])
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_the_plan_cache_is_bounded_and_keeps_plans_in_use(run: Run) -> None:
    code = """
cache = bp.fft_plan_cache
assert (cache.size, cache.max_size, cache["bp:1"].max_size) == (0, 1024, 1024)
cache.max_size = 2
given = [torch.randn(9, 10 + n % 4, dtype=torch.complex64) for n in range(12)]
moved = [one.to("bp") for one in given]
torch.bp._sleep(5e8)  # the transforms are pending while their plans are evicted: else there would be NaN
found = [torch.fft.fft(one) for one in moved]
for one, x in zip(found, given, strict=True):
    torch.testing.assert_close(one.cpu(), torch.fft.fft(x))
assert (cache.size, cache["bp:1"].size) == (2, 0)
cache.max_size = 0
assert cache.size == 0
close(torch.fft.fft, given[0])
cache.max_size = 3
close(torch.fft.fft, given[0])
assert cache.size == 1
cache.clear()
assert (cache.size, cache.max_size) == (0, 3)
torch.bp.synchronize()
cache.clear()
import ctypes, os
library = ctypes.CDLL(os.environ["TORCH_BACKPLANE_CUFFT_LIBRARY"])
text = ctypes.create_string_buffer(4096)
library.emulator_calls(text, ctypes.c_size_t(4096))
counts = dict(line.split() for line in text.value.decode().splitlines())
assert counts["cufftCreate"] == counts["cufftDestroy"], counts
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_threads_and_streams(run: Run) -> None:
    code = """
failed = []

def work(seed, stream, device):
    try:
        a = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed)) / 4
        with stream:
            moved = a.to(device)
            power = moved
            for _ in range(15):
                power = torch.baddbmm(moved[None], power[None], moved[None], beta=0.5)[0] / 2
                power = torch.fft.irfft(torch.fft.rfft(power), 12)
            found = power.cpu()
        expected = a
        for _ in range(15):
            expected = (0.5 * a + expected @ a) / 2
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    except BaseException as error:
        failed.append(error)

shared = torch.bp.Stream()
streams = [shared, shared, torch.bp.Stream(), torch.bp.Stream(priority=-1), torch.bp.Stream("bp:1")]
threads = [threading.Thread(target=work, args=(i, one, one.device)) for i, one in enumerate(streams)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(failed)
"""
    assert run(PREAMBLE + code) == "[]\n"


def test_settings_that_leave_the_libraries_out(run: Run) -> None:
    code = """
a, x = torch.randn(8, 8), torch.randn(3, 12, dtype=torch.complex64)
half = a.half()

def used():
    return called("cuBLAS matmul", torch.mm, a, a), called("cuBLAS matmul", torch.mm, half, half), called(
        "cuFFT fft", torch.fft.fft, x)

assert used() == (True, True, True)
bp.preferred_blas_library("generated")
assert used() == (False, False, True)
close(torch.mm, half, half)
bp.preferred_blas_library("driver")
with bp.fft.flags(enabled=False):
    assert used() == (True, True, False)
    close(torch.fft.fft, x)
bp.matmul.allow_fp16_reduced_precision_reduction = (False, False)  # cuBLAS can divide sums
assert used() == (True, False, True)
bp.matmul.allow_fp16_reduced_precision_reduction = True
assert used() == (True, True, True)
bp.preferred_blas_library("default")
bp.blas_workspace_size(1 << 20)
assert used() == (False, False, True)
assert bp.without_workspace()["products: driver"] > 0
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


# --- precision -------------------------------------------------------------------------------------------------------

TF32 = {"NVIDIA_TF32_OVERRIDE": "1"}  # which other tests rule out

IN_TF32 = PREAMBLE + """
def in_tf32(function, *given):
    \"\"\"Whether the errors are those of operands with 10 bits, and not with 23.\"\"\"
    wide = [one.to(torch.complex128 if one.is_complex() else torch.float64) for one in given]
    error = (function(*(one.to("bp") for one in given)).cpu() - function(*wide)).abs().max().item()
    assert error < 1e-5 or 1e-4 < error < 5e-2, error
    return error > 1e-4

a, b = torch.randn(9, 40), torch.randn(40, 7)
x, y = a.to("bp"), b.to("bp")
"""


def test_float32_products_are_computed_in_tf32_while_it_is_allowed(run: Run) -> None:
    code = """
plans.set_mode("check")
for change, expected in (
    (lambda: None, False),
    (lambda: setattr(bp.matmul, "allow_tf32", True), True),
    (lambda: setattr(bp.matmul, "allow_tf32", False), False),
    (lambda: setattr(bp.matmul, "fp32_precision", "tf32"), True),
    (lambda: setattr(bp.matmul, "fp32_precision", "none"), False),
    (lambda: torch.set_float32_matmul_precision("high"), True),
    (lambda: torch.set_float32_matmul_precision("highest"), False),
    (lambda: torch.set_float32_matmul_precision("medium"), True),
):
    change()
    for rows in (9, 9, 4, 6, 9):  # with a plan for any number of rows
        assert in_tf32(torch.mm, a[:rows], b) == expected
    assert in_tf32(lambda a, b: torch.bmm(a.expand(2, 9, 40), b.expand(2, 40, 7)), a, b) == expected
    assert in_tf32(lambda a, b: torch.nn.functional.linear(a, b.t(), b[0]), a, b) == expected
    assert in_tf32(torch.mm, torch.complex(a, -a), torch.complex(b, b * b)) == expected
close(torch.mm, a.double(), b.double())
assert torch.bp.is_tf32_supported()
with torch.bp.device(1):
    assert torch.bp.is_tf32_supported()
bp.preferred_blas_library("generated")
assert not in_tf32(torch.mm, a, b)
print(plans.stats()["aten::mm"]["dynamic_shape_replays"] > 0)
"""
    assert run(IN_TF32 + code, **TF32) == "True\n"


def test_graphs_keep_the_precision_of_their_capture_and_compiled_ones_have_that_of_the_call(run: Run) -> None:
    code = """
def error(found):
    return (found.cpu() - a.double() @ b.double()).abs().max().item() > 1e-4

warnings.simplefilter("default")  # importing Inductor warns
compiled, graph, seen = torch.compile(torch.mm), torch.bp.Graph(), []
torch.mm(x, y)
torch.set_float32_matmul_precision("high")
torch.bp.synchronize()
with torch.bp.graph(graph):
    captured = x @ y
for change in (
    lambda: torch.set_float32_matmul_precision("highest"), lambda: torch.set_float32_matmul_precision("high"),
    lambda: setattr(bp.matmul, "allow_tf32", False), lambda: setattr(bp.matmul, "allow_tf32", True),
):
    change()
    graph.replay()
    seen.append((error(captured), error(compiled(x, y)), error(x @ y)))
print(seen)
"""
    expected = [(True, on, on) for on in (False, True, False, True)]
    assert run(IN_TF32 + code, **TF32) == f"{expected}\n"


def test_sums_of_half_precision_are_rounded_while_it_is_allowed(run: Run) -> None:
    code = """
def rounds(dtype):
    a, b, c = (torch.randn(*shape).to(dtype) for shape in ((9, 200), (200, 8), (9, 8)))
    exact = torch.addmm(c.double(), a.double(), b.double(), beta=-2, alpha=0.5)
    found = torch.addmm(c.to("bp"), a.to("bp"), b.to("bp"), beta=-2, alpha=0.5).cpu()
    torch.testing.assert_close(found.double(), exact, rtol=5e-2, atol=0.5)
    return not torch.equal(found, exact.to(dtype))

def both():
    return tuple(map(rounds, HALVES))

assert both() == both() == (False, False)
for name, expected in (("fp16_reduced_precision_reduction", (True, False)), ("fp16_accumulation", (True, False)),
                       ("bf16_reduced_precision_reduction", (False, True))):
    for allowed in (True, False, True, False):
        setattr(bp.matmul, f"allow_{name}", allowed)
        assert both() == (expected if allowed else (False, False)), (name, allowed)
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_before_ampere_there_is_no_bfloat16_and_no_tf32(run: Run) -> None:
    code = """
a = torch.randn(4, 4).bfloat16()
close(torch.mm, a, a)
print(called("cuBLAS matmul", torch.mm, a, a), called("cuBLAS matmul", torch.mm, a.half(), a.half()))
print(torch.bp.is_tf32_supported())
"""
    assert run(PREAMBLE + code, CUDA_EMULATOR_ARCHITECTURE="75") == "False True\nFalse\n"


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "uses", "says"),
    [
        ("cublasCreate:1:3", "cuBLAS matmul", "cuBLAS matmul answered 3, which is: CUBLAS_STATUS_ALLOC_FAILED: not "),
        ("cublasGemmEx_64:1:15", "cuBLAS matmul", "answered 15, which is: CUBLAS_STATUS_NOT_SUPPORTED: an unsupported"),
        ("cufftXtMakePlanMany:1:2", "cuFFT fft", "cuFFT fft answered 2, which is: CUFFT_ALLOC_FAILED: not enough"),
        ("cufftXtExec:1:5", "cuFFT fft", "cuFFT fft answered 5, which is: CUFFT_INTERNAL_ERROR: an operation within"),
    ],
)
def test_a_failing_library_is_replaced_with_one_warning(run: Run, fault: str, uses: str, says: str) -> None:
    code = f"""
a, x = torch.randn(4, 4), torch.randn(3, 12, dtype=torch.complex64)
function, given = (torch.mm, (a, a)) if {uses!r} == "cuBLAS matmul" else (torch.fft.fft, (x,))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        close(function, *given)
print(*(one.message for one in caught), sep="\\n")
print(called({uses!r}, function, *given))
"""
    warning, used = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS=fault).splitlines()
    assert f"s no longer use {uses.split()[0]} on bp:0, which failed: " in warning
    assert says in warning
    assert used == "False"


def test_a_library_that_cannot_be_used_is_replaced_in_the_first_call(run: Run) -> None:
    """Although the call waits for the build of the kernel that makes its operands, and so has no status yet."""
    code = """
a = torch.full((4, 4), 2.0, device="bp").sin_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = (a @ a).cpu()
torch.testing.assert_close(found, a.cpu() @ a.cpu())
print(*(one.message for one in caught), sep="\\n")
bp.blas_workspace_size(1 << 30)
print(called("cuBLAS matmul", torch.mm, a.double().cpu(), a.double().cpu()))
"""
    faults = "cublasCreate:1:1,cublasCreate:2:1"  # also when the workspace is compared with the limit
    warning, used = run(
        PREAMBLE + code, CUDA_EMULATOR_FAULTS=faults, TORCH_BACKPLANE_CACHE_DIR="", TORCH_BACKPLANE_WORKSPACE="64MiB"
    ).splitlines()
    assert "which failed: cuBLAS matmul answered 1, which is: CUBLAS_STATUS_NOT_INITIALIZED" in warning
    assert used == "False"


def test_a_failure_in_a_replay_is_an_error_and_later_calls_work(run: Run) -> None:
    code = """
a, x = torch.randn(4, 4), torch.randn(3, 12, dtype=torch.complex64)
moved, complex = a.to("bp"), x.to("bp")
for _ in range(3):
    print(error_of(torch.mm, moved, moved))
    print(error_of(torch.fft.fft, complex))
close(torch.mm, a, a)
close(torch.fft.fft, x)
"""
    lines = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS="cublasGemmEx_64:2:14,cufftXtExec:3:6").splitlines()
    assert [lines[i] for i in (0, 1, 3, 4)] == ["no error"] * 4
    assert lines[2].startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) failed while calling cuBLAS matmul")
    assert "answered 14, which is: CUBLAS_STATUS_INTERNAL_ERROR" in lines[2]
    assert "cuFFT fft answered 6, which is: CUFFT_EXEC_FAILED" in lines[5]


@pytest.mark.parametrize("call", ["moved @ moved", "torch.fft.rfft(moved)"])
def test_a_lost_device_is_reported_as_lost(run: Run, call: str) -> None:
    """The library's status does not tell, and the library is not blamed."""
    code = f"""
moved = torch.randn(4, 4).to("bp")
{call}
torch.bp.synchronize()
moved.add_(1)
time.sleep(1)
print(error_of(lambda: {call}))
print(error_of(lambda: torch.ones(2, device="bp")))
"""
    first, second = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS="(kernel):1:719").splitlines()
    assert first.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while ")
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in first
    assert second == first


# --- what is installed -----------------------------------------------------------------------------------------------


def test_doctor_names_missing_and_unusable_libraries(result: Result) -> None:
    """Without libraries, generated kernels compute. The findings are hints unless a library is there and unusable."""
    finished = result(
        """
import torch
from torch_backplane import drivers
print((torch.ones(2, 2, device="bp") @ torch.ones(2, 2, device="bp")).tolist(), drivers.device(0).libraries)
print(*(f"{one.ok} {one.what} {one.found}|{one.remedy}" for one in drivers.findings()["cuda"][-6:-1]), sep="\\n")
""",
        TORCH_BACKPLANE_CUBLAS_LIBRARY="none",
        TORCH_BACKPLANE_CUBLASLT_LIBRARY="none",
        TORCH_BACKPLANE_CUFFT_LIBRARY="/nowhere/libcufft.so.12",
        TORCH_BACKPLANE_CUDNN_LIBRARY="none",
        TORCH_BACKPLANE_CUSOLVER_LIBRARY="none",
    )
    assert finished.returncode == 0, finished.stderr
    product, first, of_lt, of_cudnn, second, third = finished.stdout.splitlines()
    assert product == "[[2.0, 2.0], [2.0, 2.0]] ()"
    off = "switched off by TORCH_BACKPLANE_CUBLAS_LIBRARY: generated kernels compute matrix products, and the CPU"
    assert first == f"True cuBLAS {off} solves triangular systems|"
    off = "switched off by TORCH_BACKPLANE_CUBLASLT_LIBRARY: separate kernels add the bias of matrix products and"
    assert of_lt == f"True cuBLASLt {off} compute their activation|"
    off = "switched off by TORCH_BACKPLANE_CUDNN_LIBRARY: generated kernels compute convolutions and attention"
    assert of_cudnn == f"True cuDNN {off}|"
    assert second.startswith("False cuFFT is not used: OSError: /nowhere/libcufft.so.12: cannot open")
    assert second.endswith("|pip install --force-reinstall nvidia-cufft")
    off = "switched off by TORCH_BACKPLANE_CUSOLVER_LIBRARY: the CPU computes decompositions and solutions of linear"
    assert third == f"True cuSOLVER {off} systems|"


def test_versions_that_do_not_fit_are_not_used(run: Run) -> None:
    code = """
import os
from pathlib import Path
from torch_backplane.drivers.cuda.libraries import cublas, cufft, load_all
from torch_backplane.drivers.cuda.libraries.loading import load
folder = Path(os.environ["TORCH_BACKPLANE_CUBLAS_LIBRARY"]).parent
for blas, other, cuda in (("13", "12", (12, 4)), ("12", "11", (12, 4)), ("12", "11", (13, 0))):
    for name in ("cublas", "cublasLt"):
        os.environ[f"TORCH_BACKPLANE_{name.upper()}_LIBRARY"] = str(folder / f"lib{name}.so.{blas}")
    for name in ("cufft", "cusolver"):
        os.environ[f"TORCH_BACKPLANE_{name.upper()}_LIBRARY"] = str(folder / f"lib{name}.so.{other}")
    loaded = load_all(cuda)
    findings = [one for one in loaded.findings if one.what not in ("cuDNN", "NCCL")]
    print(*(f"{one.ok} {one.what} {one.found}|{one.remedy}" for one in findings), loaded.versions, sep=";")
os.environ["TORCH_BACKPLANE_CUFFT_LIBRARY"] = str(folder / "libcublas.so.13")
print(load(cufft.PRODUCT, (13, 0)).finding.found)
del os.environ["TORCH_BACKPLANE_CUBLAS_LIBRARY"]
import types
from cuda import pathfinder
pathfinder.load_nvidia_dynamic_lib = lambda name: types.SimpleNamespace(abs_path=str(folder / f"lib{name}.so.13"))
print(load(cublas.PRODUCT, (12, 4)).finding.remedy)
"""
    without = {f"TORCH_BACKPLANE_{name}_LIBRARY": "none" for name in ("CUDNN", "NCCL")}
    newer, same, older, other, both = run(code, **without).splitlines()
    of = "is not used: it is for CUDA 13, and NVIDIA's driver supports CUDA 12"
    assert newer == (
        f"False cuBLAS version 13.0 {of}|pip install nvidia-cublas-cu12;"
        f"False cuBLASLt version 13.0 {of}|pip install nvidia-cublas-cu12;"
        f"False cuFFT version 12.0 {of}|pip install nvidia-cufft-cu12;"
        f"False cuSOLVER version 12.0 {of}|pip install nvidia-cusolver-cu12;()"
    )
    assert (
        same
        == older
        == (
            "True cuBLAS version 12.0|;True cuBLASLt version 12.0|;True cuFFT version 11.0|;"
            "True cuSOLVER version 11.0|;"
            "('cuBLAS 12.0', 'cuBLASLt 12.0', 'cuFFT 11.0', 'cuSOLVER 11.0')"
        )
    )
    assert other.startswith("is not used: it has no function cufftCreate, ")
    assert both == "pip uninstall nvidia-cublas; pip install nvidia-cublas-cu12"


@pytest.mark.parametrize(
    "product", [cublas.PRODUCT, cublaslt.PRODUCT, cufft.PRODUCT, cusolver.PRODUCT], ids=lambda one: one.name
)
def test_the_search(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(product.variable, raising=False)

    class NotFound(RuntimeError):
        pass

    def search(answer: Any) -> None:
        def find(name: str) -> Any:
            assert name == product.file
            if isinstance(answer, Exception):
                raise answer
            return types.SimpleNamespace(abs_path=answer)

        module = types.SimpleNamespace(DynamicLibNotFoundError=NotFound, load_nvidia_dynamic_lib=find)
        monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)

    search(NotFound("Failure finding"))
    for version, package in (((12, 4), f"{product.package}-cu12"), ((13, 0), product.package)):
        found = load(product, version)
        assert not found.functions
        assert found.finding.ok
        assert found.finding.found.startswith(f"not installed: {product.instead}")
        assert found.finding.remedy == f"pip install {package}"
    search(RuntimeError("damaged\nmore"))
    finding = load(product, (13, 0)).finding
    assert (finding.ok, finding.found) == (False, "is not used: RuntimeError: damaged")
    search("libm.so.6")
    finding = load(product, (13, 0)).finding
    assert not finding.ok
    assert finding.found.startswith(f"is not used: it has no function {product.functions[0]}, ")
    search(None)
    assert "does not tell its file" in load(product, (13, 0)).finding.found
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    finding = load(product, (13, 0)).finding
    assert finding.ok
    assert finding.remedy == f"pip install cuda-pathfinder; pip install {product.package}"


def test_meanings_of_statuses(run: Run) -> None:
    code = """
from torch_backplane import drivers
for library in drivers.device(0).libraries:
    print(*(library.explain(status) for status in (2, 3, 99, -2)), sep=";")
"""
    of_cublas, of_cublaslt, of_cudnn, of_cufft, of_cusolver = run(code).splitlines()
    assert of_cublaslt == of_cublas
    assert of_cudnn.startswith("see cudnn_graph.h;see cudnn_graph.h;see cudnn_graph.h;CUDA_ERROR_OUT_OF_MEMORY (2): ")
    assert of_cublas.startswith(
        "see cublas_api.h;CUBLAS_STATUS_ALLOC_FAILED: not enough memory for cuBLAS;see cublas_api.h;"
        "CUDA_ERROR_OUT_OF_MEMORY (2): "
    )
    assert of_cusolver.startswith(
        "CUSOLVER_STATUS_ALLOC_FAILED: not enough memory for cuSOLVER;CUSOLVER_STATUS_INVALID_VALUE: an unsupported "
        "argument;see cusolver_common.h;"
    )
    assert of_cufft.startswith("CUFFT_ALLOC_FAILED: not enough memory for cuFFT;CUFFT_INVALID_TYPE: ")
