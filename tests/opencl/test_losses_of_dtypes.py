"""What losses refuse of a dtype, they refuse of no elements, too, and accept what the CPU accepts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

LOSSES: list[Callable[..., torch.Tensor]] = [
    F.soft_margin_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.poisson_nll_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.hinge_embedding_loss, F.multilabel_soft_margin_loss,
]  # fmt: skip
DTYPES = [torch.int8, torch.int64, torch.bool, torch.float16, torch.float32]
REDUCED = [torch.int64, torch.bool, torch.float16]


def outcome(loss: Callable[..., torch.Tensor], shape: tuple[int, ...], device: str, *dtypes: torch.dtype) -> str:
    given = [torch.zeros(shape, dtype=dtype, device=device) for dtype in dtypes]
    try:
        return str(loss(*given).dtype)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_refused_alike(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    def reduced(*given: torch.Tensor) -> torch.Tensor:
        return loss(*given, reduction=reduction)

    # How it is reduced asks for the dtype of what is reduced, and no more.
    for dtypes in itertools.product(DTYPES, DTYPES if reduction == "none" else REDUCED):
        of_nothing, of_some = (outcome(reduced, shape, "bp", *dtypes) for shape in ((0, 4), (2, 4)))
        assert of_nothing == of_some, dtypes
        expected = outcome(reduced, (2, 4), "cpu", *dtypes)
        assert expected == of_some or "not implemented for" in expected, dtypes
        assert " cannot be a constant of " not in of_some
