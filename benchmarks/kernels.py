"""What every family of operators takes beside PyTorch on the CPU, at three sizes, and what it does with memory.

    python benchmarks/kernels.py --driver opencl
    python benchmarks/kernels.py --match "sort|unique" --sizes 1000000 --json

A row's operand has about as many elements as the column says. Ratios are the CPU's time by the device's: above 1 the
device is faster. The devices take turns, round by round, in one process; times are medians over the rounds, until the
device has finished, and ratios medians of the rounds' ratios. Where PyTorch has an `out=` form it is used, so that
nobody pays for fresh memory. GB/s are of the bytes that must be read and written, once each, at the largest size; to
compare, numpy copies one array of that size to another with one thread per core.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import machine
import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

ROW = 1024  # elements of a row, where rows are not said to be others
SLOW = 0.5  # ratios below are listed

Body = Callable[[], object]
Make = Callable[[torch.device, int], Body]


@dataclasses.dataclass
class Workload:
    """A row: makes a body for a device and a number of elements; `bytes_per_element` read and written, if it counts."""

    title: str
    make: Make
    bytes_per_element: float | None = None


WORKLOADS: list[Workload] = []


def row(title: str, bytes_per_element: float | None = None) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        WORKLOADS.append(Workload(title, make, bytes_per_element))
        return make

    return add


def rand(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)


def whole(device: torch.device, most: int, *shape: int) -> torch.Tensor:
    """int64, below `most`."""
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(0)).to(device)


def rows(elements: int, size: int = ROW) -> tuple[int, int]:
    return max(1, elements // size), min(size, elements)


def images(elements: int, channels: int = 16) -> tuple[int, int, int, int]:
    side = max(4, math.isqrt(elements // (4 * channels)))
    return 4, channels, side, side


def like(function: Callable[..., torch.Tensor], *arguments: object) -> Body:
    """Calls with `out=` of the result's shape."""
    out = torch.empty_like(function(*arguments))
    return lambda: function(*arguments, out=out)


def backward(result: torch.Tensor, *leaves: torch.Tensor) -> Body:
    grad = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)


# Pointwise


@row("add", 12)
def _(device: torch.device, n: int) -> Body:
    return like(torch.add, rand(device, n), rand(device, n))


@row("add, one operand transposed", 12)
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n)
    return like(torch.add, rand(device, side, side).t(), rand(device, side, side))


@row("add of a row, bfloat16", 4)
def _(device: torch.device, n: int) -> Body:
    return like(torch.add, rand(device, *rows(n), dtype=torch.bfloat16), rand(device, ROW, dtype=torch.bfloat16)[:n])


@row("gelu", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: F.gelu(x)


@row("where", 13)
def _(device: torch.device, n: int) -> Body:
    return like(torch.where, rand(device, n) > 0.5, rand(device, n), rand(device, n))


# Copies


@row("copy", 8)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty(n, device=device)
    return lambda: out.copy_(source)


@row("cast to float16", 6)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty(n, dtype=torch.float16, device=device)
    return lambda: out.copy_(source)


@row("transposed copy", 8)
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n)
    source, out = rand(device, side, side).t(), torch.empty(side, side, device=device)
    return lambda: out.copy_(source)


@row("cat of 4", 8)
def _(device: torch.device, n: int) -> Body:
    parts = rand(device, n).chunk(4)
    return lambda: torch.cat(parts)


# Reductions


@row("sum of all", 4)
def _(device: torch.device, n: int) -> Body:
    source, out = rand(device, n), torch.empty((), device=device)
    return lambda: torch.sum(source, dim=(0,), out=out)


@row("sum of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sum(1)


@row("sum of columns", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sum(0)


@row("argmax of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.argmax(1)


@row("variance of rows", 4)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.var(1)


# Scans


@row("cumsum of a vector", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.cumsum(0)


@row("cumsum of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.cumsum(1)


@row("cummax of columns", 16)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.cummax(0)


# Sorting and compaction


@row("sort")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.sort()


@row("sort of int64")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1 << 40, n)
    return lambda: x.sort()


@row("sort of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    return lambda: x.sort(1)


@row("topk(50) of rows of 50,257")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n, 50257))
    return lambda: x.topk(50)


@row("topk(2) of rows of 64")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n, 64))
    return lambda: x.topk(2)


@row("median")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: x.median()


@row("unique of 1,000 different")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1000, n)
    return lambda: x.unique()


@row("randperm")
def _(device: torch.device, n: int) -> Body:
    return lambda: torch.randperm(n, device=device)


@row("nonzero")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n) > 0.5
    return lambda: x.nonzero()


@row("masked_select")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    mask = x > 0.5
    return lambda: x[mask]


