"""`torch.bp.amp`: automatic mixed precision, with the names and signatures of `torch.cuda.amp`.

PyTorch has deprecated torch.cuda.amp. New programs should use torch.autocast("bp"), torch.amp.GradScaler("bp"),
torch.amp.custom_fwd(device_type="bp") and torch.amp.custom_bwd(device_type="bp").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast_mode.autocast):
    """Context manager and decorator: `torch.autocast("bp", ...)`.

    Args:
        enabled: whether autocasting is enabled.
        dtype: torch.float16 or torch.bfloat16.
        cache_enabled: whether casts of weights are cached.
    """

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("bp", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler: `torch.amp.GradScaler("bp", ...)`, which documents the arguments."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(
            "bp",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorator for `forward` of autograd functions: `torch.amp.custom_fwd(device_type="bp")`."""
    return functools.partial(torch.amp.custom_fwd, device_type="bp")(fwd=fwd, cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Decorator for `backward` of autograd functions: `torch.amp.custom_bwd(device_type="bp")`."""
    return functools.partial(torch.amp.custom_bwd, device_type="bp")(bwd)


def amp_definitely_not_available() -> bool:
    """Return whether there is no bp device, so that mixed precision is not available."""
    return not torch.bp.is_available()  # type: ignore[attr-defined]
