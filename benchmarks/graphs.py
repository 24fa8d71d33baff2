"""Compares replays of graphs with the same steps run eagerly, and on the CPU.

    python benchmarks/graphs.py --driver opencl
    python benchmarks/graphs.py --match chain --json

Times are microseconds per step, or per operator if a step is a chain of operators.

A chain on OpenCL is also launched on the same queue by a bare loop in C, with as many clEnqueueNDRangeKernel calls of
the same functions with the same arguments and group sizes. A kernel that is launched with other arguments than before
needs clSetKernelArg, so the loop calls it as often as the replay does. This loop is the reference for a replay. A
second loop has a kernel object for each launch, whose arguments were set in advance: the minimum that OpenCL can take.

"device" is the time that the device works on a replay, according to a profile; a graph cannot reduce it. "at most" is
the eager time divided by it: the speedup of a replay that has no other costs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import interleaving
import launches
import report
import torch
import typer
from torch import nn

CHAIN = 1000
AIM = 1.3  # time of a replay of the chain divided by that of the loop in C
TITLE = "µs per step, or per operator of a chain"


Step = Callable[[], torch.Tensor]


def chain(device: torch.device) -> Step:
    """`CHAIN` operators on 64 elements, each of which depends on the previous one."""
    x = torch.ones(64).to(device)

    def step() -> torch.Tensor:
        y = x
        for _ in range(CHAIN // 4):
            y = (y + 1).mul_(0.5).sin_().neg_()
        return y

    return step


def training(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Step:
    """Forward, loss, backward and the optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=x.device.type != "cpu")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


class Tagger(nn.Module):
    """A two-layer LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 32), nn.LSTM(32, 64, 2), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Writer(nn.Module):
    """A GPT like that of examples/train_gpt.py, but smaller."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.place = nn.Embedding(65, 64), nn.Parameter(torch.zeros(32, 64))
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x) + self.place, self.mask, is_causal=True))


def tagger(device: torch.device) -> Step:
    x = torch.randint(0, 50, (24, 16))
    return training(Tagger().to(device), x.to(device), (x % 10).to(device))


def writer(device: torch.device) -> Step:
    x = torch.randint(0, 65, (8, 32))
    return training(Writer().to(device), x.to(device), x.to(device))


ROWS: dict[str, tuple[Callable[[torch.device], Step], int]] = {
    f"chain of {CHAIN} operators": (chain, CHAIN),
    "training step of a GPT": (writer, 1),
    "training step of an LSTM": (tagger, 1),
}


@dataclasses.dataclass
class Result:
    """Median microseconds (`device_us`: the device's work in a replay), and medians over the rounds of ratios.

    `by_eager` and `by_cpu` are speedups of a replay. `by_loop` and `by_set_before` are its time divided by a loop's.
    """

    title: str
    nodes: int
    replay_us: float
    eager_us: float
    cpu_us: float
    device_us: float
    by_eager: float
    by_cpu: float
    near_loop_us: float | None = None  # the replay, when it alternates with the loops
    loop_us: float | None = None
    by_loop: float | None = None
    set_before_us: float | None = None  # the loop whose arguments were set in advance
    by_set_before: float | None = None
    without_loop: str = ""  # the reason if there is no loop


def replayed(step: Step) -> tuple[torch.bp.Graph, torch.Tensor]:  # type: ignore[name-defined]
    """Captures a step after a warm-up, and returns the graph and the step's result."""
    stream = torch.bp.Stream()  # type: ignore[attr-defined]
    stream.wait_stream(torch.bp.current_stream())  # type: ignore[attr-defined]
    with stream:
        for _ in range(3):
            step()
    torch.bp.current_stream().wait_stream(stream)  # type: ignore[attr-defined]
    graph = torch.bp.Graph()  # type: ignore[attr-defined]
    with torch.bp.graph(graph):  # type: ignore[attr-defined]
        result = step()
    return graph, result


def device_seconds(graph: torch.bp.Graph, replays: int) -> float:  # type: ignore[name-defined]
    """Microseconds that the device works on a replay, from a profile of `replays` replays."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.PrivateUse1]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.accelerator.synchronize()
    return sum(event.device_time_total for event in profile.events()) / replays


def watched() -> launches.Watch | launches.Unavailable:
    """Starts recording OpenCL's launches, or returns the reason why that is impossible."""
    try:
        return launches.Watch()
    except launches.Unavailable as error:
        return error


