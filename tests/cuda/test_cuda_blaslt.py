"""Tests cuBLASLt on emulated CUDA devices: products with a bias, its algorithms, and when it is used.

The library is the emulator's. It checks its arguments, refuses algorithms of other products, and spoils its workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

PREAMBLE = """
import re, threading, warnings
import torch
from library_programs import HALVES, close, error_of
from functools import partial
from torch_backplane import drivers, plans
warnings.simplefilter("error")
torch.manual_seed(0)
bp = torch.backends.bp
DTYPES = (torch.float32, torch.float64, *HALVES)
linear, relu = torch.nn.functional.linear, torch._addmm_activation

def calls(function, *given):
    \"\"\"The library calls of a function, such as ["cuBLAS matmul"].\"\"\"
    text = plans.explain(function, *(one.to("bp") for one in given))
    return re.findall(r"call (\\w+ \\w+) at", text)

def operands(rows, depth, columns, dtype=torch.float32):
    shapes = ((columns,), (rows, depth), (depth, columns))
    return [torch.randn(one).to(dtype) for one in shapes]
"""


def test_products_with_a_bias_call_the_library(run: Run) -> None:
    """Each dtype, with and without the activation, on two devices; what has no bias calls cuBLAS."""
    code = """
for dtype in DTYPES:
    c, a, b = operands(5, 7, 3, dtype)
    for function in (torch.addmm, relu, lambda c, a, b: linear(a, b.t().contiguous(), c)):
        close(function, c, a, b)
        assert calls(function, c, a, b) == ["cuBLASLt linear"], calls(function, c, a, b)
    assert calls(torch.mm, a, b) == ["cuBLAS matmul"]
    torch.testing.assert_close(torch.addmm(*(one.to("bp:3") for one in (c, a, b))).cpu(), torch.addmm(c, a, b),
                               rtol=2e-2, atol=5e-2)
steps = plans.explain(relu, *(one.to("bp") for one in operands(5, 7, 3)))
assert "launch" not in steps, steps  # no kernel adds the bias or computes the activation
c, a, b = operands(5, 7, 3, torch.complex64)
assert calls(torch.addmm, c, a, b) == ["cuBLAS matmul"]
close(torch.addmm, c, a, b)
print(drivers.device(0).properties.software.partition("cuBLAS ")[2])
"""
    assert run(PREAMBLE + code) == "13.0, cuBLASLt 13.0, cuDNN 9.0, cuFFT 12.0, cuSOLVER 12.0, NCCL 2.29\n"


def test_any_layout_and_factor(run: Run) -> None:
    code = """
def into(make, function, *given):
    return function(*given, out=make(given[1]))

nan = lambda *shape: lambda a: torch.full(shape, torch.nan, dtype=a.dtype, device=a.device)
for dtype in DTYPES:
    for rows, depth, columns in ((3, 4, 5), (1, 7, 1), (1, 3, 6), (6, 3, 1), (17, 33, 9), (4, 1, 8)):
        c, a, b = operands(rows, depth, columns, dtype)
        for function in (torch.addmm, relu):
            for alpha, beta in ((1, 1), (0.5, 1), (-2, 1.0), (1, 0.25), (2, 0)):
                close(partial(function, alpha=alpha, beta=beta), c, a, b)
            close(lambda c, a, b: function(c, a.t(), b), c, a.t().contiguous(), b)
            close(lambda c, a, b: function(c, a, b.t()), c, a, b.t().contiguous())
            close(partial(into, lambda a: nan(columns, rows)(a).t(), function), c, a, b)
            close(partial(into, lambda a: nan(rows, 2 * columns)(a)[:, ::2], function), c, a, b)
            close(partial(into, lambda a: nan(rows + 2, columns + 3)(a)[1:-1, 2:-1], function), c, a, b)
            close(lambda c, a, b: function(c[::2], a, b), c.repeat_interleave(2), a, b)
            close(lambda c, a, b: function(c[:1], a, b), c, a, b)  # one number, expanded
            close(lambda c, a, b: function(c[None], a, b), c, a, b)
            close(lambda c, a, b: function(c.expand(rows, columns).contiguous(), a, b), c, a, b)
        close(lambda c, a, b: torch.baddbmm(c, torch.stack([a, -a]), torch.stack([b, b * 2])), c, a, b)
        close(lambda c, a, b: torch.baddbmm(c, a.expand(3, -1, -1), b.expand(3, -1, -1)), c, a, b)
        close(lambda c, a, b: (a @ b).addmm_(a, b, beta=1), c, a, b)
        close(partial(linear), torch.randn(2, 3, depth).to(dtype), b.t(), c)
    wide = torch.zeros(41, 40, dtype=dtype)
    wide[:] = (torch.arange(1640).view(41, 40) % 7) - 3
    for at in range(4):  # not all begin at multiples of 16 bytes
        close(lambda w: torch.addmm(w[0, at : at + 3], w[3:9, 5 + at : 16 + at], w[20:31, 1:4]), wide)
        close(lambda w: relu(w.view(-1)[at : at + 3], w[3:9, 8:19], w[20:31, at : at + 3]), wide)
    close(lambda w: torch.addmm(w[0, :10], w[::2, ::3], w[:14, ::4]), wide)
    for shape in ((0, 4, 3), (4, 0, 3), (4, 3, 0)):
        for function in (torch.addmm, relu):
            close(function, *operands(*shape, dtype))
