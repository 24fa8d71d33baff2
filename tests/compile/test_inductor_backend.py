"""Tests the choice of the language in which torch.compile generates kernels. tests/cuda/test_cuda_triton_inductor.py
tests the kernels in Triton."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_backplane import preferences
from torch_backplane.compile import inductor
from torch_backplane.triton_driver import targets


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.backends.bp.inductor_backend()
    torch._dynamo.reset()
    yield
    torch.backends.bp.inductor_backend(before)
    torch._dynamo.reset()


def test_the_default_is_the_dialect() -> None:
    assert torch.backends.bp.inductor_backend() == "dialect"
    assert torch.backends.bp.inductor_backend("triton") == "triton"
    assert torch.backends.bp.inductor_backend() == "triton"
    with pytest.raises(ValueError, match="must be one of dialect, triton, but got 'cuda'"):
        torch.backends.bp.inductor_backend("cuda")
    assert torch.backends.bp.inductor_backend() == "triton"


def test_the_environment_sets_the_default(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
import torch
print(torch.backends.bp.inductor_backend())
print(torch.backends.bp.inductor_backend("dialect"))
"""
    assert run_python(code, TORCH_BACKPLANE_INDUCTOR_BACKEND="triton").stdout == "triton\ndialect\n"
    malformed = run_python(code, TORCH_BACKPLANE_INDUCTOR_BACKEND="cuda").stderr
    assert "TORCH_BACKPLANE_INDUCTOR_BACKEND='cuda' is not one of dialect, triton" in malformed


def test_devices_that_do_not_run_triton_are_refused() -> None:
    torch.backends.bp.inductor_backend("triton")
    compiled = torch.compile(lambda x: x + 1)
    with pytest.raises(Exception, match=r"cannot generate Triton kernels: Triton kernels do not run on bp:0 \(.*CUDA"):
        compiled(torch.ones(3, device="bp"))
    inductor.check_backend([])  # graphs on other devices
    torch.backends.bp.inductor_backend("dialect")
    torch._dynamo.reset()
    assert compiled(torch.ones(3, device="bp")).tolist() == [2, 2, 2]


def test_missing_triton_and_old_pytorch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    preferences.set_inductor_backend("triton")
    monkeypatch.setattr(targets, "triton_target", lambda index: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"Triton is not installed; pip install triton==3\.7\.1 installs it"):
        inductor.check_backend([0])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(RuntimeError, match=r"it needs PyTorch 2\.13 or later, but this is 2\.12\.1\+cpu"):
        inductor.check_backend([0])
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    inductor.check_backend([0])


def test_cached_graphs_depend_on_the_choice() -> None:
    torch.zeros(1, device="bp")
    before = inductor.cache_key()
    torch.backends.bp.inductor_backend("triton")
    assert inductor.cache_key() != before
