"""torch.bp.amp: what torch.cuda.amp is, with its names and signatures.

PyTorch calls torch.cuda.amp deprecated; new programs write torch.autocast("bp"), torch.amp.GradScaler("bp") and
torch.amp.custom_fwd(device_type="bp").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast_mode.autocast):
    """torch.autocast("bp", …)."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("bp", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler("bp", …)."""

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
    """torch.amp.custom_fwd(device_type="bp")."""
    return functools.partial(torch.amp.custom_fwd, device_type="bp")(fwd=fwd, cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """torch.amp.custom_bwd(device_type="bp")."""
    return functools.partial(torch.amp.custom_bwd, device_type="bp")(bwd)


def amp_definitely_not_available() -> bool:
    """Whether there is no bp device."""
    return not torch.bp.is_available()  # type: ignore[attr-defined]