c, a, b = operands(3, 4, 5)
close(partial(relu, use_gelu=True), c, a, b)
assert calls(partial(torch.addmm, beta=2), c, a, b) == calls(relu, c[:1], a, b) == ["cuBLAS matmul"]
x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
assert calls(torch.baddbmm, c, x, y) == ["cuBLASLt linear"]
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_replays_with_other_values_and_sizes(run: Run) -> None:
    code = """
plans.set_mode("check")
for _ in range(2):
    for rows in (4, 7, 0, 12, 1, 31, 5, 7):
        for function in (torch.addmm, relu):
            close(function, *operands(rows, 3, 6))
        close(lambda c, a, b: linear(a, b.t(), c), *operands(rows, rows + 1, 2))
for name in ("addmm", "_addmm_activation"):
    assert plans.stats()[f"aten::{name}"]["replays"] > 0
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_gradients(run: Run) -> None:
    code = """
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 4))
x = torch.randn(5, 6)
expected = torch.autograd.grad(model(x).sin().sum(), model.parameters())
model.to("bp")
found = torch.autograd.grad(model(x.to("bp")).sin().sum(), model.parameters())
for one, other in zip(found, expected, strict=True):
    torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_threads_with_other_biases(run: Run) -> None:
    """All use the descriptors of one size."""
    code = """
failed = []
a, b = torch.randn(12, 8), torch.randn(8, 10)
moved = a.to("bp"), b.to("bp")

def work(number):
    try:
        bias = torch.full((10,), float(number))
        with torch.bp.Stream():
            mine = bias.to("bp")
            for _ in range(40):
                found = torch.addmm(mine, *moved).cpu()
                torch.testing.assert_close(found, torch.addmm(bias, a, b), rtol=1e-5, atol=1e-4)
    except BaseException as error:
        failed.append(error)

torch.bp.synchronize()
threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(failed)
"""
    assert run(PREAMBLE + code) == "[]\n"


def test_graphs_contain_the_calls(run: Run) -> None:
    """Of several sizes, also if the algorithms of a size are only found in the capture."""
    code = """
def step(c, a, b):
    return torch.addmm(c, relu(c, a, b), b) * 2

for n in (4, 9, 6):
    for warm in (True, False):
        c, a, b = (one.to("bp") for one in operands(n, n, n))
        if warm:
            step(c, a, b)
        torch.bp.synchronize()
        graph = torch.bp.Graph()
        with torch.bp.graph(graph):
            found = step(c, a, b)
        for _ in range(3):
            for one in (c, a, b):
                one.normal_()
            graph.replay()
            torch.testing.assert_close(found.cpu(), step(c.cpu(), a.cpu(), b.cpu()), rtol=1e-4, atol=1e-4)
        n += 20  # a size that was not used before
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


def test_compiled_graphs_call_the_library(run: Run) -> None:
    code = """
