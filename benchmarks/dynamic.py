"""Compares calls with new shapes to calls with seen shapes and to calls on the CPU, in microseconds.

    python benchmarks/dynamic.py --driver opencl
    python benchmarks/dynamic.py --driver opencl --match "softmax|layer_norm" --json

Each workload is first called with a few shapes, so that its kernels are built and its class of calls is known. Then
each round times four series of calls:

- new: shapes that were never seen, one call each.
- again: the same calls again, in which the shapes can get their exact plans.
- seen: the same shapes once more, with operands that no call has used, like those of the new shapes.
- first: the very first shape with the same operands over and over, so that everything that a call reads is cached.

The same is done on the CPU. Times last until a call returns: operands are created before, the device is held up
meanwhile, and the program waits for it afterwards. The figures are medians over all calls, since a call with a new
shape cannot be repeated.

A new shape should cost at most 5 µs more than a seen one, and at most 3 times as much. The number of workloads that
reach this relative to the first shape is reported separately.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import machine
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 32  # the sizes that do not change: features, channels …
SMALLEST = 24  # the smallest of the sizes that change
MORE = 5.0  # µs that a new shape can cost more than a seen one
TIMES = 3.0  # maximum ratio of the cost of a new shape to that of a seen one
HELD = 20  # ms for which the device is held up
WARM_UP = 32  # calls of a known shape before the timed ones, because the first calls after a wait are slow

Operands = tuple[Any, ...]


@dataclasses.dataclass
class Workload:
    """A row of the table.

    Args:
        operands: returns operands of a size, on the CPU. They are moved to the device before the timed calls.
        call: the timed function, which takes the operands.
        is_program: whether it is several operators, which are judged by the ratio only.
    """

    title: str
    operands: Callable[[int], Operands]
    call: Callable[..., object]
    is_program: bool = False


def rows(size: int) -> Operands:
    return (torch.randn(size, WIDTH),)


def vector(size: int) -> Operands:
    return (torch.randn(size),)


def two_of(make: Callable[[int], Operands]) -> Callable[[int], Operands]:
    return lambda size: make(size) + make(size)


def and_size(make: Callable[[int], Operands]) -> Callable[[int], Operands]:
    """Operands of a size that is larger than all others, and the size, for calls that slice them."""
    return lambda size: (*make(4096), size)


def heads(size: int) -> Operands:
    """Query, key and value, batch 1, 2 heads."""
    return tuple(torch.randn(1, 2, size, WIDTH) for _ in range(3))


def one_query(size: int) -> Operands:
    """The query of one token, and a cache that grows."""
    return (torch.randn(1, 2, 1, WIDTH), *(torch.randn(1, 2, size, WIDTH) for _ in range(2)))


def images(size: int) -> Operands:
    """Images of any height and width."""
    return (torch.randn(1, 4, size, size + 3),)


def parameters(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def with_parameters(make: Callable[[int], Operands], *shapes: Sequence[int]) -> Callable[[int], Operands]:
    return lambda size: (*make(size), *(parameters(*shape) for shape in shapes))


def indices(size: int) -> torch.Tensor:
    return torch.arange(size) * 7 % WIDTH


def masked(size: int) -> Operands:
    x = torch.randn(size, WIDTH)
    return x, x > 0


def backward(x: torch.Tensor, w: torch.Tensor, size: int) -> None:
    loss = torch.softmax(x[:size] @ w, -1).sum(0)
    torch.autograd.grad(loss, (x, w), torch.ones_like(loss))


def trained(size: int) -> Operands:
    return torch.randn(1024, WIDTH).requires_grad_(), torch.randn(WIDTH, WIDTH).requires_grad_(), size


def block(x: torch.Tensor, w: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Half of a transformer layer, without attention."""
    normed = F.layer_norm(x, (WIDTH,), norm, norm)
    return x + F.gelu(F.linear(normed, w))


SQUARE = (WIDTH, WIDTH)

