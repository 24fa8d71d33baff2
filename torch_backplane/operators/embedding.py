"""Embeddings: rows of a weight matrix, their gradient, and renormalization."""

from __future__ import annotations

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.indexing import Index
from torch_backplane.operators.index_kernel import check_dim, check_index, run_read, run_write
from torch_backplane.planning import Call, Number, Refused, check, operator, run_pointwise


@operator("embedding", dtypes="complex")
def embedding(
    call: Call, weight: torch.Tensor, index: torch.Tensor, padding_idx: int, scale_by_freq: bool, sparse: bool
) -> torch.Tensor:
    check_index(weight, index)
    if weight.dim() != 2:
        raise Refused("weight is not two-dimensional")
    check_dim(weight, 0, index)
    (out,) = call.outputs()
    indices = [Index(index, (*index.stride(), 0), weight.stride(0), weight.size(0))]
    return run_read("embedding", out, weight, [0] * index.dim() + [weight.stride(1)], indices)


@operator("embedding_dense_backward", dtypes="complex")
def embedding_dense_backward(
    call: Call, grad: torch.Tensor, index: torch.Tensor, num_weights: int, padding_idx: int, scale_by_freq: bool
) -> torch.Tensor:
    check_index(grad, index)
    (out,) = call.outputs()
    out.zero_()
    if not out.numel():
        return out
    rows, flat = grad.reshape(index.numel(), out.shape[-1]), index.reshape(-1)
    if scale_by_freq:
        ones = torch.ones_like(flat, dtype=torch.float32)
        counts = ones.new_zeros(num_weights).index_add_(0, flat, ones)
        rows = rows * counts.index_select(0, flat).reciprocal().to(rows.dtype).unsqueeze(1)
    indices = [Index(flat, (flat.stride(0), 0), out.stride(0), num_weights)]
    skip = padding_idx if padding_idx >= 0 else None
    arguments = (rows.shape, (0, out.stride(1)), rows.stride(), indices)
    run_write("embedding_dense_backward", out, rows, *arguments, combine="add", skip=skip)
    return out


@operator("embedding_renorm_", passed_through=["max_norm"], variants=False)
def embedding_renorm_(
    call: Call, self: torch.Tensor, index: torch.Tensor, max_norm: Number, norm_type: float
) -> torch.Tensor:
    """A row that occurs several times in `index` is written several times, each time with the same numbers."""
    check_index(self, index)
    check(self.dim() == 2, "self is not two-dimensional")
    check(self.is_floating_point(), "self is not floating-point")
    flat = index.reshape(-1)
    rows = self.index_select(0, flat)
    norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True, dtype=value_dtype(self.dtype))

    dtype, key = value_dtype(self.dtype), "embedding_renorm"

    def shrink(x: Expression, norm: Expression, most: Expression) -> Expression:
        return f.where(norm > most, x * (most / (norm + 1e-7)), x)

    run_pointwise(shrink, [rows], [rows, norms], [(max_norm, dtype)], compute=dtype, key=key, name=key)
    return self.index_copy_(0, flat.to(torch.int64), rows)
