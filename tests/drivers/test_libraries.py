"""Tests libraries of drivers (torch_backplane.drivers.libraries), on a device with two libraries and on one with none.

The driver is examples/drivers/plain_c with matrix products in C. «First» accepts up to 8 rows; «Second» has a
workspace.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import pytest

from torch_backplane.drivers.libraries import FAMILIES

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

Run = Callable[..., str]

DRIVER = '''
import ctypes, torch
from driver_plain_c_module import PlainCDevice, address, built
from torch_backplane.drivers import Driver, Library, Routine

library = built("""
#include <stdint.h>
#include <string.h>
typedef struct { char* memory; uint64_t offset; const void* data; uint64_t bytes; } argument_t;
uint64_t called[2], workspace;
int answers[2];

static float* at(const argument_t* given) { return (float*)(given->memory + given->offset); }
static int product(int which, const argument_t* given) {
  ++called[which];
  if (answers[which]) return answers[which];
  float *c = at(given), *a = at(given + 1), *b = at(given + 2);
  const float alpha = *(const float*)given[3].data, beta = *(const float*)given[4].data;
  int64_t n[15];
  for (int i = 0; i < 15; ++i) n[i] = *(const int64_t*)given[5 + i].data;
  for (int64_t i = 0; i < n[0]; ++i, c += n[9], a += n[10], b += n[11])
    for (int64_t row = 0; row < n[1]; ++row)
      for (int64_t column = 0; column < n[2]; ++column) {
        float sum = 0;
        for (int64_t k = 0; k < n[3]; ++k)
          sum += a[n[7] ? k * n[5] + row : row * n[5] + k] * b[n[8] ? column * n[6] + k : k * n[6] + column];
        float* result = c + row * n[4] + column;
        *result = alpha * sum + (beta == 0 ? 0 : beta * *result);
      }
  return 0;
}
int first(void* queue, const argument_t* given, uint64_t count) { return count == 20 ? product(0, given) : -1; }
int second(void* queue, const argument_t* given, uint64_t count) {
  if (count != 22) return -1;
  workspace = *(const int64_t*)given[21].data;
  memset(at(given + 20), 255, workspace);
  return product(1, given);
}
""")

called = (ctypes.c_uint64 * 2).in_dll(library, "called")
answers = (ctypes.c_int * 2).in_dll(library, "answers")
workspace = ctypes.c_uint64.in_dll(library, "workspace")
costs = [0, 0]

def at_most_8_rows(dtype, rows, **rest):
    return None if rows <= 8 else "takes up to 8 rows"

def scratch(dtype, rows, columns, **rest):
    return (rows - 3) * columns

def routine(function, which, **queries):
    return Routine(addresses={torch.float32: address(function)}, cost=lambda dtype, **rest: costs[which], **queries)

FIRST = Library(
    name="First", routines={"matmul": routine(library.first, 0, guard=at_most_8_rows)}, explain={7: "no room"}.get
)
SECOND = Library(
    name="Second",
    routines={"matmul": routine(library.second, 1, workspace=scratch)},
)

class LibraryDevice(PlainCDevice):
    libraries = [FIRST, SECOND]

class LibraryDriver(Driver):
    def devices(self): return [LibraryDevice()]
'''

PREAMBLE = '''
import torch, warnings
from torch_backplane import drivers, plans, preferences
torch.accelerator.device_count()
from torch_backplane.operators import library_products
import driver_libraries_module as driver
warnings.simplefilter("error")

def close(function, *given):
    found = function(*(one.to("bp") for one in given))
    torch.testing.assert_close(found.cpu(), function(*given), atol=1e-4, rtol=1e-4)

def calls():
    """Of each library since the last call of this."""
    found = list(driver.called)
    driver.called[:] = [0, 0]
    return found
'''


def install(site: Path, source: str = DRIVER) -> None:
    plain_c = (driver_packages.EXAMPLES / "plain_c" / "plain_c_driver.py").read_text(encoding="utf-8")
    driver_packages.install(site, "plain_c", plain_c, "PlainCDriver")
    driver_packages.install(site, "libraries", source, "LibraryDriver", "driver_libraries")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns run(code, driver), which runs on the device with libraries by default."""
    install(tmp_path)

    def call(code: str, driver: str = "libraries") -> str:
        result = forked.run(PREAMBLE + code, tmp_path, TORCH_BACKPLANE_DRIVERS=driver)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call


