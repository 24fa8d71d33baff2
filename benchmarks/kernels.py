"""What kernels do with memory, in GB/s: generated ones beside PyTorch's on the CPU, and beside a plain memory copy.

    python benchmarks/kernels.py --driver opencl
    python benchmarks/kernels.py --device bp:1 --mebibytes 256 --json

Each row counts the bytes that must be read and written, once each. The devices take turns, round by round, in one
process, and the figures are medians over the rounds; where PyTorch has an `out=` form it is used, so that nobody pays
for fresh memory. The memory copy is numpy's, from one array of that size to another, by one thread per core.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import machine
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

ROW = 1024  # elements of a row, for softmax and layer norm

Body = Callable[[], object]


@dataclasses.dataclass
class Workload:
    """One line: makes a body for a device and a number of float32 elements; `bytes_per_element` read and written."""

    title: str
    make: Callable[[torch.device, int], Body]
    bytes_per_element: float


def copy(device: torch.device, elements: int) -> Body:
    source, out = torch.rand(elements, device="cpu").to(device), torch.empty(elements, device=device)
    return lambda: out.copy_(source)


def add(device: torch.device, elements: int) -> Body:
    a, b, out = (torch.rand(elements).to(device) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def strided_add(device: torch.device, elements: int) -> Body:
    side = int(elements**0.5)
    a, b, out = (torch.rand(side, side).to(device) for _ in range(3))
    return lambda: torch.add(a.t(), b, out=out)


def cast(device: torch.device, elements: int) -> Body:
    source, out = torch.rand(elements).to(device), torch.empty(elements, dtype=torch.float16, device=device)
    return lambda: out.copy_(source)


def total(device: torch.device, elements: int) -> Body:
    source, out = torch.rand(elements).to(device), torch.empty((), device=device)
    return lambda: torch.sum(source, dim=(0,), out=out)


def softmax(device: torch.device, elements: int) -> Body:
    source = torch.rand(elements // ROW, ROW).to(device)
    out = torch.empty_like(source)
    return lambda: torch.softmax(source, -1, out=out)


def layer_norm(device: torch.device, elements: int) -> Body:
    source = torch.rand(elements // ROW, ROW).to(device)
    weight, bias = torch.rand(ROW).to(device), torch.rand(ROW).to(device)
    return lambda: torch.nn.functional.layer_norm(source, (ROW,), weight, bias)


WORKLOADS = [
    Workload("copy", copy, 8),
    Workload("add", add, 12),
    Workload("add, one operand transposed", strided_add, 12),
    Workload("cast to float16", cast, 6),
    Workload("sum of all", total, 4),
    Workload(f"softmax of rows of {ROW}", softmax, 8),
    Workload(f"layer norm of rows of {ROW}", layer_norm, 8),
]


@dataclasses.dataclass
class Result:
    """Median GB/s (1e9 bytes per second); `ratio` is the median over the rounds, too, of device to CPU."""

    workload: str
    device: float
    cpu: float
    ratio: float


def seconds(body: Body, device: torch.device, calls: int) -> float:
    """Time per call, until the device has finished the last. OpenMP's threads, which wait for work by running in a
    circle for a while, have gone to sleep before.
    """
    time.sleep(0.01)
    start = time.perf_counter()
    for _ in range(calls):
        body()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls


def run(workload: Workload, device: torch.device, elements: int, rounds: int) -> Result:
    """The workload on `device` and on the CPU in turn."""
    places = [device, torch.device("cpu")]
    bodies = [workload.make(place, elements) for place in places]
    times: list[list[float]] = [[], []]
    for counted in [False, False] + [True] * rounds:  # the first rounds build kernels and warm up
        for body, place, record in zip(bodies, places, times, strict=True):
            measured = seconds(body, place, 3)
            if counted:
                record.append(measured)
    here, cpu = (workload.bytes_per_element * elements / statistics.median(one) / 1e9 for one in times)
    return Result(workload.title, here, cpu, statistics.median(slow / fast for fast, slow in zip(*times, strict=True)))


def memory_copy(elements: int, threads: int, rounds: int) -> float:
    """GB/s of numpy's copy, read and written bytes together."""
    source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    parts = [(part * elements // threads, (part + 1) * elements // threads) for part in range(threads)]
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part[0] : part[1]], source[part[0] : part[1]]), parts))
            times.append(time.perf_counter() - start)
    return 8 * elements / statistics.median(times[1:]) / 1e9


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
    mebibytes: Annotated[int, typer.Option(min=1, help="size of each float32 operand")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="measurements per workload and device")] = 9,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures the memory throughput of kernels on a device and on the CPU."""
    threads = threads or os.cpu_count() or 1
    place = machine.place(device, driver, threads)
    elements = mebibytes * 2**20 // 4
    results = [run(workload, place, elements, rounds) for workload in WORKLOADS]
    environment = machine.environment(place, threads) | {
        "MiB per operand": mebibytes,
        "memory copy, GB/s": round(memory_copy(elements, threads, rounds), 1),
        "rounds": rounds,
    }
    if as_json:
        print(json.dumps(environment | {"results": [dataclasses.asdict(result) for result in results]}, indent=2))
        return
    table = Table(title="GB/s", caption=", ".join(f"{key} {value}" for key, value in environment.items()))
    table.add_column("")
    for heading in (str(place), "cpu", "ratio"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(result.workload, f"{result.device:.1f}", f"{result.cpu:.1f}", f"{result.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
