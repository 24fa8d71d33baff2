"""The speed and the economy of the caching allocator, beside malloc's in the same run.

    python benchmarks/allocator.py

Two sequences of allocations and frees are replayed natively: one recorded (with the allocator's own memory history) while
a small transformer is trained on bp, repeated until there are enough events; and a random one of a million events.
An event is one allocation or one free. «malloc» is posix_memalign to 512 bytes and free; nothing touches the memory. The
first pass of bp gets its segments from the device, the others find them cached; of those the best counts.
"""

from __future__ import annotations

import argparse
import random
from array import array
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

MIB = 1 << 20


@dataclass
class Trace:
    name: str
    events: array  # of (slot, size) pairs; size -1 frees the slot

    @property
    def count(self) -> int:
        return len(self.events) // 2


def train(steps: int) -> None:
    """Some steps of a small transformer on random tokens: what matters here is what it allocates."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 128), layers, nn.LayerNorm(128), nn.Linear(128, 256))
    model.to("bp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        length = 64 + 16 * (step % 4)  # not every batch is of the same length
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
    for slot in slots.values():  # what was alive at the end, so that the sequence can be repeated
        events.extend((slot, -1))
    return Trace(f"training, {steps} steps", events)


def repeat(trace: Trace, at_least: int) -> Trace:
    times = -(-at_least // trace.count)
    return Trace(f"{trace.name} × {times}", trace.events * times)


def random_trace(count: int, live: int = 2000) -> Trace:
    """Sizes from 16 bytes to 16 MiB, evenly on a logarithmic scale; about `live` of them at any time."""
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
    """The fastest case, and the most frequent: a small tensor that lives for a moment."""
    return Trace("one small block", array("q", [0, 1000, 0, -1]) * (count // 2))


def measure(trace: Trace, passes: int) -> list[str]:
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    base_allocated, base_reserved = memory.memory_allocated(), memory.memory_reserved()
    first = _C._memory_replay(trace.events, "bp") / trace.count
    allocated = memory.max_memory_allocated() - base_allocated
    reserved = memory.max_memory_reserved() - base_reserved
    times = {
        allocator: min(_C._memory_replay(trace.events, allocator) for _ in range(passes)) / trace.count
        for allocator in ("bp", "data_ptr", "malloc")
    }
    return [
        trace.name,
        f"{trace.count:,}",
        f"{first:.0f}",
        f"{times['bp']:.0f}",
        f"{times['data_ptr']:.0f}",
        f"{times['malloc']:.0f}",
        f"{times['data_ptr'] / times['malloc']:.2f}",
        f"{allocated / MIB:.1f}",
        f"{reserved / allocated:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events in each sequence (default 1,000,000)")
    parser.add_argument("--steps", type=int, default=8, help="training steps to record (default 8)")
    parser.add_argument("--passes", type=int, default=3, help="passes over each sequence, of which the best counts")
    arguments = parser.parse_args()

    table = Table(title="Replayed allocations and frees", caption="ns: nanoseconds per event")
    for column in ("sequence", "events", "bp first, ns", "bp, ns", "bp via c10, ns", "malloc, ns"):
        table.add_column(column, justify="left" if column == "sequence" else "right")
    for column in ("via c10 ÷ malloc", "peak allocated, MiB", "peak reserved ÷ allocated"):
        table.add_column(column, justify="right")
    traces = [
        pair_trace(arguments.events),
        repeat(record_training(arguments.steps), arguments.events),
        random_trace(arguments.events),
    ]
    for trace in traces:
        table.add_row(*measure(trace, arguments.passes))
    Console().print(table)


if __name__ == "__main__":
    main()
