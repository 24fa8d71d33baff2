"""What the kernel sanitizer finds in the launches of a check: in a worker whose device is the sanitizer's."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch_backplane import sanitizer

if TYPE_CHECKING:
    from torch_backplane.conformance.report import EntryResult


class LaunchWatch:
    """Collects findings by the call that was announced before them; calls raise none of them meanwhile."""

    def __init__(self) -> None:
        self._left = ExitStack()
        self._left.enter_context(sanitizer.collected())
        self._at = ""
        self._found: list[tuple[str, sanitizer.Finding]] = []
        self._before = (0, 0)
        self.begin()

    def begin(self) -> None:
        """What comes now belongs to another entry."""
        sanitizer.take()
        self._at, self._found, self._before = "", [], sanitizer.counts()

    def announced(self, call: str) -> None:
        """What comes now belongs to this call: «sample 3, in-place»."""
        self._found += [(self._at, one) for one in sanitizer.take()]
        self._at = call

    def end(self, result: EntryResult) -> None:
        """Notes what was found since `begin`, and how much was looked at."""
        self.announced("")
        for call, finding in self._found:
            sample, _, variant = call.partition(", ")
            result.add(finding.kind, f"{variant}, {finding.kernel}", sample, str(finding))
        result.launches, result.accesses = (
            now - before for now, before in zip(sanitizer.counts(), self._before, strict=True)
        )
