"""Tests a driver with its own dialect and launcher (examples/drivers/plain_c), and the errors of invalid ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import driver_packages
import forked
import pytest

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

SOURCE = (driver_packages.EXAMPLES / "plain_c" / "plain_c_driver.py").read_text(encoding="utf-8")

SELECTION = (
    "^(add|where|remainder|sum|argmax|sort|cumsum|gather|index_add|nonzero|bmm|softmax|"
    "nn.functional.(layer_norm|max_pool2d|cross_entropy))$"
)


def run(site: Path, code: str, source: str = SOURCE, **settings: str) -> str:
    driver_packages.install(site, "plain_c", source, "PlainCDriver")
    result = forked.run(code, site, TORCH_BACKPLANE_DRIVERS="plain_c", **settings)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_plain_c_driver_passes_conformance(tmp_path: Path) -> None:
    driver_packages.install(tmp_path, "plain_c", SOURCE, "PlainCDriver")
    what = ["--match", SELECTION, "--dtypes", "float32,int64", "--samples", "4"]
    command = ["conformance", "--driver", "plain_c", *what, "--jobs", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "torch_backplane", *command],
        env=os.environ | {"PYTHONPATH": driver_packages.python_path(tmp_path)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "All passed" in result.stdout
    assert "failed 0" in result.stdout


CALLS = """
import torch
from torch_backplane import _C, plans

x, y = torch.randn(2, 37, 130)
mask, places = x > 0.3, torch.arange(37).flip(0)
for name, call in {
    "elements": lambda x, y, mask, places: x * 2 + y,
    "strides": lambda x, y, mask, places: x.t() - y.t(),
    "numbers": lambda x, y, mask, places: x.half() + y.bfloat16() + (x + 1j * y).abs(),
    "remainders": lambda x, y, mask, places: places % -5,
    "sums": lambda x, y, mask, places: x.sum() + x.std(1).sum() + x.amax(0).sum(),
    "products": lambda x, y, mask, places: x @ y.t(),
    "rows": lambda x, y, mask, places: x.softmax(1) + torch.nn.functional.layer_norm(y, [130]),
    "order": lambda x, y, mask, places: x.sort(1)[0] + y.cumsum(0),
    "indices": lambda x, y, mask, places: x[places].index_add(0, places, y),
    "selection": lambda x, y, mask, places: x[mask],
    "copies": lambda x, y, mask, places: x.clone().fill_(3).copy_(y)[:, 1:].contiguous(),
}.items():
    for _ in range(2):  # planned, and replayed
        found = call(*(one.to("bp") for one in (x, y, mask, places))).cpu()
        torch.testing.assert_close(found, call(x, y, mask, places), atol=2e-4, rtol=1e-4, msg=name)
try:
    x.to("bp")[torch.tensor([37]).to("bp")].cpu()
except IndexError as error:
    print(error)
print(_C.fallback_counts(), _C.device_properties(0).dialect)
"""


def test_results_match_the_cpu_without_fallback(tmp_path: Path) -> None:
    printed = run(tmp_path, CALLS, TORCH_BACKPLANE_FALLBACK="error")
    assert printed.splitlines() == ["index: index 37 is out of bounds for dimension with size 37", "{} Plain C"]


def test_compile_error_is_reported(tmp_path: Path) -> None:
    code = """
import torch
try:
    print(torch.ones(3, device="bp") + 1)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    printed = run(tmp_path, code, SOURCE.replace("typedef unsigned int uint;", "typedef unsigned what uint;"))
    assert "could not be built for Plain C accelerator: RuntimeError" in printed


NEEDED = """
import torch
x = torch.ones(3, device="bp")
for call in (
    lambda: x + 1,
    lambda: torch.lgamma(x),
    lambda: x.cumsum(0),
    lambda: x.to(torch.complex64) * 1j,
    lambda: x[torch.tensor([1], device="bp")],
    lambda: x.view(torch.int32).float(),
    lambda: torch.nextafter(x, x),
):
    try:
        print(call().sum().item())
    except NotImplementedError as error:
        print(type(error).__name__, error)
"""


def test_operations_missing_in_a_dialect_raise_when_used(tmp_path: Path) -> None:
    without = SOURCE.replace('    name = "Plain C"\n', '    name = "Plain C"\n    missing = frozenset({"lgamma"})\n')
    without = without.replace('        torch.complex64: "float2", torch.complex128: "double2",\n', "")
    start = without.index('        "atomic_swap(')
    without = without[:start] + without[without.index("\n", start) + 1 :]
    printed = run(tmp_path, NEEDED, without).splitlines()
    assert printed == [
        "6.0",
        "MissingOperation aten::lgamma: the dialect Plain C has no lgamma",
        "6.0",
        "MissingOperation backplane::copy_elements: the dialect Plain C has no type for complex64",
        "MissingOperation aten::index.Tensor: the dialect Plain C has no atomic_swap",
        "3196059648.0",
        "3.0",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("dialect=PlainC", "dialect='Metal'"),
            "PlainCDevice.properties.dialect is 'Metal', which is not a built-in dialect (OpenCL C, CUDA C++, HIP C++)"
            "; for another language, use a subclass of torch_backplane.kernels.Dialect",
        ),
        (("dialect=PlainC", "dialect=PlainCDevice"), "must be a name or a subclass of torch_backplane.kernels.Dialect"),
        (("dialect=PlainC", "dialect=PlainC()"), "must be a name or a subclass of torch_backplane.kernels.Dialect"),
        (("dialect=PlainC", "dialect=Dialect"), "the dialect Dialect has the name None; it needs a string"),
        (("def header(", "def no_header("), "the dialect Plain C does not define header, which"),
        (("  types: ClassVar =", "  kinds: ClassVar ="), "the dialect Plain C does not define types, which"),
        (('"ITEM":', '"ITEMS":'), "the dialect Plain C has the unknown words ITEMS; known are GLOBAL, LOCAL, ITEM, "),
        (('"fill", "flush")', '"fill")'), "NativeLauncher.functions has no address for flush, which 'c' needs"),
        (('api="c"', 'api="cuda"'), "NativeLauncher.api is 'cuda', and must be one of opencl, c"),
        (("def native_kernel(", "def no_kernel("), "takes kernels in Plain C, but does not override native_kernel"),
    ],
)
def test_incomplete_driver_is_skipped(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert SOURCE.count(change[0]) == 1
    code = "import torch; print(torch.accelerator.device_count())"
    printed = run(tmp_path, code, SOURCE.replace(*change))
    assert printed.startswith("0\n")
    assert message in printed


def test_error_status_of_the_launcher_raises(tmp_path: Path) -> None:
    code = """
import torch
x, places = torch.ones(3).to("bp"), torch.tensor([7]).to("bp")
# The kernel of the last call writes an index error to memory, which is then reset to zero by a fill.
for call in (lambda: (x + 1).cpu(), lambda: x.clone().cpu(), lambda: x[places].cpu()):
    try:
        call()
    except (torch.AcceleratorError, IndexError) as error:
        print(str(error).splitlines()[0])
"""
    for number, line in enumerate(("kernel(items, group, arguments);", "memcpy(", "memset(")):
        at = SOURCE.index("return 0;", SOURCE.index(line))
        site = tmp_path / str(number)
        site.mkdir()
        printed = run(site, code, f"{SOURCE[:at]}return 7;{SOURCE[at + len('return 0;') :]}")
        assert f"{('launch', 'copy', 'fill')[number]} answered 7" in printed
