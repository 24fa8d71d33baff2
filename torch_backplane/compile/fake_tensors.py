"""Layouts of results that PyTorch's fake tensors do not know for devices outside of its tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._prims_common import suggest_memory_format


def install(fake_impls: ModuleType) -> None:
    """Gives fake convolutions on bp the layouts of the real ones."""
    aten, implementations = torch.ops.aten, fake_impls.op_implementations_dict
    for op in (aten.convolution.default, aten._convolution.default, aten.convolution_backward.default):
        if op in implementations:  # torch 2.11 has none of _convolution
            implementations[op] = _with_layout(implementations[op])


def _with_layout(fake: Callable[..., Any]) -> Callable[..., Any]:
    """As on CUDA, a result is channels-last if the input or the weight is."""

    @functools.wraps(fake)
    def convolution(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        found = fake(mode, func, *args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        result = first if first is not None or not isinstance(found, tuple) else found[1]
        if result is None or result.device.type != "bp":
            return found
        position = 1 if func is torch.ops.aten.convolution_backward.default else 0
        operands = args[position : position + 2]
        layouts = (suggest_memory_format(one) for one in operands)
        layout = next((one for one in layouts if one != torch.contiguous_format), torch.contiguous_format)
        if layout == torch.contiguous_format:
            return found
        with mode:
            if not isinstance(found, tuple):
                return found.contiguous(memory_format=layout)
            both = [None if one is None else one.contiguous(memory_format=layout) for one in found[:2]]
            return (*both, found[2])

    return convolution
