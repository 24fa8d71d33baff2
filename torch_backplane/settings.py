"""Settings that the environment gives, read when `torch_backplane` is imported.

What only one driver reads (TORCH_BACKPLANE_HOST_DEVICES and the like) is read there, when devices are discovered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

from torch_backplane import _C

T = TypeVar("T")

FALLBACK_POLICIES = {
    "warn": _C.FallbackPolicy.warn,
    "silent": _C.FallbackPolicy.silent,
    "error": _C.FallbackPolicy.error,
}


def choice(name: str, accepted: Mapping[str, T], default: str) -> T:
    """The value that environment variable `name` chooses among `accepted`.

    Raises:
        ValueError: it is none of them; the message names them.
    """
    text = os.environ.get(name, default).strip()
    if text not in accepted:
        raise ValueError(f"{name}={text!r} is not one of {', '.join(accepted)}")
    return accepted[text]


def apply() -> None:
    """Read the environment and tell the socket."""
    _C.set_fallback_policy(choice("TORCH_BACKPLANE_FALLBACK", FALLBACK_POLICIES, default="warn"))
    _C.set_plan_mode(choice("TORCH_BACKPLANE_PLANS", {mode: mode for mode in ("1", "0", "check")}, default="1"))
