"""A sample input together with a way to call an operator with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_backplane.conformance.transfer import LAYOUTS, Transfer, noncontiguous, tensors

_CPU = torch.device("cpu")


@dataclass
class SampleCall:
    """A function and its arguments. The arguments are copied for each call."""

    function: Callable[..., Any]
    arguments: tuple[Any, tuple[Any, ...], dict[str, Any]]  # input, args, kwargs
    variant: str
    sample: int
    output_process: Callable[[Any], Any] = lambda result: result
    stays_on_cpu: bool = False  # whether args and kwargs (not the input) stay on the CPU
    has_input: bool = True
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the tensors, if they were made non-contiguous

    def copied_to(
        self, device: torch.device, *, wider: bool = False
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on the device; if ``wider``, in float64 and complex128."""
        transfer = Transfer(device, wider=wider)
        first, args, kwargs = self.arguments
        rest = Transfer(_CPU, wider=wider) if self.stays_on_cpu else transfer
        return transfer(first), rest(args), rest(kwargs)

    def describe(self) -> str:
        """Describe the sample, for example ``#3: float32[5, 5], dim=1``."""
        first, args, kwargs = self.arguments
        words = [_brief(item) for item in (first, *args)]
        words += [f"{key}={_brief(item)}" for key, item in kwargs.items()]
        return f"#{self.sample}: " + ", ".join(words)

    def as_variant(self, variant: str, function: Callable[..., Any] | None = None, arguments: Any = None) -> SampleCall:
        """Return the same sample, called in another way."""
        return replace(self, variant=variant, function=function or self.function, arguments=arguments or self.arguments)

    @property
    def has_out(self) -> bool:
        return "out" in self.arguments[2]

    def without_out(self) -> SampleCall:
        """Return the call without ``out=``."""
        first, args, kwargs = self.arguments
        return replace(self, arguments=(first, args, {key: value for key, value in kwargs.items() if key != "out"}))

    def strided(self) -> list[SampleCall]:
        """Return calls with non-contiguous tensors, one per layout; none if no tensor has two elements or more."""
        if not any(leaf.dim() and leaf.numel() > 1 for leaf in tensors(self.arguments)):
            return []
        prefix = "" if self.variant == "forward" else f"{self.variant}, "
        return [
            replace(self, variant=prefix + name, arguments=noncontiguous(self.arguments, layout), layout=layout)
            for name, layout in LAYOUTS.items()
        ]

    def with_out(self, result: Any) -> list[SampleCall]:
        """Return calls with ``out=`` for a given result: with tensors of the right size, and with empty ones."""
        first, args, kwargs = self.arguments
        calls = []
        for variant, make in (("out=", _strided_out), ("out= resized", _empty_out)):
            out = _outs(result, make)
            if out is not None:
                calls.append(self.as_variant(variant, arguments=(first, args, {**kwargs, "out": out})))
        return calls


def _brief(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    if isinstance(item, (list, tuple)) and not isinstance(item, torch.Size):
        return "(" + ", ".join(_brief(part) for part in item) + ")"
    text = repr(item)
    return text if len(text) <= 40 else text[:37] + "..."


def _outs(result: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return tensors to pass as ``out=`` for this result; None if it contains anything but strided tensors."""
    if isinstance(result, torch.Tensor):
        return make(result) if result.layout == torch.strided else None
    if isinstance(result, (list, tuple)) and result:
        outs = [_outs(item, make) for item in result]
        return None if any(out is None for out in outs) else (outs if isinstance(result, list) else tuple(outs))
    return None


def _strided_out(like: torch.Tensor) -> torch.Tensor:
    """Return a non-contiguous tensor of the right size, filled with ones.

    The last two dimensions are swapped, or every second element is used. Batch dimensions are not permuted, because
    PyTorch's CPU ``tril`` writes past the end of such an ``out``.
    """
    if like.dim() >= 2:
        return torch.ones_like(like.mT, memory_format=torch.contiguous_format).mT
    return torch.ones(2 * like.numel(), dtype=like.dtype)[::2] if like.dim() else torch.ones_like(like)


def _empty_out(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor, which the function must resize."""
    return torch.empty(0, dtype=like.dtype)
