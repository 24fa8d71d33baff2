"""Converts a memory snapshot to a self-contained HTML page: `python -m torch_backplane memory plot`.

This module computes the allocations of each device over time, and `page.html` draws them. A snapshot is written by
`torch.bp.memory._dump_snapshot` or `torch.cuda.memory._dump_snapshot`.
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

MAX_STACKS = 40  # rows of the table of allocations at the peak
UNKNOWN = "(not recorded)"


class _Plain(pickle.Unpickler):
    """Loads only lists, dictionaries, strings and numbers, as in a snapshot. Other pickles could run arbitrary code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it contains {module}.{name}")


def read(path: Path) -> dict[str, Any]:
    """Read a snapshot from a file.

    Raises:
        ValueError: the file is no memory snapshot.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            found = _Plain(file).load()
        except Exception as error:
            raise ValueError(f"{path} is not a memory snapshot: {error}") from error
    if not isinstance(found, dict) or not {"segments", "device_traces"} <= found.keys():
        raise ValueError(f"{path} is not a memory snapshot: it has no segments and device_traces")
    return found


@dataclass
class Allocation:
    """An allocation, with the numbers of the events that made and freed it."""

    address: int
    bytes: int
    begin: int  # 0: before the recorded history
    end: int | None  # None: not freed
    stack: str


@dataclass
class Timeline:
    """The history of a device. Events are numbered from 1. Curves have one more value, for the time before event 1."""

    device: int
    events: int = 0
    allocations: list[Allocation] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)  # bytes in use
    reserved: list[int] = field(default_factory=list)  # bytes of segments
    ranges: list[tuple[int, int]] = field(default_factory=list)  # of addresses with memory, [first, last), disjoint

    @property
    def peak(self) -> int:
        """The number of the event after which the most memory was in use."""
        return max(range(len(self.allocated)), key=self.allocated.__getitem__)

    def place(self, address: int) -> int:
        """Return the position of an address if all ranges are placed one after another."""
        number = bisect.bisect_right(self.ranges, (address, 2**64)) - 1
        before = sum(last - first for first, last in self.ranges[:number])
        return before + address - self.ranges[number][0]


def stack_of(frames: list[dict[str, Any]] | None) -> str:
    """Return the Python frames as lines, the innermost first; without Python frames, the first 20 C++ frames."""
    frames = frames or []
    python = [one for one in frames if one.get("line") and str(one.get("filename", "")).endswith(".py")]
    lines = [f"{one['filename']}:{one['line']}: {one['name']}" for one in python]
    return "\n".join(lines or [str(one.get("name", "?")) for one in frames[:20]]) or UNKNOWN


def timeline(snapshot: dict[str, Any], device: int) -> Timeline:
    """Compute the history of a device. Without recorded events, it has only the allocations at the end."""
    traces = snapshot["device_traces"]
    events = traces[device] if device < len(traces) else []
    segments = [one for one in snapshot["segments"] if one["device"] == device]
    found = Timeline(device, len(events))
    living: dict[int, Allocation] = {}
    held: dict[int, int] = {}  # segments: address → size
    ranges = [(one["address"], one["address"] + one["total_size"]) for one in segments]
    change, held_change = [0] * (len(events) + 1), [0] * (len(events) + 1)
    for number, event in enumerate(events, 1):
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            living[address] = Allocation(address, size, number, None, stack_of(event.get("frames")))
        elif action in ("free_completed", "free"):
            # The allocation was made before the recorded history.
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
    """Return the devices that have segments or events in the snapshot."""
    used = {one["device"] for one in snapshot["segments"]}
    return sorted(used | {number for number, trace in enumerate(snapshot["device_traces"]) if trace})


def bytes_text(count: int) -> str:
    """Format a number of bytes, for example "12.5 MiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def table(found: Timeline) -> str:
    """Return HTML table rows of the allocations at the peak, grouped by stack trace, largest first."""
    peak, by_stack = found.peak, defaultdict(list)
    for one in found.allocations:
        if one.begin <= peak and (one.end is None or one.end > peak):
            by_stack[one.stack].append(one.bytes)
    rows = sorted(by_stack.items(), key=lambda row: -sum(row[1]))
    text = [
        f"<tr><td>{bytes_text(sum(sizes))}</td><td>{len(sizes)}</td><td><pre>{html.escape(stack)}</pre></td></tr>"
        for stack, sizes in rows[:MAX_STACKS]
    ]
    if rest := rows[MAX_STACKS:]:
        total = bytes_text(sum(sum(sizes) for _, sizes in rest))
        text.append(f"<tr><td>{total}</td><td>{sum(len(sizes) for _, sizes in rest)}</td><td>others</td></tr>")
    return "\n".join(text)


def page(snapshot: dict[str, Any], title: str = "memory") -> str:
    """Return the HTML page.

    Raises:
        ValueError: the snapshot has no segments and no events.
    """
    shown = [timeline(snapshot, number) for number in devices(snapshot)]
    if not shown:
        raise ValueError("the snapshot has no segments and no events: no device memory was allocated when it was made")
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
    text = json.dumps({"devices": data, "stacks": list(stacks)}).replace("<", "\\u003c")  # no `</script>` in data
    made = resources.files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    return made.replace("{{title}}", html.escape(title)).replace("{{data}}", text)
