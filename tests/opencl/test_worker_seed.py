"""Tests in this folder are reproducible: they start from their seeds in the worker process."""

from __future__ import annotations

import pytest
import torch
from worker_process import _call


@pytest.mark.parametrize("case", range(2))
def test_tests_start_from_their_seed_in_the_worker(test_seed: int, case: int) -> None:
    assert torch.initial_seed() == test_seed
    assert torch.bp.initial_seed() == test_seed
    torch.manual_seed(test_seed + 1)  # must not affect the next test


def leaves_an_error() -> None:
    torch.arange(3.0, device="bp")[torch.tensor([7], device="bp")]


def test_asynchronous_errors_are_raised_in_the_test_that_caused_them() -> None:
    """The next test, possibly of another file, must not raise them."""
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        _call(__name__, leaves_an_error.__name__, {}, torch.initial_seed())
    torch.bp.synchronize()
