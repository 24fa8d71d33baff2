"""Tests `conformance --sizes`: the calls that it makes, and the differences that it finds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_backplane.conformance import EntryResult, Settings
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.sizes import check_sizes, misfits

CPU, BP = torch.device("cpu"), torch.device("bp", 0)


@dataclass
class Sample:
    input: torch.Tensor
    args: tuple[Any, ...] = ()
    kwargs: Any = ()

    def __post_init__(self) -> None:
        self.kwargs = dict(self.kwargs)


@dataclass
class Operator:
    """Imitates `OpInfo`."""

    op: Callable[..., Any]
    name: str = "op"
    full_name: str = "op"

    def sample_inputs(self, device: str, dtype: torch.dtype) -> Iterator[Sample]:
        yield Sample(torch.rand(3, 4, dtype=dtype), (torch.rand(3, 4, dtype=dtype),))


def check(op: Any, device: torch.device) -> EntryResult:
    return check_sizes(op, torch.float32, Settings(sizes=True), device, lambda text: None)


def kinds(function: Callable[..., Any]) -> set[str]:
    return {finding.kind for finding in check(Operator(function), BP).findings}


def test_misfits_change_one_size_of_one_tensor() -> None:
    given = ((torch.rand(3, 4), [torch.zeros(2, dtype=torch.int64)]), {"weight": torch.rand(5)})
    for which, ((first, (second,)), named) in misfits(given, random.Random(0)):
        sizes = [*first.shape, *second.shape, *named["weight"].shape]
        assert sum(one != other for one, other in zip(sizes, [3, 4, 2, 5], strict=True)) == 1
        assert second.dtype == torch.int64
        assert which.startswith("tensor ")


@pytest.mark.parametrize("name", ["add", "mm", "nn.functional.mse_loss", "index_copy"])
def test_cpu_compared_with_itself(name: str) -> None:
    result = check(load(OP_DB)[name], CPU)
    assert result.findings == []
    assert result.both_raised > 3


def test_missing_error_is_found() -> None:
    assert kinds(lambda x, y: x + 1 if x.device.type == "bp" else x + y) == {"no error", "shape"}


def test_unexpected_error_is_found() -> None:
    assert kinds(lambda x, y: x + y if x.device.type == "bp" else x) == {"error", "shape"}


def test_wrong_error_type_is_found() -> None:
    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.device.type == "bp" and x.shape[0] != y.shape[0]:
            raise IndexError
        return x.mT @ y

    assert kinds(wrong) == {"error type"}


def test_calls_that_crash_on_the_cpu_are_skipped() -> None:
    def crashing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.device == CPU and x.shape != y.shape:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.new_zeros(2)

    result = check(Operator(crashing), BP)
    assert result.findings == []
    assert (result.compared, result.both_raised) == (0, 8)


def test_late_errors_do_not_affect_the_next_call() -> None:
    def late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            return x
        with contextlib.suppress(IndexError):  # raised immediately on host devices
            x.index_select(0, torch.full((1,), 99, device=x.device))
        raise RuntimeError("another length")

    result = check(Operator(late), BP)
    assert result.findings == []
    assert result.both_raised > 1
    assert result.compared > 1
