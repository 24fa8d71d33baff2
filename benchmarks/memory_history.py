"""What the history of the allocator costs: a step of examples/train_gpt.py with it and without it, by turns.

    python benchmarks/memory_history.py --driver opencl
    python benchmarks/memory_history.py --match default --json

The model has the example's sizes, on characters drawn at random. Each round has a step of each kind. Beside the steps
stands what one allocation or one free of a small block costs by itself, as benchmarks/allocator.py has it.
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
import report
import torch
import turns
import typer

from torch_backplane import _C
from torch_backplane.accelerator import memory

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import stdlib_text
import train_gpt

OFF = "off"
RECORDED: dict[str, dict[str, Any]] = {  # what _record_memory_history is given
    "events alone": {"context": None},
    "Python stacks": {"stacks": "python"},
    "Python and C++ stacks, the default": {},
}
WARM_UP, PAIRS = 5, 5000


@dataclasses.dataclass
class Result:
    """Medians: milliseconds of a step, nanoseconds of an allocation or a free, and times as much as when it is off."""

    title: str
    events: int  # in a step
    step_ms: float
    step_by_off: float
    event_ns: float
    event_by_off: float


def step_of(device: torch.device) -> Callable[[], float]:
    """A step of the example, its batch and its optimizer included."""
    torch.manual_seed(0)
    text = torch.randint(len(stdlib_text.ALPHABET), (100_000,), dtype=torch.uint8)
    model = train_gpt.GPT(train_gpt.Shape()).to(device)
    return train_gpt.Trainer(model, train_gpt.Settings(), text, device).step


def event_ns() -> float:
    trace = allocator.pair_trace(2 * PAIRS)
    return _C._memory_replay(trace.events, "bp") / trace.count


def record(title: str) -> None:
    """Starts it from nothing, as the row says."""
    memory._record_memory_history(None)
    if title != OFF:
        memory._record_memory_history("all", **RECORDED[title])


def events(device: torch.device) -> int:
    return len(memory._snapshot()["device_traces"][device.index])


def run(titles: list[str], device: torch.device, rounds: int) -> list[Result]:
    """Each of the rows, and first what they are compared with."""
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
            turns.ratio(steps[OFF], steps[title]),
            statistics.median(single[title]),
            turns.ratio(single[OFF], single[title]),
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
    """Compares steps of training while memory's history is recorded with steps without it."""
    titles = report.chosen(RECORDED, match)
    place, environment = report.begin(driver, threads)
    event_ns()  # the segment
    never = statistics.median(event_ns() for _ in range(rounds))
    results = run(titles, place, rounds)
    cells = [
        [
            one.title, str(one.events), f"{one.step_ms:,.1f}", f"{one.step_by_off:.3f}", f"{one.event_ns:,.0f}",
            f"{one.event_by_off:.2f}",
        ]
        for one in results
    ]  # fmt: skip
    columns = ("", "events in a step", "step, ms", "by off", "an allocation or a free, ns", "by off")
    in_all = {"an allocation or a free before it was ever on, ns": round(never, 1)}
    title = "steps of training while memory's history is recorded"
    report.tell(environment | {"rounds": rounds}, results, title, columns, cells, as_json, in_all)


if __name__ == "__main__":
    typer.run(main)
