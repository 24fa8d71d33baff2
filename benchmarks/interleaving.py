"""The shared part of benchmarks whose rows compare a device's time with the CPU's.

The CPU's side runs in another process, like a program that uses no other device. In a single process, the OpenMP
threads of the two sides would interfere with each other.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import random
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Annotated, Any, NamedTuple

import report
import torch
import typer

SLOW = 0.5  # ratios below are listed
CPU = torch.device("cpu")
Body = Callable[[], object]
Make = Callable[[torch.device], Body]


class Row(NamedTuple):
    """A row: `make(device)` returns the function to time, whose result is ignored."""

    title: str
    make: Make
    seconds: float = 0.05  # target duration of a round on the slower side


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call; `ratio` is the median over the rounds of the other's time ÷ the device's."""

    title: str
    device_ms: float
    other_ms: float  # on the CPU, or on the same device with another library
    ratio: float


class RemoteBody:
    """A body that runs on the CPU in the other process, which holds one body at a time.

    Args:
        make: as in `Row`; must be picklable.

    Raises:
        RuntimeError: `make` raised an error.
    """

    def __init__(self, make: Make) -> None:
        self._ask(make)

    def seconds(self, calls: int) -> float:
        """As the function `seconds`. Raises RuntimeError if a call raises an error."""
        return float(self._ask(calls))

    def __call__(self) -> None:
        self.seconds(1)

    @staticmethod
    def _ask(what: Make | int) -> Any:
        connection = _process(torch.get_num_threads(), torch.autograd.is_multithreading_enabled())
        connection.send(what)
        found, error = connection.recv()
        if error:
            raise RuntimeError(f"in the process of the CPU's side:\n{error}")
        return found


@functools.cache
def _process(threads: int, autograd_threads: bool) -> Connection:
    """Starts the other process as a daemon and returns the connection to it."""
    context = multiprocessing.get_context("spawn")  # a forked process would inherit this one's OpenMP state
    here, there = context.Pipe()
    context.Process(target=_serve, args=(there, threads, autograd_threads), daemon=True).start()
    there.close()  # so that recv() fails when that process ends
    return here


def _serve(connection: Connection, threads: int, autograd_threads: bool) -> None:
    torch.set_num_threads(threads)
    torch.autograd.set_multithreading_enabled(autograd_threads)
    body: Body = lambda: None  # noqa: E731
    while True:
        what = connection.recv()
        try:
            if isinstance(what, int):
                connection.send((seconds(body, CPU, what), ""))
            else:
                torch.manual_seed(0)
                body = what(CPU)
                connection.send((None, ""))
        except Exception:
            connection.send((None, traceback.format_exc()))


class Side(NamedTuple):
    """One of the two sides of a comparison: a device and, if it matters, its preferred library for matrix products."""

    place: torch.device
    library: str = ""
    finish: Callable[[], object] | None = None  # waits for the device, instead of PyTorch
    is_apart: bool = False  # whether it runs in the other process: see RemoteBody

    def __str__(self) -> str:
        return self.library or str(self.place)

    def choose(self, body: Body) -> None:
        """Selects the side's library, if it has one, and calls the body so that it gets new plans."""
        if self.library:
            torch.backends.bp.preferred_blas_library(self.library)  # type: ignore[attr-defined]
            seconds(body, self.place, 2)


def seconds(body: Body, device: torch.device, calls: int, finish: Callable[[], object] | None = None) -> float:
    """Seconds per call, until the device has finished the last one.

    First waits until OpenMP's idle threads, which spin for a while, are asleep.
    """
    if isinstance(body, RemoteBody):
        return body.seconds(calls)
    time.sleep(0.01)
    start = time.perf_counter()
    for _ in range(calls):
        body()
    if finish is not None:
        finish()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
    return (time.perf_counter() - start) / calls


def interleaved_times(bodies: Sequence[Body], sides: Sequence[Side], calls: int, rounds: int) -> list[list[float]]:
    """Seconds per call in each round, for each body.

    The sides alternate, so that other load affects all of them. Their order is random in each round, because it
    matters: for example, a side is faster right after the CPU's process than after others.
    """
    times: list[list[float]] = [[] for _ in bodies]
    interleaving, draws = list(zip(bodies, sides, times, strict=True)), random.Random(0)
    for counted in [False, False] + [True] * rounds:  # the first rounds build kernels and warm up
        for body, side, record in draws.sample(interleaving, len(interleaving)):
            side.choose(body)
            measured = seconds(body, side.place, calls, side.finish)
            if counted:
                record.append(measured)
    return times


def ratio(device: Sequence[float], other: Sequence[float]) -> float:
    """The median over the rounds of the other's time divided by the device's."""
    return statistics.median(slow / fast for fast, slow in zip(device, other, strict=True))


def run(row: Row, device: Side, other: Side, rounds: int) -> Result:
    """Runs the row on both sides in turn."""
    sides = [device, other]
    bodies: list[Body] = []
    for side in sides:
        torch.manual_seed(0)
        bodies.append(RemoteBody(row.make) if side.is_apart else row.make(side.place))
    once = 0.0
    for body, side in zip(bodies, sides, strict=True):
        side.choose(body)
        seconds(body, side.place, 1)
        once = max(once, seconds(body, side.place, 1))
    times = interleaved_times(bodies, sides, max(1, int(row.seconds / once)), rounds)
    here, there = map(statistics.median, times)
    return Result(row.title, here * 1e3, there * 1e3, ratio(*times))


def main(rows: Callable[[], Sequence[Row]], unit: str = "ms") -> None:
    """Runs the command-line program of a benchmark.

    Args:
        rows: returns the rows; its docstring is the help text.
        unit: what the table shows besides ratios: "ms", or "1/s" for calls per second.
    """

    def program(
        device: report.Device = "bp",
        driver: report.Driver = None,
        generated: report.Generated = False,
        library: Annotated[bool, typer.Option(help="compare generated products with the driver's library")] = False,
        match: report.Match = "",
        rounds: report.Rounds = 7,
        threads: report.Threads = 0,
        autograd_threads: Annotated[
            bool | None,
            typer.Option(help="use PyTorch's threads for backward passes on both sides. Default: not on host devices"),
        ] = None,
        as_json: report.AsJson = False,
    ) -> None:
        chosen = report.chosen(rows(), match, lambda row: row.title)
        place, environment = report.begin(driver, threads, device, generated)
        if autograd_threads is None:
            autograd_threads = torch.get_device_module("bp").get_device_properties(place).driver != "host"
        torch.autograd.set_multithreading_enabled(autograd_threads)
        sides = Side(place), Side(CPU, is_apart=True)
        if library:
            sides = Side(place, "generated"), Side(place, "driver")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    sides[1].choose(lambda: None)
                except UserWarning as error:  # the driver has no library
                    raise typer.BadParameter(str(error), param_hint="--library") from error
        results = [run(row, *sides, rounds) for row in chosen]
        environment |= {"rounds": rounds, "generated": generated, "library": library}
        environment["autograd threads"] = autograd_threads
        cells = []
        for result in results:
            figures = [result.device_ms, result.other_ms]
            shown = [f"{figure:.3f}" if unit == "ms" else f"{1e3 / figure:.2f}" for figure in figures]
            cells.append([result.title, f"{result.ratio:.2f}", *shown])
        in_all = report.summary({result.title: result.ratio for result in results}, SLOW)
        title = f"{sides[1]} time ÷ {sides[0]} time, and {unit} of both"
        report.print_report(environment, results, title, ("", "", *map(str, sides)), cells, as_json, in_all)

    program.__doc__ = rows.__doc__
    typer.run(program)
