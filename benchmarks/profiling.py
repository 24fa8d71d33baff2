"""What a profile costs: a step under torch.profiler beside the same step without it.

Once bp and PyTorch's operators are recorded, once the operators alone; and the CPU's step, with its operators.

    python benchmarks/profiling.py --driver opencl
    python benchmarks/profiling.py --match chain --json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import statistics
from typing import Annotated

import graphs
import machine
import torch
import turns
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile


@dataclasses.dataclass
class Result:
    """Median milliseconds of a step, and medians over the rounds of how many times as long it takes under a profile."""

    title: str
    plain_ms: float
    by_devices: float
    by_operators: float
    cpu_plain_ms: float
    cpu_by_operators: float
    commands: int  # of the device, in a step


def recorded(activities: list[ProfilerActivity]) -> contextlib.AbstractContextManager[profile | None]:
    return profile(activities=activities) if activities else contextlib.nullcontext()


def run(title: str, place: torch.device, rounds: int) -> Result:
    make = graphs.ROWS[title][0]
    cpu = torch.device("cpu")
    bodies = {place: make(place), cpu: make(cpu)}
    host, device = ProfilerActivity.CPU, ProfilerActivity.PrivateUse1
    modes = [(place, []), (place, [host, device]), (place, [host]), (cpu, []), (cpu, [host])]
    calls = max(1, int(0.1 / max(turns.seconds(body, where, 3) for where, body in bodies.items())))
    times: list[list[float]] = [[] for _ in modes]
    commands = 0
    for counted in [False] + [True] * rounds:
        for record, (where, activities) in zip(times, modes, strict=True):
            with recorded(activities) as found:
                bodies[where]()
                took = turns.seconds(bodies[where], where, calls)
            if counted:
                record.append(took)
            if found is not None and device in activities:
                kinds = [event.device_type for event in found.events()]
                commands = kinds.count(torch.autograd.DeviceType.PrivateUse1) // (calls + 1)
    medians = [statistics.median(one) * 1e3 for one in times]
    return Result(
        title, medians[0], turns.ratio(times[0], times[1]), turns.ratio(times[0], times[2]), medians[3],
        turns.ratio(times[3], times[4]), commands,
    )  # fmt: skip


def main(
    driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
    match: Annotated[str, typer.Option(help="a regular expression: only rows whose title has it")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="measurements per row")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares steps under a profile with the same steps without one."""
    titles = [title for title in graphs.ROWS if re.search(match, title)]
    if not titles:
        raise typer.BadParameter(f"no row has {match!r} in its title", param_hint="--match")
    threads = threads or os.cpu_count() or 1
    place = machine.place("bp", driver, threads)
    environment = machine.environment(place, threads) | {"rounds": rounds}
    results = [run(title, place, rounds) for title in titles]
    if as_json:
        print(json.dumps(environment | {"results": [dataclasses.asdict(result) for result in results]}, indent=2))
        return
    table = Table(
        title="a step under a profile, in times a step without one",
        caption=", ".join(f"{k} {v}" for k, v in environment.items()),
    )
    for column in ("", "ms", "operators and bp", "operators", "cpu ms", "cpu operators", "commands"):
        table.add_column(column, justify="right" if table.columns else "left")
    for one in results:
        table.add_row(
            one.title, f"{one.plain_ms:,.2f}", f"{one.by_devices:.2f}", f"{one.by_operators:.2f}",
            f"{one.cpu_plain_ms:,.2f}", f"{one.cpu_by_operators:.2f}", str(one.commands),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