import ctypes, os
warnings.simplefilter("default")  # importing Inductor warns

def count():
    text = ctypes.create_string_buffer(4096)
    ctypes.CDLL(os.environ["TORCH_BACKPLANE_CUBLASLT_LIBRARY"]).emulator_calls(text, ctypes.c_size_t(4096))
    return int(dict(line.split() for line in text.value.decode().splitlines()).get("cublasLtMatmul", 0))

model = torch.compile(lambda x, w, c: linear(x, w, c))
for rows in (3, 8, 5, 8):
    x, w, c = torch.randn(rows, 6), torch.randn(4, 6), torch.randn(4)
    before = count()
    torch.testing.assert_close(model(x.to("bp"), w.to("bp"), c.to("bp")).cpu(), linear(x, w, c), rtol=1e-5, atol=1e-5)
    assert count() > before
print("done")
"""
    assert run(PREAMBLE + code) == "done\n"


# --- algorithms ------------------------------------------------------------------------------------------------------

# The timing of trials is replaced: each candidate takes a given time.
TUNED = PREAMBLE + """
from torch_backplane import tuning
from torch_backplane.tuning.choosing import forced
from torch_backplane.tuning.trials import Clock

milliseconds, trials = {}, []
timed = Clock.milliseconds

def time(clock):
    timed(clock)
    trials.append(forced("products"))
    return milliseconds.get(trials[-1], 5.0)

Clock.milliseconds = time

def form(function, *given):
    \"\"\"The library call of a function, and the number of the algorithm.\"\"\"
    text = plans.explain(function, *(one.to("bp") for one in given))
    (name, numbers), = re.findall(r"call (\\w+ \\w+) at .*?, (1, \\d+, [^a-z]*)", text)
    return name, int(numbers.split(", ")[14])
"""


def test_algorithms_are_candidates_of_the_tuner(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "results%d.csv")
    code = """
c, a, b = operands(6, 8, 10)
plain = partial(torch.mm, a)
assert form(torch.addmm, c, a, b) == ("cuBLASLt linear", 0)
torch.bp.tunable.enable()
torch.bp.tunable.set_numerical_check_tolerances(True, 1e-4, 1e-4)
for function, given, fastest, expected in (
    (torch.addmm, (c, a, b), "driver/cublaslt/2", ("cuBLASLt linear", 2)),
    (relu, (c, a, b), "driver/cublaslt/1", ("cuBLASLt linear", 1)),
    (torch.mm, (a, b), "driver/cublaslt/3", ("cuBLASLt matmul", 3)),
    (torch.bmm, (a[None], b[None]), "driver/cublaslt", ("cuBLASLt matmul", 0)),
    (torch.addmm, (c[:9], a, b[:, :9]), "driver/cublas", ("cuBLAS matmul", 0)),
    (torch.addmm, (c[:8], a, b[:, :8]), "driver", ("cuBLASLt linear", 0)),
):
    milliseconds.clear()
    trials.clear()
    milliseconds[fastest] = 1.0
    close(function, *given)
    assert fastest in trials, trials
    assert form(function, *given) == expected, (fastest, form(function, *given))
    close(function, *given)
    seen = sorted(set(trials))
    assert "generated" in seen and len(seen) == len(set(seen)), seen
    print(*(one for one in seen if one.startswith("driver")))
close(torch.addmm, *operands(6, 0, 10))
"""
    first = run(TUNED + code, PYTORCH_TUNABLEOP_FILENAME=file).splitlines()
    every = "driver driver/cublas driver/cublaslt/1 driver/cublaslt/2 driver/cublaslt/3 driver/cublaslt/4"
    assert first[0] == first[1] == first[4] == first[5] == every
    assert first[2] == first[3] == every.replace("cublas ", "cublaslt ")
    again = """
