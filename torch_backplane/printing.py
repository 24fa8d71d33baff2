"""Printing of bp tensors.

PyTorch formats numbers with about a dozen float64 operators. A device may lack float64, and each operator that falls
back copies its operands. So the elements to print (of a large tensor, a summary) are copied to the CPU first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, _tensor_str


def install() -> None:
    """Patch torch._tensor_str. Called when torch_backplane is imported."""
    _tensor_str._tensor_str = _on_cpu_if_small(_tensor_str._tensor_str)
    _tensor_str.get_summarized_data = _to_cpu(_tensor_str.get_summarized_data)


def _is_bp(tensor: Tensor) -> bool:
    return tensor.device.type == "bp"


def _on_cpu_if_small(render: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(render)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> str:  # `self` is PyTorch's parameter name
        small = _is_bp(self) and self.numel() <= _tensor_str.PRINT_OPTS.threshold
        return render(self.cpu() if small else self, *args, **kwargs)

    return wrapper


def _to_cpu(summarize: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(summarize)
    def wrapper(self: Tensor) -> Tensor:
        summary = summarize(self)
        return summary.cpu() if _is_bp(summary) else summary

    return wrapper
