"""Tests benchmarks/dynamic.py and benchmarks/generate.py: the calls that they make, their times and their reports."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import benchmark_modules
import pytest
import torch
from benchmark_modules import FOLDER as BENCHMARKS
from benchmark_modules import Clock
from test_benchmarks import run_json
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
BP = torch.device("bp", 0)

dynamic = benchmark_modules.load("dynamic")
generate = benchmark_modules.load("generate")


def clock_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


# dynamic.py


def test_dynamic_compares_new_shapes_with_seen_ones() -> None:
    report = run_json("dynamic.py", "--rounds", "2", "--calls", "2", "--match", "^(softmax|cat|x \\* y)$")
    assert report["device"] == "bp:0"
    assert report["new shapes"] == 4
    assert [result["workload"] for result in report["results"]] == ["cat", "softmax", "x * y"]
    for result in report["results"]:
        assert min(*result["device_us"].values(), *result["cpu_us"].values()) > 0
        assert list(result["device_us"]) == ["new", "again", "seen", "first"]
        assert result["served"] == {"dynamic_shape_replays_of": 0, "planner_calls": 0, "traces": 0, "exact": {}}
    assert report["summary"]["operators"] == 3


def test_dynamic_rejects_a_match_without_results() -> None:
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / "dynamic.py"), "--match", "nonsense"], capture_output=True, text=True
    )
    assert finished.returncode != 0
    assert "--match nonsense: none of the" in finished.stderr
    assert "Traceback" not in finished.stderr


RANDOM = ("dropout", "randn")


@pytest.mark.parametrize("workload", dynamic.WORKLOADS, ids=lambda workload: workload.title)
def test_workloads_match_the_cpu(workload: Any) -> None:
    made = workload.operands(dynamic.SMALLEST)
    here, there = (tree_leaves(workload.call(*dynamic.moved(made, place))) for place in (BP, CPU))
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        if other is None:
            assert one is None
        elif workload.title in RANDOM:
            assert (one.shape, one.device.type) == (other.shape, "bp")
        else:
            torch.testing.assert_close(one.cpu(), other)


def test_workload_titles_are_unique() -> None:
    titles = [workload.title for workload in dynamic.WORKLOADS]
    assert len(set(titles)) == len(titles)


def test_each_shape_is_new_once_and_then_seen(clock: Clock) -> None:
    met: list[tuple[str, int]] = []

    def call(x: torch.Tensor) -> None:
        known = (x.device.type, len(x)) in met
        met.append((x.device.type, len(x)))
        clock.now += ((7 if known else 20) if x.device.type == "bp" else 3) * 1e-6

    workload = dynamic.Workload("made up", lambda size: (torch.zeros(size),), call)
    result = dynamic.run(workload, BP, rounds=3, calls=2, known=2)
    assert result.device_us == pytest.approx({"new": 20, "again": 7, "seen": 7, "first": 7})
    assert result.cpu_us == pytest.approx({"new": 3, "again": 3, "seen": 3, "first": 3})
    sizes = [size for device, size in met if device == "bp"]
    assert sizes[0] == max(sizes)
    assert len(set(sizes)) == 2 + 3 * 2
    assert [size for device, size in met if device == "cpu"] == [
        *sizes[:4],
        *sizes[5:],
    ]  # one call on bp only checks whether the workload waits for the device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of(dynamic, monkeypatch)


def test_synchronization_and_operand_creation_are_not_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def work_off(device: torch.device) -> None:
        clock.now += 1

    monkeypatch.setattr(torch.accelerator, "synchronize", work_off)

    def make(size: int) -> tuple[torch.Tensor]:
        clock.now += 1
        return (torch.zeros(size),)

    def call(x: torch.Tensor) -> None:
        clock.now += 2e-6

    result = dynamic.run(dynamic.Workload("made up", make, call), BP, rounds=2, calls=2, known=2)
    assert [*result.device_us.values(), *result.cpu_us.values()] == pytest.approx([2] * 8)
    assert result.held


def test_calls_that_synchronize_are_timed_without_blocking_the_device(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = False

    def hold(device: torch.device) -> None:
        nonlocal held
        held = device.type == "bp"

    def call(x: torch.Tensor) -> None:
        nonlocal held
        clock.now += dynamic.HELD * 1e-3 if held else 5e-6
        held = False

    monkeypatch.setattr(dynamic, "hold", hold)
    workload = dynamic.Workload("made up", lambda size: (torch.zeros(size),), call)
    result = dynamic.run(workload, BP, rounds=2, calls=2, known=2)
    assert not result.held
    assert result.device_us == pytest.approx({"new": 5, "again": 5, "seen": 5, "first": 5})


def counts(**given: Any) -> dict[str, Any]:
    none = {"planner_calls": 0, "unplannable_calls": 0, "dynamic_shape_replays": 0, "traces": 0}
    return {**none, "reasons": [], "reasons_for_exact": [], **given}


def test_served_counts_are_differences_of_statistics() -> None:
    before = {"aten::add": counts(planner_calls=2, dynamic_shape_replays=5), "aten::mul": counts(planner_calls=1)}
    after = {
        "aten::add": counts(planner_calls=2, dynamic_shape_replays=9, traces=1),
        "aten::mul": counts(planner_calls=3, unplannable_calls=1, reasons_for_exact=["b", "a", "b"]),
        "aten::sub": counts(),
    }
    served = dynamic.Served()
    served.add(before, after)
    assert dataclasses.astuple(served) == (4, 3, 1, {"aten::mul": ["a", "b"]})
    served.add(before, after)
    assert dataclasses.astuple(served) == (8, 6, 2, {"aten::mul": ["a", "b"]})
    assert served.share() == "57 %"
    assert dynamic.Served().share() == "no planner"


@pytest.mark.parametrize(
    ("new", "seen", "little_more", "no_multiple"),
    [(8, 4, True, True), (10, 4, False, True), (13, 4, False, False), (4, 1, True, False)],
)
def test_new_shapes_are_rated_against_seen_shapes(
    new: float, seen: float, little_more: bool, no_multiple: bool
) -> None:
    device = {"new": new, "again": 100, "seen": seen, "first": 1000}
    result = dynamic.Result("made up", device, device, False, True, dynamic.Served())
    assert (result.costs_little_more(), result.is_no_multiple()) == (little_more, no_multiple)
    assert result.costs_little_more("first")
    assert result.is_good() == (little_more and no_multiple)
    assert dataclasses.replace(result, is_program=True).is_good() == no_multiple


# generate.py


class Writer:
    """Replaces the model: returns the tokens and the time of each."""

    def __init__(self, wrong: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.wrong = wrong

    def __call__(self, place: torch.device, prompt: torch.Tensor, tokens: int) -> Any:
        seen = any(device == place.type for device, _ in self.calls)
        self.calls.append((place.type, prompt.numel()))
        each = {("bp", False): 0.5, ("bp", True): 0.25, ("cpu", False): 0.1, ("cpu", True): 0.05}[place.type, seen]
        text = torch.arange(prompt.numel() + tokens)[None]
        if self.wrong is not None and place.type == "bp":
            text[0, self.wrong] = -1
        return generate.Pass(text, [each * token for token in range(tokens + 1)])


def no_tie(text: torch.Tensor, one: int, other: int) -> float:
    return 0.1


def test_first_pass_is_compared_with_repeated_passes() -> None:
    writer = Writer()
    result = generate.measure(writer, BP, length=16, tokens=8, repeats=2, gap=no_tie)
    assert writer.calls == [("bp", 16), ("cpu", 16)] * 3
    speeds = result.device_first, result.device_repeated, result.cpu_first, result.cpu_repeated
    assert speeds == pytest.approx((2, 4, 10, 20))
    assert result.ratio == pytest.approx(0.5)


def test_tokens_that_differ_from_the_cpu_are_an_error() -> None:
    with pytest.raises(SystemExit, match="token 5 is -1 on the device and 5 on the CPU"):
        generate.measure(Writer(wrong=5), BP, length=4, tokens=8, repeats=1, gap=no_tie)


def test_different_tokens_after_a_tie_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[list[int], int, int]] = []

    def tie(text: torch.Tensor, one: int, other: int) -> float:
        asked.append((text[0].tolist(), one, other))
        return 1e-7

    generate.measure(Writer(wrong=5), BP, length=4, tokens=8, repeats=1, gap=tie)
    assert asked == [([0, 1, 2, 3, 4], -1, 5)] * 2
    assert "1e-07 apart: a tie, so that nothing after it was compared" in capsys.readouterr().err


def test_long_text_is_reported_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PART", 2)
    here = generate.Pass(torch.zeros(1, 5), [0.0, 1.0, 2.0, 4.0, 6.0, 10.0])
    cpu = generate.Pass(torch.zeros(1, 5), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    found_parts = generate.parts(here, cpu, 5)
    assert [(part["from"], part["to"], part["device"], part["cpu"]) for part in found_parts] == [
        (0, 2, 1, 2), (2, 4, 0.5, 2), (4, 5, 0.25, 2)
    ]  # fmt: skip
    assert [part["device_to_first_part"] for part in found_parts] == [1, 0.5, 0.25]
    assert [part["cpu_to_first_part"] for part in found_parts] == [1, 1, 1]


needs_transformers: Callable[..., Any] = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (pip install transformers)"
)


@needs_transformers
def test_generate_compares_bp_with_cpu() -> None:
    options = ("--tokens", "3", "--long", "4", "--repeats", "1", "--layers", "1")
    report = run_json("generate.py", *options)
    assert report["device"] == "bp:0"
    assert [prompt["length"] for prompt in report["prompts"]] == [16, 37]
    for prompt in report["prompts"]:
        assert min(prompt.values()) > 0
    assert [(part["from"], part["to"]) for part in report["long"]] == [(0, 4)]
    assert report["plans"]["classes that met a second shape"] == 0  # host devices have no planners


def test_generate_reports_a_missing_dependency() -> None:
    program = (
        "import runpy, sys; sys.modules['transformers'] = None; sys.argv = ['generate.py']\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"runpy.run_path({str(BENCHMARKS / 'generate.py')!r}, run_name='__main__')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode != 0
    assert "pip install transformers" in finished.stderr
    assert "Traceback" not in finished.stderr
