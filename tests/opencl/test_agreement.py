"""Tests of `agrees`: its later calls find errors that a first call does not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees

X = torch.arange(12.0).view(4, 3)


def on_bp(x: torch.Tensor) -> bool:
    return x.device == torch.device(DEVICE)


def calls(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that `agrees` passes to the device, in enough calls to see all its variations."""
    given: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        if on_bp(x):
            given.append(x)
        return function(x)

    for _ in range(16):
        agrees(noted, X)
    return given


def test_values_layouts_offsets_and_sizes_vary() -> None:
    given = calls(lambda x: x * 2)
    assert {x.storage_offset() for x in given} == {0, 1}
    assert {tuple(x.shape) for x in given} == {(4, 3), (3, 3)}
    assert {x.stride() for x in given} == {(3, 1), (6, 2), (1, 4)}
    assert {x[0, 0].item() for x in given} == {0.0, 11.0}
    assert all(torch.equal(x.cpu(), X) for x in given[::4])
    assert all(torch.equal(x.cpu(), X) for x in given[3::4])


def test_results_cached_from_the_first_call_are_detected() -> None:
    kept: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if not on_bp(x):
            return x * 2
        kept.append(x * 2)
        return kept[0]

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        agrees(double, X)
    assert len(kept) == 2


ASSUMING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strides": lambda x: x.as_strided((4, 3), (3, 1), x.storage_offset()) if x.shape == (4, 3) else x,
    "offset": lambda x: x.as_strided(x.shape, x.stride(), 0),
    "sizes": lambda x: x if x.shape == (4, 3) else x[:2],
}


@pytest.mark.parametrize("assumed", ASSUMING)
def test_assumed_layouts_and_sizes_are_detected(assumed: str) -> None:
    with pytest.raises(AssertionError):
        calls(lambda x: (ASSUMING[assumed](x) if on_bp(x) else x).clone())


def test_device_must_raise_the_same_error_type_as_the_cpu() -> None:
    def refused(x: torch.Tensor, error: type[Exception] | None) -> torch.Tensor:
        if x.shape[0] == 3 and (error is not None or not on_bp(x)):
            raise (error or ValueError)("three rows")
        return x.clone()

    calls(lambda x: refused(x, ValueError))
    with pytest.raises(AssertionError, match="None; the CPU: ValueError"):
        calls(lambda x: refused(x, None))
    with pytest.raises(AssertionError, match=r"IndexError.*; the CPU: ValueError"):
        calls(lambda x: refused(x, IndexError if on_bp(x) else ValueError))
