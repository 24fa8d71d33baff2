"""Streams and events of torch.bp, alone and with torch.Stream, torch.Event and torch.accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

MILLISECOND = 1_000_000  # in cycles of torch.bp._sleep


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    """Each test starts on bp:0 with default streams, and leaves no pending work."""
    torch.bp.set_device(0)
    yield
    for index in range(torch.bp.device_count()):
        torch.bp.set_stream(torch.bp.default_stream(index))
        torch.bp.synchronize(index)
    torch.bp.set_device(0)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_new_stream_is_on_the_given_device() -> None:
    for device in (1, "bp:1", torch.device("bp:1"), torch.device("bp", 1)):
        assert torch.bp.Stream(device).device == torch.device("bp:1")
    assert torch.bp.Stream().device == torch.device("bp:0")
    assert torch.bp.Stream(-1).device == torch.device("bp:0")
    with torch.bp.device(2):
        assert torch.bp.Stream().device == torch.device("bp:2")


def test_a_stream_is_a_torch_stream() -> None:
    stream = torch.bp.Stream()
    assert isinstance(stream, torch.Stream)
    plain = torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    assert stream == plain
    assert plain == stream
    assert hash(stream) == hash(plain)
    assert len({stream, plain, torch.bp.Stream()}) == 2
    assert stream != torch.bp.Stream()
    assert stream != torch.bp.default_stream()
    assert stream != 5
    assert stream is not None
    assert repr(stream).startswith("<torch.bp.Stream device=bp:0 bp_stream=0x")


def test_stream_knows_that_it_is_captured() -> None:
    if not hasattr(torch.Stream, "is_capturing"):
        pytest.skip("torch 2.11 has no Stream.is_capturing()")
    stream, other = torch.bp.Stream(), torch.bp.Stream()
    graph = torch.bp.Graph()
    x = torch.ones(3, device="bp")
    assert not stream.is_capturing()
    with torch.bp.stream(stream):
        graph.capture_begin()
        assert stream.is_capturing()
        assert not other.is_capturing()
        x += 1
        graph.capture_end()
    assert not stream.is_capturing()


def test_equal_stream_ids_on_other_devices_are_other_streams() -> None:
    assert torch.bp.default_stream(0).stream_id == torch.bp.default_stream(1).stream_id
    assert torch.bp.default_stream(0) != torch.bp.default_stream(1)


def test_invalid_stream_arguments_raise() -> None:
    with pytest.raises(TypeError, match="takes device and priority, but got color"):
        torch.bp.Stream(color=3)
    with pytest.raises(ValueError, match="Expected a bp device, but got: cpu"):
        torch.bp.Stream("cpu")
    with pytest.raises(RuntimeError, match="invalid device ordinal: bp:99"):
        torch.bp.Stream(99)
    unknown = torch.bp.Stream(stream_id=1000, device_index=0)
    with pytest.raises(RuntimeError, match="bp:0 has no stream with id 1000"):
        torch.bp.set_stream(unknown)


def test_priorities() -> None:
    least, greatest = torch.bp.Stream.priority_range()
    assert (least, greatest) == (0, -1)
    assert torch.bp.Stream().priority == least
    assert torch.bp.Stream(priority=-1).priority == greatest
    assert torch.bp.Stream(priority=-100).priority == greatest
    assert torch.bp.Stream(priority=100).priority == least
    assert torch.Stream(device="bp", priority=-1) != torch.bp.default_stream()


def test_the_stream_pool_is_round_robin() -> None:
    streams = [torch.bp.Stream(3) for _ in range(33)]
    assert len(set(streams)) == 32
    assert streams[0] == streams[32]


def test_query_and_synchronize_see_pending_work() -> None:
    stream = torch.bp.Stream()
    assert stream.query()
    with stream:
        torch.bp._sleep(200 * MILLISECOND)
    assert not stream.query()
    assert torch.bp.default_stream().query()
    stream.synchronize()
    assert stream.query()


def test_synchronize_waits_for_every_stream_of_the_device() -> None:
    streams = [torch.bp.Stream(1), torch.bp.Stream(1)]
    for stream in streams:
        with torch.bp.stream(stream):
            torch.bp._sleep(50 * MILLISECOND)
    torch.bp.synchronize(1)
    assert all(stream.query() for stream in streams)


def test_work_on_a_stream_runs_in_order() -> None:
    stream = torch.bp.Stream()
    source = torch.arange(64, dtype=torch.float32).pin_memory()
    with stream:
        torch.bp._sleep(50 * MILLISECOND)
        there = source.to("bp", non_blocking=True)
        back = torch.empty_like(source).pin_memory()
        back.copy_(there, non_blocking=True)
    stream.synchronize()
    assert torch.equal(back, source)


@pytest.mark.parametrize("kind", ["kernel", "fill", "copy", "product", "event", "all of them"])
def test_submission_blocks_while_many_commands_are_pending(kind: str) -> None:
    x, y, z = (torch.ones(8, 8, device="bp") for _ in range(3))
    event = torch.bp.Event()
    commands = {
        "kernel": lambda: y.add_(1),
        "fill": lambda: z.zero_(),
        "copy": lambda: z.copy_(x),
        "product": lambda: torch.mm(x, x, out=z),
        "event": lambda: event.record(),
    }
    chosen = [commands[kind]] if kind in commands else list(commands.values())
    for _ in range(2):
        for command in chosen:
            command()  # builds its kernel
        y.zero_()
        torch.bp.synchronize()
        end, given = torch.bp.Event(), 0
        torch.bp._sleep(500 * MILLISECOND)
        end.record()
        while not end.query() and given < 3000:
            chosen[given % len(chosen)]()
            given += 1
        assert given < 1100
        added = -(-given // len(chosen)) if chosen[0] is commands["kernel"] else 0
        assert y.unique().tolist() == [added]


def test_reading_a_tensor_waits_for_its_stream() -> None:
    values = torch.zeros(8, device="bp")
    torch.bp._sleep(50 * MILLISECOND)
    values.copy_(torch.ones(8).pin_memory(), non_blocking=True)
    assert (values + 1).tolist() == [2.0] * 8


def test_record_stream() -> None:
    side = torch.bp.Stream()
    tensor = torch.ones(1 << 20, device="bp")
    address = tensor.data_ptr()
    with side:
        torch.bp._sleep(200 * MILLISECOND)
    tensor.record_stream(side)
    del tensor
    # The side stream still has work from before record_stream, so the memory must not be reused.
    other = torch.empty(1 << 20, device="bp")
    assert not side.query()
    assert other.data_ptr() != address
    for plain in (torch.Stream(device="bp"), torch.accelerator.current_stream()):
        other.record_stream(plain)


# --- current streams -------------------------------------------------------------------------------------------------


def test_stream_contexts_nest_and_restore() -> None:
    before = torch.bp.current_stream()
    assert before == torch.bp.default_stream()
    outer, inner = torch.bp.Stream(), torch.bp.Stream()
    with torch.bp.stream(outer):
        assert torch.bp.current_stream() == outer
        with torch.bp.stream(inner):
            assert torch.bp.current_stream() == inner
        assert torch.bp.current_stream() == outer
        with torch.bp.stream(None):
            assert torch.bp.current_stream() == outer
    assert torch.bp.current_stream() == before


@pytest.mark.parametrize("context", [torch.bp.stream, lambda stream: stream], ids=["stream()", "with stream"])
def test_a_stream_context_makes_the_streams_device_current(context) -> None:
    on_first, on_second = torch.bp.Stream(0), torch.bp.Stream(1)
    torch.bp.set_stream(on_first)
    with context(on_second):
        assert torch.bp.current_device() == 1
        assert torch.bp.current_stream() == on_second
        assert torch.bp.current_stream(0) == on_first
    assert torch.bp.current_device() == 0
    assert torch.bp.current_stream() == on_first
    assert torch.bp.current_stream(1) == torch.bp.default_stream(1)


def test_a_stream_context_restores_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), torch.bp.stream(torch.bp.Stream(1)):
        raise ZeroDivisionError
    assert torch.bp.current_device() == 0
    assert torch.bp.current_stream(1) == torch.bp.default_stream(1)


def test_set_stream() -> None:
    stream = torch.bp.Stream(2)
    torch.bp.set_stream(stream)
    assert torch.bp.current_device() == 2
    assert torch.bp.current_stream() == stream
    torch.bp.set_stream(None)  # changes nothing, as in torch.cuda
    assert torch.bp.current_stream() == stream
    with pytest.raises(TypeError, match=r"expected a torch.Stream, but got int"):
        torch.bp.set_stream(3)
    with pytest.raises(TypeError, match=r"expected a torch.Stream, but got str"):
        torch.bp.stream("side")


def test_a_stream_of_another_device_type_is_refused() -> None:
    foreign = torch.Stream(stream_id=0, device_index=0, device_type=1)  # a CUDA stream
    with pytest.raises(RuntimeError, match="expected a stream of a bp device"):
        torch.bp.set_stream(foreign)


def test_torch_accelerator_and_torch_bp_share_the_current_stream() -> None:
    stream = torch.bp.Stream(1)
    torch.accelerator.set_stream(stream)
    assert torch.bp.current_device() == 1
    assert torch.bp.current_stream() == stream == torch.accelerator.current_stream()
    plain = torch.Stream(device="bp:0")
    with plain:
        assert torch.bp.current_stream() == plain
        assert torch.accelerator.current_stream() == plain
    with torch.bp.stream(plain):
        assert torch.accelerator.current_stream(0) == plain


def test_each_thread_has_its_own_device_and_stream() -> None:
    torch.bp.set_device(1)
    torch.bp.set_stream(torch.bp.Stream(1))
    seen = []

    def look() -> None:
        seen.append((torch.bp.current_device(), torch.bp.current_stream(1) == torch.bp.default_stream(1)))
        torch.bp.set_device(2)
        torch.bp.set_stream(torch.bp.Stream(2))
        seen.append((torch.bp.current_device(), torch.bp.current_stream() == torch.bp.default_stream(2)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [(0, True), (2, False)]
    assert torch.bp.current_device() == 1
    assert torch.bp.current_stream(2) == torch.bp.default_stream(2)


# --- native handles --------------------------------------------------------------------------------------------------


def test_an_external_stream_equals_its_source_stream() -> None:
    stream = torch.bp.Stream(1)
    external = torch.bp.ExternalStream(stream.bp_stream, device=1)
    assert isinstance(external, torch.bp.Stream)
    assert external == stream
    assert external.bp_stream == stream.bp_stream == stream._as_parameter_.value
    assert torch.bp.get_stream_from_external(stream.bp_stream, "bp:1") == stream
    with external:
        torch.bp._sleep(100 * MILLISECOND)
    assert not stream.query()
    with pytest.raises(TypeError, match="takes stream_ptr and device"):
        torch.bp.ExternalStream(stream.bp_stream, name="x")


def test_invalid_external_streams_raise() -> None:
    stream, current = torch.bp.Stream(1), torch.bp.current_stream()
    for number in (0, 1, 12345, -1, 2**64, stream.bp_stream + 8, stream.bp_stream):
        for made in (torch.bp.ExternalStream, torch.bp.get_stream_from_external):
            # The OpenCL driver accepts handles of OpenCL, and has its own error for other numbers.
            text = f"^an external stream must be made from the bp_stream of a stream of bp:0, but got {number};"
            with pytest.raises((RuntimeError, ValueError), match=f"{text}|^[0-9]+ is not a command queue"):
                made(number, device=0)
    with pytest.raises(TypeError):
        torch.bp.ExternalStream("12345")
    assert torch.bp.current_stream() == current
    torch.bp.synchronize()
    assert torch.bp.ExternalStream(current.bp_stream) == current
    assert (torch.ones(2, device="bp") + 1).tolist() == [2, 2]


@pytest.mark.skipif(not hasattr(torch.Stream, "native_handle"), reason="this torch has no torch.Stream.native_handle")
def test_the_native_handle_of_a_plain_stream() -> None:
    stream = torch.bp.Stream()
    with stream:
        if torch.bp.get_device_properties().driver == "host":
            with pytest.raises(NotImplementedError, match=r"^host devices have no native stream handles"):
                torch.accelerator.current_stream().native_handle  # noqa: B018
        else:
            assert torch.accelerator.current_stream().native_handle == stream.native_handle != stream.bp_stream


# --- events ----------------------------------------------------------------------------------------------------------


def test_an_unrecorded_event() -> None:
    event = torch.bp.Event()
    assert isinstance(event, torch.Event)
    assert event.query()
    event.synchronize()
    event.wait()
    assert event.bp_event == 0
    assert repr(event) == "<torch.bp.Event uninitialized>"
    with pytest.raises(RuntimeError, match="Both events must be recorded"):
        event.elapsed_time(torch.bp.Event())


def test_an_event_completes_after_the_work_before_it() -> None:
    event = torch.bp.Event(blocking=True)
    torch.bp._sleep(200 * MILLISECOND)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert event.bp_event
    assert repr(event) == f"<torch.bp.Event {event.bp_event:#x}>"


def test_wait_event() -> None:
    first, second = torch.bp.Stream(), torch.bp.Stream()
    with first:
        torch.bp._sleep(200 * MILLISECOND)
    event = first.record_event()
    second.wait_event(event)
    mark = second.record_event()
    assert not event.query()
    assert not mark.query()
    mark.synchronize()
    assert event.query()


def test_a_stream_is_idle_when_a_waiting_stream_has_completed() -> None:
    first, second, third = (torch.bp.Stream() for _ in range(3))
    for _ in range(100):
        with first:
            torch.bp._sleep(MILLISECOND // 10)
        second.wait_stream(first)
        third.wait_stream(second)
        third.synchronize()
        assert first.query()
        second.synchronize()


def test_wait_stream() -> None:
    first, second = torch.bp.Stream(), torch.Stream(device="bp")
    with first:
        torch.bp._sleep(200 * MILLISECOND)
    second.wait_stream(first)
    third = torch.bp.Stream()
    third.wait_stream(second)
    assert not third.query()
    third.synchronize()
    assert first.query()


def test_copies_across_streams_keep_the_order_of_events() -> None:
    first, second = torch.bp.Stream(), torch.bp.Stream()
    host = torch.full((16,), 7.0).pin_memory()
    target = torch.zeros(16, device="bp")
    result = torch.zeros(16).pin_memory()
    first.wait_stream(torch.bp.current_stream())
    with first:
        torch.bp._sleep(100 * MILLISECOND)
        target.copy_(host, non_blocking=True)
    second.wait_stream(first)
    with second:
        result.copy_(target, non_blocking=True)
    second.synchronize()
    assert torch.equal(result, host)


def test_wait_event_of_another_device() -> None:
    first, second = torch.bp.Stream(0), torch.bp.Stream(1)
    with first:
        torch.bp._sleep(100 * MILLISECOND)
    event = first.record_event()
    second.wait_event(event)
    second.synchronize()
    assert event.query()


def test_elapsed_time_is_at_least_the_sleep() -> None:
    start, end = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
    start.record()
    torch.bp._sleep(30 * MILLISECOND)
    end.record()
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 30
    assert end.elapsed_time(start) <= -30
    plain = torch.Event(device="bp", enable_timing=True)
    plain.record()
    plain.synchronize()
    assert start.elapsed_time(plain) >= 30


def test_elapsed_time_needs_timing() -> None:
    start, end = torch.bp.Event(), torch.bp.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(end)
    with pytest.raises(TypeError, match=r"expected a torch.Event, but got float"):
        end.elapsed_time(1.0)


def test_an_event_belongs_to_the_device_of_its_first_record() -> None:
    event, other = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
    event.record(torch.bp.Stream(0))
    assert event.device == torch.device("bp:0")
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.bp.Stream(1))
    other.record(torch.bp.Stream(1))
    torch.bp.synchronize(0)
    torch.bp.synchronize(1)
    with pytest.raises(RuntimeError, match="does not match other's device_index"):
        event.elapsed_time(other)


def test_an_event_can_be_recorded_again() -> None:
    event = torch.bp.Event()
    event.record()
    event.synchronize()
    torch.bp._sleep(100 * MILLISECOND)
    event.record()
    assert not event.query()
    event.synchronize()


def test_invalid_event_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.Stream, but got int"):
        torch.bp.Event().record(5)
    with pytest.raises(TypeError, match=r"expected a torch.Stream, but got int"):
        torch.bp.Event().wait(5)
    with pytest.raises(TypeError, match=r"expected a torch.Stream, but got"):
        torch.bp.Stream().wait_stream(torch.bp.Event())


def test_sharing_between_processes_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot be shared between processes"):
        torch.bp.Event(interprocess=True)
    with pytest.raises(NotImplementedError, match="cannot be shared between processes"):
        torch.bp.Event().ipc_handle()
    with pytest.raises(NotImplementedError, match="shares neither memory nor events between processes"):
        torch.bp.Event.from_ipc_handle("bp:0", b"")
    with pytest.raises(NotImplementedError, match="graph's replay"):
        torch.bp.Event(external=True)
