"""Collects the kernel sanitizer's findings during a check. Runs in a worker whose device is the sanitizer's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch_backplane import sanitizer

if TYPE_CHECKING:
    from torch_backplane.conformance.report import EntryResult


class LaunchWatch:
    """Assigns each finding to the call announced before it. Launches do not raise while this exists."""

    def __init__(self) -> None:
        self._left = ExitStack()
        self._left.enter_context(sanitizer.collected())
        self._at = ""
        self._found: list[tuple[str, sanitizer.Finding]] = []
        self._before = (0, 0)
        self.begin()

    def begin(self) -> None:
        """Start a new entry: discard earlier findings and restart the counts."""
        sanitizer.take()
        self._at, self._found, self._before = "", [], sanitizer.counts()

    def announced(self, call: str) -> None:
        """Assign the findings from now on to this call, such as "sample 3, in-place"."""
        self._found += [(self._at, one) for one in sanitizer.take()]
        self._at = call

    def end(self, result: EntryResult) -> None:
        """Add the findings since `begin`, and the numbers of launches and accesses checked, to the result."""
        self.announced("")
        for call, finding in self._found:
            sample, _, variant = call.partition(", ")
            result.add(finding.kind, f"{variant}, {finding.kernel}", sample, str(finding))
        result.launches, result.accesses = (
            now - before for now, before in zip(sanitizer.counts(), self._before, strict=True)
        )
