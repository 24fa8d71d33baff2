"""Measures the cost of profiling: a step under torch.profiler and the same step without it.

On the device, one profile records operators and the device's commands, and one records operators only. On the CPU, the
profile records operators.

    python benchmarks/profiling.py --driver opencl
    python benchmarks/profiling.py --match chain --json
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics

import graphs
import interleaving
import report
import torch
import typer
from torch.profiler import ProfilerActivity, profile


@dataclasses.dataclass
class Result:
    """Median milliseconds of a step, and the median over the rounds of its slowdown under a profile."""

    title: str
    plain_ms: float
    by_devices: float
    by_operators: float
    cpu_plain_ms: float
    cpu_by_operators: float
    commands: int  # of the device, per step


def recorded(activities: list[ProfilerActivity]) -> contextlib.AbstractContextManager[profile | None]:
    return profile(activities=activities) if activities else contextlib.nullcontext()


def run(title: str, place: torch.device, rounds: int) -> Result:
    make = graphs.ROWS[title][0]
    cpu = torch.device("cpu")
    bodies = {place: make(place), cpu: make(cpu)}
    host, device = ProfilerActivity.CPU, ProfilerActivity.PrivateUse1
    modes = [(place, []), (place, [host, device]), (place, [host]), (cpu, []), (cpu, [host])]
    calls = max(1, int(0.1 / max(interleaving.seconds(body, where, 3) for where, body in bodies.items())))
    times: list[list[float]] = [[] for _ in modes]
    commands = 0
    for counted in [False] + [True] * rounds:
        for record, (where, activities) in zip(times, modes, strict=True):
            with recorded(activities) as found:
                bodies[where]()
                took = interleaving.seconds(bodies[where], where, calls)
            if counted:
                record.append(took)
            if found is not None and device in activities:
                kinds = [event.device_type for event in found.events()]
                commands = kinds.count(torch.autograd.DeviceType.PrivateUse1) // (calls + 1)
    medians = [statistics.median(one) * 1e3 for one in times]
    return Result(
        title, medians[0], interleaving.ratio(times[0], times[1]), interleaving.ratio(times[0], times[2]), medians[3],
        interleaving.ratio(times[3], times[4]), commands,
    )  # fmt: skip


def main(
    driver: report.Driver = None,
    match: report.Match = "",
    rounds: report.Rounds = 7,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares steps under a profiler with the same steps without one."""
    titles = report.chosen(graphs.ROWS, match)
    place, environment = report.begin(driver, threads)
    results = [run(title, place, rounds) for title in titles]
    cells = [
        [
            one.title, f"{one.plain_ms:,.2f}", f"{one.by_devices:.2f}", f"{one.by_operators:.2f}",
            f"{one.cpu_plain_ms:,.2f}", f"{one.cpu_by_operators:.2f}", str(one.commands),
        ]
        for one in results
    ]  # fmt: skip
    columns = ("", "ms", "operators and bp", "operators", "cpu ms", "cpu operators", "commands")
    title = "slowdown of a step under a profiler"
    report.print_report(environment | {"rounds": rounds}, results, title, columns, cells, as_json)


if __name__ == "__main__":
    typer.run(main)
