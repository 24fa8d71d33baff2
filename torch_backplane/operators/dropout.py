"""Dropout and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels.dtypes import FACTS
from torch_backplane.kernels.templates.random import WORDS_PER_CALL, dropout
from torch_backplane.planning import Call, operator, plan_pointwise, random_numbers, run_template


@operator("native_dropout", variants=False, dtypes="any")
def native_dropout(call: Call, self: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and its mask (true: kept), in one launch. csrc/aten/dropout.cpp takes several steps."""
    if train is False or p == 0 or not self.numel():
        return self.clone(), torch.ones_like(self, dtype=torch.bool)
    torch._check(0 <= p <= 1, lambda: f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 1:
        return torch.zeros_like(self), torch.zeros_like(self, dtype=torch.bool)
    scale = 1 / (1 - p)
    if not self.is_floating_point() or self.dtype not in FACTS:
        mask = torch.empty_like(self, dtype=torch.bool).bernoulli_(1 - p)
        return (self * mask).mul_(scale), mask  # raises PyTorch's error for integers
    out, mask = torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)
    # The kernel reads and writes elements in memory order, so strides must be equal. They can be of any dense layout.
    if out.stride() != self.stride():
        self = torch.empty_like(self).copy_(self)
    run_template(dropout, self.device, out, mask, self, p, scale, random_numbers(WORDS_PER_CALL), name="dropout")
    return out, mask


@operator("native_dropout_backward", passed_through=["scale"])
def native_dropout_backward(call: Call, grad: torch.Tensor, mask: torch.Tensor, scale: Any) -> torch.Tensor:
    # As on CUDA. PyTorch's CPU kernel accepts a mask of any dtype.
    torch._check(mask.dtype == torch.bool, lambda: f"Mask should be Bool Scalar Type, and got {mask.dtype}")
    torch.result_type(grad, mask)  # raises PyTorch's error for unsigned integers, which do not promote with bool
    return plan_pointwise("native_dropout_backward", lambda g, m, s: g * (m.to(g.dtype) * s), call, (grad, mask, scale))