def test_first_library_that_accepts_the_call_runs(run: Run) -> None:
    run("""
def product(rows, batch=()):
    return torch.randn(*batch, rows, 5), torch.randn(*batch, 5, 6)

for rows, batch, expected in ((8, (), [1, 0]), (9, (), [0, 1]), (3, (2,), [1, 0]), (11, (2,), [0, 1])):
    a, b = product(rows, batch)
    close(torch.matmul, a, b)
    assert calls() == expected, (rows, batch)
    assert expected[0] or driver.workspace.value == (rows - 3) * 6
a, b = product(9)
close(lambda a, b: torch.addmm(torch.ones(6, device=a.device), a, b, beta=2, alpha=3), a, b)
close(lambda a, b: a.t().contiguous().t() @ b.t().contiguous().t(), a, b)
assert calls() == [0, 2]
close(torch.matmul, torch.randn(3, 5), torch.randn(5, 9).t().contiguous().t())
assert calls() == [1, 0]
close(torch.mm, a.double(), b.double())
assert calls() == [0, 0]
""")


def test_sizes_on_both_sides_of_a_guard_have_separate_plans(run: Run) -> None:
    run("""
plans.set_mode("check")
for rows in (4, 7, 8, 9, 12, 5, 31, 8, 3):
    close(torch.mm, torch.randn(rows, 5), torch.randn(5, 6))
    assert calls() == ([1, 0] if rows <= 8 else [0, 1]), rows
""")


def test_workspace_can_be_empty_and_is_limited(run: Run) -> None:
    run("""
drivers.device(0).libraries = [driver.SECOND]
close(torch.mm, torch.randn(3, 5), torch.randn(5, 6))
assert calls() == [0, 1] and driver.workspace.value == 0
for limit, expected in ((36, [0, 1]), (35, [0, 0])):
    preferences.set_workspace(limit)
    close(torch.mm, torch.randn(9, 5), torch.randn(5, 6))
    assert calls() == expected, limit
""")


def test_the_cheapest_candidate_runs(run: Run) -> None:
    run("""
for rows, which in ((4, 0), (9, 1)):
    for cost, expected in ((10**15, 0), (0, 1)):
        driver.costs[which] = cost
        torch.backends.bp.preferred_blas_library("generated")  # the change invalidates plans
        torch.backends.bp.preferred_blas_library("default")
        close(torch.mm, torch.randn(rows, 5), torch.randn(5, 6))
        assert sum(calls()) == expected, (rows, cost)
driver.costs[1] = 10**15
torch.backends.bp.preferred_blas_library("driver")
close(torch.mm, torch.randn(9, 5), torch.randn(5, 6))
assert calls() == [0, 1]
""")


def test_failing_library_warns_once_and_the_next_one_runs(run: Run) -> None:
    run("""
a, b = torch.randn(4, 5), torch.randn(5, 6)

def warnings_of(function, *given):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            close(function, *given)
        close(function, torch.cat([given[0]] * 2), given[1])
    return [str(one.message) for one in found]

driver.answers[0] = 7
(message,) = warnings_of(torch.mm, a, b)
assert message.startswith("matrix products no longer use First on bp:0, which failed: "), message
assert "no room" in message
assert calls() == [1, 4]
driver.answers[:] = [0, 9]
torch.backends.bp.preferred_blas_library("driver")  # the change invalidates plans
torch.backends.bp.preferred_blas_library("default")
(message,) = warnings_of(torch.mm, torch.randn(10, 5), b)
assert message.startswith("matrix products no longer use Second on bp:0, which failed: "), message
assert calls() == [0, 1]
""")


