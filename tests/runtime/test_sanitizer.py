"""torch_backplane.testing.sanitizer: it finds races between streams, without false alarms."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_backplane.testing import sanitizer
from torch_backplane.testing.sanitizer import RaceError

bp = torch.bp


@pytest.fixture(autouse=True)
def _at_rest() -> Iterator[None]:
    yield
    bp.synchronize()


def other_stream() -> Any:
    stream = bp.Stream()
    stream.wait_stream(bp.current_stream())
    return stream


def test_a_race_of_a_read_and_a_write_reports_both_stacks() -> None:
    with sanitizer.sanitize():
        x = torch.ones(1024, device="bp")
        side = other_stream()
        x.mul_(2)
        with bp.stream(side), pytest.raises(RaceError) as found:
            x + 1
    error = found.value
    assert (error.first.writes, error.second.writes) == (True, False)
    assert (error.first.operator, error.second.operator) == ("aten.mul_.Tensor", "aten.add.Tensor")
    text = str(error)
    assert f"4,096 bytes of bp:0 at {x.data_ptr():#x}" in text
    assert "writes argument self on stream 0 of bp:0" in text
    assert f"reads argument self on stream {side.stream_id} of bp:0" in text
    assert (text.count("x.mul_(2)"), text.count("x + 1")) == (1, 1)
    assert x.tolist() == [2] * 1024


WAITS: dict[str, Callable[[Any, Any], object]] = {
    "wait_stream": lambda first, second: second.wait_stream(first),
    "an event": lambda first, second: second.wait_event(first.record_event()),
    "an event that is waited for": lambda first, second: first.record_event().synchronize(),
    "the stream": lambda first, second: first.synchronize(),
    "the device": lambda first, second: bp.synchronize(),
    "through a third stream": lambda first, second: (
        (third := bp.Stream()).wait_stream(first),
        second.wait_stream(third),
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_every_way_to_wait_prevents_a_race(name: str) -> None:
    with sanitizer.sanitize() as looked:
        x = torch.ones(64, device="bp")
        first, second = other_stream(), other_stream()
        with bp.stream(first):
            x.mul_(2)
        WAITS[name](first, second)
        with bp.stream(second):
            x.add_(1)
        WAITS[name](second, bp.current_stream())
        assert x.sum().item() == 192
        assert looked.operators >= 4


def test_waiting_for_an_earlier_event_is_a_race() -> None:
    with sanitizer.sanitize():
        x = torch.ones(64, device="bp")
        side = other_stream()
        early = bp.current_stream().record_event()
        x.mul_(2)
        side.wait_event(early)
        with bp.stream(side), pytest.raises(RaceError):
            x.add_(1)


def test_concurrent_reads_and_parts_of_a_tensor() -> None:
    with sanitizer.sanitize():
        x = torch.ones(8, 64, device="bp")
        first, second = other_stream(), other_stream()
        for stream in (first, second):
            with bp.stream(stream):
                x.sum()
                x.view(-1).exp()
        columns = torch.ones(8, 64, device="bp")
        first.wait_stream(bp.current_stream())
        second.wait_stream(bp.current_stream())
        with bp.stream(first):
            x2 = columns[:, :32]
            x2.mul_(2)
            columns[0].narrow(0, 0, 4).zero_()
        with bp.stream(second):
            columns[:, 32:].mul_(3)
            with pytest.raises(RaceError, match=r"^16 bytes of bp:0 at"):
                columns[0].sum()


def test_memory_that_another_stream_still_uses() -> None:
    """The block returns to the stream that allocated it, and the next tensor on this stream reuses it."""

    def program(record: bool) -> None:
        x = torch.ones(1 << 16, device="bp")
        side = other_stream()
        with bp.stream(side):
            x.sum()
        if record:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        y = torch.zeros(1 << 16, device="bp")
        assert record or y.data_ptr() == address
        bp.current_stream().wait_stream(side)

    with sanitizer.sanitize():
        program(record=True)
        bp.synchronize()
        with pytest.raises(RaceError, match="its result"):
            program(record=False)


def test_backward_passes_are_checked() -> None:
    with sanitizer.sanitize():
        x = torch.ones(64, device="bp", requires_grad=True)
        side = other_stream()
        with bp.stream(side):
            loss = (x * x).sum()
        bp.current_stream().wait_stream(side)
        loss.backward()
        bp.current_stream().wait_stream(side)
        assert x.grad.sum().item() == 128
        again = bp.Stream()
        x.grad.add_(1)
        with bp.stream(again), pytest.raises(RaceError):
            x.grad.add_(1)


def test_copies_between_devices_synchronize_the_streams() -> None:
    if bp.device_count() < 2:
        pytest.skip("needs two devices")
    with sanitizer.sanitize():
        x = torch.ones(1000, device="bp:0")
        y = x.to("bp:1")
        y.add_(1)
        x.copy_(y)
        assert x.sum().item() == 2000
        host = x.cpu()
        assert host.sum().item() == 2000


def test_waiting_for_either_stream_of_a_copy_between_devices() -> None:
    """As in a reduction: one device adds another's gradient and sends the sum back."""
    if bp.device_count() < 2:
        pytest.skip("needs two devices")
    first, second = (torch.bp.Stream(f"bp:{index}") for index in range(2))
    with sanitizer.sanitize():
        total, gradient = (torch.ones(1000, device=f"bp:{index}") for index in range(2))
        first.wait_stream(bp.current_stream(0))
        second.wait_stream(bp.current_stream(1))
        with first:
            total.add_(gradient.to(total.device))  # copies on the current stream of bp:1, not on `second`
        second.wait_stream(first)
        with second:
            gradient.copy_(total)
        first.wait_stream(bp.current_stream(0))
        with first:  # with devices of two drivers, the host can have waited for the copies
            total.add_(1)
        with torch.bp.Stream("bp:0"), pytest.raises(RaceError):
            total.add_(1)


