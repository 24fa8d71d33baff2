"""Measures one operator call on a device and on the CPU, in microseconds.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --driver opencl --json

The tensors have 16 elements, so that nearly all of the time is overhead: Python, the dispatcher, the allocator and the
launch. Each measurement ends when the device has finished. The two devices alternate, round by round, in one process;
the figures are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import machine
import torch
import typer
from rich.console import Console
from rich.table import Table

ELEMENTS = 16
CHAIN = 1000  # operations in the chain
HELD_CALLS = 300  # while the device is held up: calls wait for the device if about 1,024 commands are pending

# A workload makes a body for a device. The body takes the number of calls to make.
Body = Callable[[int], object]


def multiply(device: torch.device) -> Body:
    """a * b"""
    a, b = (torch.rand(ELEMENTS).to(device) for _ in range(2))

    def body(calls: int) -> None:
        for _ in range(calls):
            a * b

    return body


def empty(device: torch.device) -> Body:
    """torch.empty(16)"""

    def body(calls: int) -> None:
        for _ in range(calls):
            torch.empty(ELEMENTS, device=device)

    return body


def chain(device: torch.device) -> Body:
    """x = x * y + z, where each operator depends on the previous one"""
    start, y, z = (torch.rand(ELEMENTS).to(device) for _ in range(3))

    def body(calls: int) -> None:
        for _ in range(calls):
            x = start
            for _ in range(CHAIN // 2):
                x = x * y + z

    return body


@dataclasses.dataclass
class Workload:
    """A row of the table: what is timed, and the number of calls per round."""

    title: str
    make: Callable[[torch.device], Body]
    calls: int


WORKLOADS = [
    Workload(f"a * b, {ELEMENTS} elements", multiply, 5000),
    Workload(f"torch.empty({ELEMENTS})", empty, 5000),
    Workload(f"chain of {CHAIN:,} operators", chain, 10),
]


@dataclasses.dataclass
class Result:
    """Median microseconds per call of the workload's body."""

    workload: str
    device_us: float
    cpu_us: float
    ratio: float


def microseconds(body: Body, calls: int, device: torch.device) -> float:
    """Time per call, from the first call until the device has finished the last."""
    start = time.perf_counter()
    body(calls)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls * 1e6


def run(workload: Workload, device: torch.device, rounds: int, scale: float = 1.0) -> Result:
    """Runs the workload on `device` and on the CPU in turn. `scale` multiplies the number of calls per round."""
    calls = max(1, int(workload.calls * scale))
    places = [device, torch.device("cpu")]
    bodies = [workload.make(place) for place in places]
    times: list[list[float]] = [[], []]
    for counted in [False] + [True] * rounds:  # the first round warms up
        for body, place, record in zip(bodies, places, times, strict=True):
            measured = microseconds(body, calls, place)
            if counted:
                record.append(measured)
    on_device, on_cpu = map(statistics.median, times)
    return Result(workload.title, on_device, on_cpu, on_device / on_cpu)


def runs_kernels(device: torch.device) -> bool:
    return device.type == "bp" and bool(torch.get_device_module(device).get_device_properties(device).dialect)


def hold(device: torch.device, calls: int) -> None:
    """Keeps the device busy for 50 µs per call, at least 10 ms, so that it does not start the following work.

    If the device is the CPU, its work would take cores from the measured program.
    """
    torch.get_device_module(device)._sleep(max(calls * 50_000, 10_000_000))


def split(device: torch.device, calls: int) -> dict[str, float]:
    """Microseconds of each part of a replayed a * b, issued from C++ to a device that is held up as with `hold`."""
    from torch_backplane import _C

    a, b = (torch.rand(ELEMENTS).to(device) for _ in range(2))
    a * b
    seconds = _C.time_plan("aten::mul.Tensor", a, b, times=calls)
    torch.accelerator.synchronize(device)
    parts = {name: value / calls * 1e6 for name, value in seconds.items()}
    parts["dispatch"] = parts["call"] - sum(value for name, value in parts.items() if name != "call")
    return parts