def test_numbers_are_those_that_the_dtype_is_computed_in(run: Run) -> None:
    """float32 for half precision; real and imaginary part for complex numbers. Replays have their own."""
    run("""
import ctypes
from c_argument import CArgument
seen = []

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(CArgument), ctypes.c_uint64)
def record(queue, given, count):
    types = {4: ctypes.c_float, 8: ctypes.c_double}
    numbers = (given[i] for i in range(3, count - 15))
    seen.append([(one.bytes, types[one.bytes].from_address(one.data).value) for one in numbers])
    return 0

dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
addresses = dict.fromkeys(dtypes, ctypes.cast(record, ctypes.c_void_p).value)
routine = driver.Routine(addresses=addresses, cost=lambda dtype, **rest: 0)
drivers.device(0).libraries = [driver.Library(name="Recorder", routines={"matmul": routine})]
for dtype in dtypes:
    a = torch.ones(3, 3, dtype=dtype, device="bp")
    part = 8 if dtype in (torch.float64, torch.complex128) else 4
    for alpha in (0.1, 0.1, 0.75):
        torch.addmm(a, a, a, alpha=alpha, beta=-2)
        torch.accelerator.synchronize()  # the call can wait for the build of a kernel that copies
        near = torch.tensor(alpha, dtype=torch.float64 if part == 8 else torch.float32).item()
        zero = [(part, 0.0)] * dtype.is_complex
        assert seen.pop() == [(part, near), *zero, (part, -2.0), *zero], (dtype, alpha)
    if dtype.is_complex:
        torch.addmm(a, a, a, alpha=2 - 3j, beta=0.5j)
        torch.accelerator.synchronize()
        assert seen.pop() == [(part, one) for one in (2.0, -3.0, 0.0, 0.5)]
assert not seen
""")


def test_a_bias_an_activation_and_a_form_reach_the_routine(run: Run) -> None:
    """A library that computes the bias gets it; its forms, and those of the others, are named by the library."""
    run("""
import ctypes
from c_argument import CArgument
from torch_backplane.drivers.libraries import FAMILIES
seen = []

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(CArgument), ctypes.c_uint64)
def record(queue, given, count):
    names = FAMILIES["linear"].integers
    assert count == 5 + len(names)
    bias = ctypes.c_float.from_address(given[3].memory + given[3].offset).value
    alpha = ctypes.c_float.from_address(given[4].data).value
    integers = {name: ctypes.c_int64.from_address(given[5 + i].data).value for i, name in enumerate(names)}
    seen.append((bias, alpha, integers["activation"], integers["form"], integers["alignment"]))
    return 0

def forms(dtype, rows, **rest):
    return 3 if rows < 8 else 1

routine = driver.Routine(
    addresses={torch.float32: ctypes.cast(record, ctypes.c_void_p).value}, cost=lambda dtype, **rest: 0, forms=forms
)
drivers.device(0).libraries = [driver.FIRST, driver.SECOND, driver.Library(name="Bi-As", routines={"linear": routine})]
activation = torch._addmm_activation
c, a, b = (torch.full(shape, 2.0, device="bp") for shape in ((6,), (7, 5), (5, 6)))
odd = torch.full((9,), 3.0, device="bp")

def last():
    torch.accelerator.synchronize()
    return seen.pop()

for _ in range(2):
    torch.addmm(c, a, b, alpha=0.5)
    assert last() == (2.0, 0.5, 0, 0, 16)
    activation(c, a, b)
    assert last() == (2.0, 1.0, 1, 0, 16)
    activation(c, a, b, use_gelu=True)  # a kernel computes it
    assert last() == (2.0, 1.0, 0, 0, 16)
    torch.addmm(odd[2:8], a, b)
    assert last() == (3.0, 1.0, 0, 0, 4)
for other in (
    lambda: torch.addmm(c, a, b, beta=2), lambda: torch.addmm(c[:1], a, b), lambda: torch.addmm(c.expand(7, 6), a, b),
    lambda: a @ b, lambda: torch.addmm(c.double(), a.double(), b.double()),
):
    other()
    torch.accelerator.synchronize()
    assert not seen
finish = library_products.finish(a @ b, c, 1)
assert library_products.forms(a @ b, a, b, finish) == ["bias/1", "bias/2", "first", "second"]
assert library_products.forms(a @ b, a, b) == ["second"]
nine = torch.ones(9, 5, device="bp")
assert library_products.forms(nine @ b, nine, b, finish) == ["second"]
assert library_products.has_form("bias/2", a @ b, a, b, finish)
assert not library_products.has_form("third", a @ b, a, b, finish)
""")