c, a, b = operands(6, 8, 10)
torch.bp.tunable.enable()
print(form(torch.addmm, c, a, b), form(relu, c, a, b), form(torch.mm, a, b), trials)
"""
    expected = "('cuBLASLt linear', 2) ('cuBLASLt linear', 1) ('cuBLASLt matmul', 3) []\n"
    assert run(TUNED + again, PYTORCH_TUNABLEOP_FILENAME=file) == expected
    lines = (tmp_path / "results0.csv").read_text(encoding="utf-8").splitlines()
    assert "ProductTunableOp_float32,a=6x8:8x1 b=8x10:10x1 added=1 bias=10:1 relu=1,driver/cublaslt/1,1" in lines


def test_a_tuned_algorithm_that_is_missing_is_replaced(run: Run, tmp_path: Path) -> None:
    """Then the first one runs, as for results of a library that is no longer installed."""
    file = tmp_path / "results0.csv"
    code = """
c, a, b = operands(6, 8, 10)
torch.bp.tunable.enable()
milliseconds["driver/cublaslt/4"] = 1.0
close(torch.addmm, c, a, b)
print(form(torch.addmm, c, a, b))
"""
    settings = {"PYTORCH_TUNABLEOP_FILENAME": str(tmp_path / "results%d.csv")}
    assert run(TUNED + code, **settings) == "('cuBLASLt linear', 4)\n"
    file.write_text(file.read_text(encoding="utf-8").replace("cublaslt/4", "cublaslt/7"), encoding="utf-8")
    assert run(TUNED + code, **settings) == "('cuBLASLt linear', 0)\n"
    assert run(TUNED + code.replace("form(", "calls("), **settings, TORCH_BACKPLANE_CUBLASLT_LIBRARY="none") == (
        "['cuBLAS matmul']\n"
    )


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_preferred_library(run: Run) -> None:
    code = """
c, a, b = operands(6, 8, 10)

def used():
    for function, *given in ((torch.mm, a, b), (torch.addmm, c, a, b), (relu, c, a, b), (torch.bmm, a[None], b[None])):
        close(function, *given)
    return *calls(torch.mm, a, b), *calls(torch.addmm, c, a, b), *calls(relu, c, a, b)

first = used()
assert first == ("cuBLAS matmul", "cuBLASLt linear", "cuBLASLt linear")
for name, expected in (
    ("cublaslt", ("cuBLASLt matmul", "cuBLASLt linear", "cuBLASLt linear")), ("cublas", ("cuBLAS matmul",) * 3),
    ("generated", ()), ("driver", first), ("cublaslt", ("cuBLASLt matmul", *first[1:])), ("default", first),
):
    assert bp.preferred_blas_library(name) == bp.preferred_blas_library() == name
    assert used() == expected, (name, used())
bp.preferred_blas_library("cublaslt")
complex = torch.complex(a, a)
close(torch.mm, complex, complex.t())
assert calls(torch.mm, complex, complex.t()) == ["cuBLAS matmul"]
from torch_backplane import preferences
with preferences.preferring("products", "generated"):
    assert used() == ()
assert bp.preferred_blas_library() == "cublaslt"
print(error_of(bp.preferred_blas_library, "magma"))
print(error_of(bp.preferred_fft_library, "cufft"))
bp.preferred_blas_library("cublas")
for rows in (3, 5, 7, 9):  # its plans serve any number of rows
    close(torch.addmm, *operands(rows, 8, 10))
assert plans.stats()["aten::addmm"]["dynamic_shape_replays"] > 0
"""
    names = "accepted are default, host, driver, generated"
    assert run(PREAMBLE + code) == (
        f"ValueError: products have no library 'magma': {names}, cublas, cublaslt\n"
        f"ValueError: transforms have no library 'cufft': {names}\n"
    )
    code = 'print(error_of(bp.preferred_blas_library, "cublaslt"))'
    without = run(PREAMBLE + code, TORCH_BACKPLANE_CUBLASLT_LIBRARY="none")
    assert without == f"ValueError: products have no library 'cublaslt': {names}, cublas\n"


def test_precision_is_what_is_allowed(run: Run) -> None:
    """As for cuBLAS: TF32, rounded parts of sums, sums in float16, and sums that must not be divided."""
    code = """