def bare_loops(
    watch: launches.Watch | launches.Unavailable,
    graph: torch.bp.Graph,  # type: ignore[name-defined]
    result: torch.Tensor,
) -> list[launches.Loop]:
    """Loops in C that do what the graph does: one sets arguments in the loop, one in advance. Checks their results.

    Raises:
        Unavailable: nothing was recorded, or OpenCL does not launch all of the graph's nodes.
    """
    if isinstance(watch, launches.Unavailable):
        raise watch
    for _ in range(2):  # the second replay sets the same arguments as any later one
        start = watch.calls()
        graph.replay()
        torch.accelerator.synchronize(result.device)
    given = watch.launches(start)
    watch.stop()
    if len(given) != len(graph):
        raise launches.Unavailable(f"OpenCL launched {len(given)} kernels for {len(graph)} nodes")
    expected = result.cpu()
    loops = [watch.loop(given, beforehand) for beforehand in (False, True)]
    for loop in loops:
        result.zero_()
        torch.accelerator.synchronize(result.device)
        loop()
        loop.finish()
        if not torch.equal(result.cpu(), expected):
            raise RuntimeError("the loop in C and the replay have different results")
    return loops


def run(title: str, place: torch.device, rounds: int, watch: launches.Watch | launches.Unavailable) -> Result:
    """Runs the row's step as a replay, eagerly and on the CPU in turn; a chain also with the loops in C."""
    make, operators = ROWS[title]
    torch.manual_seed(0)
    step = make(place)  # keeps the inputs alive, which the graph reads at each replay
    graph, result = replayed(step)
    loops, without = [], ""
    if operators > 1:
        try:
            loops = bare_loops(watch, graph, result)
        except launches.Unavailable as error:
            without = str(error)

    def timed(bodies: list[interleaving.Body], sides: list[interleaving.Side]) -> tuple[list[list[float]], list[float]]:
        """Each body's times in the rounds, and its median in microseconds per operator."""
        pairs = list(zip(bodies, sides, strict=True))
        for _ in range(2):  # the first calls are slow, especially in the CPU's process
            once = max(interleaving.seconds(body, side.place, 3, side.finish) for body, side in pairs)
        times = interleaving.interleaved_times(bodies, sides, max(1, int(0.1 / once)), rounds)
        return times, [statistics.median(one) * 1e6 / operators for one in times]

    here = interleaving.Side(place)
    times, (replay, eager, cpu) = timed(
        [graph.replay, step, interleaving.RemoteBody(make)], [here, here, interleaving.Side(interleaving.CPU)]
    )
    by_eager, by_cpu = interleaving.ratio(times[0], times[1]), interleaving.ratio(times[0], times[2])
    device = device_seconds(graph, 10) / operators
    found = Result(title, len(graph), replay, eager, cpu, device, by_eager, by_cpu, without_loop=without)
    if loops:  # measured separately: a queue is faster after a pause, such as the CPU's turn
        finished = [interleaving.Side(place, finish=loop.finish) for loop in loops]
        times, medians = timed([graph.replay, *loops], [here, *finished])
        found.near_loop_us, found.loop_us, found.set_before_us = medians
        found.by_loop, found.by_set_before = (interleaving.ratio(one, times[0]) for one in times[1:])
    return found


def loop_ratios(results: Sequence[Result]) -> dict[str, str]:
    """The lines to print about the loops in C."""
    ratios = {}
    for one in results:
        if one.without_loop:
            ratios[f"{one.title}, without a loop in C"] = one.without_loop
        elif one.by_loop is not None:
            ratios[f"{one.title}, replay ÷ loop in C (aim {AIM})"] = (
                f"{one.by_loop:.2f}; {one.near_loop_us:.2f} and {one.loop_us:.2f} µs"
            )
            before = f"{one.by_set_before:.2f}; {one.set_before_us:.2f} µs"
            ratios[f"{one.title}, replay ÷ loop with arguments set in advance"] = before
    return ratios


def main(
    driver: report.Driver = None,
    generated: report.Generated = False,
    match: report.Match = "",
    rounds: report.Rounds = 7,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares replays of graphs with the same steps run eagerly, and on the CPU."""
    titles = report.chosen(ROWS, match)
    watch = watched()  # before a device is used
    place, environment = report.begin(driver, threads, generated=generated)
    results = [run(title, place, rounds, watch) for title in titles]
    cells = [
        [
            one.title, str(one.nodes), f"{one.replay_us:,.1f}", f"{one.eager_us:,.1f}", f"{one.cpu_us:,.1f}",
            f"{one.device_us:,.1f}", f"{one.by_eager:.2f}", f"{one.eager_us / one.device_us:.2f}", f"{one.by_cpu:.2f}",
        ]
        for one in results
    ]  # fmt: skip
    columns = ("", "nodes", "replay", "eager", "cpu", "device", "eager ÷ replay", "at most", "cpu ÷ replay")
    environment |= {"rounds": rounds, "generated": generated}
    report.print_report(environment, results, TITLE, columns, cells, as_json, loop_ratios(results))


if __name__ == "__main__":
    typer.run(main)
