"""Printing bp tensors.

PyTorch formats numbers with a dozen operators in float64. A device may lack float64, and where operators fall back by
copying each of them would copy; so what is to be printed, never more than a summary, goes to the CPU first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, _tensor_str


def install() -> None:
    """Teach torch._tensor_str; called when torch_backplane is imported."""
    _tensor_str._tensor_str = _on_cpu_if_small(_tensor_str._tensor_str)
    _tensor_str.get_summarized_data = _to_cpu(_tensor_str.get_summarized_data)


def _is_bp(tensor: Tensor) -> bool:
    return tensor.device.type == "bp"


def _on_cpu_if_small(render: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(render)
    def wrapper(self: Tensor, *args: Any, **kwargs: Any) -> str:  # named as PyTorch's first parameter is
        small = _is_bp(self) and self.numel() <= _tensor_str.PRINT_OPTS.threshold
        return render(self.cpu() if small else self, *args, **kwargs)

    return wrapper


def _to_cpu(summarize: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(summarize)
    def wrapper(self: Tensor) -> Tensor:
        summary = summarize(self)
        return summary.cpu() if _is_bp(summary) else summary

    return wrapper
