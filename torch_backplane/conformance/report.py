"""What a conformance run found, as data: findings per entry, totals, groups of like failures, JSON.

An entry is one operator in one dtype.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

# Every kind of finding, and whether it makes the entry fail.
KINDS: dict[str, bool] = {
    "crash": True,  # the worker process died
    "hang": True,  # the operator ran into the time limit
    "error": True,  # the device raised where the CPU did not
    "no error": True,  # the CPU raised where the device did not
    "error type": True,  # both raised, another type of exception each (`--sizes`)
    "structure": True,  # another number or type of results
    "device": True,  # a result on the wrong device
    "dtype": True,
    "shape": True,
    "values": True,
    "strides": True,  # of a tensor that the caller owns: in-place, out=
    "mutation": True,  # an input that changed differently
    "aliasing": True,  # a view that is not one, a copy that is not one, an out= that was not returned
    "out of bounds": True,  # what the kernel sanitizer finds (`--sanitize`)
    "race": True,
    "barrier": True,
    "random": True,  # not reproducible under one seed, or the same under all seeds
    "nearer": False,  # beyond the tolerance of the CPU's values, and nowhere farther from float64's than those
    "carried": False,  # the same and farther, of a chain of operators of which each is right (steps.py)
    "cpu out=": False,  # the CPU's own out= result is not its functional one; the device was compared with the latter
    "meant": False,  # in the tables of meant.py, with its reason
    "cpu crash": False,  # PyTorch's CPU kernel ended its process; the device was not asked
    "stricter": False,  # refused, and not by the CPU: wrong arguments of an internal operator, out= with overlaps
    "read first": False,  # an out= over an input, which the CPU refuses: the device has read everything by then
    "layout": False,  # other strides, or another lazy conj/neg bit, of a fresh result: the same numbers
    "refused": False,  # a clear refusal: names the device and what it does not support (sparse, a dtype)
}

SANITIZER_KINDS = ("out of bounds", "race", "barrier")


@dataclass
class Finding:
    """One way in which an entry differed; like ones of other samples are counted in ``count``."""

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
    """What happened to one operator in one dtype."""

    op: str
    dtype: str
    seconds: float = 0.0
    samples: int = 0  # sample inputs tried, forward and backward
    compared: int = 0  # calls that ran on both sides and were compared
    both_raised: int = 0  # calls that raised on both sides
    findings: list[Finding] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)  # ATen operator: calls that fell back
    launches: int = 0  # that the kernel sanitizer looked at, and accesses to device memory in them (`--sanitize`)
    accesses: int = 0

    @property
    def status(self) -> str:
        """``failed``; ``refused`` (nothing but clear refusals); ``empty`` (nothing to compare); else ``passed``."""
        if any(finding.fails for finding in self.findings):
            return "failed"
        if self.compared:
            return "passed"
        return "refused" if self.of_kind("refused") else "empty"

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def add(self, kind: str, variant: str, sample: str, message: str) -> None:
        """Notes a finding; the first of its kind and variant is kept in full, the others are counted."""
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
    """Failures with the same cause."""

    kind: str
    message: str  # the shortest of the group
    entries: list[EntryResult]


def _cause(finding: Finding) -> tuple[str, str]:
    """The key under which like findings meet: the kind, and the message without its numbers, shapes and names."""
    text = finding.message.splitlines()[0] if finding.message else ""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "…", text)
    text = re.sub(r"aten::\w+(\.\w+)?", "aten::…", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    text = re.sub(r"#(, ?#)+", "#", text)
    return finding.kind, text[:120]


def group_findings(results: Iterable[EntryResult], failing: bool = True) -> list[Group]:
    """Groups findings by cause, largest group first.

    Args:
        results: the entries to look at.
        failing: True for the findings that fail an entry, False for the others (nearer, cpu out=, layout, refused).
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
    """The whole run: what was asked, on what, and every entry's result."""

    settings: dict[str, Any]
    environment: dict[str, Any]  # versions, device name, date
    seconds: float
    results: list[EntryResult]

    def with_status(self, status: str) -> list[EntryResult]:
        return [result for result in self.results if result.status == status]

    @property
    def ok(self) -> bool:
        """True when something was compared and nothing failed."""
        return bool(self.with_status("passed")) and not self.with_status("failed")

    def _sanitized(self) -> dict[str, int]:
        """How much the kernel sanitizer looked at, and how many findings it has of each kind."""
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
        """ATen operator → number of calls that fell back, and of entries that made them; most calls first."""
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
