"""Graph branches that run concurrently keep the order of dependent commands."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from agreement import DEVICE
from test_graphs import captured

SIZE = 1_000_000  # elements: enough work that concurrent branches are worth the waits between queues

def queues(graph: torch.bp.Graph, path: Path) -> list[int]:
    """The queue of each node, read from the graph's debug dump."""
    graph.debug_dump(str(path / "graph.dot"))
    return [int(found) for found in re.findall(r"queue (\d+)", (path / "graph.dot").read_text())]


def need_queues() -> None:
    if torch.bp.get_device_properties(DEVICE).driver == "host":
        pytest.skip("host devices run everything in the calling thread, so no branches run concurrently")


def inspectable_graph() -> torch.bp.Graph:
    graph = torch.bp.Graph()
    graph.enable_debug_mode()
    return graph


def test_concurrent_branches_use_several_queues(tmp_path: Path) -> None:
    need_queues()
    x = torch.ones(SIZE, device=DEVICE)
    side, third = torch.bp.Stream(), torch.bp.Stream()
    chain = inspectable_graph()
    with captured(chain):  # uses two streams, but nothing can run concurrently
        first = torch.bp.current_stream()
        y = x + 1
        side.wait_stream(first)
        with side:
            y = y * 2
        first.wait_stream(side)
        y = y + 3
    assert queues(chain, tmp_path) == [0, 0, 0]

    forked = inspectable_graph()
    with captured(forked):
        first = torch.bp.current_stream()
        for stream in (side, third):
            stream.wait_stream(first)
        with side:
            a = (x + 1) * 2
        with third:
            b = (x + 3) * 4
        c = (x + 5) * 6
        first.wait_stream(side)
        d = a + c
        first.wait_stream(third)
        e = b + d
    assert queues(forked, tmp_path) == [0, 0, 1, 1, 2, 2, 0, 0]  # the first branch starts on queue 0, which is idle

    small = inspectable_graph()
    with captured(small):  # less work than the waits cost
        first = torch.bp.current_stream()
        side.wait_stream(first)
        with side:
            x[:10] + 1
        x[:10] + 2
        first.wait_stream(side)
    assert queues(small, tmp_path) == [0, 0]
    for number in (1, 2):
        x.fill_(number)
        forked.replay()
        chain.replay()
        assert (y == (number + 1) * 2 + 3).all()
        assert (e == (number + 1) * 2 + (number + 3) * 4 + (number + 5) * 6).all()


def test_more_branches_than_queues(tmp_path: Path) -> None:
    need_queues()
    x = torch.rand(SIZE, device=DEVICE)
    graph, streams = inspectable_graph(), [torch.bp.Stream() for _ in range(20)]
    results = []
    with captured(graph):
        first = torch.bp.current_stream()
        for number, stream in enumerate(streams):
            stream.wait_stream(first)
            with stream:
                results.append((x + number).sin() * 2)
        for stream in streams:
            first.wait_stream(stream)
        total = torch.stack(results).sum(0)
    assert set(queues(graph, tmp_path)) == set(range(8))
    for add in (0, 1):
        x += add
        graph.replay()
        expected = sum((x.cpu() + number).sin() * 2 for number in range(20))
        torch.testing.assert_close(total.cpu(), expected)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_on_several_streams(seed: int) -> None:
    """The capture has only the necessary waits: reads wait for the last write, and writes for earlier accesses."""
    chance = random.Random(seed)
    values = [torch.full((chance.choice((7, 300_000)),), float(number), device=DEVICE) for number in range(6)]
    expected = [value.cpu() for value in values]
    graph, others = torch.bp.Graph(), [torch.bp.Stream() for _ in range(chance.randint(1, 4))]
    program = []
    for _ in range(60):
        source, target = chance.sample(range(len(values)), 2)
        program.append((chance.randrange(len(others) + 1), source, target, chance.random() < 0.3))

    def step(values: list[torch.Tensor], source: int, target: int, heavy: bool) -> None:
        new = values[source].sum()
        for _ in range(4 if heavy else 0):
            new = (values[source] * 0.5 + new).mean()
        values[target].mul_(0.5).add_(new * 1e-3)

    with captured(graph):
        first = torch.bp.current_stream()
        begin = first.record_event()
        streams = [first, *others]
        written = [begin] * len(values)
        read: list[list[torch.bp.Event]] = [[] for _ in values]
        joined = [first]
        for index, source, target, heavy in program:
            stream = streams[index]
            if stream not in joined:
                joined.append(stream)
            for event in (begin, written[source], written[target], *read[target]):
                stream.wait_event(event)
            with stream:
                step(values, source, target, heavy)
            done = stream.record_event()
            read[source].append(done)
            written[target], read[target] = done, []
        for stream in joined[1:]:
            first.wait_stream(stream)

    on = torch.bp.Stream()
    for replay in range(4):
        with on if replay % 2 else torch.bp.current_stream():
            torch.bp.current_stream().wait_stream(torch.bp.default_stream())
            graph.replay()
            found = [value * 2 for value in values]  # submitted after the replay, without synchronizing
            torch.bp.default_stream().wait_stream(torch.bp.current_stream())
        for _, source, target, heavy in program:
            step(expected, source, target, heavy)
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), wanted * 2, rtol=1e-4, atol=1e-4)


def test_random_numbers_follow_the_order_of_the_capture() -> None:
    x = torch.zeros(1000, device=DEVICE)
    graph, side = torch.bp.Graph(), torch.bp.Stream()

    def drawn() -> list[torch.Tensor]:
        first = torch.bp.current_stream()
        side.wait_stream(first)
        with side:
            a = torch.rand_like(x)
        b = torch.rand_like(x)
        first.wait_stream(side)
        return [a, b]

    with captured(graph):
        results = drawn()
    torch.manual_seed(3)
    expected = [[one.cpu() for one in drawn()] for _ in range(2)]
    torch.manual_seed(3)
    for wanted in expected:
        graph.replay()
        assert all(torch.equal(one.cpu(), other) for one, other in zip(results, wanted, strict=True))
