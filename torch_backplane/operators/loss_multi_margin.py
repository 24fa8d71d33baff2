"""Margin losses of rows of classes, with one target or a set of labels for each row, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import margin_losses as kernels
from torch_backplane.operators.loss import MEAN, NONE, SUM, write_loss
from torch_backplane.planning import Call, Number, check, contiguous_result, error_report, operator, run_template
from torch_backplane.planning.pointwise import type_name


def _rows(call: Call, self: torch.Tensor, target: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """self as (rows, classes), contiguous. `others` and given results must have its dtype."""
    for other in (*call.written, *others):
        # Raised here, because the CPU kernels do not support half precision: calls in it would run in float32.
        if other.dtype != self.dtype:
            raise RuntimeError(f"expected scalar type {type_name(self.dtype)} but found {type_name(other.dtype)}")
    check(self.is_floating_point(), f"{self.dtype}".replace("torch.", ""))
    check(target.dtype == torch.int64, f"targets of {target.dtype}".replace("torch.", ""))
    check(self.dim() <= 2 and (self.dim() == 0 or self.size(-1) > 0), "self has more than 2 dimensions or no classes")
    return (self if self.dim() == 2 else self.view(1, -1)).contiguous()


def _check_last(call: Call, like: torch.Tensor) -> None:
    """Refuses a given last result that is not contiguous. One of another shape becomes contiguous as it is resized."""
    given = [one for one in call.written[-1:] if one.shape == like.shape]
    check(all(one.is_contiguous() for one in given), "the result is not contiguous")


def _meta(shape: Any, self: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=self.dtype, device="meta")


def _reduce(call: Call, out: torch.Tensor, of_rows: torch.Tensor, reduction: int) -> None:
    """Writes the losses of the rows, or their mean or sum, to `out`."""
    if of_rows.numel():
        # Without a reduction, the loss of a single row can be zero-dimensional.
        reduction = SUM if reduction == NONE and out.dim() == 0 else reduction
        write_loss(call, out, lambda a: a, of_rows, reduction=reduction)
    else:
        out.zero_()  # PyTorch's kernels leave it uninitialized


def _share(rows: torch.Tensor, reduction: int) -> float:
    return 1.0 / (rows.numel() if reduction == MEAN else rows.size(1))


def _fitting(margin: Any, self: torch.Tensor) -> Any:
    return margin.fitting(self.dtype) if isinstance(margin, Number) else margin


def _of_one(
    call: Call, self: torch.Tensor, target: torch.Tensor, p: float, weight: torch.Tensor | None, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(self as rows, the target of each row, the weights of classes)."""
    rows = _rows(call, self, target, *others)
    check(p in (1, 2), "p is neither 1 nor 2")
    check(target.dim() <= 1 and target.numel() == rows.size(0), "not one target for each row")
    if weight is None:
        return rows, target.contiguous(), None
    fits = weight.dtype == self.dtype and weight.dim() <= 1 and weight.numel() == rows.size(1)
    check(fits, "weight has another dtype than self, or not one element for each class")
    return rows, target.contiguous(), weight.contiguous()


@operator("multi_margin_loss", by_value=["p"], static={"p": (1, 2)})
def multi_margin_loss(
    call: Call,
    self: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: Any,
    weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    rows, targets, weights = _of_one(call, self, target, p, weight)
    each = reduction == NONE and target.dim() == 1
    (out,) = call.outputs(like=[_meta(rows.size(0) if each else (), self)])
    call.check_apart()
    of_rows = torch.empty(rows.size(0), dtype=value_dtype(self.dtype), device=self.device)
    if rows.numel():
        report = error_report(out.device, "multi_margin_loss")
        params = kernels.MarginParams(weights, 1 if p == 1 else 2, _fitting(margin, self))
        arguments = (of_rows, rows, targets, params, report)
        run_template(kernels.multi_margin_loss, out.device, *arguments, name=report.operator)
    _reduce(call, out, of_rows, reduction)
    return out


@operator("multi_margin_loss_backward", by_value=["p"], static={"p": (1, 2)})
def multi_margin_loss_backward(
    call: Call,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    p: float,
    margin: Any,
    weight: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    rows, targets, weights = _of_one(call, self, target, p, weight, grad_output)
    _check_last(call, self)
    (out,) = call.outputs(like=[_meta(self.shape, self)])
    call.check_apart()
    if not rows.numel():
        return out
    grad = grad_output.expand(rows.size(0))
    with contiguous_result(out) as result:
        report = error_report(out.device, "multi_margin_loss_backward")
        order = 1 if p == 1 else 2
        params = kernels.MarginParams(weights, order, _fitting(margin, self), _share(rows, reduction))
        arguments = (result, grad, rows, targets, params, report)
        run_template(kernels.multi_margin_loss_backward, out.device, *arguments, name=report.operator)
    return out


def _of_labels(
    call: Call, self: torch.Tensor, target: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(self as rows, the labels of each row)."""
    rows = _rows(call, self, target, *others)
    fits = target.shape == self.shape if self.dim() == 2 else target.dim() <= 1 and target.numel() == rows.size(1)
    check(fits, "target does not match self")
    return rows, target.contiguous().view(rows.shape)


@operator("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(
    call: Call, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, targets = _of_labels(call, self, target)
    _check_last(call, target)
    each = reduction == NONE and target.dim() == 2
    out, is_target = call.outputs(like=[_meta(rows.size(0) if each else (), self), _meta(target.shape, self)])
    call.check_apart()
    of_rows = torch.empty(rows.size(0), dtype=value_dtype(self.dtype), device=self.device)
    if rows.numel():
        name = "multilabel_margin_loss_forward"
        with contiguous_result(is_target) as marks:
            run_template(
                kernels.mark_targets, out.device, marks, targets, error_report(out.device, name), name=name
            )
            run_template(kernels.multilabel_margin_loss, out.device, of_rows, rows, targets, marks, name=name)
    _reduce(call, out, of_rows, reduction)
    return out, is_target


@operator("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    call: Call,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    is_target: torch.Tensor,
) -> torch.Tensor:
    rows, targets = _of_labels(call, self, target, grad_output, is_target)
    check(is_target.shape == target.shape, "is_target has another shape than target")
    _check_last(call, self)
    (out,) = call.outputs(like=[_meta(self.shape, self)])
    call.check_apart()
    if not rows.numel():
        return out
    grad, marks = grad_output.expand(rows.size(0)), is_target.contiguous()
    with contiguous_result(out) as result:
        report = error_report(out.device, "multilabel_margin_loss_backward")
        arguments = (result, grad, rows, (targets, marks), _share(rows, reduction), report)
        run_template(kernels.multilabel_margin_loss_backward, out.device, *arguments, name=report.operator)
    return out
