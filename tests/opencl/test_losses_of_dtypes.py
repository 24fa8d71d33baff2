"""Losses reject the same dtypes with and without elements, and accept all dtypes that the CPU accepts."""

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
def test_unsupported_dtypes_raise_with_and_without_elements(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    def reduced(*given: torch.Tensor) -> torch.Tensor:
        return loss(*given, reduction=reduction)

    # A reduction depends only on the dtype of the unreduced loss, so fewer combinations suffice.
    for dtypes in itertools.product(DTYPES, DTYPES if reduction == "none" else REDUCED):
        of_nothing, of_some = (outcome(reduced, shape, "bp", *dtypes) for shape in ((0, 4), (2, 4)))
        assert of_nothing == of_some, dtypes
        expected = outcome(reduced, (2, 4), "cpu", *dtypes)
        assert expected == of_some or "not implemented for" in expected, dtypes
        assert " cannot be a constant of " not in of_some