def rounds(function, *given):
    exact = function(*(one.double() for one in given))
    found = function(*(one.to("bp") for one in given)).cpu()
    torch.testing.assert_close(found.double(), exact, rtol=5e-2, atol=0.5)
    if given[0].dtype == torch.float32:
        return (found - exact).abs().max().item() > 1e-4
    return not torch.equal(found, exact.to(given[0].dtype))

def rounded():
    found = []
    for dtype in (torch.float32, *HALVES):
        c, a, b = operands(9, 200, 8, dtype)
        both = rounds(torch.addmm, c, a, b), rounds(torch.mm, a, b)
        assert both[0] == both[1], (dtype, both)
        found.append(both[0])
    return tuple(found)

bp.preferred_blas_library("cublaslt")
assert rounded() == (False, False, False)
for name, expected in (
    ("allow_tf32", (True, False, False)), ("allow_fp16_reduced_precision_reduction", (False, True, False)),
    ("allow_bf16_reduced_precision_reduction", (False, False, True)), ("allow_fp16_accumulation", (False, True, False)),
):
    for allowed in (True, False, True, False):
        setattr(bp.matmul, name, allowed)
        assert rounded() == (expected if allowed else (False, False, False)), (name, allowed)
half = torch.randn(4, 6).half(), torch.randn(6, 4).half()
bp.preferred_blas_library("default")
bp.matmul.allow_fp16_reduced_precision_reduction = (False, False)
assert calls(torch.mm, *half) == ["cuBLASLt matmul"]  # cuBLAS can divide sums
assert calls(torch.addmm, half[0].new_zeros(4), *half) == ["cuBLASLt linear"]
assert rounded() == (False, False, False)
assert calls(torch.mm, *(one.bfloat16() for one in half)) == ["cuBLAS matmul"]
close(torch.mm, half[0][:, :0], half[1][:0])
print(len(torch.bp.tunable.get_results()))
"""
    assert run(PREAMBLE + code, NVIDIA_TF32_OVERRIDE="1") == "0\n"


def test_sums_that_must_not_be_divided_have_fewer_algorithms(run: Run) -> None:
    code = """
from torch_backplane.operators import library_products
a, b = torch.randn(6, 8).half().to("bp"), torch.randn(8, 10).half().to("bp")

def algorithms():
    return [one for one in library_products.forms(a @ b, a, b) if "cublaslt" in one]

found = {}
for allowed in ((False, False), (False, True), (True, True)):
    bp.matmul.allow_fp16_reduced_precision_reduction = allowed
    found[allowed] = algorithms()
print(*found.values(), sep="\\n")
"""
    undivided, in_float32, rounded = map(eval, run(PREAMBLE + code).splitlines())
    assert undivided == ["cublaslt/1"]
    assert in_float32 == ["cublaslt", "cublaslt/1", "cublaslt/2"]
    assert rounded == ["cublaslt", *(f"cublaslt/{number}" for number in range(1, 5))]


def test_the_workspace_limit_leaves_algorithms_out(run: Run) -> None:
    code = """
c, a, b = operands(6, 8, 10)
bp.blas_workspace_size(1)
assert calls(torch.addmm, c, a, b) == []
close(torch.addmm, c, a, b)
bp.blas_workspace_size(1 << 30)
assert calls(torch.addmm, c, a, b) == ["cuBLASLt linear"]
print(bp.without_workspace()["products: driver"] > 0)
"""
    assert run(PREAMBLE + code) == "True\n"


def test_before_ampere_there_is_no_bfloat16(run: Run) -> None:
    code = """
for dtype in HALVES:
    close(relu, *operands(4, 4, 4, dtype))
    print(calls(relu, *operands(4, 4, 4, dtype)))
