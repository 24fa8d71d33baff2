"""Tests that declaring planners, for devices that run kernels, does not change the operators of host devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paths
import pytest

CODE = """
import torch
import torch_backplane.operators  # also imported when a device that runs kernels is discovered

torch.manual_seed(3)
state = torch.get_rng_state()
x = torch.ones(1000, device="bp", requires_grad=True)
a = torch.nn.functional.dropout(x, 0.5)
torch.manual_seed(3)
assert torch.equal(a, torch.nn.functional.dropout(x, 0.5)), "bp's generator decides"
assert torch.equal(torch.get_rng_state(), state), "and the CPU's is left alone"
a.sum().backward()

y = torch.randn(3, 8, device="bp", requires_grad=True)
torch.nn.functional.rms_norm(y, (8,)).sum().backward()
torch.nn.functional.conv2d(torch.randn(1, 2, 5, 5, device="bp"), torch.randn(3, 2, 3, 3, device="bp"))
q = torch.randn(1, 2, 4, 8, device="bp", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
torch.nn.LSTM(4, 5).to("bp")(torch.randn(2, 1, 4, device="bp"))[0].sum().backward()
print("fine")
"""


def test_planners_do_not_affect_host_devices(run_python: Callable[..., Any]) -> None:
    result = run_python(CODE, TORCH_BACKPLANE_DRIVERS="host")
    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


# Tests of operators on host devices. In these files, other tests decide whether planners are declared in the process.
ANSWERS = [
    "accelerator/test_cuda_dtypes.py", "accelerator/test_graphs_on_host.py", "runtime/test_copy_on_write.py",
    "runtime/test_fallback.py",
]  # fmt: skip


@pytest.mark.slow
def test_host_operator_tests_pass_with_planners_declared(run_python: Callable[..., Any]) -> None:
    files = [str(paths.TESTS / name) for name in ANSWERS]
    code = f"import sys, pytest, torch, torch_backplane.operators; sys.exit(pytest.main({['-q', '-x', *files]}))"
    result = run_python(code, timeout=600, TORCH_BACKPLANE_DRIVERS="host", PYTEST_XDIST_WORKER=None)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
