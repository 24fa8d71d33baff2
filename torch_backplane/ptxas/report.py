"""The results of a run, as JSON: a row for each kernel, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_backplane.ptxas.collect import Kernel
from torch_backplane.ptxas.measure import Measured
from torch_backplane.ptxas.nvrtc import version

FIGURES = ("registers", "stack", "spilled", "shared", "occupancy")

# Accepted findings: (what, a regular expression for a part of the kernel's text) → the reason.
KNOWN = {
    (
        "lacks",
        r"bp_copy\((?:(?:un)?signed char|short|unsigned short|int|unsigned int)\* out0, const long long\* in0,",
    ): ("only the low part of each int64 is read"),
}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a kernel on an architecture; `reason` is empty unless it is accepted."""

    what: str
    kernel: str
    case: str
    architecture: str
    detail: str
    reason: str


def findings(kernel: Kernel, measured: Mapping[str, Measured]) -> Iterator[Finding]:
    """Yield a kernel's errors, warnings, spilled registers, missing instructions, and groups that are too large."""
    for architecture, one in measured.items():
        found = {
            "error": one.error,
            "warning": one.warning,
            "spill": f"{one.spilled} bytes" if one.spilled else "",
            "lacks": ", ".join(one.lacking),
            "too large": "" if one.occupancy or one.error else f"no compute unit holds a group of {kernel.group}",
        }
        for what, detail in found.items():
            if detail:
                yield Finding(what, kernel.entry, kernel.case, architecture, detail, _reason(what, kernel.text))


def _reason(what: str, text: str) -> str:
    return next((why for (kind, part), why in KNOWN.items() if kind == what and re.search(part, text)), "")


def report(
    kernels: Sequence[Kernel], measured: Sequence[Mapping[str, Measured]], programs: int, errors: Mapping[str, str]
) -> dict[str, Any]:
    """Return the results.

    Args:
        kernels: those that were compiled.
        measured: the figures of each, by architecture.
        programs: the number of programs that ran.
        errors: of the programs that ended early, by title.
    """
    found = [one for kernel, each in zip(kernels, measured, strict=True) for one in findings(kernel, each)]
    return {
        "ok": bool(kernels) and all(one.reason for one in found),
        "nvrtc": version(),
        "programs": programs,
        "early": dict(errors),
        "figures": FIGURES,
        "findings": [vars(one) for one in found],
        "kernels": [_row(kernel, each) for kernel, each in zip(kernels, measured, strict=True)],
    }


def _row(kernel: Kernel, measured: Mapping[str, Measured]) -> dict[str, Any]:
    figures = {name: [getattr(one, figure) for figure in FIGURES] for name, one in measured.items() if not one.error}
    return {"kernel": kernel.entry, "case": kernel.case, "group": kernel.group, **figures}