"""
    assert run(PREAMBLE + code, CUDA_EMULATOR_ARCHITECTURE="75") == "['cuBLASLt linear']\n[]\n"


# --- failures --------------------------------------------------------------------------------------------------------

FAILING = """
given = operands(6, 8, 10)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        close(relu, *given)
print(*(one.message for one in caught), sep="\\n")
print(calls(relu, *given), calls(torch.mm, *given[1:]))
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cublasLtCreate:1:3", "answered 3, which is: CUBLAS_STATUS_ALLOC_FAILED: not enough memory"),
        ("cublasLtMatmulDescCreate:1:3", "answered 3, which is: CUBLAS_STATUS_ALLOC_FAILED: not enough memory"),
        ("cublasLtMatmulDescSetAttribute:1:7", "answered 7, which is: CUBLAS_STATUS_INVALID_VALUE: an unsupported"),
        ("cublasLtMatrixLayoutCreate:3:3", "answered 3, which is: CUBLAS_STATUS_ALLOC_FAILED: not enough memory"),
        ("cublasLtMatmulPreferenceCreate:1:3", "answered 3, which is: CUBLAS_STATUS_ALLOC_FAILED: not enough memory"),
        ("cublasLtMatmulPreferenceSetAttribute:2:7", "answered 7, which is: CUBLAS_STATUS_INVALID_VALUE: an unsu"),
        ("cublasLtMatmulAlgoGetHeuristic:1:14", "answered 14, which is: CUBLAS_STATUS_INTERNAL_ERROR: an operation"),
        ("cublasLtMatmul:1:13", "answered 13, which is: CUBLAS_STATUS_EXECUTION_FAILED: a kernel could not be"),
    ],
    ids=lambda one: one.partition(":")[0],
)
def test_a_failing_library_is_replaced_with_one_warning(run: Run, fault: str, says: str) -> None:
    """cuBLAS computes the products then. A call that fails while the algorithms are found fails again when it runs."""
    call, number, status = fault.split(":")
    again = [] if call == "cublasLtMatmul" else [f"{call}:{count}:{status}" for count in range(int(number), 40)]
    faults = ",".join(dict.fromkeys([fault, *again]))
    warning, used = run(PREAMBLE + FAILING, CUDA_EMULATOR_FAULTS=faults).splitlines()
    assert warning.startswith("matrix products with a bias no longer use cuBLASLt on bp:0, which failed: ")
    assert f"cuBLASLt linear {says}" in warning
    assert used == "['cuBLAS matmul'] ['cuBLAS matmul']"


def test_a_product_without_an_algorithm_is_no_failure(run: Run) -> None:
    code = FAILING + """
print(calls(relu, *operands(7, 8, 10)))
"""
    fault = "cublasLtMatmulAlgoGetHeuristic:1:15"
    empty, used, other = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS=fault).splitlines()
    assert (empty, used, other) == ("", "['cuBLAS matmul'] ['cuBLAS matmul']", "['cuBLASLt linear']")


def test_a_failure_in_a_replay_is_an_error_and_later_calls_work(run: Run) -> None:
    code = """
given = [one.to("bp") for one in operands(6, 8, 10)]
for _ in range(3):
    print(error_of(torch.addmm, *given))
"""
    first, second, third = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS="cublasLtMatmul:2:14").splitlines()
    assert first == third == "no error"
    assert second.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) failed while calling cuBLASLt linear")
    assert "answered 14, which is: CUBLAS_STATUS_INTERNAL_ERROR" in second


def test_without_cublas_it_computes_all_products(run: Run) -> None:
    code = """
c, a, b = operands(6, 8, 10)
close(torch.addmm, c, a, b)
close(torch.mm, a, b)
print(calls(torch.addmm, c, a, b), calls(torch.mm, a, b))
"""
    of_lt = "['cuBLASLt linear'] ['cuBLASLt matmul']\n"
    assert run(PREAMBLE + code, TORCH_BACKPLANE_CUBLAS_LIBRARY="none") == of_lt
    without = run(PREAMBLE + code, TORCH_BACKPLANE_CUBLASLT_LIBRARY="none")
    assert without == "['cuBLAS matmul'] ['cuBLAS matmul']\n"
