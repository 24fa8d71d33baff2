"""Compares GPT-2's matrix products untuned and tuned, in turn, on one device.

The calls cycle through the layers, like the model, so that the weights do not fit in the caches. Tuning measures the
same case (`torch.bp.tunable.set_rotating_buffer_size`); with cached operands, other candidates can be faster. Where
tuning chooses what an untuned call does, the ratio shows the noise of the times.

python benchmarks/tuning.py --driver opencl
TORCH_BACKPLANE_TARGET=nvidia-ada python benchmarks/tuning.py --driver opencl --match 'of 64 tokens'
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import tempfile
from collections.abc import Callable
from functools import partial

import interleaving
import report
import torch
import typer

from torch_backplane import plans

LAYERS, WIDTH, HEADS, WORDS = 12, 768, 12, 50257
TOKENS = (1, 16, 64, 256)


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call; `ratio` is the median over the rounds of untuned time divided by tuned time."""

    title: str
    candidate: str
    is_changed: bool  # whether tuning changed what is run
    untuned_ms: float
    tuned_ms: float
    ratio: float


def linear(tokens: int, size: int, out_size: int, device: torch.device) -> interleaving.Body:
    shapes = ((tokens, size), (out_size, size), (out_size,))
    layers = 1 if out_size == WORDS else LAYERS
    given = itertools.cycle([[torch.randn(shape).to(device) for shape in shapes] for _ in range(layers)])
    return lambda: torch.nn.functional.linear(*next(given))


def heads(tokens: int, by_values: bool, device: torch.device) -> interleaving.Body:
    """Queries times keys, or (`by_values`) the softmax of that times values."""
    width = WIDTH // HEADS
    shapes = ((HEADS, tokens, tokens if by_values else width), (HEADS, tokens, width))
    given = itertools.cycle([[torch.randn(shape).to(device) for shape in shapes] for _ in range(LAYERS)])

    def multiply() -> torch.Tensor:
        a, b = next(given)
        return torch.bmm(a, b if by_values else b.mT)

    return multiply


def rows() -> dict[str, Callable[[torch.device], interleaving.Body]]:
    found: dict[str, Callable[[torch.device], interleaving.Body]] = {}
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


def computed_by(body: interleaving.Body) -> list[str]:
    """The kernels and host operators that a call runs."""
    return re.findall(r"(?:launch|on the host) ([\w:.]+)", str(plans.explain(body)))


def compare(title: str, body: interleaving.Body, device: torch.device, rounds: int, seconds: float = 0.05) -> Result:
    """Tunes the operators that `body` calls, and times it untuned and tuned."""
    tunable = torch.get_device_module("bp").tunable
    tunable.enable(False)
    untuned = computed_by(body)
    tunable.enable()
    known = len(tunable.get_results())
    body()
    chosen = ", ".join(one[2] for one in tunable.get_results()[known:])
    once = interleaving.seconds(body, device, 1)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for tuned, record in times.items():
            tunable.enable(tuned)
            interleaving.seconds(body, device, 2)  # the setting needs new plans
            record.append(interleaving.seconds(body, device, max(1, int(seconds / once))))
    before, after = (statistics.median(record) * 1e3 for record in times.values())
    is_changed = computed_by(body) != untuned or "/" in chosen  # a form can differ in the launch only
    return Result(title, chosen, is_changed, before, after, interleaving.ratio(times[True], times[False]))


def program(
    driver: report.Driver = None,
    match: report.Match = "",
    rounds: report.Rounds = 7,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares GPT-2's products untuned and tuned."""
    makers = rows()
    titles = report.chosen(makers, match)
    place, environment = report.begin(driver, threads)
    with tempfile.TemporaryDirectory() as folder:  # ignores earlier tuning results
        torch.get_device_module("bp").tunable.set_filename(f"{folder}/results.csv")
        results = [compare(title, makers[title](place), place, rounds) for title in titles]
    cells = [
        [
            *(one.title, f"{one.ratio:.2f}", f"{one.untuned_ms:.3f}", f"{one.tuned_ms:.3f}", one.candidate),
            "" if one.is_changed else "as untuned",
        ]
        for one in results
    ]
    columns = ("", "", "untuned", "tuned", "candidate", "")
    title = f"untuned time ÷ tuned time on {place}, and ms of both"
    changed = {one.title: one.ratio for one in results if one.is_changed}
    in_all = {"changed by tuning": f"{len(changed)} of {len(results)}"}
    if changed:
        in_all |= report.summary(changed, 0.95, "slower than")
    report.print_report(environment | {"rounds": rounds}, results, title, columns, cells, as_json, in_all)


if __name__ == "__main__":
    typer.run(program)
