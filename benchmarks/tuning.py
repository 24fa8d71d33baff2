"""What tuning makes of GPT-2's matrix products: untuned and tuned by turns, on one device.

python benchmarks/tuning.py --driver opencl
TORCH_BACKPLANE_TARGET=nvidia-ada python benchmarks/tuning.py --driver opencl --match 'of 64 tokens'
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import machine
import torch
import turns
import typer
from rich.console import Console
from rich.table import Table

WIDTH, HEADS, WORDS = 768, 12, 50257
TOKENS = (1, 16, 64, 256)


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call; `ratio` is the median over the rounds of the time untuned by the time tuned."""

    title: str
    candidate: str
    untuned_ms: float
    tuned_ms: float
    ratio: float


def linear(tokens: int, size: int, out_size: int, device: torch.device) -> turns.Body:
    x, weight, bias = torch.randn(tokens, size), torch.randn(out_size, size), torch.randn(out_size)
    given = [one.to(device) for one in (x, weight, bias)]
    return lambda: torch.nn.functional.linear(*given)


def heads(tokens: int, by_values: bool, device: torch.device) -> turns.Body:
    """Queries by keys, or what softmax makes of that by values."""
    a = torch.randn(HEADS, tokens, tokens if by_values else WIDTH // HEADS).to(device)
    b = torch.randn(HEADS, tokens, WIDTH // HEADS).to(device)
    return lambda: torch.bmm(a, b if by_values else b.mT)


def rows() -> dict[str, Callable[[torch.device], turns.Body]]:
    found: dict[str, Callable[[torch.device], turns.Body]] = {}
    for tokens in TOKENS:
        for name, size, out_size in (
            ("queries, keys and values", WIDTH, 3 * WIDTH),
            ("projection", WIDTH, WIDTH),
            ("first of the two layers", WIDTH, 4 * WIDTH),
            ("second of the two layers", 4 * WIDTH, WIDTH),
            ("words", WIDTH, WORDS),
        ):
            found[f"{name}, of {tokens} tokens"] = partial(linear, tokens, size, out_size)
        for name, by_values in (("scores", False), ("values", True)):
            found[f"{name}, of {tokens} tokens"] = partial(heads, tokens, by_values)
    return found


def compare(title: str, body: turns.Body, device: torch.device, rounds: int, seconds: float = 0.05) -> Result:
    """Tunes what `body` calls, and measures it."""
    tunable = torch.get_device_module("bp").tunable
    tunable.enable()
    known = len(tunable.get_results())
    body()
    chosen = ", ".join(one[2] for one in tunable.get_results()[known:])
    once = turns.seconds(body, device, 1)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for tuned, record in times.items():
            tunable.enable(tuned)
            turns.seconds(body, device, 2)  # plans were made without it
            record.append(turns.seconds(body, device, max(1, int(seconds / once))))
    before, after = (statistics.median(record) * 1e3 for record in times.values())
    return Result(title, chosen, before, after, turns.ratio(times[True], times[False]))


def summary(results: Sequence[Result]) -> dict[str, str]:
    mean = math.exp(statistics.fmean(math.log(result.ratio) for result in results))
    slower = [f"{result.title}: {result.ratio:.2f}" for result in results if result.ratio < 0.95]
    return {"geometric mean": f"{mean:.2f}", "slower than 0.95": "; ".join(slower) or "none"}


def program(
    driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
    match: Annotated[str, typer.Option(help="a regular expression: only rows whose title has it")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="measurements per row, tuned and untuned")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares GPT-2's products untuned and tuned."""
    chosen = {title: make for title, make in rows().items() if re.search(match, title)}
    if not chosen:
        raise typer.BadParameter(f"no row has {match!r} in its title", param_hint="--match")
    threads = threads or os.cpu_count() or 1
    place = machine.place("bp", driver, threads)
    with tempfile.TemporaryDirectory() as folder:  # what was tuned elsewhere is not looked at
        torch.get_device_module("bp").tunable.set_filename(f"{folder}/results.csv")
        results = [compare(title, make(place), place, rounds) for title, make in chosen.items()]
    environment = machine.environment(place, threads) | {"rounds": rounds}
    if as_json:
        shown = {"results": [dataclasses.asdict(result) for result in results]}
        print(json.dumps(environment | summary(results) | shown, indent=2))
        return
    caption = ", ".join(f"{key} {value}" for key, value in environment.items())
    table = Table(title=f"time untuned by time tuned on {place}, and ms of both", caption=caption)
    for column in ("", "", "untuned", "tuned", "candidate"):
        table.add_column(column, justify="right" if 0 < len(table.columns) < 4 else "left")
    for one in results:
        table.add_row(one.title, f"{one.ratio:.2f}", f"{one.untuned_ms:.3f}", f"{one.tuned_ms:.3f}", one.candidate)
    console = Console()
    console.print(table)
    for key, value in summary(results).items():
        console.print(f"{key}: {value}")


if __name__ == "__main__":
    typer.run(program)
