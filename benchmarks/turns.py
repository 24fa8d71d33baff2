"""Benchmarks whose rows are a device's time beside the CPU's: what they have in common."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import machine
import torch
import typer
from rich.console import Console
from rich.table import Table

SLOW = 0.5  # ratios below are listed
Body = Callable[[], object]


class Row(NamedTuple):
    """What is measured: `make(device)` gives a function to be called; nobody looks at what it returns."""

    title: str
    make: Callable[[torch.device], Body]
    seconds: float = 0.05  # how long a round should go on, on either device


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call; `ratio` is the median over the rounds of the CPU's time by the device's."""

    title: str
    device_ms: float
    cpu_ms: float
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


def in_turn(bodies: Sequence[Body], places: Sequence[torch.device], calls: int, rounds: int) -> list[list[float]]:
    """Seconds of a call in each round, for each body. The devices take turns, so that what else goes on meets all."""
    times: list[list[float]] = [[] for _ in bodies]
    for counted in [False, False] + [True] * rounds:  # the first rounds build kernels and warm up
        for body, place, record in zip(bodies, places, times, strict=True):
            measured = seconds(body, place, calls)
            if counted:
                record.append(measured)
    return times


def ratio(device: Sequence[float], cpu: Sequence[float]) -> float:
    """The median of the rounds' ratios, the CPU's time by the device's."""
    return statistics.median(slow / fast for fast, slow in zip(device, cpu, strict=True))


def run(row: Row, device: torch.device, rounds: int) -> Result:
    """The row on `device` and on the CPU in turn."""
    places = [device, torch.device("cpu")]
    bodies = []
    for place in places:
        torch.manual_seed(0)
        bodies.append(row.make(place))
    for body, place in zip(bodies, places, strict=True):
        seconds(body, place, 1)
    once = max(seconds(body, place, 1) for body, place in zip(bodies, places, strict=True))
    times = in_turn(bodies, places, max(1, int(row.seconds / once)), rounds)
    here, cpu = map(statistics.median, times)
    return Result(row.title, here * 1e3, cpu * 1e3, ratio(*times))


def summary(results: Sequence[Result]) -> dict[str, str]:
    """The geometric mean of the ratios, and what is below SLOW."""
    mean = math.exp(statistics.fmean(math.log(result.ratio) for result in results))
    slow = [f"{result.title}: {result.ratio:.2f}" for result in results if result.ratio < SLOW]
    return {"geometric mean": f"{mean:.2f}", f"below {SLOW}": "; ".join(slow) or "none"}


def main(rows: Callable[[], Sequence[Row]], unit: str = "ms") -> None:
    """The program: runs what the command line asks for among `rows()`.

    Args:
        unit: what the table shows besides ratios: "ms", or how many calls a second, "1/s".
    """

    def program(
        device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
        driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
        generated: Annotated[bool, typer.Option(help="kernels alone: as if the host did not see the memory")] = False,
        match: Annotated[str, typer.Option(help="a regular expression: only rows whose title has it")] = "",
        rounds: Annotated[int, typer.Option(min=1, help="measurements per row and device")] = 7,
        threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    ) -> None:
        chosen = [row for row in rows() if re.search(match, row.title)]
        if not chosen:
            raise typer.BadParameter(f"no row has {match!r} in its title", param_hint="--match")
        if generated:
            os.environ["TORCH_BACKPLANE_DISCRETE"] = "1"  # read when the devices are first needed
        threads = threads or os.cpu_count() or 1
        place = machine.place(device, driver, threads)
        results = [run(row, place, rounds) for row in chosen]
        environment = machine.environment(place, threads) | {"rounds": rounds, "generated": generated}
        if as_json:
            report = environment | summary(results) | {"results": [dataclasses.asdict(result) for result in results]}
            print(json.dumps(report, indent=2))
            return
        title = f"cpu's time by {place}'s, and {unit} of {place} and of cpu"
        table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in environment.items()))
        for column in ("", "", str(place), "cpu"):
            table.add_column(column, justify="right" if table.columns else "left")
        for result in results:
            figures = [result.device_ms, result.cpu_ms]
            shown = [f"{figure:.3f}" if unit == "ms" else f"{1e3 / figure:.2f}" for figure in figures]
            table.add_row(result.title, f"{result.ratio:.2f}", *shown)
        console = Console()
        console.print(table)
        for key, value in summary(results).items():
            console.print(f"{key}: {value}")

    program.__doc__ = rows.__doc__
    typer.run(program)