def test_libraries_are_told_what_they_may_do(run: Run) -> None:
    run("""
import ctypes
from torch_backplane.drivers.libraries import Allowed
dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
told, switches = [], torch.backends.bp.matmul

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
def nothing(queue, given, count):
    return 0

def guard(dtype, allowed, **rest):
    told.append(Allowed(allowed))
    return None if allowed & Allowed.DIVIDED_SUMS else "can divide sums"

addresses = dict.fromkeys(dtypes, ctypes.cast(nothing, ctypes.c_void_p).value)
routine = driver.Routine(addresses=addresses, guard=guard, cost=lambda dtype, **rest: 0)
drivers.device(0).libraries = [driver.Library(name="Told", routines={"matmul": routine})]

def allowed(dtype):
    one = torch.ones(3, 3, dtype=dtype, device="bp")
    told.clear()
    one @ one  # a plan of the first call is used only while the guard would get the same
    planned = told[-1] if told else None
    library_products.why_not(one, one, one)
    assert planned in (None, told[-1]), (planned, told)
    return told[-1]

DIVIDED, TF32, ROUNDED = Allowed.DIVIDED_SUMS, Allowed.TF32, Allowed.ROUNDED_SUMS
assert [allowed(dtype) for dtype in dtypes] == [DIVIDED] * 5
for change, expected in (
    (lambda: torch.set_float32_matmul_precision("high"), TF32), (lambda: setattr(switches, "allow_tf32", False), 0),
    (lambda: setattr(switches, "allow_tf32", True), TF32), (lambda: setattr(switches, "fp32_precision", "ieee"), 0),
    (lambda: setattr(switches, "fp32_precision", "none"), TF32),
    (lambda: torch.set_float32_matmul_precision("highest"), 0),
):
    change()
    assert [allowed(dtype) for dtype in dtypes] == [DIVIDED, DIVIDED, DIVIDED | expected, DIVIDED, DIVIDED | expected]
    assert switches.allow_tf32 == bool(expected) and switches.fp32_precision == ("tf32" if expected else "ieee")
switches.allow_fp16_accumulation = True
switches.allow_bf16_reduced_precision_reduction = True
assert [allowed(dtype) for dtype in dtypes[:3]] == [DIVIDED | Allowed.HALF_SUMS, DIVIDED | ROUNDED, DIVIDED]
half = torch.ones(3, 3, dtype=torch.float16, device="bp")
switches.allow_fp16_reduced_precision_reduction = (False, False)
assert library_products.why_not(half, half, half) == "(Told) can divide sums"
assert library_products.why_not(half.float(), half.float(), half.float()) is None
""")


def test_calls_are_tuned_in_the_precision_of_their_problem(run: Run) -> None:
    run("""
from torch_backplane import tuning
from torch_backplane.drivers.libraries import Allowed
told = set()

def guard(dtype, allowed, **rest):
    told.add(Allowed.TF32 in Allowed(allowed))

addresses, switches = driver.FIRST.routines["matmul"].addresses, torch.backends.bp.matmul
routine = driver.Routine(addresses=addresses, guard=guard, cost=lambda dtype, **rest: 0, tf32=True)
drivers.device(0).libraries = [driver.Library(name="Told", routines={"matmul": routine})]
assert torch.bp.is_tf32_supported()
tuning.context.benchmark("products", True)
for allowed in (False, True, False):
    switches.allow_tf32 = allowed
    told.clear()
    close(torch.mm, torch.randn(4, 5), torch.randn(5, 6))
    assert told <= {allowed}, told
without, of_tf32 = tuning.context.benchmarked(0)
assert of_tf32.parameters == f"{without.parameters} tf32=1"
for problem, allowed in ((of_tf32, True), (without, False)):
    for before in ("tf32", "ieee", "none"):
        switches.fp32_precision = before
        told.clear()
        tuning.tune("products", problem, torch.device("bp:0"), ["driver"], 0)
        assert told == {allowed}, (problem, before)
        assert switches.allow_tf32 == (before == "tf32")
""")