def test_captured_operators_have_not_run() -> None:
    with sanitizer.sanitize():
        x = torch.ones(64, device="bp")
        for _ in range(2):  # each on another stream
            graph = bp.Graph()
            with bp.graph(graph, stream=bp.Stream()):
                x.add_(1)
            x.mul_(2)
            graph.replay()
            assert x.cpu().unique().numel() == 1
        side = other_stream()
        x.add_(1)
        with bp.stream(side), pytest.raises(RaceError):
            x.mul_(2)


@pytest.mark.parametrize("name", ["item", "tolist", "cpu", "nonzero", "equal", "unique"])
def test_operators_that_synchronize(name: str) -> None:
    def wait(x: torch.Tensor) -> object:
        return x.sum().item() if name == "item" else x.equal(x + 1) if name == "equal" else getattr(x, name)()

    with sanitizer.sanitize():
        x = torch.ones(64, device="bp")
        side = other_stream()
        wait(x)
        with bp.stream(side):
            x.mul_(2)
        bp.current_stream().wait_stream(side)
        x.sum()
        with bp.stream(side), pytest.raises(RaceError):
            x.mul_(2)


def test_copies_from_pageable_memory_have_completed() -> None:
    """As in torch.cuda. Only non-blocking copies from pinned memory can be pending."""
    with sanitizer.sanitize():
        x = torch.ones(64).to("bp")
        with bp.stream(bp.Stream()):
            x.add_(1)


def test_lazy_copies_stay_lazy() -> None:
    x = torch.ones(64, device="bp")
    with sanitizer.sanitize():
        lazy = x._lazy_clone()
        x.sum()
        lazy.sum()
        assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def test_fake_tensors_have_no_memory() -> None:
    with sanitizer.sanitize() as looked, FakeTensorMode():
        x = torch.ones(64, device="bp")
        with bp.stream(bp.Stream()):
            x.add_(1)
        assert looked.operators == 0


def test_a_race_within_a_graph() -> None:
    with sanitizer.sanitize():
        x = torch.ones(64, device="bp")
        graph, stream, side = bp.Graph(), bp.Stream(), bp.Stream()
        with bp.graph(graph, stream=stream):
            y = x + 1
            side.wait_stream(stream)
            x.mul_(2)
            with bp.stream(side):
                y.mul_(2)
                with pytest.raises(RaceError, match="mul_"):
                    x.sub_(1)
            stream.wait_stream(side)
        graph.replay()
        assert x.cpu().unique().numel() == 1


