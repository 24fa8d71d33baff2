"""Group norm and its gradient."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates.norms import Affine, Saved, Sets, Statistics
from torch_backplane.operators.normalization import (
    Optional,
    Results,
    check_channels,
    check_gradients,
    check_parameters,
    new_like,
    run_norm,
    run_norm_backward,
)
from torch_backplane.planning import Call, Refused, check, operator
from torch_backplane.planning.strides import is_channels_last, suggested

# PyTorch's kernels accept other layouts since torch 2.14.
ONLY_CONTIGUOUS = torch.__version__ < "2.14"


def _check_groups(self: torch.Tensor, batch: int, channels: int, length: int, groups: int) -> None:
    """Raises an error for sizes with which kernels, like PyTorch's CPU kernel, would read out of bounds."""
    whole = batch * channels * length
    torch._check(self.numel() == whole, lambda: f"expected {whole} elements in groups, but got {list(self.shape)}")
    torch._check(
        groups > 0 and channels % groups == 0, lambda: f"expected {groups} groups to divide {channels} channels evenly"
    )


def _normalized(
    self: torch.Tensor, weight: Optional, bias: Optional, batch: int, groups: int
) -> list[torch.Tensor] | None:
    """Meta tensors like the result, mean and rstd; None if PyTorch's meta function determines them.

    The result has the layout of the CPU's. That of PyTorch's meta function is always contiguous since torch 2.14.
    """
    mixed = check_parameters(self, weight, bias)
    if self.numel() == 0 and not mixed:
        return None
    statistics = torch.empty([batch, groups], dtype=torch.float32 if mixed else self.dtype, device="meta")
    out = torch.empty_like(self, memory_format=suggested(self.shape, self.stride()), device="meta")
    return [out, statistics, statistics]


@operator("native_group_norm")
def native_group_norm(
    call: Call,
    self: torch.Tensor,
    weight: Optional,
    bias: Optional,
    batch: int,
    channels: int,
    length: int,
    groups: int,
    eps: float,
) -> Results:
    if any(one is not None and one.shape != (channels,) for one in (weight, bias)):
        raise Refused("weight or bias does not have one element for each channel")
    if ONLY_CONTIGUOUS:
        check(self.is_contiguous() or is_channels_last(self.shape, self.stride()), "self is not contiguous")
    _check_groups(self, batch, channels, length, groups)
    out, mean, rstd = call.outputs(like=_normalized(self, weight, bias, batch, groups))
    sets = Sets.group(batch, channels, length, groups)
    run_norm(sets, out, self, Affine(weight, bias), Statistics(mean, rstd), eps)
    return out, mean, rstd


@operator("native_group_norm_backward")
def native_group_norm_backward(
    call: Call,
    grad: torch.Tensor,
    self: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Optional,
    batch: int,
    channels: int,
    length: int,
    groups: int,
    output_mask: list[bool],
) -> Results:
    _check_groups(self, batch, channels, length, groups)
    _check_groups(grad, batch, channels, length, groups)
    check_channels(channels, weight=weight)
    check_channels(batch * groups, mean=mean, rstd=rstd)
    check_parameters(self, weight)
    check_gradients(self, grad, mean, rstd)
    channel = self.new_empty(channels) if weight is None else weight
    results = new_like([self, channel, channel], output_mask, first=suggested(self.shape, self.stride()))
    run_norm_backward(Sets.group(batch, channels, length, groups), results, Saved(grad, self, weight, mean, rstd))
    return results
