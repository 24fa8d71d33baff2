"""torchvision: its operators under `torch.autocast("bp")`, as under `torch.autocast("cuda")`.

torchvision registers autocast kernels for CPU, CUDA and XPU: its operators compute in float32 and return the dtype of
their first argument. Without one for bp, detection models fail, because features are in half precision and boxes are
not. Added: kernels of these operators for bp's autocast key, through torch.library. The operators run on bp without
this, as fallbacks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torchvision

OPERATORS = ("deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")  # of AutocastCUDA

_library = torch.library.Library("torchvision", "IMPL")


def _in_float32(operator: Any, *arguments: Any) -> Any:
    def cast(value: Any, dtype: torch.dtype) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if is_float else value

    with torch.autocast("bp", enabled=False):
        result = operator(*(cast(argument, torch.float32) for argument in arguments))
    dtype = arguments[0].dtype
    return tuple(cast(one, dtype) for one in result) if isinstance(result, tuple) else cast(result, dtype)


@functools.cache
def enable() -> None:
    """Registers the autocast kernels."""
    torchvision.extension._assert_has_ops()
    for name in OPERATORS:
        operator = getattr(torch.ops.torchvision, name).default
        _library.impl(name, functools.partial(_in_float32, operator), "AutocastPrivateUse1")


enable()
