"""Tests repeat: each starts from a seed of its own (conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("case", range(2))
def test_a_test_starts_from_its_seed(test_seed: int, case: int) -> None:
    assert torch.initial_seed() == test_seed
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(test_seed)))
    torch.manual_seed(test_seed + 1)  # which the next test does not see
