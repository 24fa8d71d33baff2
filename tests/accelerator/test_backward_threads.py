"""Backward passes run in the autograd engine's device threads, or in the calling thread without multithreading."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch


def thread_of_a_pass(x: torch.Tensor) -> int:
    """Returns the id of the thread in which a hook of a backward pass runs."""
    found: list[int] = []
    x.register_hook(lambda gradient: found.append(threading.get_ident()))
    (x * 2).sum().backward()
    return found[0]


def test_backward_runs_in_device_threads() -> None:
    own = threading.get_ident()
    threads = [thread_of_a_pass(torch.ones(3, device=f"bp:{index}", requires_grad=True)) for index in (0, 1, 0)]
    assert threads[0] == threads[2]
    assert len({own, *threads}) == 3
    assert thread_of_a_pass(torch.ones(3, requires_grad=True)) == own


def test_backward_without_multithreading_runs_in_the_calling_thread() -> None:
    def other() -> None:
        x = torch.ones(3, device="bp", requires_grad=True)
        with torch.autograd.set_multithreading_enabled(False):
            found.append((thread_of_a_pass(x), threading.get_ident()))

    found: list[tuple[int, int]] = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    other()
    assert [ran == asked for ran, asked in found] == [True, True]
    assert found[0] != found[1]


@pytest.mark.parametrize("enabled", [True, False])
def test_backward_over_several_devices(enabled: bool) -> None:
    x = torch.arange(4.0, device="bp:0", requires_grad=True)
    seen: dict[str, tuple[int, int]] = {}

    def hook(gradient: torch.Tensor) -> None:
        seen[str(gradient.device)] = threading.get_ident(), torch.bp.current_device()

    y = (x * 3).to("bp:1")
    y.register_hook(hook)
    z = (y * y).to("bp:2") + 1
    z.register_hook(hook)
    with torch.autograd.set_multithreading_enabled(enabled):
        (z.sum().to("bp:0") + x.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 19, 37, 55]
    threads = {thread for thread, _ in seen.values()}
    assert len({*threads, threading.get_ident()}) == (3 if enabled else 1)
    assert {name: device for name, (_, device) in seen.items()} == {"bp:1": 1, "bp:2": 2}
    assert torch.bp.current_device() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_multithreading_setting_is_kept(enabled: bool) -> None:
    x = torch.ones(3, device="bp", requires_grad=True)
    with torch.autograd.set_multithreading_enabled(enabled):
        (x * 2).sum().backward()
        assert torch.autograd.is_multithreading_enabled() == enabled

        def fails(gradient: torch.Tensor) -> None:
            raise ValueError("raised by a hook")

        x.register_hook(fails)
        with pytest.raises(ValueError, match="raised by a hook"):
            (x * 2).sum().backward()
        assert torch.autograd.is_multithreading_enabled() == enabled


def test_nested_backward() -> None:
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