WORKLOADS = [
    Workload("x[:n] + 1", and_size(vector), lambda x, n: x[:n] + 1),
    Workload("x[:n].sum(0)", and_size(rows), lambda x, n: x[:n].sum(0)),
    Workload("layer_norm", with_parameters(rows, (WIDTH,), (WIDTH,)), lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b)),
    Workload("cat", two_of(rows), lambda x, y: torch.cat([x, y])),
    Workload("cat of a cache and a token", lambda n: (heads(n)[0], heads(1)[0]), lambda x, y: torch.cat([x, y], -2)),
    Workload("index_select", lambda n: (torch.randn(WIDTH, WIDTH), indices(n)), lambda x, i: x.index_select(0, i)),
    Workload("softmax", rows, lambda x: torch.softmax(x, -1)),
    Workload("softmax over n", lambda n: (torch.randn(WIDTH, n),), lambda x: torch.softmax(x, -1)),
    Workload("log_softmax", rows, lambda x: torch.log_softmax(x, -1)),
    Workload("x * y", two_of(rows), torch.mul),
    Workload("x + bias", with_parameters(rows, (WIDTH,)), torch.add),
    Workload("x * column", lambda n: (torch.randn(n, WIDTH), torch.randn(n, 1)), torch.mul),
    Workload("x.add_(y)", two_of(rows), lambda x, y: x.add_(y)),
    Workload("x.T + y", lambda n: (torch.randn(n, WIDTH), torch.randn(WIDTH, n)), lambda x, y: x.T + y),
    Workload("gelu", rows, F.gelu),
    Workload("silu", rows, F.silu),
    Workload("relu", rows, torch.relu),
    Workload("tanh", rows, torch.tanh),
    Workload("rsqrt", lambda n: (torch.rand(n, 1) + 1,), torch.rsqrt),
    Workload("pow 2", rows, lambda x: x.pow(2)),
    Workload("neg", rows, torch.neg),
    Workload("to float16", rows, lambda x: x.half()),
    Workload("where", lambda n: (*masked(n), torch.randn(n, WIDTH)), lambda x, mask, y: torch.where(mask, x, y)),
    Workload("masked_fill", masked, lambda x, mask: x.masked_fill(mask, float("-inf"))),
    Workload("mean over the last", rows, lambda x: x.mean(-1, keepdim=True)),
    Workload("mean over n", rows, lambda x: x.mean(0)),
    Workload("sum of all", rows, torch.sum),
    Workload("max over the last", rows, lambda x: x.max(-1)),
    Workload("max over n", rows, lambda x: x.max(0)),
    Workload("argmax", rows, lambda x: x.argmax(-1)),
    Workload("var", rows, lambda x: x.var(-1)),
    Workload("rms_norm", with_parameters(rows, (WIDTH,)), lambda x, w: F.rms_norm(x, (WIDTH,), w)),
    Workload("group_norm", images, lambda x: F.group_norm(x, 2)),
    Workload("batch_norm", with_parameters(images, (4,)), lambda x, m: F.batch_norm(x, m, m * m + 1)),
    Workload("batch_norm, training", images, lambda x: F.batch_norm(x, None, None, training=True)),
    Workload("mm", with_parameters(rows, SQUARE), torch.mm),
    Workload("mm over n", lambda n: (torch.randn(WIDTH, n), torch.randn(n, WIDTH)), torch.mm),
    Workload("bmm", lambda n: (torch.randn(2, n, WIDTH), torch.randn(2, WIDTH, n)), torch.bmm),
    Workload("addmm", with_parameters(rows, SQUARE, (WIDTH,)), lambda x, w, b: torch.addmm(b, x, w)),
    Workload("linear", with_parameters(rows, SQUARE, (WIDTH,)), F.linear),
    Workload("linear, batched", with_parameters(lambda n: (torch.randn(2, n, WIDTH),), SQUARE, (WIDTH,)), F.linear),
    Workload("matmul, 4 dimensions", lambda n: heads(n)[:2], lambda q, k: q @ k.transpose(-2, -1)),
    Workload("attention", heads, F.scaled_dot_product_attention),
    Workload("attention, causal", heads, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    Workload("attention of one query", one_query, F.scaled_dot_product_attention),
    Workload("embedding", lambda n: (indices(n)[None], torch.randn(WIDTH, WIDTH)), F.embedding),
    Workload("conv2d", with_parameters(images, (8, 4, 3, 3), (8,)), lambda x, w, b: F.conv2d(x, w, b, padding=1)),
    Workload("conv2d, 1x1", with_parameters(images, (8, 4, 1, 1)), F.conv2d),
    Workload("conv2d, stride 2", with_parameters(images, (8, 4, 3, 3)), lambda x, w: F.conv2d(x, w, stride=2)),
    Workload("max_pool2d", images, lambda x: F.max_pool2d(x, 3, 2, 1)),
    Workload("avg_pool2d", images, lambda x: F.avg_pool2d(x, 2)),
    Workload("adaptive_avg_pool2d", images, lambda x: F.adaptive_avg_pool2d(x, 1)),
    Workload("interpolate", images, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)),
    Workload("pad", images, lambda x: F.pad(x, (1, 1, 1, 1))),
    Workload("topk", rows, lambda x: x.topk(4)),
    Workload("topk over n", lambda n: (torch.randn(2, n),), lambda x: x.topk(4)),
    Workload("sort", rows, lambda x: x.sort(-1)),
    Workload("arange", lambda n: (torch.zeros(1), n), lambda x, n: torch.arange(n, device=x.device)),
    Workload("zeros", lambda n: (torch.zeros(1), n), lambda x, n: torch.zeros(n, WIDTH, device=x.device)),
    Workload("ones_like", rows, torch.ones_like),
    Workload("gather", lambda n: (torch.randn(n, WIDTH), indices(n)[:, None]), lambda x, i: x.gather(1, i)),
    Workload("x[indices]", lambda n: (torch.randn(WIDTH, WIDTH), indices(n)), lambda x, i: x[i]),
    Workload(
        "index_add",
        lambda n: (torch.randn(*SQUARE), indices(n), torch.randn(n, WIDTH)),
        lambda x, i, y: x.index_add(0, i, y),
    ),
    Workload("x[:n] = 1", and_size(rows), lambda x, n: x[:n].fill_(1)),
    Workload("expand + contiguous", lambda n: (torch.randn(1, n, 8),), lambda x: x.expand(4, -1, -1).contiguous()),
    Workload("transpose + contiguous", lambda n: (torch.randn(n, WIDTH),), lambda x: x.T.contiguous()),
    Workload("heads made contiguous", heads, lambda q, k, v: q.transpose(1, 2).reshape(1, -1, 2 * WIDTH)),
    Workload("clone", rows, torch.clone),
    Workload("stack", two_of(rows), lambda x, y: torch.stack([x, y])),
    Workload("cumsum", rows, lambda x: x.cumsum(-1)),
    Workload("cumsum over n", rows, lambda x: x.cumsum(0)),
    Workload("triu", lambda n: (torch.randn(n, n),), lambda x: x.triu(1)),
    Workload("tril", lambda n: (torch.randn(n, n),), torch.tril),
    Workload("eq", two_of(rows), torch.eq),
    Workload("any", masked, lambda x, mask: mask.any()),
    Workload("nll_loss", lambda n: (torch.randn(n, WIDTH), indices(n)), F.nll_loss),
    Workload("cross_entropy", lambda n: (torch.randn(n, WIDTH), indices(n)), F.cross_entropy),
    Workload("mse_loss", two_of(rows), F.mse_loss),
    Workload("dropout", rows, F.dropout),
    Workload("randn", lambda n: (torch.zeros(1), n), lambda x, n: torch.randn(n, WIDTH, device=x.device)),
    Workload(
        "lstm_cell",
        with_parameters(
            lambda n: tuple(torch.randn(n, WIDTH) for _ in range(3)), (4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH)
        ),
        lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u),
        is_program=True,
    ),
    Workload("layer_norm, gelu of linear, sum", with_parameters(rows, SQUARE, (WIDTH,)), block, is_program=True),
    Workload("softmax(x[:n] @ w, -1).sum(0) and its gradients", trained, backward, is_program=True),
]


