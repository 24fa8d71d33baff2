"""Dropout, with backward."""

from __future__ import annotations

import torch

from torch_backplane.kernels.dtypes import FACTS
from torch_backplane.kernels.templates.random import WORDS_PER_CALL, dropout
from torch_backplane.planning import Call, operator, pointwise, random_numbers, run_template


@operator("native_dropout", variants=False, dtypes="any")
def native_dropout(call: Call, self: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and its mask (true: kept). What csrc/aten/dropout.cpp does in several steps is one launch here."""
    if train is False or not self.numel():
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    torch._check(0 <= p <= 1, lambda: f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 1:
        return torch.zeros_like(self), torch.zeros_like(self, dtype=torch.bool)
    scale = 1 / (1 - p)
    if not self.is_floating_point() or self.dtype not in FACTS:
        mask = torch.empty_like(self, dtype=torch.bool).bernoulli_(1 - p)
        return (self * mask).mul_(scale), mask  # which integers are refused for
    out, mask = torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)
    # Dense in any order: the elements in memory are gone through as they lie.
    if out.stride() != self.stride():
        self = torch.empty_like(self).copy_(self)
    chances = (1 - p, scale)
    run_template(dropout, self.device, out, mask, self, *chances, *random_numbers(WORDS_PER_CALL), name="dropout")
    return out, mask


pointwise(
    "native_dropout_backward",
    lambda grad, mask, scale: grad * (mask.to(grad.dtype) * scale),
    passed_through=["scale"],
)
