"""The command-line options and the output of benchmarks with rows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import machine
import torch
import typer
from rich.console import Console
from rich.table import Table

Row = TypeVar("Row")

Device = Annotated[str, typer.Option(help="the device to compare with cpu")]
Driver = Annotated[str | None, typer.Option(help="use only these Backplane drivers, comma-separated")]
Generated = Annotated[bool, typer.Option(help="use generated kernels only, as if the host could not access the memory")]
Match = Annotated[str, typer.Option(help="run only rows whose title matches this regular expression")]
Rounds = Annotated[int, typer.Option(min=1, help="measurements per row")]
Threads = Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def chosen(rows: Iterable[Row], match: str, title: Callable[[Row], str] = str) -> list[Row]:
    """The rows whose title matches --match. Exits with an error if there are none."""
    found = [row for row in rows if re.search(match, title(row))]
    if not found:
        raise typer.BadParameter(f"no row has a title that matches {match!r}", param_hint="--match")
    return found


def begin(
    driver: str | None, threads: int, device: str = "bp", generated: bool = False
) -> tuple[torch.device, dict[str, Any]]:
    """Applies the options. Returns the device to measure and the environment to report."""
    if generated:
        os.environ["TORCH_BACKPLANE_DISCRETE"] = "1"  # read when the devices are first needed
    threads = threads or os.cpu_count() or 1
    place = machine.place(device, driver, threads)
    return place, machine.environment(place, threads)


def summary(ratios: Mapping[str, float], least: float, label: str = "below") -> dict[str, str]:
    """The geometric mean of `ratios`, and the titles of those that are less than `least`."""
    mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
    less = [f"{title}: {ratio:.2f}" for title, ratio in ratios.items() if ratio < least]
    return {"geometric mean": f"{mean:.2f}", f"{label} {least}": "; ".join(less) or "none"}


def print_report(
    environment: Mapping[str, Any],
    results: Sequence[Any],
    title: str,
    columns: Sequence[str],
    cells: Iterable[Sequence[str]],
    as_json: bool,
    in_all: Mapping[str, Any] | None = None,
) -> None:
    """Prints `cells` as a table, or `results`, which are dataclasses, as JSON; `in_all` with both."""
    in_all = in_all or {}
    if as_json:
        found = {"results": [dataclasses.asdict(result) for result in results]}
        print(json.dumps({**environment, **in_all, **found}, indent=2))
        return
    table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in environment.items()))
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    for row in cells:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for key, value in in_all.items():
        console.print(f"{key}: {value}")