def test_sanitize_ends_with_its_block_and_does_not_nest() -> None:
    x = torch.ones(8, device="bp")
    with sanitizer.sanitize():
        with pytest.raises(RuntimeError, match="enabled already"):
            sanitizer.enable()
        with pytest.raises(RuntimeError, match="enabled already"), sanitizer.sanitize():
            pass
    side = bp.Stream()
    x.mul_(2)
    with bp.stream(side):
        x + 1


def test_other_threads_are_not_checked() -> None:
    found: list[BaseException] = []

    def race() -> None:
        try:
            x = torch.ones(8, device="bp")
            with bp.stream(bp.Stream()):
                x.mul_(2)
        except BaseException as error:
            found.append(error)

    with sanitizer.sanitize():
        thread = threading.Thread(target=race)
        thread.start()
        thread.join()
    assert not found


def test_the_environment_variable_enables_the_sanitizer(run_python: Callable[..., Any]) -> None:
    code = """
import torch
x = torch.ones(8, device="bp")
side = torch.bp.Stream()
side.wait_stream(torch.bp.current_stream())
x.mul_(2)
with torch.bp.stream(side):
    x.add_(1)
"""
    done = run_python(code, TORCH_BACKPLANE_SANITIZER="1")
    assert done.returncode == 1
    assert "RaceError: 32 bytes of bp:0" in done.stderr
    assert run_python(code, TORCH_BACKPLANE_SANITIZER="0").returncode == 0
    assert "is not one of 0, 1" in run_python(code, TORCH_BACKPLANE_SANITIZER="2").stderr


# --- races injected into correct programs


class Step(NamedTuple):
    stream: int
    read: int
    written: int


class Wait(NamedTuple):
    stream: int
    on: int


STREAMS, TENSORS, STEPS = 4, 3, 14


def races(program: list[Step | Wait]) -> bool:
    """Whether two unordered steps use one tensor and one of them writes. Uses reachability, not vector clocks."""
    before: list[set[int]] = []  # for each place, the places that are complete before it begins
    latest = [set[int]() for _ in range(STREAMS)]
    for place, item in enumerate(program):
        if isinstance(item, Wait):
            latest[item.stream] |= latest[item.on]
            before.append(set())
            continue
        before.append(set(latest[item.stream]))
        for other_place in range(place):
            other = program[other_place]
            if not isinstance(other, Step) or other_place in before[place]:
                continue
            if item.written in (other.written, other.read) or item.read == other.written:
                return True
        latest[item.stream].add(place)
    return False


def right_program(chance: random.Random) -> list[Step | Wait]:
    program: list[Step | Wait] = []
    for _ in range(STEPS):
        step = Step(chance.randrange(STREAMS), chance.randrange(TENSORS), chance.randrange(TENSORS))
        while races([*program, step]):
            program.append(Wait(step.stream, chance.choice([one for one in range(STREAMS) if one != step.stream])))
        program.append(step)
    return program


def run(program: list[Step | Wait]) -> None:
    tensors = [torch.full((16,), float(index), device="bp") for index in range(TENSORS)]
    streams = [bp.current_stream(), *(bp.Stream() for _ in range(STREAMS - 1))]
    for stream in streams[1:]:
        stream.wait_stream(streams[0])
    for item in program:
        if isinstance(item, Wait):
            streams[item.stream].wait_stream(streams[item.on])
            continue
        with bp.stream(streams[item.stream]):
            if item.read == item.written:
                tensors[item.written].mul_(0.5)
            else:
                tensors[item.written].add_(tensors[item.read])


def test_a_hundred_injected_races_are_found() -> None:
    chance = random.Random(0)
    injected = found = alarms = 0
    while injected < 100:
        program = right_program(chance)
        waits = [place for place, item in enumerate(program) if isinstance(item, Wait)]
        chance.shuffle(waits)
        without = [program[:place] + program[place + 1 :] for place in waits]
        wrong = next((one for one in without if races(one)), None)
        if wrong is None:
            continue
        injected += 1
        for which, is_wrong in ((program, False), (wrong, True)):
            try:
                with sanitizer.sanitize():
                    run(which)
            except RaceError:
                found += is_wrong
                alarms += not is_wrong
            bp.synchronize()
    assert (found, alarms) == (100, 0)