def test_device_without_libraries(run: Run) -> None:
    warnings_of = run(
        """
a, b = torch.randn(4, 5), torch.randn(5, 6)
close(torch.mm, a, b)
warnings.simplefilter("default")
torch.backends.bp.preferred_blas_library("driver")
close(torch.mm, a, b)
assert calls() == [0, 0]
print(library_products.why_not(a.to("bp")))
""",
        driver="plain_c",
    )
    assert warnings_of == "is not available on this device\n"


def test_routine_families_without_a_planner_give_a_warning(tmp_path: Path) -> None:
    unplanned = [name for name, family in FAMILIES.items() if not family.memory]
    assert unplanned
    change = f"FIRST.routines.update(dict.fromkeys({unplanned}, FIRST.routines['matmul']))"
    install(tmp_path, f"{DRIVER}\n{change}")
    result = forked.run("import torch; print(torch.ones(2, device='bp').tolist())", tmp_path,
                        TORCH_BACKPLANE_DRIVERS="libraries")  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "[1.0, 1.0]\n")
    for name in unplanned:
        assert f"no planner calls the {name} routine of the library First yet" in result.stderr


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ("FIRST", "LibraryDevice.libraries is Library("),
        ("['blas']", "LibraryDevice.libraries has 'blas'; each element must be a Library"),
        ("[FIRST, FIRST]", "LibraryDevice.libraries has the library First more than once"),
        ("[Library(name='', routines=FIRST.routines)]", "Library.name is '', and must be a string that is not empty"),
        ("[Library(name='L', routines={})]", "the library L has the routines {}; it needs a dictionary by family"),
        (
            "[Library(name='L', routines={'gemm': 1})]",
            f"the library L has a routine for 'gemm'; the families are {', '.join(FAMILIES)}",
        ),
        ("[Library(name='L', routines={'matmul': 7})]", "matmul routine of the library L is 7, and must be a Routine"),
        ("[Library(name='L', routines=FIRST.routines, explain=7)]", "explain of the library L is 7"),
        ("[made(addresses={})]", "matmul routine of the library L has the addresses {}; it needs one for each"),
        ("[made(addresses={'float32': 1})]", "has the addresses {'float32': 1}; it needs one for each"),
        ("[made(addresses={torch.float32: 0})]", "has the address 0 for torch.float32; it must be above 0"),
        ("[made(guard=1)]", "has the guard 1; it must be a function of a call, or None"),
        ("[made(workspace=64)]", "has the workspace 64; it must be a function of a call, or None"),
        ("[made(cost='none')]", "has the cost 'none'; it must be a function of a call, or None"),
        ("[made(forms=3)]", "has the forms 3; it must be a function of a call, or None"),
        ("[made(tf32=1)]", "has tf32 = 1, which must be a bool"),
        ("[made(cache=[])]", "has a cache without size, max_size, set_max_size"),
    ],
)
def test_driver_with_invalid_libraries_is_skipped(tmp_path: Path, libraries: str, message: str) -> None:
    source = f"""{DRIVER}
def made(**changed):
    return Library(name="L", routines={{"matmul": Routine(**{{"addresses": {{torch.float32: 1}}}} | changed)}})
LibraryDevice.libraries = {libraries}
"""
    install(tmp_path, source)
    code = "import torch; print(torch.accelerator.device_count())"
    result = forked.run(code, tmp_path, TORCH_BACKPLANE_DRIVERS="libraries")
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr
    assert message in result.stderr


def test_libraries_need_a_native_launcher(tmp_path: Path) -> None:
    source = """
from torch_backplane.drivers import Library, Routine
import torch
MinimalDevice.libraries = [Library(name="L", routines={"fft": Routine(addresses={torch.float32: 1})})]
"""
    driver_packages.install(tmp_path, "minimal", driver_packages.MINIMAL + source, "MinimalDriver")
    code = "import torch; print(torch.accelerator.device_count())"
    result = forked.run(code, tmp_path, TORCH_BACKPLANE_DRIVERS="minimal")
    assert result.stdout == "0\n", result.stderr
    assert "MinimalDevice has libraries but no native_launcher; routines need a native queue" in result.stderr
