"""Graphs: a step that is given to the device again in one call, beside the same step eagerly, and beside the CPU.

    python benchmarks/graphs.py --driver opencl
    python benchmarks/graphs.py --match chain --json

Times are microseconds of a step, or of an operator where a step is a chain of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

import report
import torch
import turns
import typer
from torch import nn

CHAIN = 1000


def chain(device: torch.device) -> turns.Body:
    """So many operators on 64 numbers, each of which waits for the one before."""
    x = torch.ones(64).to(device)

    def step() -> torch.Tensor:
        y = x
        for _ in range(CHAIN // 4):
            y = (y + 1).mul_(0.5).sin_().neg_()
        return y

    return step


def training(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> turns.Body:
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
    """A GPT as examples/train_gpt.py's, smaller."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.place = nn.Embedding(65, 64), nn.Parameter(torch.zeros(32, 64))
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x) + self.place, self.mask, is_causal=True))


def tagger(device: torch.device) -> turns.Body:
    x = torch.randint(0, 50, (24, 16))
    return training(Tagger().to(device), x.to(device), (x % 10).to(device))


def writer(device: torch.device) -> turns.Body:
    x = torch.randint(0, 65, (8, 32))
    return training(Writer().to(device), x.to(device), x.to(device))


ROWS: dict[str, tuple[Callable[[torch.device], turns.Body], int]] = {
    f"chain of {CHAIN} operators": (chain, CHAIN),
    "training step of a GPT": (writer, 1),
    "training step of an LSTM": (tagger, 1),
}


@dataclasses.dataclass
class Result:
    """Median microseconds, and medians over the rounds of how many times as fast a replay is."""

    title: str
    nodes: int
    replay_us: float
    eager_us: float
    cpu_us: float
    by_eager: float
    by_cpu: float


def replayed(step: turns.Body) -> tuple[torch.bp.Graph, turns.Body]:  # type: ignore[name-defined]
    """The graph of a step, once it is warm, and what replays it."""
    stream = torch.bp.Stream()  # type: ignore[attr-defined]
    stream.wait_stream(torch.bp.current_stream())  # type: ignore[attr-defined]
    with stream:
        for _ in range(3):
            step()
    torch.bp.current_stream().wait_stream(stream)  # type: ignore[attr-defined]
    graph = torch.bp.Graph()  # type: ignore[attr-defined]
    with torch.bp.graph(graph):  # type: ignore[attr-defined]
        step()
    return graph, graph.replay


def run(title: str, place: torch.device, rounds: int) -> Result:
    make, operators = ROWS[title]
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    step = make(place)  # has the inputs, which the graph reads at each replay
    graph, replay = replayed(step)
    torch.manual_seed(0)
    bodies = [replay, step, make(cpu)]
    sides = [turns.Side(place), turns.Side(place), turns.Side(cpu)]
    once = max(turns.seconds(body, side.place, 2) for body, side in zip(bodies, sides, strict=True))
    times = turns.in_turn(bodies, sides, max(1, int(0.1 / once)), rounds)
    replays, eagers, cpus = (statistics.median(one) * 1e6 / operators for one in times)
    by_eager, by_cpu = turns.ratio(times[0], times[1]), turns.ratio(times[0], times[2])
    return Result(title, len(graph), replays, eagers, cpus, by_eager, by_cpu)


def main(
    driver: report.Driver = None,
    generated: report.Generated = False,
    match: report.Match = "",
    rounds: report.Rounds = 7,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares replays of graphs with the same steps made eagerly, and with the CPU's."""
    titles = report.chosen(ROWS, match)
    place, environment = report.begin(driver, threads, generated=generated)
    results = [run(title, place, rounds) for title in titles]
    cells = [
        [
            one.title, str(one.nodes), f"{one.replay_us:,.1f}", f"{one.eager_us:,.1f}", f"{one.cpu_us:,.1f}",
            f"{one.by_eager:.2f}", f"{one.by_cpu:.2f}",
        ]
        for one in results
    ]  # fmt: skip
    columns = ("", "in the graph", "replay", "eager", "cpu", "eager by replay", "cpu by replay")
    environment |= {"rounds": rounds, "generated": generated}
    report.tell(environment, results, "µs of a step, or of an operator of a chain", columns, cells, as_json)


if __name__ == "__main__":
    typer.run(main)
