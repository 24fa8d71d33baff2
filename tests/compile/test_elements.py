"""Loops of a compiled kernel over the same elements: GPUs read memory once, and CPUs compute what is slow once."""

from __future__ import annotations

from pathlib import Path

import forked
import on_opencl
import pytest
import torch
from element_cases import CASES, check

from torch_backplane import drivers

pytestmark = pytest.mark.filterwarnings("ignore")
needs_kernels = pytest.mark.skipif(not drivers.device(0).properties.dialect, reason="the devices have no dialect")


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_elements(name: str) -> None:
    check(CASES[name])


ON_GPU = """
import warnings
from element_cases import CASES, check

warnings.simplefilter("ignore")
for name, case in CASES.items():
    check(case)
    print(name)
"""


def test_elements_on_the_target_of_a_gpu(tmp_path: Path) -> None:
    """The devices of other tests are CPUs."""
    on_opencl.require_platform()
    settings = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    done = forked.run(ON_GPU, tmp_path, timeout=280, **settings)
    assert done.stdout.splitlines() == [*CASES], done.stderr


@pytest.mark.slow
def test_teams_have_no_races(tmp_path: Path) -> None:
    settings = {"TORCH_BACKPLANE_SANITIZE_KERNELS": "1", "TORCH_BACKPLANE_TARGET": "nvidia-ada"}
    done = forked.run(ON_GPU, tmp_path, timeout=280, **settings)
    assert done.stdout.splitlines() == [*CASES], done.stderr


@needs_kernels
@pytest.mark.parametrize("name", ["softmax of 17", "softmax of 4112", "one after another", "in place", "positions"])
def test_dynamic_shapes(name: str) -> None:
    check(CASES[name], count=False, dynamic=True)


@needs_kernels
def test_indices_are_checked() -> None:
    compiled = torch.compile(CASES["indices"].function)

    def call_and_wait() -> None:
        compiled(table, index)
        torch.bp.synchronize()

    table, index = torch.randn(20, 200, device="bp"), torch.tensor([3, 20, 1], device="bp")
    with pytest.raises(IndexError, match="index 20 is out of bounds"):
        call_and_wait()
    torch.testing.assert_close(compiled(table, index % 20), CASES["indices"].function(table, index % 20))
