"""Embedding bags: sums, means or maxima of rows of a weight matrix, and their gradients."""

from __future__ import annotations

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import embedding_bag as kernels
from torch_backplane.kernels.templates.embedding_bag import MAX, MEAN, Elements, Results
from torch_backplane.operators.index_kernel import check_dim, check_index
from torch_backplane.planning import Call, RunOnCPU, check, error_report, expect_values, operator, run_template


@operator("_embedding_bag", "_embedding_bag_forward_only", variants=False, one_dtype=["weight", "per_sample_weights"])
def embedding_bag(
    call: Call,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple[torch.Tensor, ...]:
    check_index(weight, indices, offsets)
    check(weight.dim() == 2 and indices.dim() == offsets.dim() == 1, "weight is not a matrix, or an index no vector")
    check_dim(weight, 0, indices)
    check(weight.is_floating_point(), "weight is not floating-point")
    check(offsets.numel() > 0 or not include_last_offset, "no last offset")
    out, bag_of, sizes, positions = call.outputs()
    if not weight.shape[1]:
        raise RunOnCPU("weight has no columns")
    if include_last_offset or not indices.numel():  # there can be elements after the last bag
        bag_of.fill_(-1)
        sizes.zero_()
    if not indices.numel():
        expect_values((offsets, "x == 0", f"{kernels.OFFSETS}: they are not 0, and there are no elements"))
        out.zero_()
        positions.fill_(-1)
    elif out.numel():
        report = error_report(out.device, "embedding_bag")
        results = Results(out, bag_of, sizes, positions)
        elements = _elements(indices, per_sample_weights, padding_idx)
        arguments = (results, weight.contiguous(), elements, offsets.contiguous(), mode, report)
        run_template(kernels.embedding_bag, out.device, *arguments, name=report.operator)
    return out, bag_of, sizes, positions


def _elements(indices: torch.Tensor, scale: torch.Tensor | None, padding_idx: int) -> Elements:
    return Elements(indices.contiguous(), None if scale is None else scale.contiguous(), padding_idx)


@operator("_embedding_bag_backward", variants=False)
def embedding_bag_backward(
    call: Call,
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    positions: torch.Tensor,
    num_weights: int,
    scale_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int,
) -> torch.Tensor:
    if sparse:
        raise RunOnCPU("a sparse gradient")
    options = (num_weights, scale_by_freq, mode, per_sample_weights, padding_idx)
    return torch.ops.aten._embedding_bag_dense_backward(grad, indices, bag_of, sizes, positions, *options)


@operator("_embedding_bag_dense_backward", variants=False)
def embedding_bag_dense_backward(
    call: Call,
    grad: torch.Tensor,
    indices: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    positions: torch.Tensor,
    num_weights: int,
    scale_by_freq: bool,
    mode: int,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int,
) -> torch.Tensor:
    """Unlike PyTorch's CPU kernel, `scale_by_freq` divides by the frequency of the index itself, as on CUDA."""
    check_index(grad, indices, bag_of, sizes, positions)
    check(grad.dim() == 2 and bag_of.shape == indices.shape, "grad is not a matrix, or not one bag for each element")
    if mode == MAX:
        check(positions.shape == grad.shape, "not one position for each gradient")
        known = positions >= 0
        rows = torch.where(known, positions, 0).to(torch.int64)
        return grad.new_zeros((num_weights, grad.shape[1])).scatter_add_(0, rows, grad * known)
    rows = grad.new_empty((indices.numel(), grad.shape[1]), dtype=value_dtype(grad.dtype))
    if rows.numel():
        check(mode != MEAN or sizes.numel() >= grad.shape[0], "not one size for each bag")
        counts = sizes.contiguous() if mode == MEAN else None
        elements = _elements(indices, per_sample_weights, padding_idx)
        arguments = (rows, grad.contiguous(), bag_of.contiguous(), counts, elements)
        run_template(kernels.spread, grad.device, *arguments, name="embedding_bag")
    found = torch.ops.aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_by_freq)
    return found.to(grad.dtype)


@operator("_embedding_bag_per_sample_weights_backward", variants=False, one_dtype=["grad", "weight"])
def embedding_bag_per_sample_weights_backward(
    call: Call,
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    check_index(grad, indices, bag_of)
    check(bag_of.shape == indices.shape, "not one bag for each element")
    check(grad.dim() == 2 and grad.shape[1:] == weight.shape[1:], "grad has not the columns of weight")
    out = grad.new_empty(indices.shape)
    report = error_report(out.device, "embedding_bag")
    elements = _elements(indices, None, padding_idx)
    arguments = (out, grad.contiguous(), weight.contiguous(), bag_of.contiguous(), elements, report)
    run_template(kernels.scale_gradient, out.device, *arguments, name=report.operator)
    return out
