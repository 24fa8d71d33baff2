"""multinomial: one draw and several, with and without replacement, and invalid arguments."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, had, plans_from_the_start, refused_alike

from torch_backplane import plans


def test_several_draws() -> None:
    weights = torch.tensor([[0.0, 1, 0, 3], [1, 1, 2, 0]])
    for dtype in had((torch.float32, torch.float64, torch.float16)):
        given = weights.to(dtype).to(DEVICE)
        with plans_from_the_start():
            drawn = torch.multinomial(given, 20000, True)
            assert drawn.dtype == torch.int64
            shares = torch.stack([(drawn.cpu() == i).double().mean(-1) for i in range(4)], -1)
            torch.testing.assert_close(shares, weights.double() / 4, atol=0.02, rtol=0)
            assert not shares[weights == 0].any()
            assert not torch.equal(drawn, torch.multinomial(given, 20000, True))
            assert plans.stats()["aten::multinomial"]["planner_calls"] == 1


def test_draws_without_replacement() -> None:
    weights = torch.tensor([[0.0, 1, 0, 3], [1, 0, 2, 0]]).to(DEVICE)
    for _ in range(5):
        drawn = torch.multinomial(weights, 2).sort(-1)[0]
        assert drawn.tolist() == [[1, 3], [0, 2]]
    first = torch.stack([torch.multinomial(weights[0], 2) for _ in range(400)])[:, 0]
    assert 0.6 < (first.cpu() == 3).double().mean().item() < 0.9
    out = torch.empty(2, 2, dtype=torch.int64, device=DEVICE)
    torch.multinomial(weights, 2, out=out)
    assert out.sort(-1)[0].tolist() == [[1, 3], [0, 2]]


@pytest.mark.parametrize("replacement", [False, True])
def test_invalid_arguments_raise(replacement: bool) -> None:
    for shape, count in (((3,), 0), ((3,), -1), ((2, 2, 2), 1), ((), 1), ((2, 3), 0)):
        refused_alike(lambda w: torch.multinomial(w, count, replacement), torch.ones(shape))  # noqa: B023
    refused_alike(lambda w: torch.multinomial(w, 1, replacement), torch.ones(3, dtype=torch.int64))
    refused_alike(lambda w: torch.multinomial(w, 4), torch.ones(3))
    refused_alike(lambda w, out: torch.multinomial(w, 2, replacement, out=out), torch.ones(3), torch.zeros(2))
    for bad in ([0.0, -1], [float("nan"), 1], [float("inf"), 1], [0.0, 0]):
        with pytest.raises(RuntimeError):
            torch.multinomial(torch.tensor(bad), 2, replacement)
        weights = torch.tensor(bad).to(DEVICE)
        with pytest.raises(RuntimeError):
            torch.multinomial(weights, 2, replacement).cpu()


def test_one_dynamic_shape_plan() -> None:
    with plans_from_the_start():
        for count in (5, 6, 7, 9):
            torch.multinomial(torch.ones(count, 4, device=DEVICE), 3, True)
        stats = plans.stats()["aten::multinomial"]
        assert stats["dynamic_shape_classes"] == 1, stats
        assert not stats["reasons_for_exact"], stats
        assert stats["dynamic_shape_replays"] >= 1, stats  # some sizes can need their own plan