def issue(device: torch.device, calls: int, rounds: int, held: bool = False) -> float:
    """Microseconds until a call of a * b returns, without waiting for the device; the median over the rounds.

    Args:
        held: whether the device is held up meanwhile.
    """
    body = multiply(device)
    times = []
    for _ in range(rounds + 1):
        if held:
            hold(device, calls)
        start = time.perf_counter()
        body(calls)
        times.append((time.perf_counter() - start) / calls * 1e6)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return statistics.median(times[1:])


# Calls that are measured without a plan, on tensors of 128 rows.
FIRST_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a * b": lambda rows, weight: rows * rows,
    "a * b, broadcast": lambda rows, weight: rows * weight,
    "sum(-1)": lambda rows, weight: rows.sum(-1),
    "layer_norm": lambda rows, weight: torch.nn.functional.layer_norm(rows, weight.shape, weight, weight),
}


def first_calls(device: torch.device, calls: int, rounds: int) -> dict[str, float]:
    """Microseconds of each call without a plan whose kernel is built, while the device is held up.

    The result is the minimum of the rounds' medians.
    """
    from torch_backplane import plans

    found = {}
    rows, weight = torch.rand(128, 64).to(device), torch.rand(64).to(device)
    for name, function in FIRST_CALLS.items():
        medians = []
        function(rows, weight)
        for _ in range(rounds):
            times = []
            hold(device, calls * 10)
            for _ in range(calls):
                plans.clear()
                start = time.perf_counter()
                function(rows, weight)
                times.append((time.perf_counter() - start) * 1e6)
            torch.accelerator.synchronize(device)
            medians.append(statistics.median(times))
        found[name] = min(medians)
    return found


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str, typer.Option(help="only these Backplane drivers, comma-separated; empty: all")] = "host",
    rounds: Annotated[int, typer.Option(min=1, help="measurements per workload and device")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch's CPU threads")] = 1,
    scale: Annotated[float, typer.Option(min=0.0, help="multiplies the number of calls per round")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures microseconds per operator on a device and on the CPU."""
    place = machine.place(device, driver, threads)
    results = [run(workload, place, rounds, scale) for workload in WORKLOADS]
    environment = machine.environment(place, threads) | {
        "rounds": rounds,
    }
    calls = max(1, int(2000 * scale))
    issued = issue(place, calls, rounds)
    few = min(calls, HELD_CALLS)
    held = issue(place, few, rounds, held=True) if runs_kernels(place) else None
    parts = split(place, few) if runs_kernels(place) else None
    first = first_calls(place, max(1, int(50 * scale)), rounds) if runs_kernels(place) else None
    if as_json:
        environment |= {"issue_us": issued, "issue_held_us": held, "parts_us": parts, "first_call_us": first}
        print(json.dumps(environment | {"results": [dataclasses.asdict(result) for result in results]}, indent=2))
        return
    caption = ", ".join(f"{key} {value}" for key, value in environment.items())
    table = Table(title="microseconds per call", caption=caption)
    table.add_column("")
    for heading in (str(place), "cpu", "ratio"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(result.workload, f"{result.device_us:.2f}", f"{result.cpu_us:.2f}", f"{result.ratio:.2f}")
    Console().print(table)
    print(f"a * b, time until the call returns: {issued:.2f} µs")
    if parts is not None:
        print(f"the same, while the device is held up: {held:.2f} µs")
        shares = ", ".join(f"{name} {value:.2f}" for name, value in parts.items() if name != "call")
        print(f"a replayed a * b from C++: {parts['call']:.2f} µs, of which {shares}")
    if first is not None:
        print("first call, kernel built: " + ", ".join(f"{name} {value:.0f} µs" for name, value in first.items()))


if __name__ == "__main__":
    typer.run(main)
