"""Tests of this folder repeat, too: they start from their seeds in the process in which they run."""

from __future__ import annotations

import pytest
import torch
from worker_process import _call


@pytest.mark.parametrize("case", range(2))
def test_a_test_starts_from_its_seed_in_the_worker(test_seed: int, case: int) -> None:
    assert torch.initial_seed() == test_seed
    assert torch.bp.initial_seed() == test_seed
    torch.manual_seed(test_seed + 1)  # which the next test does not see


def leaves_an_error() -> None:
    torch.arange(3.0, device="bp")[torch.tensor([7], device="bp")]


def test_a_test_answers_for_its_late_errors() -> None:
    """And not the next one, which may be of another file."""
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        _call(__name__, leaves_an_error.__name__, {}, torch.initial_seed())
    torch.bp.synchronize()
