"""searchsorted and bucketize."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, plans_from_the_start

from torch_backplane import plans

BOUNDARIES = torch.tensor([-2.0, -1.0, 0.0, 0.0, 1.5, 3.0])
VALUES = torch.tensor([[-5.0, -1.0, 0.0], [2.0, 9.0, float("nan")]])


@pytest.mark.parametrize("right", [False, True])
def test_one_sequence(right: bool) -> None:
    agrees(lambda b, v: torch.searchsorted(b, v, right=right), BOUNDARIES, VALUES)
    agrees(lambda b, v: torch.bucketize(v, b, right=right, out_int32=True), BOUNDARIES, VALUES.t())
    agrees(lambda b: (torch.searchsorted(b, 1.5, right=right), torch.bucketize(0, b, right=right)), BOUNDARIES)
    agrees(lambda b, v: torch.bucketize(v, b, right=right), BOUNDARIES.to(torch.int32), VALUES.nan_to_num().int())


def test_a_sequence_for_each_row() -> None:
    b = torch.randn(2, 3, 7).sort().values
    agrees(torch.searchsorted, b, torch.randn(2, 3, 4))
    agrees(lambda b, v: torch.searchsorted(b, v, side="right"), b.half(), torch.randn(2, 3, 1).half())
    unsorted = torch.randn(2, 5)
    agrees(lambda b, v, s: torch.searchsorted(b, v, sorter=s), unsorted, torch.randn(2, 3), unsorted.argsort())


def test_empty_and_zero_dim_operands() -> None:
    agrees(torch.searchsorted, BOUNDARIES, torch.zeros(0))
    agrees(torch.searchsorted, torch.zeros(0), VALUES)
    agrees(torch.searchsorted, BOUNDARIES, torch.tensor(1.0))


def test_plan_is_reused_for_other_numbers() -> None:
    b = BOUNDARIES.to("bp:0")
    with plans_from_the_start():
        assert [torch.searchsorted(b, number).item() for number in (-3.0, 0.5, 7.0)] == [0, 4, 6]
        assert plans.stats()["aten::searchsorted.Scalar"]["planner_calls"] == 1


def test_out_and_two_dtypes() -> None:
    agrees(lambda b, v, out: torch.bucketize(v, b, out=out), BOUNDARIES, VALUES, torch.empty(2, 3, dtype=torch.int64))
    agrees(torch.bucketize, VALUES, BOUNDARIES.half(), fallbacks=1)
