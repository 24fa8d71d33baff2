"""torch.compile on a device whose dialect is part of another package: examples/drivers/plain_c."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)


@pytest.fixture
def plain_c(tmp_path: Path) -> Path:
    """A folder where the driver is installed."""
    source = (driver_packages.EXAMPLES / "plain_c" / "plain_c_driver.py").read_text(encoding="utf-8")
    driver_packages.install(tmp_path, "plain_c", source, "PlainCDriver")
    return tmp_path


PROGRAM = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

torch.manual_seed(0)


def check(name, function, *arguments):
    compiled = torch.compile(function)
    given = [one.to("bp") for one in arguments]
    found, code = run_and_get_code(compiled, *given)
    torch.testing.assert_close(
        found, function(*arguments), rtol=1e-4, atol=1e-4, check_device=False, msg=lambda text: f"{name}: {text}"
    )
    print(name, *("void bp_fused_" in one and "#include <stdint.h>" in one for one in code))


check("elements", lambda x, y: torch.tanh(x * y) + x.exp().clamp(max=3), torch.randn(37, 130), torch.randn(130))
check("half", lambda x, y: (x * 2 + 1, y - 1), (torch.arange(300) / 8).half(), (torch.arange(60) / 2).bfloat16())
check("rows", lambda x: torch.softmax(x, -1).argmax(-1), torch.randn(20, 300))
check("columns", lambda x: (x * 2).sum(0) + x.std(0), torch.randn(300, 37))
check("whole", lambda x: (x * x).sum(), torch.randn(1 << 20))
check("scans", lambda x: ((x.softmax(-1)).cumsum(-1), x.cummax(-1)), torch.randn(20, 300))
check("scans of columns", lambda x: (x.logcumsumexp(0), x.cumprod(0)), torch.rand(300, 37))
check("indices", lambda x, i: x[i] * 2, torch.randn(30, 5), torch.randint(0, 30, (70,)))
check("additions", lambda x, i: torch.zeros_like(x[:9]).index_add(0, i, x) + 1, torch.randn(30), torch.arange(30) % 9)
compiled = torch.compile(lambda x: torch.softmax(x * 2, -1), dynamic=True)
for size in ((3, 5), (70, 200), (16, 16)):
    x = torch.randn(size)
    torch.testing.assert_close(compiled(x.to("bp")).cpu(), torch.softmax(x * 2, -1))
model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 4))
twin = copy.deepcopy(model).to("bp")
x, target = torch.randn(64, 20), torch.randint(0, 4, (64,))
F.cross_entropy(model(x), target).backward()
F.cross_entropy(torch.compile(twin)(x.to("bp")), target.to("bp")).backward()
for one, other in zip(model.parameters(), twin.parameters()):
    torch.testing.assert_close(other.grad.cpu(), one.grad, rtol=1e-4, atol=1e-5)
half = torch.compile(lambda x: F.dropout(x, 0.5))(torch.ones(10000, device="bp")).mean().item()
print(0.9 < half < 1.1)
try:
    check("bounds", lambda x, i: x[i] + 1, torch.randn(3), torch.tensor([5]))
except IndexError as error:
    print("index 5 is out of bounds" in str(error))
"""


DOCUMENTED = """
import torch
from torch._inductor.utils import run_and_get_code

given = torch.randn(2, 100, device="bp")
_, (code,) = run_and_get_code(torch.compile(lambda x, y: (x * y).relu() + 1), *given)
print(code)
"""


def test_the_documented_kernel_is_what_is_generated(plain_c: Path) -> None:
    page = (paths.ROOT / "docs" / "write-a-driver.md").read_text(encoding="utf-8")
    kernel = page.partition("```c\nFUNCTION void bp_fused")[2].partition("```")[0]
    done = forked.run(DOCUMENTED, plain_c, TORCH_BACKPLANE_DRIVERS="plain_c")
    assert kernel
    assert kernel in done.stdout, done.stderr


def test_kernels_in_plain_c(plain_c: Path) -> None:
    settings = {"TORCH_BACKPLANE_DRIVERS": "plain_c", "TORCH_BACKPLANE_FALLBACK": "error"}
    done = forked.run(PROGRAM, plain_c, timeout=280, **settings)
    names = ("elements", "half", "rows", "columns", "whole", "scans", "scans of columns", "indices", "additions")
    assert done.stdout.splitlines() == [*(f"{name} True" for name in names), "True", "True"], done.stderr
