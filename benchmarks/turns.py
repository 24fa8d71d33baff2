"""Benchmarks whose rows are a device's time beside the CPU's: what they have in common.

The CPU's side is in a process of its own, as a program that uses no other device is: OpenMP's threads of the one and of
the other would hinder each other within one.
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
    """What is measured: `make(device)` gives a function to be called; nobody looks at what it returns."""

    title: str
    make: Make
    seconds: float = 0.05  # how long a round should go on, on either device


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call; `ratio` is the median over the rounds of the other's time by the device's."""

    title: str
    device_ms: float
    other_ms: float  # the CPU's, or the same device's by another library
    ratio: float


class Apart:
    """A body for the CPU in the other process, one at a time.

    Args:
        make: as a row's; what can be pickled.

    Raises:
        RuntimeError: it could not be made.
    """

    def __init__(self, make: Make) -> None:
        self._ask(make)

    def seconds(self, calls: int) -> float:
        """As the function. Raises RuntimeError where a call raises."""
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
    """Starts it, as a daemon, and returns the way to it."""
    context = multiprocessing.get_context("spawn")  # a forked one would have this one's OpenMP
    here, there = context.Pipe()
    context.Process(target=_serve, args=(there, threads, autograd_threads), daemon=True).start()
    there.close()  # so that the end of that process ends what waits for it
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
    """One of the two that are compared: a device, and the library that it prefers for products, if that matters."""

    place: torch.device
    library: str = ""
    finish: Callable[[], object] | None = None  # waits for the device, in place of PyTorch
    is_apart: bool = False  # in the other process: see Apart

    def __str__(self) -> str:
        return self.library or str(self.place)

    def choose(self, body: Body) -> None:
        """From here on its library computes; plans are made anew."""
        if self.library:
            torch.backends.bp.preferred_blas_library(self.library)  # type: ignore[attr-defined]
            seconds(body, self.place, 2)


def seconds(body: Body, device: torch.device, calls: int, finish: Callable[[], object] | None = None) -> float:
    """Time per call, until the device has finished the last. OpenMP's threads, which wait for work by running in a
    circle for a while, have gone to sleep before.
    """
    if isinstance(body, Apart):
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


def in_turn(bodies: Sequence[Body], sides: Sequence[Side], calls: int, rounds: int) -> list[list[float]]:
    """Seconds of a call in each round, for each body. The sides take turns, so that what else goes on meets all, in an
    order that is drawn for each round: who comes after the CPU's process, say, is quicker than who comes after others.
    """
    times: list[list[float]] = [[] for _ in bodies]
    turns, draws = list(zip(bodies, sides, times, strict=True)), random.Random(0)
    for counted in [False, False] + [True] * rounds:  # the first rounds build kernels and warm up
        for body, side, record in draws.sample(turns, len(turns)):
            side.choose(body)
            measured = seconds(body, side.place, calls, side.finish)
            if counted:
                record.append(measured)
    return times


def ratio(device: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' ratios, the other's time by the device's."""
    return statistics.median(slow / fast for fast, slow in zip(device, other, strict=True))


def run(row: Row, device: Side, other: Side, rounds: int) -> Result:
    """The row on both sides in turn."""
    sides = [device, other]
    bodies: list[Body] = []
    for side in sides:
        torch.manual_seed(0)
        bodies.append(Apart(row.make) if side.is_apart else row.make(side.place))
    once = 0.0
    for body, side in zip(bodies, sides, strict=True):
        side.choose(body)
        seconds(body, side.place, 1)
        once = max(once, seconds(body, side.place, 1))
    times = in_turn(bodies, sides, max(1, int(row.seconds / once)), rounds)
    here, there = map(statistics.median, times)
    return Result(row.title, here * 1e3, there * 1e3, ratio(*times))


def main(rows: Callable[[], Sequence[Row]], unit: str = "ms") -> None:
    """The program: runs what the command line asks for among `rows()`.

    Args:
        unit: what the table shows besides ratios: "ms", or how many calls a second, "1/s".
    """

    def program(
        device: report.Device = "bp",
        driver: report.Driver = None,
        generated: report.Generated = False,
        library: Annotated[bool, typer.Option(help="kernels beside the driver's library of products")] = False,
        match: report.Match = "",
        rounds: report.Rounds = 7,
        threads: report.Threads = 0,
        autograd_threads: Annotated[
            bool | None,
            typer.Option(help="both sides with PyTorch's threads for backward passes. Default: not on host devices"),
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
                except UserWarning as error:  # there is none
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
        title = f"time of {sides[1]} by that of {sides[0]}, and {unit} of both"
        report.tell(environment, results, title, ("", "", *map(str, sides)), cells, as_json, in_all)

    program.__doc__ = rows.__doc__
    typer.run(program)
