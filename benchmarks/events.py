"""Measures events and small copies between host and device memory, in microseconds.

    python benchmarks/events.py --driver opencl

Each figure is the minimum of the medians of several rounds, which other load affects least.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import machine
import torch
import typer


def record_and_wait(device: torch.device) -> Callable[[], object]:
    """an event recorded in one stream and waited for by another"""
    first, second, event = torch.Stream(device), torch.Stream(device), torch.Event(device)

    def body() -> None:
        event.record(first)
        second.wait_event(event)

    return body


def query(device: torch.device) -> Callable[[], object]:
    """query of a completed event"""
    event = torch.Event(device)
    event.record()
    event.synchronize()
    return event.query


def to_host(device: torch.device) -> Callable[[], object]:
    """x.cpu() of 16 elements"""
    return torch.rand(16).to(device).cpu


def to_device(device: torch.device) -> Callable[[], object]:
    """x.to(device) of 16 elements"""
    x = torch.rand(16)
    return lambda: x.to(device)


def to_device_pinned(device: torch.device) -> Callable[[], object]:
    """y.copy_(x, non_blocking=True) of 16 pinned elements"""
    x, y = torch.rand(16).pin_memory(), torch.empty(16, device=device)
    return lambda: y.copy_(x, non_blocking=True)


WORKLOADS = (record_and_wait, query, to_host, to_device, to_device_pinned)


def main(
    driver: Annotated[str | None, typer.Option(help="Use only this driver.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per workload.")] = 9,
    calls: Annotated[int, typer.Option(min=1, help="Calls per round.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures events and small copies on a device."""
    device = machine.place("bp", driver, threads=1)
    figures = {}
    for workload in WORKLOADS:
        body = workload(device)
        medians = []
        for _ in range(rounds):
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                body()
                times.append(time.perf_counter() - start)
            torch.accelerator.synchronize(device)
            medians.append(statistics.median(times))
        figures[str(workload.__doc__)] = 1e6 * min(medians)
    if as_json:
        print(json.dumps({"microseconds": figures, **machine.environment(device, threads=1)}))
        return
    for name, microseconds in figures.items():
        print(f"{microseconds:8.2f}  {name}")


if __name__ == "__main__":
    typer.run(main)
