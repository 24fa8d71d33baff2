"""What the sanitizer finds, in words."""

from __future__ import annotations

from dataclasses import dataclass

OUT_OF_BOUNDS, RACE, BARRIER = "out of bounds", "race", "barrier"


class KernelSanitizerError(RuntimeError):
    """A launch did what it must not. `findings` are all of it; the message has them, one for each line."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        super().__init__("\n".join(str(one) for one in findings))


@dataclass(frozen=True)
class Finding:
    """One way in which a launch went wrong.

    Args:
        kind: "out of bounds", "race" (two work items, one of which writes, touch a byte, and no barrier orders them) or
            "barrier" (one that some work items of a group do not get to).
        kernel: its entry point.
        argument: the parameter that brings the memory; "" for local memory, and for an address that is no memory's.
        index: of the element that is touched, from where the argument points: below 0 before it. In local memory the
            byte; of an address that is no memory's the address.
        text: all of it in words.
        count: accesses of the launch of this kind to this argument.
    """

    kind: str
    kernel: str
    argument: str
    index: int
    text: str
    count: int

    def __str__(self) -> str:
        more = f" (the first of {self.count:,} such accesses of this launch)" if self.count > 1 else ""
        return f"{self.kernel}: {self.kind}: {self.text}{more}"
