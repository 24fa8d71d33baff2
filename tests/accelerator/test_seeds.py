"""Tests are reproducible: each starts from its own seed (conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("case", range(2))
def test_a_test_starts_from_its_seed(test_seed: int, case: int) -> None:
    assert torch.initial_seed() == test_seed
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(test_seed)))
    torch.manual_seed(test_seed + 1)  # does not affect the next test
