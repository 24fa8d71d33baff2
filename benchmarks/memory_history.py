"""Measures the cost of the memory history: steps of examples/train_gpt.py with and without recording, in turn.

    python benchmarks/memory_history.py --driver opencl
    python benchmarks/memory_history.py --match default --json

The model has the example's sizes, and its text is random. Each round has a step of each kind. The cost of one
allocation or free of a small block is measured, too, as in benchmarks/allocator.py.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allocator
import interleaving
import report
import torch
import typer

from torch_backplane import _C
from torch_backplane.accelerator import memory

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import stdlib_text
import train_gpt

OFF = "off"
RECORDED: dict[str, dict[str, Any]] = {  # arguments of _record_memory_history
    "events alone": {"context": None},
    "Python stacks": {"stacks": "python"},
    "Python and C++ stacks, the default": {},
}
WARM_UP, PAIRS = 5, 5000


@dataclasses.dataclass
class Result:
    """Medians: milliseconds of a step, nanoseconds of an allocation or free, and their ratios to `OFF`."""

    title: str
    events: int  # in a step
    step_ms: float
    step_by_off: float
    event_ns: float
    event_by_off: float


def step_of(device: torch.device) -> Callable[[], float]:
    """A step of the example, including its batch and its optimizer."""
    torch.manual_seed(0)
    text = torch.randint(len(stdlib_text.ALPHABET), (100_000,), dtype=torch.uint8)
    model = train_gpt.GPT(train_gpt.Shape()).to(device)
    return train_gpt.Trainer(model, train_gpt.Settings(), text, device).step


def event_ns() -> float:
    trace = allocator.pair_trace(2 * PAIRS)
    return _C._memory_replay(trace.events, "bp") / trace.count


def record(title: str) -> None:
    """Clears the history, and records as the row says."""
    memory._record_memory_history(None)
    if title != OFF:
        memory._record_memory_history("all", **RECORDED[title])


def events(device: torch.device) -> int:
    return len(memory._snapshot()["device_traces"][device.index])


def run(titles: list[str], device: torch.device, rounds: int) -> list[Result]:
    """Measures `OFF`, which the rows are compared with, and the rows."""
    step = step_of(device)
    for _ in range(WARM_UP):
        step()
    rows = [OFF, *titles]
    steps: dict[str, list[float]] = {title: [] for title in rows}
    single: dict[str, list[float]] = {title: [] for title in rows}
    counts = dict.fromkeys(rows, 0)
    try:
        for first in [True] + [False] * (rounds - 1):
            for title in rows:
                record(title)
                start = time.perf_counter()
                step()
                steps[title].append(time.perf_counter() - start)
                if first:
                    counts[title] = events(device)
                record(title)
                single[title].append(event_ns())
    finally:
        record(OFF)
    return [
        Result(
            title,
            counts[title],
            statistics.median(steps[title]) * 1e3,
            interleaving.ratio(steps[OFF], steps[title]),
            statistics.median(single[title]),
            interleaving.ratio(single[OFF], single[title]),
        )
        for title in rows
    ]


def main(
    driver: report.Driver = None,
    match: report.Match = "",
    rounds: report.Rounds = 15,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares training steps that record the memory history with steps that do not."""
    titles = report.chosen(RECORDED, match)
    place, environment = report.begin(driver, threads)
    event_ns()  # allocates the segment
    never = statistics.median(event_ns() for _ in range(rounds))
    results = run(titles, place, rounds)
    cells = [
        [
            one.title, str(one.events), f"{one.step_ms:,.1f}", f"{one.step_by_off:.3f}", f"{one.event_ns:,.0f}",
            f"{one.event_by_off:.2f}",
        ]
        for one in results
    ]  # fmt: skip
    columns = ("", "events per step", "step, ms", "÷ off", "allocation or free, ns", "÷ off")
    in_all = {"allocation or free before recording was ever on, ns": round(never, 1)}
    title = "training steps while the memory history is recorded"
    report.print_report(environment | {"rounds": rounds}, results, title, columns, cells, as_json, in_all)


if __name__ == "__main__":
    typer.run(main)
