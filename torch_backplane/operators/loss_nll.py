"""Negative log likelihood loss, on which cross entropy is built, and its gradient."""

from __future__ import annotations

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.losses import LossParams, nll_loss, nll_loss_backward
from torch_backplane.planning import (
    Call,
    Refused,
    RunOnCPU,
    check_same_dtype,
    contiguous_result,
    error_report,
    operator,
    run_template,
)

_FEW = 4096  # targets that one work group reduces; more targets go through the usual reduction


def _by_positions(self: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(self as (batch, classes, positions), contiguous; the targets, contiguous)."""
    if target.dtype != torch.int64:
        raise Refused(f"targets of {target.dtype}")
    classes = self.shape[0] if self.dim() == 1 else self.shape[1]
    batch = 1 if self.dim() == 1 else self.shape[0]
    return self.contiguous().view(batch, classes, -1 if self.numel() else 1), target.contiguous()


def _check_images(call: Call, self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Refuses images for which the CPU kernel raises an error. PyTorch's meta functions do not check them."""
    if self.dim() != 4 or target.dim() != 3 or target.shape != (self.shape[0], *self.shape[2:]):
        raise Refused("target does not match the shape of self")
    if weight is not None and (weight.dim() != 1 or weight.shape[0] != self.shape[1]):
        raise Refused("weight does not have one element for each class")


def _known(reduction: int, self: torch.Tensor) -> int:
    """The reduction that PyTorch computes: for a single row and for unknown numbers, the sum."""
    return reduction if reduction == 1 or (reduction == 0 and self.dim() != 1) else 2


@operator("nll_loss_forward", "nll_loss2d_forward", one_dtype=["self", "weight"])
def nll_loss_forward(
    call: Call,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if "nll_loss2d" in call.name:
        _check_images(call, self, target, weight)
    check_same_dtype(call, self.dtype)
    out, total_weight = call.outputs(contiguous=True)
    if not self.numel():
        raise RunOnCPU("self is empty")
    values, targets = _by_positions(self, target)
    reduction = _known(reduction, self)
    if reduction == 0:
        total_weight.zero_()
    weight = None if weight is None else weight.contiguous()
    name = call.name.partition("::")[2]
    report = error_report(out.device, name)
    with contiguous_result(out) as result:
        if reduction == 0 or targets.numel() <= _FEW:
            params = LossParams(weight, reduction, ignore_index)
            run_template(nll_loss, out.device, result, total_weight, values, targets, params, report, name=name)
        else:
            losses, weights = (torch.empty_like(targets, dtype=value_dtype(self.dtype)) for _ in range(2))
            params = LossParams(weight, 0, ignore_index)
            run_template(nll_loss, out.device, losses, weights, values, targets, params, report, name=name)
            loss, weighs = losses.sum(), weights.sum()
            result.copy_(loss / weighs if reduction == 1 else loss)
            total_weight.copy_(weighs)
    return out, total_weight


@operator("nll_loss_backward", "nll_loss2d_backward", one_dtype=["grad_output", "self", "weight", "total_weight"])
def nll_loss_backward_(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    if "nll_loss2d" in call.name:
        _check_images(call, self, target, weight)
        if grad.shape != target.shape if reduction == 0 else grad.dim() > 1 or grad.numel() != 1:
            raise Refused("grad_output does not have the shape of the loss")
    (out,) = call.outputs()
    if not self.numel():
        raise RunOnCPU("self is empty")
    reduction = _known(reduction, self)
    with contiguous_result(out) as result:
        values, targets = _by_positions(result, target)
        result.zero_()
        params = LossParams(None if weight is None else weight.contiguous(), reduction, ignore_index)
        name = call.name.partition("::")[2]
        arguments = (values, grad.contiguous(), total_weight, targets, params, error_report(out.device, name))
        run_template(nll_loss_backward, out.device, *arguments, name=name)
    return out
