"""`agrees` itself: what a first call would not show, the calls after it do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees

X = torch.arange(12.0).view(4, 3)


def on_bp(x: torch.Tensor) -> bool:
    return x.device == torch.device(DEVICE)


def calls(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """What `agrees` hands to the device in as many calls as bring all of its variations."""
    given: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        if on_bp(x):
            given.append(x)
        return function(x)

    for _ in range(16):
        agrees(noted, X)
    return given


def test_numbers_layouts_places_and_sizes_vary() -> None:
    given = calls(lambda x: x * 2)
    assert {x.storage_offset() for x in given} == {0, 1}
    assert {tuple(x.shape) for x in given} == {(4, 3), (3, 3)}
    assert {x.stride() for x in given} == {(3, 1), (6, 2), (1, 4)}
    assert {x[0, 0].item() for x in given} == {0.0, 11.0}
    assert all(torch.equal(x.cpu(), X) for x in given[::4])
    assert all(torch.equal(x.cpu(), X) for x in given[3::4])


def test_what_was_kept_from_the_first_call_is_found() -> None:
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
def test_a_layout_or_a_size_that_is_assumed_is_found(assumed: str) -> None:
    with pytest.raises(AssertionError):
        calls(lambda x: (ASSUMING[assumed](x) if on_bp(x) else x).clone())


def test_a_call_that_the_cpu_refuses_must_be_refused_alike() -> None:
    def refused(x: torch.Tensor, error: type[Exception] | None) -> torch.Tensor:
        if x.shape[0] == 3 and (error is not None or not on_bp(x)):
            raise (error or ValueError)("three rows")
        return x.clone()

    calls(lambda x: refused(x, ValueError))
    with pytest.raises(AssertionError, match="None; the CPU: ValueError"):
        calls(lambda x: refused(x, None))
    with pytest.raises(AssertionError, match=r"IndexError.*; the CPU: ValueError"):
        calls(lambda x: refused(x, IndexError if on_bp(x) else ValueError))
