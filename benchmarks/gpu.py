"""Measures bp on a GPU and, if PyTorch has it, torch.cuda on the same GPU in the same process.

    python benchmarks/gpu.py --driver cuda
    python benchmarks/gpu.py --driver cuda --match "softmax|product" --json results.json
    python benchmarks/gpu.py --driver opencl          # the OpenCL driver on the same GPU

Rows are issue times of small operators (until the call returns), memory bandwidth, products, convolutions, attention,
and training steps, eager and compiled. The sides alternate, round by round; figures are medians. The ratio is
torch.cuda's time divided by bp's: above 1, bp is faster. A row that fails is reported, and the others continue. The
JSON file is written after every row, so a run that is stopped leaves what it has measured.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import report
import torch
import training
import typer
from interleaving import Body, Make, Side, interleaved_times, ratio, seconds

from torch_backplane.audit.workloads import WORKLOADS

F = torch.nn.functional

# Rows of the audit's workloads, whose bytes per element are known.
BANDWIDTH = (
    "copy", "transposed copy", "add", "gelu", "sum of all", "sum of rows", "sum of columns", "softmax of rows",
    "layer norm of rows", "cumsum of rows",
)  # fmt: skip
SECONDS = 0.05  # of a round on the slower side


class Sizes(NamedTuple):
    """Sizes of the rows."""

    elements: int  # of bandwidth rows
    product: int  # rows, columns and depth
    images: tuple[int, int, int]  # number, channels, side
    attention: tuple[int, int, int]  # batch, heads, length
    models: bool  # whether there are training steps
    calls: int  # of issue times


SIZES = {
    "full": Sizes(1 << 25, 4096, (32, 128, 56), (4, 16, 2048), True, 1000),
    "tiny": Sizes(1 << 10, 16, (1, 2, 6), (1, 1, 16), False, 3),
}


class Row(NamedTuple):
    """A row: `amount` bytes or operations per call give the rate in `unit`."""

    group: str
    title: str
    make: Make
    unit: str  # µs: time until a call returns; ms: time of a call; GB/s or TFLOP/s
    amount: float = 0.0


@dataclasses.dataclass
class Result:
    """Median milliseconds of a call on both sides; `ratio` is other_ms ÷ bp_ms. A side without a figure is None."""

    group: str
    title: str
    unit: str
    bp: float | None = None  # in `unit`
    other: float | None = None
    bp_ms: float | None = None
    other_ms: float | None = None
    ratio: float | None = None
    error: str = ""


def issue(operator: Callable[..., object], *shapes: tuple[int, ...]) -> Make:
    """The body of an operator on small operands."""

    def make(device: torch.device) -> Body:
        operands = [torch.rand(shape).to(device) for shape in shapes]
        return lambda: operator(*operands)

    return make


def product(size: int, dtype: torch.dtype, device: torch.device) -> Body:
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def convolution(sizes: tuple[int, int, int], dtype: torch.dtype, is_training: bool, device: torch.device) -> Body:
    count, channels, side = sizes
    x = torch.randn(count, channels, side, side).to(device, dtype).requires_grad_(is_training)
    weight = torch.randn(channels, channels, 3, 3).to(device, dtype).requires_grad_(is_training)
    if not is_training:
        return lambda: F.conv2d(x, weight, padding=1)
    grad = torch.ones(count, channels, side, side).to(device, dtype)
    return lambda: torch.autograd.grad(F.conv2d(x, weight, padding=1), (x, weight), grad)


def attention(sizes: tuple[int, int, int], dtype: torch.dtype, is_training: bool, device: torch.device) -> Body:
    shape = (*sizes, 64)
    query, key, value = (torch.randn(shape).to(device, dtype).requires_grad_(is_training) for _ in range(3))
    forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    if not is_training:
        return forward
    grad = torch.ones(shape).to(device, dtype)
    return lambda: torch.autograd.grad(forward(), (query, key, value), grad)


def compiled_step(build: training.Model, device: torch.device) -> Body:
    """As `training.make`, with a compiled model."""

    def compiled() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
        model, x, target = build()
        return cast(torch.nn.Module, torch.compile(model)), x, target

    return training.make(compiled, device)


def rows(sizes: Sizes) -> Iterator[Row]:
    """All rows."""
    for title, operator, *shapes in (
        ("a * b", torch.mul, (16,), (16,)),
        ("sum", torch.sum, (16, 16)),
        ("mm", torch.mm, (16, 16), (16, 16)),
        ("layer norm", lambda x: F.layer_norm(x, (16,)), (16, 16)),
        ("empty", lambda x: torch.empty_like(x), (16,)),
    ):
        yield Row("issue", title, issue(operator, *shapes), "µs")
    for one in WORKLOADS:
        if one.title in BANDWIDTH and one.bytes_per_element is not None:
            make = partial(_elements, one.make, sizes.elements)
            yield Row("bandwidth", one.title, make, "GB/s", one.bytes_per_element * sizes.elements / 1e9)
    count, channels, side = sizes.images
    batch, heads, length = sizes.attention
    conv_operations = 2 * count * side * side * channels * channels * 9 / 1e12
    attention_operations = 4 * batch * heads * length * length * 64 / 2 / 1e12  # causal: half of the products
    for dtype in (torch.float32, torch.bfloat16):
        name, n = str(dtype).removeprefix("torch."), sizes.product
        yield Row("products", f"product of {n}³, {name}", partial(product, n, dtype), "TFLOP/s", 2 * n**3 / 1e12)
        for is_training, what, times in ((False, "", 1.0), (True, " with gradients", 3.0)):
            title = f"convolution of {count} × {channels} × {side}²{what}, {name}"
            make = partial(convolution, sizes.images, dtype, is_training)
            yield Row("convolutions", title, make, "TFLOP/s", times * conv_operations)
        for is_training, what, times in ((False, "", 1.0), (True, " with gradients", 3.5)):
            title = f"attention of {batch} × {heads} × {length}{what}, {name}"
            make = partial(attention, sizes.attention, dtype, is_training)
            yield Row("attention", title, make, "TFLOP/s", times * attention_operations)
    if sizes.models:
        for build in (training.gpt, training.resnet):
            yield Row("training", f"{build.__doc__}, eager", partial(training.make, build), "ms")
            yield Row("training", f"{build.__doc__}, compiled", partial(compiled_step, build), "ms")


def _elements(make: Callable[[torch.device, int], Body], elements: int, device: torch.device) -> Body:
    return make(device, elements)


def issue_seconds(body: Body, side: Side, calls: int) -> float:
    """Seconds until a call returns. The device finishes afterwards."""
    start = time.perf_counter()
    for _ in range(calls):
        body()
    taken = (time.perf_counter() - start) / calls
    if side.finish is not None:
        side.finish()
    return taken


def times_of(row: Row, bodies: list[Body], sides: list[Side], rounds: int, calls: int) -> list[list[float]]:
    """Seconds per call in each round, for each side."""
    if row.unit == "µs":
        for body, side in zip(bodies, sides, strict=True):
            issue_seconds(body, side, calls)
        found = [
            [issue_seconds(body, side, calls) for body, side in zip(bodies, sides, strict=True)] for _ in range(rounds)
        ]
        return [list(one) for one in zip(*found, strict=True)]
    once = 0.0
    for body, side in zip(bodies, sides, strict=True):
        seconds(body, side.place, 1, side.finish)
        once = max(once, seconds(body, side.place, 1, side.finish))
    return interleaved_times(bodies, sides, max(1, min(1000, int(SECONDS / once))), rounds)


def told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def run(row: Row, sides: list[Side], rounds: int, calls: int) -> Result:
    """Measures a row. An error of any side is in the result; a side that cannot make its body is left out."""
    result = Result(row.group, row.title, row.unit)
    bodies, working = [], []
    for side in sides:
        torch.manual_seed(0)
        try:
            body = row.make(side.place)
            seconds(body, side.place, 1, side.finish)
        except Exception as error:
            result.error += f"{side}: {told(error)}. "
        else:
            bodies.append(body)
            working.append(side)
    if not bodies:
        return result
    try:
        times = times_of(row, bodies, working, rounds, calls)
    except Exception as error:
        result.error += told(error)
        return result
    for side, taken in zip(working, times, strict=True):
        median = statistics.median(taken)
        figure = row.amount / median if row.amount else median * (1e6 if row.unit == "µs" else 1e3)
        if side is sides[0]:
            result.bp, result.bp_ms = figure, median * 1e3
        else:
            result.other, result.other_ms = figure, median * 1e3
    if len(times) == 2:
        result.ratio = ratio(*times)
    return result


def side_of(device: str) -> Side:
    """A side that waits for its own device: torch.accelerator knows only one type."""
    place = torch.empty(1, device=device).device
    finish = None if place.type == "cpu" else partial(torch.get_device_module(place).synchronize, place)
    return Side(place, finish=finish)


def line(result: Result) -> str:
    """A result as a line of text."""
    figures = {"bp": result.bp, "other": result.other}
    parts = [f"{name} {value:.3g} {result.unit}" for name, value in figures.items() if value is not None]
    parts += [f"ratio {result.ratio:.2f}"] if result.ratio is not None else []
    return f"{result.title}: {', '.join([*parts, result.error])}".rstrip(", ")


def main(
    driver: report.Driver = None,
    other: Annotated[str, typer.Option(help="the device to compare with; cuda is left out if there is none")] = "cuda",
    match: report.Match = "",
    size: Annotated[str, typer.Option(help=f"sizes of the rows: {', '.join(SIZES)}")] = "full",
    rounds: report.Rounds = 7,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="write JSON after every row")] = "",
) -> None:
    """Measures bp on a GPU, and torch.cuda on the same one."""
    if size not in SIZES:
        raise typer.BadParameter(f"{size} is none of {', '.join(SIZES)}", param_hint="--size")
    chosen = report.chosen(rows(SIZES[size]), match, lambda row: f"{row.group}: {row.title}")
    place, environment = report.begin(driver, 0)
    reference = None if other == "cuda" and not torch.cuda.is_available() else side_of(other)
    if reference is None:
        print("PyTorch has no CUDA here: only bp is measured", flush=True)
    bp = torch.get_device_module("bp")
    environment |= {
        "driver": bp.get_device_properties(place).driver,
        "other": None if reference is None else other,
        "size": size,
        "rounds": rounds,
    }
    sides = [side_of(str(place)), *([reference] if reference else [])]
    results: list[Result] = []
    for row in chosen:
        results.append(run(row, sides, rounds, SIZES[size].calls))
        print(line(results[-1]), flush=True)
        if json_file:
            write(json_file, environment | {"results": [dataclasses.asdict(one) for one in results]})
        gc.collect()
        bp.empty_cache()
    if any(one.bp is None for one in results):
        raise typer.Exit(1)


def write(file: str, data: dict[str, Any]) -> None:
    """Replaces the file by a complete one, also if this process is stopped meanwhile."""
    path = Path(file)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    typer.run(main)
