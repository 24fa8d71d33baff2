"""Compares every family of operators with PyTorch on the CPU, at three sizes, and reports memory throughput.

    python benchmarks/kernels.py --driver opencl
    python benchmarks/kernels.py --match "sort|unique" --sizes 1000000 --json

A row's operand has about as many elements as the column says. Ratios are the CPU's time divided by the device's: above
1 the device is faster. The devices alternate, round by round; the CPU's side runs in another process. Times last until
the device has finished, and are medians over the rounds; ratios are medians of the rounds' ratios. Operators that have
an `out=` variant use it, so that allocations are not measured. GB/s counts the bytes that must be read and written,
once each, at the largest size. For comparison, numpy copies an array of that size with one thread per core.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import numpy as np
import report
import torch
import typer
from interleaving import CPU, SLOW, Body, RemoteBody, Side, interleaved_times, ratio

from torch_backplane.audit.workloads import WORKLOADS, Workload


@dataclasses.dataclass
class Result:
    """Median milliseconds; `ratio` is the median over the rounds of the CPU's time divided by the device's."""

    workload: str
    elements: int
    device_ms: float
    cpu_ms: float
    ratio: float
    gigabytes_per_second: float | None


def make(title: str, elements: int, device: torch.device) -> Body:
    """The body of the workload with this title."""
    (workload,) = (one for one in WORKLOADS if one.title == title)
    return workload.make(device, elements)


def run(workload: Workload, device: torch.device, elements: int, rounds: int) -> Result:
    """Runs the workload on `device` and on the CPU in turn."""
    sides = [Side(device), Side(CPU)]
    bodies: list[Body] = [workload.make(device, elements), RemoteBody(partial(make, workload.title, elements))]
    times = interleaved_times(bodies, sides, max(1, min(50, 2**20 // elements)), rounds)
    here, cpu = map(statistics.median, times)
    rate = None if workload.bytes_per_element is None else workload.bytes_per_element * elements / here / 1e9
    return Result(workload.title, elements, here * 1e3, cpu * 1e3, ratio(*times), rate)


def memory_copy(elements: int, threads: int, rounds: int) -> float:
    """GB/s of numpy's copy, which counts read and written bytes."""
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
    device: report.Device = "bp",
    driver: report.Driver = None,
    match: report.Match = "",
    sizes: Annotated[str, typer.Option(help="elements of operands, comma-separated")] = "4096,262144,4194304",
    rounds: report.Rounds = 7,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares the kernels of a device with the CPU's."""
    try:
        counts = sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{sizes} is not a comma-separated list of integers", param_hint="--sizes") from None
    if counts[0] < 256:
        raise typer.BadParameter(f"{counts[0]} elements are too few; the minimum is 256", param_hint="--sizes")
    chosen = report.chosen(WORKLOADS, match, lambda workload: workload.title)
    place, environment = report.begin(driver, threads, device)
    results = [run(workload, place, elements, rounds) for workload in chosen for elements in counts]
    environment |= {
        "memory copy, GB/s": round(memory_copy(counts[-1], environment["threads"], rounds), 1),
        "rounds": rounds,
    }
    cells = []
    for at in range(0, len(results), len(counts)):
        of_sizes = results[at : at + len(counts)]
        rate = of_sizes[-1].gigabytes_per_second
        shown = [f"{result.ratio:.2f}  {result.device_ms:.3f}" for result in of_sizes]
        cells.append([of_sizes[0].workload, *shown, "" if rate is None else f"{rate:.1f}"])
    columns = ("", *(f"{count:,}" for count in counts), "GB/s")
    in_all = report.summary({f"{one.workload} of {one.elements:,}": one.ratio for one in results}, SLOW)
    report.print_report(
        environment, results, f"cpu time ÷ {place} time, and ms on {place}", columns, cells, as_json, in_all
    )


if __name__ == "__main__":
    typer.run(main)
