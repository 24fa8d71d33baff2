"""A memory snapshot as one page of HTML, which opens without a network: `python -m torch_backplane memory plot`.

What a device's memory held, and when, is worked out here; `page.html` draws it. A snapshot is what
`torch.bp.memory._dump_snapshot` or `torch.cuda.memory._dump_snapshot` writes.
"""

from __future__ import annotations

import bisect
import html
import json
import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

MOST_STACKS = 40  # in the table of what lives at the peak
UNKNOWN = "(not recorded)"


class _Plain(pickle.Unpickler):
    """Reads lists, dictionaries, texts and numbers, which is all that a snapshot has: another file may run anything."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")


def read(path: Path) -> dict[str, Any]:
    """The snapshot in a file. Raises ValueError where it holds none, and OSError where it cannot be read."""
    with path.open("rb") as file:
        try:
            found = _Plain(file).load()
        except Exception as error:
            raise ValueError(f"{path} is no memory snapshot: {error}") from error
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise ValueError(f"{path} is no memory snapshot: it has no segments and device_traces")
    return found


@dataclass
class Allocation:
    """Memory in use, from one event to another."""

    address: int
    bytes: int
    begin: int  # the number of the event that made it; 0 where that was before the history
    end: int | None  # that freed it; None: it lives
    stack: str


@dataclass
class Timeline:
    """What a device's history tells. Events are numbered from 1; curves have a number more, for before them."""

    device: int
    events: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)  # bytes in use
    reserved: list[int] = field(default_factory=list)  # bytes of segments
    ranges: list[tuple[int, int]] = field(default_factory=list)  # addresses that segments had, [first, last), apart

    @property
    def peak(self) -> int:
        """The number of the event after which most was in use."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)

    def place(self, address: int) -> int:
        """How far from the lowest address of all ranges, without what lies between them."""
        number = bisect.bisect_right(self.ranges, (address, 2**64)) - 1
        before = sum(last - first for first, last in self.ranges[:number])
        return before + address - self.ranges[number][0]


def stack_of(frames: list[dict[str, Any]] | None) -> str:
    """Lines of the Python frames, the innermost first; of C++'s where there are no others."""
    frames = frames or []
    python = [one for one in frames if one.get("line") and str(one.get("filename", "")).endswith(".py")]
    lines = [f"{one['filename']}:{one['line']}: {one['name']}" for one in python]
    return "\n".join(lines or [str(one.get("name", "?")) for one in frames[:20]]) or UNKNOWN


def timeline(snapshot: dict[str, Any], device: int) -> Timeline:
    """What the snapshot says of a device. Without a history, what lives at its end is all that is known."""
    traces = snapshot["device_traces"]
    events = traces[device] if device < len(traces) else []
    segments = [one for one in snapshot["segments"] if one["device"] == device]
    found = Timeline(device, len(events))
    living: dict[int, Allocation] = {}
    held: dict[int, int] = {}  # segments by their address
    ranges = [(one["address"], one["address"] + one["total_size"]) for one in segments]
    change, held_change = [0] * (len(events) + 1), [0] * (len(events) + 1)
    for number, event in enumerate(events, 1):
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            living[address] = Allocation(address, size, number, None, stack_of(event.get("frames")))
        elif action in ("free_completed", "free"):
            # A history that begins late knows nothing of it.
            gone = living.pop(address, None) or Allocation(address, size, 0, None, UNKNOWN)
            gone.end = number
            found.allocations.append(gone)
        elif action in ("segment_alloc", "segment_map"):
            held[address] = size
            held_change[number] += size
            ranges.append((address, address + size))
        elif action in ("segment_free", "segment_unmap"):
            if held.pop(address, None) is None:
                held_change[0] += size
            held_change[number] -= size
            ranges.append((address, address + size))
    for segment in segments:
        address = segment["address"]
        if address not in held:
            held_change[0] += segment["total_size"] if not segment.get("is_expandable") else 0
        for block in segment["blocks"]:
            at = block.get("address", address)
            address = at + block["size"]
            if block["state"].startswith("active") and at not in living:
                living[at] = Allocation(at, block["requested_size"], 0, None, stack_of(block.get("frames")))
    found.allocations += living.values()
    for one in found.allocations:
        change[one.begin] += one.bytes
        if one.end is not None:
            change[one.end] -= one.bytes
        ranges.append((one.address, one.address + one.bytes))
    for curve, changes in ((found.allocated, change), (found.reserved, held_change)):
        total = 0
        for one_change in changes:
            total += one_change
            curve.append(total)
    for first, last in sorted(ranges):
        if found.ranges and first <= found.ranges[-1][1]:
            found.ranges[-1] = (found.ranges[-1][0], max(found.ranges[-1][1], last))
        else:
            found.ranges.append((first, last))
    return found


def devices(snapshot: dict[str, Any]) -> list[int]:
    """Those that the snapshot tells anything of."""
    used = {one["device"] for one in snapshot["segments"]}
    return sorted(used | {number for number, trace in enumerate(snapshot["device_traces"]) if trace})


def bytes_text(count: int) -> str:
    """12.5 MiB"""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def table(found: Timeline) -> str:
    """Rows of HTML: what is in use at the peak, by where it was allocated, the most first."""
    peak, by_stack = found.peak, defaultdict(list)
    for one in found.allocations:
        if one.begin <= peak and (one.end is None or one.end > peak):
            by_stack[one.stack].append(one.bytes)
    rows = sorted(by_stack.items(), key=lambda row: -sum(row[1]))
    text = [
        f"<tr><td>{bytes_text(sum(sizes))}</td><td>{len(sizes)}</td><td><pre>{html.escape(stack)}</pre></td></tr>"
        for stack, sizes in rows[:MOST_STACKS]
    ]
    if rest := rows[MOST_STACKS:]:
        total = bytes_text(sum(sum(sizes) for _, sizes in rest))
        text.append(f"<tr><td>{total}</td><td>{sum(len(sizes) for _, sizes in rest)}</td><td>others</td></tr>")
    return "\n".join(text)


def page(snapshot: dict[str, Any], title: str = "memory") -> str:
    """The page of HTML. Raises ValueError where the snapshot tells of no memory."""
    shown = [timeline(snapshot, number) for number in devices(snapshot)]
    if not shown:
        raise ValueError("the snapshot tells of no memory: none was allocated, or it was taken of another process")
    stacks: dict[str, int] = {}
    data = []
    for one in shown:
        boxes = [
            [
                each.begin,
                one.events + 1 if each.end is None else each.end,
                one.place(each.address),
                each.bytes,
                stacks.setdefault(each.stack, len(stacks)),
            ]
            for each in one.allocations
        ]
        height = sum(last - first for first, last in one.ranges)
        data.append(
            {
                "device": one.device,
                "events": one.events,
                "height": height,
                "allocated": one.allocated,
                "reserved": one.reserved,
                "boxes": boxes,
                "peak": one.peak,
                "table": table(one),
            }
        )
    text = json.dumps({"devices": data, "stacks": list(stacks)}).replace("<", "\\u003c")  # nothing ends the script
    made = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    return made.replace("{{title}}", html.escape(title)).replace("{{data}}", text)