@dataclasses.dataclass
class Served:
    """How operators with planners handled new shapes."""

    dynamic_shape_replays_of: int = 0
    planner_calls: int = 0
    traces: int = 0
    exact: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # operators whose planner ran: reasons

    def add(self, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
        """Adds the changes between two results of `stats`."""
        for name, now in after.items():

            def risen(count: str, name: str = name, now: dict[str, Any] = now) -> int:
                return int(now.get(count, 0) - before.get(name, {}).get(count, 0))

            self.dynamic_shape_replays_of += risen("dynamic_shape_replays")
            self.traces += risen("traces")
            planned = risen("planner_calls") + risen("unplannable_calls")
            self.planner_calls += planned
            if planned:
                self.exact[name] = sorted({*now["reasons"], *now.get("reasons_for_exact", [])})

    def share(self) -> str:
        calls = self.dynamic_shape_replays_of + self.planner_calls
        return f"{int(100 * self.dynamic_shape_replays_of / calls)} %" if calls else "no planner"


@dataclasses.dataclass
class Result:
    """Medians over the calls in microseconds: "new", "again", "seen" and "first" as in the module's docstring."""

    workload: str
    device_us: dict[str, float]
    cpu_us: dict[str, float]
    is_program: bool
    held: bool  # whether the device was held up meanwhile; False if the call waits for it
    served: Served

    def costs_little_more(self, than: str = "seen") -> bool:
        return self.device_us["new"] - self.device_us[than] <= MORE

    def is_no_multiple(self, than: str = "seen") -> bool:
        return self.device_us["new"] <= TIMES * self.device_us[than]

    def is_good(self) -> bool:
        return self.is_no_multiple() and (self.is_program or self.costs_little_more())


def stats(device: torch.device) -> dict[str, dict[str, Any]]:
    if device.type != "bp":
        return {}
    from torch_backplane import plans

    return plans.stats(used=False)


def forget(device: torch.device) -> None:
    """Drops the plans of earlier workloads, but not their kernels."""
    if device.type == "bp":
        from torch_backplane import plans

        plans.clear()


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def moved(operands: Operands, device: torch.device) -> Operands:
    """Copies of the operands on `device`, in fresh memory also on the CPU."""
    found = []
    for one in operands:
        if isinstance(one, torch.Tensor):
            there = one.detach().to(device, copy=True)
            one = there.requires_grad_(one.requires_grad)
        found.append(one)
    return tuple(found)


def hold(device: torch.device) -> None:
    """Keeps the device busy so that it does not start the following work.

    If the device is the CPU, its work would take cores from the measured program.
    """
    if device.type == "bp" and torch.get_device_module(device).get_device_properties(device).dialect:
        torch.get_device_module(device)._sleep(HELD * 1_000_000)


def timed(call: Callable[..., object], given: Sequence[Operands]) -> list[float]:
    """Microseconds until each call returned."""
    times = []
    for operands in given:
        start = time.perf_counter()
        call(*operands)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def waits(call: Callable[..., object], operands: Operands, device: torch.device) -> bool:
    """Whether the call returns only after the device has finished its work."""
    hold(device)
    (took,) = timed(call, [operands])
    wait(device)
    return took > HELD * 1000 / 2


def sizes(count: int) -> list[int]:
    """`count` different sizes in random order, the largest first: a launch wider than all before can wait for them."""
    found = list(range(SMALLEST, SMALLEST + count - 1))
    random.Random(count).shuffle(found)
    return [SMALLEST + count - 1, *found]


def run(workload: Workload, device: torch.device, rounds: int, calls: int, known: int) -> Result:
    """Runs the workload with new shapes and then with the same shapes, on `device` and on the CPU in turn.

    Args:
        rounds: number of rounds, each with `calls` new shapes.
        known: number of shapes that are called beforehand.
    """
    places = [device, torch.device("cpu")]
    forget(device)
    ahead = iter(sizes(known + rounds * calls))
    met = [[moved(made, place) for place in places] for made in (workload.operands(next(ahead)) for _ in range(known))]
    for each in met:
        for place, operands in zip(places, each, strict=True):
            timed(workload.call, [operands] * 2)
            wait(place)
    first = met[0]
    held = not waits(workload.call, first[0], device)
    how = Served()
    times: list[dict[str, list[float]]] = [{"new": [], "again": [], "seen": [], "first": []} for _ in places]
    for _ in range(rounds):
        several = [workload.operands(next(ahead)) for _ in range(calls)]
        for place, familiar, found in zip(places, first, times, strict=True):
            given, untouched = ([moved(made, place) for made in several] for _ in range(2))
            wait(place)
            if held:
                hold(place)
            timed(workload.call, [familiar] * WARM_UP)
            before = stats(place)
            found["new"] += timed(workload.call, given)
            how.add(before, stats(place))
            timed(workload.call, [familiar] * WARM_UP)
            found["again"] += timed(workload.call, given)
            timed(workload.call, [familiar] * WARM_UP)
            found["seen"] += timed(workload.call, untouched)
            found["first"] += timed(workload.call, [familiar] * calls)
            wait(place)
    medians = [{name: statistics.median(values) for name, values in found.items()} for found in times]
    return Result(workload.title, medians[0], medians[1], workload.is_program, held, how)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str | None, typer.Option(help="use only these Backplane drivers, comma-separated")] = None,
    match: Annotated[str, typer.Option(help="run only workloads whose title matches this regular expression")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="rounds of new and then seen shapes on each device")] = 8,
    calls: Annotated[int, typer.Option(min=1, help="new shapes per round")] = 8,
    known: Annotated[int, typer.Option(min=1, help="shapes that are called beforehand")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch's CPU threads")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures microseconds per call of a new shape, of a seen one, and on the CPU."""
    torch.manual_seed(0)
    place = machine.place(device, driver, threads)
    chosen = [workload for workload in WORKLOADS if re.search(match, workload.title)]
    if not chosen:
        sys.exit(f"--match {match}: none of the {len(WORKLOADS)} workloads matches")
    results = [run(workload, place, rounds, calls, known) for workload in chosen]
    environment = machine.environment(place, threads) | {
        "new shapes": rounds * calls,
        "known before": known,
    }
    operators = [result for result in results if not result.is_program]
    summary = {"operators": len(operators)}
    for than in ("seen", "first"):
        summary[f"at most {MORE:g} µs more than {than}"] = sum(result.costs_little_more(than) for result in operators)
        summary[f"at most {TIMES:g} times {than}"] = sum(result.is_no_multiple(than) for result in operators)
    summary |= {
        "planners ran for new shapes": sum(result.served.planner_calls > 0 for result in operators),
    }
    if as_json:
        rows = [dataclasses.asdict(result) for result in results]
        print(json.dumps(environment | {"summary": summary, "results": rows}, indent=2))
        return
    caption = ", ".join(f"{key} {value}" for key, value in environment.items())
    table = Table(title="microseconds until a call returns", caption=caption)
    table.add_column("")
    for heading in ("new", "again", "seen", "first", "new/seen", "cpu new", "cpu seen", "new/cpu", "any shape"):
        table.add_column(heading, justify="right")
    for result in results:
        here, cpu = result.device_us, result.cpu_us
        table.add_row(
            escape(result.workload),
            *(f"{figure:.1f}" for figure in here.values()),
            f"{'' if result.is_good() else '! '}{here['new'] / here['seen']:.2f}",
            f"{cpu['new']:.1f}",
            f"{cpu['seen']:.1f}",
            f"{here['new'] / cpu['new']:.2f}",
            result.served.share(),
        )
    Console().print(table)
    for result in results:
        for name, reasons in result.served.exact.items():
            print(f"{result.workload}: {name} ran its planner: {shortened('; '.join(reasons)) or 'no guards held'}")
        if not result.held:
            print(f"{result.workload}: the call waits for the device, which was not held up")
    print(", ".join(f"{name}: {value}" for name, value in summary.items()))


if __name__ == "__main__":
    typer.run(main)
