"""What every family of operators takes beside PyTorch on the CPU, at three sizes, and what it does with memory.

    python benchmarks/kernels.py --driver opencl
    python benchmarks/kernels.py --match "sort|unique" --sizes 1000000 --json

A row's operand has about as many elements as the column says. Ratios are the CPU's time by the device's: above 1 the
device is faster. The devices take turns, round by round, in one process; times are medians over the rounds, until the
device has finished, and ratios medians of the rounds' ratios. Where PyTorch has an `out=` form it is used, so that
nobody pays for fresh memory. GB/s are of the bytes that must be read and written, once each, at the largest size; to
compare, numpy copies one array of that size to another with one thread per core.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import machine
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from turns import SLOW, Side, in_turn, ratio

from torch_backplane.audit.workloads import WORKLOADS, Workload


@dataclasses.dataclass
class Result:
    """Median milliseconds; `ratio` is the median over the rounds of the CPU's time by the device's."""

    workload: str
    elements: int
    device_ms: float
    cpu_ms: float
    ratio: float
    gigabytes_per_second: float | None


def run(workload: Workload, device: torch.device, elements: int, rounds: int) -> Result:
    """The workload on `device` and on the CPU in turn."""
    sides = [Side(device), Side(torch.device("cpu"))]
    bodies = [workload.make(side.place, elements) for side in sides]
    times = in_turn(bodies, sides, max(1, min(50, 2**20 // elements)), rounds)
    here, cpu = map(statistics.median, times)
    rate = None if workload.bytes_per_element is None else workload.bytes_per_element * elements / here / 1e9
    return Result(workload.title, elements, here * 1e3, cpu * 1e3, ratio(*times), rate)


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


def summary(results: list[Result]) -> dict[str, str]:
    """The geometric mean of the ratios, and what is below SLOW."""
    mean = math.exp(statistics.fmean(math.log(result.ratio) for result in results))
    slow = (result for result in results if result.ratio < SLOW)
    named = [f"{result.workload} of {result.elements:,}: {result.ratio:.2f}" for result in slow]
    return {"geometric mean": f"{mean:.2f}", f"below {SLOW}": "; ".join(named) or "none"}


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
    match: Annotated[str, typer.Option(help="a regular expression: only rows whose title has it")] = "",
    sizes: Annotated[str, typer.Option(help="elements of operands, with commas between them")] = "4096,262144,4194304",
    rounds: Annotated[int, typer.Option(min=1, help="measurements per workload, size and device")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares the kernels of a device with the CPU's."""
    try:
        counts = sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{sizes} are no numbers with commas between them", param_hint="--sizes") from None
    if counts[0] < 256:
        raise typer.BadParameter(f"{counts[0]} elements are fewer than 256", param_hint="--sizes")
    chosen = [workload for workload in WORKLOADS if re.search(match, workload.title)]
    if not chosen:
        raise typer.BadParameter(f"no row has {match!r} in its title", param_hint="--match")
    threads = threads or os.cpu_count() or 1
    place = machine.place(device, driver, threads)
    results = [run(workload, place, elements, rounds) for workload in chosen for elements in counts]
    environment = machine.environment(place, threads) | {
        "memory copy, GB/s": round(memory_copy(counts[-1], threads, rounds), 1),
        "rounds": rounds,
    }
    if as_json:
        report = environment | summary(results) | {"results": [dataclasses.asdict(result) for result in results]}
        print(json.dumps(report, indent=2))
        return
    table = Table(
        title=f"cpu's time by {place}'s, and {place}'s ms",
        caption=", ".join(f"{key} {value}" for key, value in environment.items()),
    )
    table.add_column("")
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    table.add_column("GB/s", justify="right")
    for at in range(0, len(results), len(counts)):
        of_sizes = results[at : at + len(counts)]
        rate = of_sizes[-1].gigabytes_per_second
        cells = [f"{result.ratio:.2f}  {result.device_ms:.3f}" for result in of_sizes]
        table.add_row(of_sizes[0].workload, *cells, "" if rate is None else f"{rate:.1f}")
    console = Console()
    console.print(table)
    for key, value in summary(results).items():
        console.print(f"{key}: {value}")


if __name__ == "__main__":
    typer.run(main)
