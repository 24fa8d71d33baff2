"""Results of a conformance run: findings per entry, totals, failures grouped by cause, JSON.

An entry is one operator in one dtype.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

# Every kind of finding, and whether it fails the entry.
KINDS: dict[str, bool] = {
    "crash": True,  # the worker process died
    "hang": True,  # the operator exceeded the time limit
    "error": True,  # the device raised where the CPU did not
    "no error": True,  # the CPU raised where the device did not
    "error type": True,  # both raised, with different exception types (`--sizes`)
    "structure": True,  # different number or type of results
    "device": True,  # a result on the wrong device
    "dtype": True,
    "shape": True,
    "values": True,
    "strides": True,  # of a tensor that the caller passed: in-place, out=
    "mutation": True,  # an argument changed differently
    "aliasing": True,  # a copy instead of a view or the reverse, or out= was not returned
    "out of bounds": True,  # a finding of the kernel sanitizer (`--sanitize`), as are the next two
    "race": True,
    "barrier": True,
    "random": True,  # not reproducible under one seed, or the same under all seeds
    "nearer": False,  # values beyond the tolerance of the CPU's, but as close to float64's as these (comparison.py)
    "carried": False,  # values farther from float64's than the CPU's, in a chain of steps that are right (steps.py)
    "cpu out=": False,  # the CPU's out= result differs from its functional one; the device was compared with the latter
    "accepted": False,  # an accepted difference: ties.py, or the tables of accepted.py with the reason
    "cpu crash": False,  # PyTorch's CPU kernel crashed its process; the device was not called
    "stricter": False,  # refused by the device only: wrong arguments of an internal operator, out= with overlaps
    "read first": False,  # out= overlaps an input, which the CPU refuses; the device's result is right
    "layout": False,  # a new result with other strides or another lazy conj/neg bit, and the same values
    "refused": False,  # a clear refusal: names the device and what it does not support (sparse layout, a dtype)
}

SANITIZER_KINDS = ("out of bounds", "race", "barrier")


@dataclass
class Finding:
    """A difference between device and CPU. Findings of the same kind and variant are counted in ``count``."""

    kind: str  # one of KINDS
    variant: str  # "forward", "in-place", "out=", …; "" when unknown
    sample: str  # which sample input, and its shapes; "" when unknown
    message: str
    count: int = 1

    @property
    def fails(self) -> bool:
        return KINDS[self.kind]


@dataclass
class EntryResult:
    """The result of checking one operator in one dtype."""

    op: str
    dtype: str
    seconds: float = 0.0
    samples: int = 0  # sample inputs tried, forward and backward
    compared: int = 0  # calls that ran on both sides and were compared
    both_raised: int = 0  # calls that raised on both sides
    findings: list[Finding] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)  # ATen operator: calls that fell back
    libraries: dict[str, int] = field(default_factory=dict)  # library function: calls by plans (libraries.py)
    launches: int = 0  # checked by the kernel sanitizer (`--sanitize`)
    accesses: int = 0  # to device memory in these launches

    @property
    def status(self) -> str:
        """``failed``, ``passed``, ``refused`` (nothing compared, something refused) or ``empty`` (nothing compared)."""
        if any(finding.fails for finding in self.findings):
            return "failed"
        if self.compared:
            return "passed"
        return "refused" if self.of_kind("refused") else "empty"

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def add(self, kind: str, variant: str, sample: str, message: str) -> None:
        """Add a finding. The first of a kind and variant is kept in full; later ones are only counted."""
        for finding in self.findings:
            if (finding.kind, finding.variant) == (kind, variant):
                finding.count += 1
                return
        self.findings.append(Finding(kind, variant, sample, message))

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EntryResult:
        fields = {key: value for key, value in data.items() if key != "status"}
        fields["findings"] = [Finding(**finding) for finding in data["findings"]]
        return cls(**fields)


@dataclass
class Group:
    """Findings with the same cause."""

    kind: str
    message: str  # the shortest of the group
    entries: list[EntryResult]


def _cause(finding: Finding) -> tuple[str, str]:
    """The key that groups findings: the kind, and the message without numbers, shapes and names."""
    text = finding.message.splitlines()[0] if finding.message else ""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "…", text)
    text = re.sub(r"aten::\w+(\.\w+)?", "aten::…", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    text = re.sub(r"#(, ?#)+", "#", text)
    return finding.kind, text[:120]


def group_findings(results: Iterable[EntryResult], failing: bool = True) -> list[Group]:
    """Group findings by cause, largest group first.

    Args:
        results: the entries whose findings are grouped.
        failing: True for the findings that fail an entry, False for the others.
    """
    members: dict[tuple[str, str], list[tuple[EntryResult, Finding]]] = {}
    for result in results:
        seen = set()
        for finding in result.findings:
            cause = _cause(finding)
            if finding.fails == failing and cause not in seen:
                seen.add(cause)
                members.setdefault(cause, []).append((result, finding))
    groups = [
        Group(kind, min((finding.message for _, finding in pairs), key=len), [result for result, _ in pairs])
        for (kind, _), pairs in members.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.entries), group.kind, group.message))


@dataclass
class Report:
    """A complete run: settings, environment, and the result of every entry."""

    settings: dict[str, Any]
    environment: dict[str, Any]  # versions, device name, date
    seconds: float
    results: list[EntryResult]
    left_out: int = 0  # entries that were not checked, because the time was over

    def with_status(self, status: str) -> list[EntryResult]:
        return [result for result in self.results if result.status == status]

    @property
    def ok(self) -> bool:
        """True if at least one entry passed and none failed."""
        return bool(self.with_status("passed")) and not self.with_status("failed")

    def _sanitized(self) -> dict[str, int]:
        """Launches and accesses checked by the kernel sanitizer, and its findings by kind."""
        return {
            "launches": sum(result.launches for result in self.results),
            "accesses": sum(result.accesses for result in self.results),
            **{kind.replace(" ", "_"): self._count(kind) for kind in SANITIZER_KINDS},
        }

    def _count(self, kind: str) -> int:
        return sum(finding.count for result in self.results for finding in result.of_kind(kind))

    def totals(self) -> dict[str, int]:
        counts = Counter(result.status for result in self.results)
        return {
            "entries": len(self.results),
            "left_out": self.left_out,
            **{status: counts[status] for status in ("passed", "failed", "refused", "empty")},
            "layout": sum(bool(result.of_kind("layout")) for result in self.results),
            "nearer": sum(bool(result.of_kind("nearer")) for result in self.results),
            "carried": sum(bool(result.of_kind("carried")) for result in self.results),
            "cpu_out": sum(bool(result.of_kind("cpu out=")) for result in self.results),
            "without_fallback": sum(result.status == "passed" and not result.fallbacks for result in self.results),
            "compared_calls": sum(result.compared for result in self.results),
            **(self._sanitized() if self.settings.get("sanitize") else {}),
        }

    def fallbacks(self) -> dict[str, dict[str, int]]:
        """ATen operator → number of fallback calls, and of entries that made them; most calls first."""
        calls: Counter[str] = Counter()
        entries: Counter[str] = Counter()
        for result in self.results:
            calls.update(result.fallbacks)
            entries.update(result.fallbacks.keys())
        return {name: {"calls": count, "entries": entries[name]} for name, count in calls.most_common()}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "settings": self.settings,
            "environment": self.environment,
            "seconds": round(self.seconds, 1),
            "totals": self.totals(),
            "fallbacks": self.fallbacks(),
            "entries": [result.to_json() for result in self.results],
        }
