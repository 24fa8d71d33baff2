"""PyTorch's profilers: with bp events around each operator, and with the commands of the devices."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_backplane import plans

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("use_kineto", [False, True])
def test_operators_have_device_times(use_kineto: bool, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 64, device="bp")
    x @ x
    with torch.autograd.profiler.profile(use_device="bp", use_kineto=use_kineto) as profiler:
        y = x @ x
        (y + 1).sum().item()
    events = {event.name: event for event in profiler.function_events}
    assert {"aten::mm", "aten::add", "aten::sum"} <= set(events)
    assert all(0 <= event.device_time < 1e9 for event in profiler.function_events)  # microseconds
    printed = capfd.readouterr()
    assert "INTERNAL ASSERT" not in printed.err + printed.out


def test_device_times_include_the_work() -> None:
    """200 million cycles of a 1 GHz clock are 200,000 microseconds."""
    x = torch.ones(1, device="bp")
    profiler = torch.autograd.profiler.profile(use_device="bp", use_kineto=False)
    with profiler, torch.autograd.profiler.record_function("outer"):
        torch.bp._sleep(200_000_000)
        x + 1
    outer = next(event for event in profiler.function_events if event.name == "outer")
    assert 150_000 < outer.device_time < 60_000_000


def test_plans_are_recorded_while_the_profiler_runs() -> None:
    x = torch.randn(5, 7, device="bp")
    before = plans.stats().get("aten::cumsum", {}).get("unplannable_calls", 0)
    with torch.autograd.profiler.profile(use_device="bp", use_kineto=False):
        for _ in range(3):
            x.cumsum(1)
            torch.nn.functional.layer_norm(x, (7,))
    after = plans.stats()
    assert after.get("aten::cumsum", {}).get("unplannable_calls", 0) == before
    assert not [name for name, found in after.items() if "it uses streams or events" in found["reasons"]]


def test_the_capability_lists_the_supported_dtypes() -> None:
    if not hasattr(torch.accelerator, "get_device_capability"):
        pytest.skip("this release of torch has no torch.accelerator.get_device_capability")
    listed = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.int64, torch.bool, torch.bfloat16} <= listed
    for dtype in listed:
        assert torch.empty(2, dtype=dtype, device="bp").dtype == dtype
    supported = torch.bp.get_device_properties().dtypes
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert (dtype in listed) == (dtype in supported)
    assert not listed & {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


needs_tracer = pytest.mark.skipif(
    not hasattr(torch.autograd.ProfilerState, "KINETO_PRIVATEUSE1"),
    reason="this release of torch has no interface for profilers of other devices",
)


def profiled(function: Callable[[], Any], **options: Any) -> torch.profiler.profile:
    """A profile of one call of `function`, after a call that is not profiled."""
    function()
    torch.bp.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1], **options
    ) as found:
        function()
        torch.bp.synchronize()
    return found


def trace_of(profile: torch.profiler.profile, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def on_device(profile: torch.profiler.profile) -> list[Any]:
    """The events of commands, without the device ranges of record_function."""
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
    return [event for event in events if not event.is_user_annotation]


@needs_tracer
def test_commands_belong_to_their_operators() -> None:
    x = torch.randn(300, 300, device="bp")
    found = profiled(lambda: torch.relu(torch.mm(x, x) + 1))
    rows = {row.key: row for row in found.key_averages() if row.device_type == torch.autograd.DeviceType.CPU}
    for name in ("aten::mm", "aten::add", "aten::relu"):
        assert rows[name].self_device_time_total > 0, name
        assert len([event for event in found.events() if event.name == name and event.kernels]) == 1, name
    total = sum(event.time_range.elapsed_us() for event in on_device(found))
    of_operators = sum(row.self_device_time_total for row in rows.values() if row.key.startswith("aten::"))
    assert of_operators == pytest.approx(total, rel=1e-3)
    assert "Self BP" in found.key_averages().table()


@needs_tracer
def test_times_of_commands_are_on_the_host_clock() -> None:
    """Command times are within the profile, in stream order, and after the calls that submitted them."""
    x = torch.randn(1 << 20, device="bp")
    start = time.time_ns()
    found = profiled(lambda: [x + number for number in range(20)])
    took = (time.time_ns() - start) / 1e3
    events = sorted(on_device(found), key=lambda event: event.time_range.start)
    assert len(events) == 20
    for first, second in itertools.pairwise(events):
        assert first.time_range.end <= second.time_range.start + 5
    adds = [event for event in found.events() if event.name == "aten::add"]
    assert all(event.time_range.elapsed_us() > 0 for event in events)
    for called, ran in zip(adds, events, strict=True):
        assert ran.time_range.start >= called.time_range.start - 1000  # microseconds: an event relates the clocks
    assert events[-1].time_range.end - events[0].time_range.start < took


@needs_tracer
def test_backward_and_record_function(tmp_path: Path) -> None:
    x = torch.randn(64, 64, device="bp", requires_grad=True)

    def step() -> None:
        with torch.profiler.record_function("forward pass"):
            y = torch.sin(x).exp()
        with torch.bp.nvtx.range("backward {}", "pass"):
            y.sum().backward()

    found = profiled(step)
    backward = [event for event in found.events() if event.name.startswith("autograd::engine::evaluate_function: Sin")]
    assert backward
    assert all(event.device_time_total > 0 for event in backward)
    trace = trace_of(found, tmp_path)
    annotations = {event["name"]: event for event in trace if event.get("cat") == "gpu_user_annotation"}
    assert set(annotations) == {"forward pass", "backward pass"}
    work = [event for event in trace if event.get("cat") == "kernel"]
    span = annotations["forward pass"]
    inside = [
        event
        for event in work
        if span["ts"] <= event["ts"] and event["ts"] + event["dur"] <= span["ts"] + span["dur"] + 1
    ]
    assert len(inside) >= 2
    assert {event["pid"] for event in work} == {0}


@needs_tracer
def test_traces_have_copies_streams_and_flow_arrows(tmp_path: Path) -> None:
    x = torch.randn(1 << 16, device="bp")
    stream = torch.bp.Stream()

    def copies() -> None:
        host = x.cpu()
        y = host.to("bp")
        stream.wait_stream(torch.bp.current_stream())
        with torch.bp.stream(stream):
            y.add_(1)
        torch.bp.current_stream().wait_stream(stream)

    trace = trace_of(profiled(copies), tmp_path)
    assert [event["args"]["bytes"] for event in trace if event.get("name") == "Memcpy DtoH"] == [1 << 18]
    assert [event["args"]["bytes"] for event in trace if event.get("name") == "Memcpy HtoD"] == [1 << 18]
    kernels = [event for event in trace if event.get("cat") == "kernel"]
    assert {event["tid"] for event in kernels} == {stream.stream_id}
    arrows = {event["id"] for event in trace if event.get("ph") == "s"}
    assert arrows == {event["id"] for event in trace if event.get("ph") == "f"}
    assert len(arrows) >= 2
    named = {event["args"]["labels"] for event in trace if event.get("name") == "process_labels"}
    assert torch.bp.get_device_name(0) in named
    assert any(event.get("name") == "bpDeviceSynchronize" for event in trace)


@needs_tracer
def test_planners_builds_and_launches_are_recorded() -> None:
    """On devices that run kernels. No other test builds this kernel, so it is built here."""
    if not torch.bp.get_device_properties().dialect:
        pytest.skip("host devices run no kernels")
    x = torch.randn(3, 7, 11, 13, device="bp")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    ) as found:
        for _ in range(3):
            torch.logcumsumexp(x, 2)
    names = [event.name for event in found.events()]
    assert any(name.startswith("plan ") for name in names)
    assert any(name.startswith("build ") for name in names)
    assert "bpLaunchKernel" in names
    assert len(on_device(found)) >= 3


@needs_tracer
def test_a_profile_of_the_cpu_records_no_device_events() -> None:
    x = torch.randn(10, device="bp")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        x + 1
    assert not on_device(found)
    assert not [event for event in found.events() if event.name.startswith("bp")]


@needs_tracer
def test_schedules_and_consecutive_profiles() -> None:
    x = torch.randn(100, device="bp")
    seen: list[int] = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda profile: seen.append(len(on_device(profile))),
    ) as profiler:
        for _ in range(8):
            x.mul(2)
            profiler.step()
    assert seen == [2, 2]
    again = torch.profiler.profile(activities=torch.profiler.supported_activities())
    with torch.profiler.profile(activities=torch.profiler.supported_activities()):
        x.mul(2)
        again.start()  # in PyTorch, a second profile replaces the first
        x.mul(2)
        torch.bp.synchronize()
        again.stop()
        x.mul(2)
    assert len(on_device(again)) == 1
    assert len(on_device(profiled(lambda: x.mul(3)))) == 1


@needs_tracer
def test_errors_in_a_profile() -> None:
    x = torch.randn(3, 4, device="bp")

    def wrong() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ x
        x + 1

    assert len(on_device(profiled(wrong))) == 1


@needs_tracer
def test_memory_of_operators(tmp_path: Path) -> None:
    x = torch.randn(1024, 1024, device="bp")
    found = profiled(lambda: x.exp(), profile_memory=True, record_shapes=True, with_stack=True)
    rows = {row.key: row for row in found.key_averages() if row.device_type == torch.autograd.DeviceType.CPU}
    assert rows["aten::exp"].device_memory_usage == 4 << 20
    found.export_memory_timeline(str(tmp_path / "memory.json"), device="bp:0")
    times, sizes = json.loads((tmp_path / "memory.json").read_text())
    assert len(times) == len(sizes)
    assert max(sum(row) for row in sizes) >= 4 << 20


def test_invalid_ranges_raise() -> None:
    nvtx = torch.bp.nvtx
    with pytest.raises(RuntimeError, match="needs an open range in this thread"):
        nvtx.range_pop()
    assert (nvtx.range_push("a"), nvtx.range_push("b"), nvtx.range_pop(), nvtx.range_pop()) == (0, 1, 1, 0)
    with pytest.raises(TypeError, match="a str, but got int"):
        nvtx.range_push(3)
    number = nvtx.range_start("c")
    nvtx.range_end(number)
    with pytest.raises(ValueError, match="no open range has the id"):
        nvtx.range_end(number)


def test_ranges_are_in_profiles() -> None:
    nvtx = torch.bp.nvtx
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        nvtx.range_push("outer")
        nvtx.mark("moment")
        with nvtx.range("{} of {name}", 1, name="two"):
            number = nvtx.range_start("across")
        nvtx.range_pop()
        thread = threading.Thread(target=nvtx.range_end, args=(number,))
        thread.start()
        thread.join()
    names = {event.name for event in found.events()}
    assert {"outer", "moment", "1 of two", "across"} <= names
