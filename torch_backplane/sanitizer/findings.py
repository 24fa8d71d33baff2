"""Findings of the kernel sanitizer and their messages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from torch_backplane.interpreter.library import Kernel, integers

OUT_OF_BOUNDS, RACE, BARRIER = "out of bounds", "race", "barrier"


class KernelSanitizerError(RuntimeError):
    """A launch accessed memory out of bounds, had a race, or had a divergent barrier.

    `findings` has all findings. The message has one line for each.
    """

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        super().__init__("\n".join(str(one) for one in findings))


@dataclass(frozen=True)
class Finding:
    """A finding in a launch.

    Args:
        kind: "out of bounds", "race" (two work items access the same byte, one of them writes, and no barrier orders
            them) or "barrier" (some work items of a group do not reach a barrier).
        kernel: the entry point of the kernel.
        argument: the parameter whose memory was accessed; "" for local memory and for addresses of no argument.
        index: index of the accessed element relative to the argument's pointer; negative before it. The byte for local
            memory, and the address for addresses of no argument.
        text: the message.
        count: number of findings of this kind for this argument in the launch.
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


class RawFinding(ctypes.Structure):
    """`Finding` in observer.h."""

    _fields_: ClassVar = [
        *integers("kernel", "kind", "access", "other_access", "argument"),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        *integers("item", "group", "other_item", "other_group", "count"),
    ]


_VERBS = ("", "reads", "writes", "swaps")
_KINDS = (OUT_OF_BOUNDS, RACE, RACE, BARRIER, OUT_OF_BOUNDS)
_IN_ARGUMENT, _LOCAL_RACE, _BARRIER = (0, 1), 2, 3


def _place(item: int, group: int) -> str:
    return f"work item {item} of group {group}"


def described(raw: RawFinding, kernel: Kernel) -> Finding:
    who = _place(raw.item, raw.group)
    other = f"{_place(raw.other_item, raw.other_group)} {_VERBS[raw.other_access]}"
    argument, index = "", raw.offset
    if raw.kind in _IN_ARGUMENT:
        argument, size = kernel.names[raw.argument], kernel.item_bytes[raw.argument] or 1
        index = raw.offset // size
        if raw.kind == 0:
            has = f"which has {raw.end // size:,} elements of {size} bytes from there on"
            before = f" and {-raw.begin:,} bytes before" if raw.begin else ""
            text = f"{who} {_VERBS[raw.access]} {raw.size} bytes at index {index:,} of {argument}, {has}{before}"
        else:
            text = f"{who} {_VERBS[raw.access]} and {other} index {index:,} of {argument}, and no barrier orders them"
    elif raw.kind == _LOCAL_RACE:
        text = f"{who} {_VERBS[raw.access]} and {other} byte {index:,} of local memory, and no barrier orders them"
    elif raw.kind == _BARRIER:
        text = f"{who} does not reach a barrier or shuffle where others of its group wait"
    else:
        text = f"{who} {_VERBS[raw.access]} {raw.size} bytes at {index:#x}, which is in the memory of no argument"
    return Finding(_KINDS[raw.kind], kernel.entry, argument, index, text, raw.count)
