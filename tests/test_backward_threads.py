"""Backward passes run in the thread that asks for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch


def thread_of_a_pass(x: torch.Tensor) -> int:
    """Where a hook of the pass runs."""
    found: list[int] = []
    x.register_hook(lambda gradient: found.append(threading.get_ident()))
    (x * 2).sum().backward()
    return found[0]


def test_passes_run_in_the_thread_that_asks() -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    assert thread_of_a_pass(x) == threading.get_ident()
    found: list[tuple[int, int]] = []

    def other() -> None:
        y = torch.ones(3, device="bp", requires_grad=True)
        found.append((thread_of_a_pass(y), threading.get_ident()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found[0][0] == found[0][1] != threading.get_ident()


def test_over_several_devices() -> None:
    x = torch.arange(4.0, device="bp:0", requires_grad=True)
    seen: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(threading.get_ident())

    y = (x * 3).to("bp:1")
    y.register_hook(hook)
    z = (y * y).to("bp:2") + 1
    z.register_hook(hook)
    (z.sum().to("bp:0") + x.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 19, 37, 55]
    assert seen == [threading.get_ident()] * 2
    assert torch.bp.current_device() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_programs_own_setting_stays(enabled: bool) -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    with torch.autograd.set_multithreading_enabled(enabled):
        (x * 2).sum().backward()
        assert torch.autograd.is_multithreading_enabled() == enabled

        def fails(gradient: torch.Tensor) -> None:
            raise ValueError("a hook's own")

        x.register_hook(fails)
        with pytest.raises(ValueError, match="a hook's own"):
            (x * 2).sum().backward()
        assert torch.autograd.is_multithreading_enabled() == enabled


def test_a_pass_in_a_pass() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            with torch.enable_grad():
                again = x.detach().requires_grad_()
                (again * 2).backward(gradient)
            return again.grad

    x = torch.ones(3, device="bp", requires_grad=True)
    y = x
    for _ in range(3):
        y = Twice.apply(y)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8] * 3
    assert torch.autograd.is_multithreading_enabled()


def test_programs_without_a_bp_device_are_left_alone() -> None:
    code = """
import torch
enabled = []
x = torch.ones(3, requires_grad=True)
x.register_hook(lambda gradient: enabled.append(torch.autograd.is_multithreading_enabled()))
(x * 2).sum().backward()
torch.ones(3, device="bp")
(x * 2).sum().backward()
print(enabled)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[True, False]\n", done.stderr
