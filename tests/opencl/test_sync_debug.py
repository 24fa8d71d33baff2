"""torch.bp.set_sync_debug_mode reports synchronizing operations by the operator's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from agreement import DEVICE


@contextmanager
def mode(chosen: int | str) -> Iterator[None]:
    torch.bp.set_sync_debug_mode(chosen)
    try:
        yield
    finally:
        torch.bp.set_sync_debug_mode("default")


def run(function: Callable[[torch.Tensor], object], x: torch.Tensor, chosen: str) -> list[str]:
    """The warnings or the error of a call in a mode."""
    with mode(chosen), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            function(x)
        except RuntimeError as error:
            if chosen != "error":
                raise
            return [str(error)]
    return [str(one.message) for one in warned]


WAIT: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "if": (lambda x: bool((x > 0).all()), "aten::_local_scalar_dense"),
    "equal": (lambda x: torch.equal(x, x), "aten::equal"),
    "to the CPU": (lambda x: x.cpu(), "aten::_copy_from"),
    "to the CPU, transposed": (lambda x: x.T.cpu(), "aten::_copy_from"),
    "from the CPU": (lambda x: x.copy_(torch.ones(4, 5)), "aten::_copy_from"),
    "from the CPU, not pinned": (lambda x: x.copy_(torch.ones(4, 5), non_blocking=True), "aten::_copy_from"),
    "an operator on the CPU": (lambda x: torch.linalg.eigvalsh(x[:, :4]), "aten::_linalg_eigh"),
    "a stream": (lambda x: torch.bp.current_stream().synchronize(), ""),
}
NEED_NOT: dict[str, Callable[[torch.Tensor], object]] = {
    "elementwise": lambda x: (x + 1).sin_(),
    "reductions": lambda x: (x.sum(), x.max(0), x.argsort()),
    "a product": lambda x: x @ x.T,
    "views": lambda x: x.T.reshape(-1)[2:],
    "factories": lambda x: torch.zeros_like(x) + torch.arange(5, device=x.device),
    "copies within the device": lambda x: x.clone().copy_(x),
    "pinned memory": lambda x: x.copy_(torch.ones(4, 5).pin_memory(), non_blocking=True),
    "the whole device": lambda x: torch.bp.synchronize(),
    "an event": lambda x: torch.bp.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", WAIT)
def test_synchronizing_operations_are_reported(name: str) -> None:
    function, operator = WAIT[name]
    x = torch.randn(4, 5, device=DEVICE)
    function(x)
    text = "called a synchronizing bp operation" + (f": {operator}" if operator else "")
    assert run(function, x, "default") == []
    warned = run(function, x, "warn")
    assert warned
    assert all(text in one for one in warned)
    (error,) = run(function, x, "error")
    assert text in error
    assert run(function, x, "default") == []


@pytest.mark.parametrize("name", NEED_NOT)
def test_other_operations_are_not_reported(name: str) -> None:
    x = torch.randn(4, 5, device=DEVICE)
    NEED_NOT[name](x)  # makes plans and compiles kernels
    for chosen in ("warn", "error"):
        assert run(NEED_NOT[name], x, chosen) == []


def test_errors_are_raised_before_a_copy() -> None:
    x, there = torch.randn(4, 5, device=DEVICE), torch.zeros(4, 5)
    with mode("error"):
        with pytest.raises(RuntimeError, match="synchronizing"):
            there.copy_(x)
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.copy_(torch.ones(4, 5))
    assert there.count_nonzero() == 0
    assert not torch.equal(x.cpu(), torch.ones(4, 5))


def test_modes() -> None:
    assert torch.bp.get_sync_debug_mode() == 0
    for number, name in enumerate(("default", "warn", "error")):
        for chosen in (number, name):
            with mode(chosen):
                assert torch.bp.get_sync_debug_mode() == number
    for wrong in (3, -1, "loud"):
        with pytest.raises(ValueError, match="'default' \\(0\\), 'warn' \\(1\\) or 'error' \\(2\\)"):
            torch.bp.set_sync_debug_mode(wrong)
    assert torch.bp.get_sync_debug_mode() == 0
