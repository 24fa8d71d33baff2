"""Dtypes that PyTorch's CPU and CUDA kernels reject for an operator, although generated kernels could compute them.

bp devices reject them, too, with PyTorch's error, so that a program behaves the same on every device.
"""

from __future__ import annotations

from collections.abc import Set

import torch

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_BOOL = {torch.bool}

# Rejected dtypes of the first tensor, by operator (all overloads) or by overload ("round.decimals").
_REFUSED: dict[str, Set[torch.dtype]] = {
    **dict.fromkeys(
        ("addcmul", "bucketize", "ceil", "elu", "floor", "geometric_", "kthvalue", "leaky_relu", "lerp",
         "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "nanmedian", "reflection_pad1d",
         "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
         "round", "searchsorted", "softplus", "threshold", "trunc"),
        _BOOL,
    ),
    **dict.fromkeys(
        ("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
         "_adaptive_avg_pool3d_backward", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_avg_pool3d_backward",
         "adaptive_max_pool2d", "adaptive_max_pool2d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
         "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d",
         "nll_loss2d_forward", "nll_loss_forward", "round.decimals"),
        _INTEGERS | _BOOL,
    ),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), (_INTEGERS - {torch.int64}) | _BOOL),
}  # fmt: skip


def refused_dtypes(name: str) -> Set[torch.dtype]:
    """The dtypes that an operator, such as "aten::round.decimals", rejects for its first tensor."""
    name = name.removeprefix("aten::")
    return _REFUSED.get(name, set()) | _REFUSED.get(name.partition(".")[0], set())