# Gather and scatter


@row("gather of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    index = whole(device, x.shape[1], *x.shape)
    return lambda: x.gather(1, index)


@row("embedding of rows of 256")
def _(device: torch.device, n: int) -> Body:
    table, index = rand(device, 10_000, 256), whole(device, 10_000, max(1, n // 256))
    return lambda: F.embedding(index, table)


@row("embedding of rows of 256, backward")
def _(device: torch.device, n: int) -> Body:
    table, index = rand(device, 10_000, 256).requires_grad_(), whole(device, 10_000, max(1, n // 256))
    return backward(F.embedding(index, table), table)


@row("index_add of rows of 64")
def _(device: torch.device, n: int) -> Body:
    x, index = rand(device, *rows(n, 64)), whole(device, 100, max(1, n // 64))
    out = torch.zeros(100, 64, device=device)
    return lambda: out.index_add_(0, index, x)


@row("bincount of 1,000 different")
def _(device: torch.device, n: int) -> Body:
    x = whole(device, 1000, n)
    return lambda: x.bincount()


# Rows


@row("softmax of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    out = torch.empty_like(x)
    return lambda: torch.softmax(x, -1, out=out)


@row("softmax of one row", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    out = torch.empty_like(x)
    return lambda: torch.softmax(x, -1, out=out)


@row("layer norm of rows", 8)
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    weight, bias = rand(device, x.shape[1]), rand(device, x.shape[1])
    return lambda: F.layer_norm(x, x.shape[1:], weight, bias)


@row("layer norm of rows, backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n)).requires_grad_()
    weight, bias = (rand(device, x.shape[1]).requires_grad_() for _ in range(2))
    return backward(F.layer_norm(x, x.shape[1:], weight, bias), x, weight, bias)


@row("batch norm in training")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    norm = torch.nn.BatchNorm2d(x.shape[1]).to(device)
    return lambda: norm(x)


@row("cross entropy of rows")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *rows(n))
    target = whole(device, x.shape[1], x.shape[0])
    return lambda: F.cross_entropy(x, target)


# Images


@row("max_pool2d(2)")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    return lambda: F.max_pool2d(x, 2)


@row("max_pool2d(3, 2), backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n)).requires_grad_()
    return backward(F.max_pool2d(x, 3, 2), x)


@row("avg_pool2d(2), backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n)).requires_grad_()
    return backward(F.avg_pool2d(x, 2), x)


@row("reflection pad by 2")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n))
    return lambda: F.pad(x, (2, 2, 2, 2), "reflect")


@row("upsampling to twice the size, nearest")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4))
    return lambda: F.interpolate(x, scale_factor=2)


@row("upsampling to twice the size, bilinear")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4))
    return lambda: F.interpolate(x, scale_factor=2, mode="bilinear")


@row("upsampling to twice the size, bilinear, backward")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, *images(n // 4)).requires_grad_()
    return backward(F.interpolate(x, scale_factor=2, mode="bilinear"), x)


# Products


@row("product of square matrices")
def _(device: torch.device, n: int) -> Body:
    side = math.isqrt(n) // 2  # so that the largest one does not take longer than all others
    return like(torch.mm, rand(device, side, side), rand(device, side, side))


@row("products of 64 × 64 matrices")
def _(device: torch.device, n: int) -> Body:
    count = max(1, n // 4096)
    return like(torch.bmm, rand(device, count, 64, 64), rand(device, count, 64, 64))


@row("product of a matrix and a vector", 4)
def _(device: torch.device, n: int) -> Body:
    return like(torch.mv, rand(device, *rows(n)), rand(device, min(ROW, n)))


@row("convolution, 3 × 3, 16 to 16 channels")
def _(device: torch.device, n: int) -> Body:
    x, weight = rand(device, *images(n)), rand(device, 16, 16, 3, 3)
    return lambda: F.conv2d(x, weight, padding=1)


@row("convolution, 3 × 3, depthwise")
def _(device: torch.device, n: int) -> Body:
    x, weight = rand(device, *images(n)), rand(device, 16, 1, 3, 3)
    return lambda: F.conv2d(x, weight, padding=1, groups=16)


@row("attention, causal, heads of 64")
def _(device: torch.device, n: int) -> Body:
    length = min(512, max(16, n // 512))
    q, k, v = (rand(device, max(1, n // (512 * length)), 8, length, 64) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


# Random numbers, optimizers


@row("normal numbers", 4)
def _(device: torch.device, n: int) -> Body:
    out = torch.empty(n, device=device)
    return lambda: out.normal_()


@row("dropout")
def _(device: torch.device, n: int) -> Body:
    x = rand(device, n)
    return lambda: F.dropout(x, 0.1)


@row("a fused step of AdamW, 8 tensors")
def _(device: torch.device, n: int) -> Body:
    parameters = [torch.nn.Parameter(one.clone()) for one in rand(device, n).chunk(8)]
    for one in parameters:
        one.grad = torch.ones_like(one)
    return torch.optim.AdamW(parameters, fused=True).step


@dataclasses.dataclass
class Result:
    """Median milliseconds; `ratio` is the median over the rounds of the CPU's time by the device's."""

    workload: str
    elements: int
    device_ms: float
    cpu_ms: float
    ratio: float
    gigabytes_per_second: float | None


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


def run(workload: Workload, device: torch.device, elements: int, rounds: int) -> Result:
    """The workload on `device` and on the CPU in turn."""
    places = [device, torch.device("cpu")]
    bodies = [workload.make(place, elements) for place in places]
    times: list[list[float]] = [[], []]
    calls = max(1, min(50, 2**20 // elements))
    for counted in [False, False] + [True] * rounds:  # the first rounds build kernels and warm up
        for body, place, record in zip(bodies, places, times, strict=True):
            measured = seconds(body, place, calls)
            if counted:
                record.append(measured)
    here, cpu = map(statistics.median, times)
    rate = None if workload.bytes_per_element is None else workload.bytes_per_element * elements / here / 1e9
    ratio = statistics.median(slow / fast for fast, slow in zip(*times, strict=True))
    return Result(workload.title, elements, here * 1e3, cpu * 1e3, ratio, rate)


def memory_copy(elements: int, threads: int, rounds: int) -> float:
    """GB/s of numpy's copy, read and written bytes together."""
    source, target = np.ones(elements, np.float32), np.zeros(elements, np.float32)
    parts = [(part * elements // threads, (part + 1) * elements // threads) for part in range(threads)]
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part[0] : part[1]], source[part[0] : part[1]]), parts))
            times.append(time.perf_counter() - start)
    return 8 * elements / statistics.median(times[1:]) / 1e9


def summary(results: list[Result]) -> dict[str, str]:
    """The geometric mean of the ratios, and what is below SLOW."""
    mean = math.exp(statistics.fmean(math.log(result.ratio) for result in results))
    slow = (result for result in results if result.ratio < SLOW)
    named = [f"{result.workload} of {result.elements:,}: {result.ratio:.2f}" for result in slow]
    return {"geometric mean": f"{mean:.2f}", f"below {SLOW}": "; ".join(named) or "none"}


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str | None, typer.Option(help="only these Backplane drivers, comma-separated")] = None,
    match: Annotated[str, typer.Option(help="a regular expression: only rows whose title has it")] = "",
    sizes: Annotated[str, typer.Option(help="elements of operands, with commas between them")] = "4096,262144,4194304",
    rounds: Annotated[int, typer.Option(min=1, help="measurements per workload, size and device")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's CPU threads; 0: one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compares the kernels of a device with the CPU's."""
    try:
        counts = sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{sizes} are no numbers with commas between them", param_hint="--sizes") from None
    if counts[0] < 256:
        raise typer.BadParameter(f"{counts[0]} elements are fewer than 256", param_hint="--sizes")
    chosen = [workload for workload in WORKLOADS if re.search(match, workload.title)]
    if not chosen:
        raise typer.BadParameter(f"no row has {match!r} in its title", param_hint="--match")
    threads = threads or os.cpu_count() or 1
    place = machine.place(device, driver, threads)
    results = [run(workload, place, elements, rounds) for workload in chosen for elements in counts]
    environment = machine.environment(place, threads) | {
        "memory copy, GB/s": round(memory_copy(counts[-1], threads, rounds), 1),
        "rounds": rounds,
    }
    if as_json:
        report = environment | summary(results) | {"results": [dataclasses.asdict(result) for result in results]}
        print(json.dumps(report, indent=2))
        return
    table = Table(
        title=f"cpu's time by {place}'s, and {place}'s ms",
        caption=", ".join(f"{key} {value}" for key, value in environment.items()),
    )
    table.add_column("")
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    table.add_column("GB/s", justify="right")
    for at in range(0, len(results), len(counts)):
        of_sizes = results[at : at + len(counts)]
        rate = of_sizes[-1].gigabytes_per_second
        cells = [f"{result.ratio:.2f}  {result.device_ms:.3f}" for result in of_sizes]
        table.add_row(of_sizes[0].workload, *cells, "" if rate is None else f"{rate:.1f}")
    console = Console()
    console.print(table)
    for key, value in summary(results).items():
        console.print(f"{key}: {value}")


if __name__ == "__main__":
    typer.run(main)
