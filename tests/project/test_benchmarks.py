"""Tests that the benchmarks run, measure the intended work and report it. Times come from a fake clock."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import benchmark_modules
import pytest
import torch
from benchmark_modules import FOLDER as BENCHMARKS
from benchmark_modules import Clock
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


def run_json(script: str, *options: str) -> dict[str, Any]:
    """Runs the benchmark with --json and returns its report."""
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options, "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_overhead_compares_bp_with_cpu() -> None:
    report = run_json("overhead.py", "--rounds", "2", "--scale", "0.01")
    assert report["device"] == "bp:0"
    assert [result["workload"] for result in report["results"]] == [
        "a * b, 16 elements",
        "torch.empty(16)",
        "chain of 1,000 operators",
    ]
    for result in report["results"]:
        assert min(result["device_us"], result["cpu_us"]) > 0
    assert report["rounds"] == 2
    assert report["parts_us"] is None  # measured only on devices that run kernels
    assert report["first_call_us"] is None


def test_events_and_copies_are_all_measured() -> None:
    report = run_json("events.py", "--rounds", "2", "--calls", "3")
    assert report["device"] == "bp:0"
    assert set(report["microseconds"]) == {str(one.__doc__) for one in benchmark_modules.load("events").WORKLOADS}
    assert min(report["microseconds"].values()) > 0


def test_collectives_are_compared_with_gloo() -> None:
    report = run_json("distributed.py", "--rounds", "1", "--largest", "2000")
    assert [row["title"] for row in report["results"]] == ["all_reduce of 1,024 bytes"]
    (row,) = report["results"]
    assert row["ratio"] == pytest.approx(row["device_us"] / row["gloo_us"])
    assert set(report["ddp_ms"]) == {"without_communication", "overlapped", "not_overlapped"}
    assert min(report["ddp_ms"].values()) > 0


@pytest.mark.slow
def test_profiling_costs_are_measured() -> None:
    report = run_json("profiling.py", "--match", "chain", "--rounds", "1")
    (result,) = report["results"]
    assert result["commands"] == 1000
    assert min(result[name] for name in ("plain_ms", "by_devices", "by_operators", "cpu_by_operators")) > 0


@pytest.mark.slow
def test_memory_history_is_compared_with_steps_without_it() -> None:
    report = run_json("memory_history.py", "--rounds", "1", "--match", "alone|default")
    off, *recorded = report["results"]
    assert [off["title"], off["events"], off["step_by_off"]] == ["off", 0, 1]
    assert [one["title"] for one in recorded] == ["events alone", "Python and C++ stacks, the default"]
    for one in recorded:
        assert one["events"] > 100
        assert one["step_by_off"] == pytest.approx(one["step_ms"] / off["step_ms"])
        assert one["event_by_off"] == pytest.approx(one["event_ns"] / off["event_ns"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(benchmark_modules.load("overhead"), "time", clock)
    return clock


def test_call_time_includes_device_work(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = benchmark_modules.load("overhead")

    def body(calls: int) -> None:
        clock.now += calls * 2e-6

    def work_off(device: torch.device) -> None:
        clock.now += 30e-6

    monkeypatch.setattr(torch.accelerator, "synchronize", work_off)
    assert overhead.microseconds(body, 10, torch.device("bp")) == pytest.approx(5)
    assert overhead.microseconds(body, 10, CPU) == pytest.approx(2)


def test_devices_alternate_and_the_first_round_is_ignored(clock: Clock) -> None:
    overhead = benchmark_modules.load("overhead")
    calls: list[tuple[str, int]] = []

    def make(device: torch.device) -> Callable[[int], None]:
        rounds = iter([1000, 9, 6, 30] if device.type == "bp" else [1000, 2, 4, 3])

        def body(count: int) -> None:
            calls.append((device.type, count))
            clock.now += count * next(rounds) * 1e-6

        return body

    result = overhead.run(overhead.Workload("made up", make, 100), torch.device("bp"), rounds=3, scale=0.05)
    assert calls == [("bp", 5), ("cpu", 5)] * 4
    assert result.workload == "made up"
    assert (result.device_us, result.cpu_us, result.ratio) == pytest.approx((9, 3, 3))


class Operators(TorchDispatchMode):
    """Counts operator calls by name, device and number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__, result.device.type, result.numel()] += 1
        return result


