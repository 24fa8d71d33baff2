"""PyTorch's profiler with events of bp around each operator."""

from __future__ import annotations

import pytest
import torch

from torch_backplane import plans

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("use_kineto", [False, True])
def test_operators_have_times_on_the_device(use_kineto: bool, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_times_are_those_of_the_work() -> None:
    """200 million cycles of a clock of 1 GHz."""
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


def test_the_capability_lists_what_the_device_takes() -> None:
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
