"""Measures the speed and the memory overhead of the caching allocator, and malloc's speed in the same run.

    python benchmarks/allocator.py
    python benchmarks/allocator.py --json

Sequences of allocations and frees are replayed natively. One is the simplest possible: a small block that is allocated
and freed repeatedly. One is recorded from the memory history while a small transformer is trained on bp, and repeated
until it has enough events. One is random. An event is one allocation or one free. "bp" calls the allocator, "bp via
c10" uses c10's interface to it, as operators do, and "malloc" is posix_memalign to 512 bytes and free. Nothing accesses
the memory. The first pass of bp gets its segments from the device; later passes find them in the cache. The allocators
alternate, the best passes count, and times are the thread's CPU time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
from array import array
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

MIB = 1 << 20


@dataclasses.dataclass
class Trace:
    name: str
    events: array[int]  # of (slot, size) pairs; size -1 frees the slot

    @property
    def count(self) -> int:
        return len(self.events) // 2


def train(steps: int) -> None:
    """Trains a small transformer on random tokens for some steps. Only its allocations matter."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 128), layers, nn.LayerNorm(128), nn.Linear(128, 256))
    model.to("bp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        length = 64 + 16 * (step % 4)  # batches differ in length
        tokens = torch.randint(0, 256, (8, length + 1)).to("bp")
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def record_training(steps: int) -> Trace:
    memory._record_memory_history("all", context=None, clear_history=True)
    train(steps)
    history = memory._snapshot()["device_traces"][_C.current_device()]
    memory._record_memory_history(None)
    slots: dict[int, int] = {}
    events = array("q")
    count = 0
    for entry in history:
        if entry["action"] == "alloc":
            slots[entry["addr"]] = count
            events.extend((count, entry["size"]))
            count += 1
        elif entry["action"] == "free_completed" and entry["addr"] in slots:
            events.extend((slots.pop(entry["addr"]), -1))
    for slot in slots.values():  # free what is alive at the end, so that the sequence can be repeated
        events.extend((slot, -1))
    return Trace(f"training, {steps} steps", events)


def repeat(trace: Trace, at_least: int) -> Trace:
    times = -(-at_least // trace.count)
    return Trace(f"{trace.name} × {times}", trace.events * times)


def random_trace(count: int, live: int = 2000) -> Trace:
    """Blocks of 16 bytes to 16 MiB, uniform on a logarithmic scale; about `live` are allocated at any time."""
    choose = random.Random(0)
    events = array("q")
    slots: list[int] = []
    unused = list(range(2 * live))
    for _ in range(count):
        if slots and (not unused or choose.random() < len(slots) / (2 * live)):
            index = choose.randrange(len(slots))
            slots[index], slots[-1] = slots[-1], slots[index]
            slot = slots.pop()
            unused.append(slot)
            events.extend((slot, -1))
        else:
            slot = unused.pop()
            slots.append(slot)
            events.extend((slot, int(2 ** choose.uniform(4, 24))))
    return Trace("random", events)


def pair_trace(count: int) -> Trace:
    """The fastest and most frequent case: a small tensor with a short lifetime."""
    return Trace("one small block", array("q", [0, 1000, 0, -1]) * (count // 2))


ALLOCATORS = ("bp", "data_ptr", "malloc")  # names in the runtime's replay


@dataclasses.dataclass
class Result:
    """Nanoseconds per event, and peak bytes."""

    sequence: str
    events: int
    first_ns: float
    bp_ns: float
    c10_ns: float
    malloc_ns: float
    ratio: float  # c10_ns / malloc_ns
    peak_allocated: int
    reserved_per_allocated: float  # peak reserved / peak allocated


def measure(trace: Trace, passes: int) -> Result:
    """Replays a sequence, starting with an empty cache."""
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    allocated_before, reserved_before = memory.memory_allocated(), memory.memory_reserved()
    first = _C._memory_replay(trace.events, "bp")
    allocated = memory.max_memory_allocated() - allocated_before
    reserved = memory.max_memory_reserved() - reserved_before
    times: dict[str, list[float]] = {allocator: [] for allocator in ALLOCATORS}
    for _ in range(passes):
        for allocator, record in times.items():
            record.append(_C._memory_replay(trace.events, allocator))
    bp, c10, malloc = (min(times[allocator]) / trace.count for allocator in ALLOCATORS)
    return Result(
        trace.name, trace.count, first / trace.count, bp, c10, malloc, c10 / malloc, allocated, reserved / allocated
    )


ROWS: dict[str, Callable[[Result], str]] = {
    "events": lambda result: f"{result.events:,}",
    "bp, first pass, ns/event": lambda result: f"{result.first_ns:.0f}",
    "bp, ns/event": lambda result: f"{result.bp_ns:.0f}",
    "bp via c10, ns/event": lambda result: f"{result.c10_ns:.0f}",
    "malloc, ns/event": lambda result: f"{result.malloc_ns:.0f}",
    "bp via c10 ÷ malloc": lambda result: f"{result.ratio:.2f}",
    "peak allocated, MiB": lambda result: f"{result.peak_allocated / MIB:,.3f}",
    "peak reserved ÷ allocated": lambda result: f"{result.reserved_per_allocated:.3f}",
}


def main(
    events: Annotated[int, typer.Option(min=2, help="minimum number of events per sequence")] = 1_000_000,
    steps: Annotated[int, typer.Option(min=1, help="training steps to record")] = 8,
    passes: Annotated[int, typer.Option(min=1, help="passes per sequence and allocator")] = 5,
    driver: Annotated[str, typer.Option(help="only these Backplane drivers, comma-separated; empty: all")] = "host",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures nanoseconds per allocation or free, and the ratio of reserved to allocated memory."""
    if driver:
        os.environ["TORCH_BACKPLANE_DRIVERS"] = driver  # read when the devices are first needed
    traces = [pair_trace(events), repeat(record_training(steps), events), random_trace(events)]
    results = [measure(trace, passes) for trace in traces]
    environment = {
        "device": torch.get_device_module("bp").get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "passes": passes,
    }
    if as_json:
        print(json.dumps(environment | {"results": [dataclasses.asdict(result) for result in results]}, indent=2))
        return
    caption = ", ".join(f"{key} {value}" for key, value in environment.items())
    table = Table(title="replayed allocations and frees", caption=caption)
    table.add_column("")
    for result in results:
        table.add_column(result.sequence, justify="right")
    for title, cell in ROWS.items():
        table.add_row(title, *map(cell, results))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
