"""Tests of this folder repeat, too: they start from their seeds in the process in which they run."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("case", range(2))
def test_a_test_starts_from_its_seed_in_the_worker(test_seed: int, case: int) -> None:
    assert torch.initial_seed() == test_seed
    assert torch.bp.initial_seed() == test_seed
    torch.manual_seed(test_seed + 1)  # which the next test does not see