@pytest.mark.parametrize(
    ("workload", "expected"),
    [(0, {"mul": 3}), (1, {"empty": 3}), (2, {"mul": 1500, "add": 1500})],
    ids=["multiply", "empty", "chain"],
)
@pytest.mark.parametrize("device", ["bp", "cpu"])
def test_workloads_call_the_operators_in_their_titles(workload: int, expected: dict[str, int], device: str) -> None:
    body = benchmark_modules.load("overhead").WORKLOADS[workload].make(torch.device(device))
    with Operators() as operators:
        body(3)
    assert operators.counts == {(name, device, 16): count for name, count in expected.items()}


def test_overhead_reports_an_unknown_device() -> None:
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py"), "--device", "nonsense"], capture_output=True, text=True
    )
    assert finished.returncode != 0
    assert "Expected one of cpu, cuda" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_import_time_runs() -> None:
    report = run_json("import_time.py", "--rounds", "1")
    assert list(report["medians"]) == ["import torch", "import torch; import torch_backplane"]
    for row in report["medians"].values():
        assert row["process_ms"] > row["torch_ms"] + row["backplane_ms"]


def test_import_time_measures_the_statement_after_torch() -> None:
    _, nothing, _ = benchmark_modules.load("import_time").measure("")
    of_torch, then, whole = benchmark_modules.load("import_time").measure("time.sleep(1)")
    assert nothing < 500
    assert 1000 <= then < 1500
    assert whole >= of_torch + then


def test_import_time_reports_medians(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_time = benchmark_modules.load("import_time")
    asked: list[str] = []
    rows = iter(
        [(999.0, 999.0, 999.0)] * 2 + [(10, 0, 30), (11, 4, 40), (14, 0, 31), (10, 6, 39), (12, 0, 90), (19, 5, 35)]
    )

    def measure(then: str) -> tuple[float, float, float]:
        asked.append(then)
        return next(rows)

    monkeypatch.setattr(import_time, "measure", measure)
    import_time.main(rounds=3, as_json=True)
    assert asked == ["", "import torch_backplane"] * 4
    report = json.loads(capsys.readouterr().out)
    without, with_backplane = report["medians"].values()
    assert without == {"torch_ms": 12, "backplane_ms": 0, "process_ms": 31}
    assert with_backplane == {"torch_ms": 11, "backplane_ms": 5, "process_ms": 39}
    assert report["added_process_ms"] == 8


def test_kernels_compare_every_row_at_every_size() -> None:
    report = run_json("kernels.py", "--match", "^(add|sort|median)$", "--sizes", "300,4096", "--rounds", "1")
    found = [(result["workload"], result["elements"]) for result in report["results"]]
    assert found == [(name, size) for name in ("add", "sort", "median") for size in (300, 4096)]
    for result in report["results"]:
        assert result["ratio"] == pytest.approx(result["cpu_ms"] / result["device_ms"])
    assert float(report["geometric mean"]) > 0


@pytest.mark.parametrize("options", [["--sizes", "255"], ["--sizes", "4096,many"], ["--match", "^nothing$"]])
def test_kernels_rejects_invalid_options(options: list[str]) -> None:
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), *options]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 2
    assert options[0] in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "row"),
    [
        ("matmul.py", "a @ b, 64, float32"),
        ("convolution.py", "2048 to 512, 1 × 1 of 7, stride 1, gradient of the weight"),
        ("attention.py", "128 queries and keys, float32, causal, with gradients"),
        ("rnn.py", "GRU, 24 × 16 × 32 to 64, 2 layers in both directions, with gradients"),
        ("training.py", "convolutions of 16 and 32 channels, 64 images of 28 × 28"),
    ],
)
def test_one_row_of_each_benchmark_runs(script: str, row: str) -> None:
    report = run_json(script, "--match", f"^{row}$", "--rounds", "1")
    (result,) = report["results"]
    assert result["title"] == row
    assert result["ratio"] == pytest.approx(result["other_ms"] / result["device_ms"])
    assert float(report["geometric mean"]) == pytest.approx(result["ratio"], abs=0.01)


