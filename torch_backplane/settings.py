"""Settings that the environment gives: what there is, and those that hold for all devices, which are read when
`torch_backplane` is imported.

What only one driver reads (TORCH_BACKPLANE_HOST_DEVICES and the like) is read there, when devices are discovered.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from torch_backplane import _C

T = TypeVar("T")

PREFIX = "TORCH_BACKPLANE_"


class Variable(NamedTuple):
    """An environment variable that Backplane reads."""

    meaning: str
    values: str
    default: str
    read: str  # when


VARIABLES: Mapping[str, Variable] = {
    "TORCH_BACKPLANE_FALLBACK": Variable(
        "what happens where an operator runs as PyTorch's CPU kernel, with copies",
        "warn, silent, error", "warn", "at import",
    ),
    "TORCH_BACKPLANE_PLANS": Variable(
        "whether plans are replayed, or what runs beside them", "1, 0, check", "1", "at import"
    ),
    "TORCH_BACKPLANE_SANITIZER": Variable(
        "whether work of two streams on the same memory, without a wait between them, is an error", "0, 1", "0",
        "at import",
    ),
    "TORCH_BACKPLANE_LAUNCH_BLOCKING": Variable(
        "whether each operator waits for the device, so that errors of kernels come from the call itself",
        "0, 1", "0", "at import",
    ),
    "TORCH_BACKPLANE_DRIVERS": Variable(
        "drivers to ask, in order", "names, such as opencl,host", "all that are installed", "at discovery"
    ),
    "TORCH_BACKPLANE_VISIBLE_DEVICES": Variable(
        "devices to use, in order", "such as host:1,host:0", "all", "at discovery"
    ),
    "TORCH_BACKPLANE_HOST_DEVICES": Variable("number of host devices", "0 to 64", "1", "at discovery"),
    "TORCH_BACKPLANE_HOST_MEMORY": Variable("memory of each", "such as 2GiB", "the machine's", "at discovery"),
    "TORCH_BACKPLANE_HOST_ASYNC": Variable(
        "whether streams of host devices work in threads of their own, as GPUs do", "0, 1", "0", "at discovery"
    ),
    "TORCH_BACKPLANE_HOST_DELAYS": Variable(
        "the same, and some of the work begins up to 0.2 ms late, as this seed has it", "a seed, such as 1", "none",
        "at discovery",
    ),
    "TORCH_BACKPLANE_DISCRETE": Variable(
        "whether devices in host memory behave as if the CPU could not reach it", "0, 1", "0", "at discovery"
    ),
    "TORCH_BACKPLANE_TARGET": Variable(
        "a modelled device that those which run kernels are taken for",
        "a name, such as nvidia-ada, or a file", "none", "at discovery",
    ),
    "TORCH_BACKPLANE_SANITIZE_KERNELS": Variable(
        "whether the only device is one that checks what kernels do to memory: bounds, and races in a launch",
        "0, 1", "0", "at discovery",
    ),
    "TORCH_BACKPLANE_WORKSPACE": Variable(
        "what a product or a convolution may take beside operands and results", "such as 8MiB", "no limit",
        "when the first one is planned",
    ),
    "TORCH_BACKPLANE_CACHE_SIZE": Variable(
        "how large the kernels on disk may get", "such as 512MiB", "1GiB", "when one is written"
    ),
    "TORCH_BACKPLANE_CACHE_DIR": Variable(
        "their folder", "a folder; empty: none", "torch_backplane in $XDG_CACHE_HOME or ~/.cache", "when one is built"
    ),
}  # fmt: skip

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


def unknown() -> dict[str, str]:
    """The variables that are set, begin as ours do and are read by nobody; with each the one that was perhaps meant.

    A driver from elsewhere has its name in its own variables, behind our prefix, and these are left to it.
    """
    names = [name for name in os.environ if name.startswith(PREFIX) and name not in VARIABLES]
    if not names:
        return {}
    import difflib
    from importlib.metadata import entry_points

    drivers = entry_points(group="torch_backplane.drivers")
    others = tuple(f"{PREFIX}{one.name.upper()}_" for one in drivers if not one.value.startswith("torch_backplane."))
    return {
        name: next(iter(difflib.get_close_matches(name, VARIABLES, 1, cutoff=0.85)), "")
        for name in sorted(names)
        if not name.startswith(others)
    }


def has_sanitizer() -> bool:
    """Whether the environment wants races between streams to be looked for."""
    return choice("TORCH_BACKPLANE_SANITIZER", {"0": False, "1": True}, default="0")


def apply() -> None:
    """Read the environment and tell the runtime. Warns of variables that nobody reads.

    Raises:
        ValueError: one is malformed.
    """
    for name, near in unknown().items():
        meant = f"did you mean {near}?" if near else "docs/torch-bp.md lists what there is"
        warnings.warn(f"{name} is set, and Backplane reads no such variable: {meant}", stacklevel=2)
    _C.set_fallback_policy(choice("TORCH_BACKPLANE_FALLBACK", FALLBACK_POLICIES, default="warn"))
    _C.set_launch_blocking(choice("TORCH_BACKPLANE_LAUNCH_BLOCKING", {"0": False, "1": True}, default="0"))
    _C.set_plan_mode(choice("TORCH_BACKPLANE_PLANS", {mode: mode for mode in ("1", "0", "check")}, default="1"))