def test_library_option_needs_a_library() -> None:
    command = [sys.executable, str(BENCHMARKS / "matmul.py"), "--driver", "host", "--library", "--match", "a @ b, 64"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 2
    assert "--library" in refused.stderr


def test_tuned_and_untuned_calls_are_compared() -> None:
    report = run_json("tuning.py", "--match", "^(scores|projection), of 16 tokens$", "--rounds", "1")
    assert [one["title"] for one in report["results"]] == ["projection, of 16 tokens", "scores, of 16 tokens"]
    for one in report["results"]:
        assert one["ratio"] == pytest.approx(one["untuned_ms"] / one["tuned_ms"])
    changed = [one["ratio"] for one in report["results"] if one["is_changed"]]
    assert report["changed by tuning"] == f"{len(changed)} of 2"
    assert ("geometric mean" in report) == bool(changed)
    if changed:
        mean = math.prod(changed) ** (1 / len(changed))
        assert float(report["geometric mean"]) == pytest.approx(mean, abs=0.01)


def test_calls_changed_by_tuning_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    import tuning

    output = iter(
        [
            "aten::mm: planned\n  → launch bp_matmul_packed on 2×1×1 items in groups of 1×1×1: argument 0",
            "aten::mm: planned\n  → on the host aten::mm.out(argument 0)",
        ]
    )
    monkeypatch.setattr(tuning.plans, "explain", lambda body: next(output))
    assert tuning.computed_by(lambda: None) == ["bp_matmul_packed"]
    assert tuning.computed_by(lambda: None) == ["aten::mm.out"]


@pytest.mark.parametrize("script", ["matmul.py", "training.py", "tuning.py"])
def test_benchmarks_reject_a_match_without_results(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / script), "--match", "^nothing$"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert refused.returncode == 2
    assert "--match" in refused.stderr


def test_cpu_side_runs_in_another_process() -> None:
    import interleaving  # as the child process imports it

    def calls_with_the_device(function: Callable[..., Any]) -> Any:
        return functools.partial(functools.partial, function)

    good = interleaving.RemoteBody(calls_with_the_device(repr))
    assert interleaving.seconds(good, CPU, 3) > 0
    with pytest.raises(RuntimeError, match=r"(?s)the CPU's side.*TypeError"):
        interleaving.RemoteBody(len)
    fails = interleaving.RemoteBody(calls_with_the_device(len))
    with pytest.raises(RuntimeError, match=r"(?s)the CPU's side.*TypeError"):
        fails()
    interleaving.RemoteBody(calls_with_the_device(repr))()


def test_rows_alternate_for_the_given_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    interleaving, clock = benchmark_modules.load("interleaving"), Clock()
    monkeypatch.setattr(interleaving, "time", clock)
    monkeypatch.setattr(clock, "sleep", lambda seconds: None, raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    calls: list[str] = []

    def make(device: torch.device) -> Callable[[], None]:
        def body() -> None:
            calls.append(device.type)
            clock.now += 0.02 if device.type == "bp" else 0.05

        return body

    result = interleaving.run(
        interleaving.Row("made up", make, seconds=0.1),
        interleaving.Side(torch.device("bp")),
        interleaving.Side(torch.device("cpu")),
        3,
    )
    # A warm-up call, a call to measure the duration, then two calls per round; the first two rounds do not count.
    assert calls[:4] == ["bp", "bp", "cpu", "cpu"]
    of_rounds = ["".join(calls[start : start + 4]) for start in range(4, len(calls), 4)]
    assert len(of_rounds) == 5
    assert set(of_rounds) == {"bpbpcpucpu", "cpucpubpbp"}  # the order varies
    assert (result.device_ms, result.other_ms, result.ratio) == pytest.approx((20, 50, 2.5))
