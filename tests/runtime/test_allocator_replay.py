"""benchmarks/allocator.py: it replays the recorded sequences and reports the times of the replays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import benchmark_modules
import paths
import pytest
import torch

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

BENCHMARK = paths.ROOT / "benchmarks" / "allocator.py"


def test_the_benchmark_reports_every_sequence() -> None:
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), "--events", "2000", "--steps", "1", "--passes", "1", "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(finished.stdout)["results"]
    assert [result["sequence"].partition(",")[0] for result in results] == ["one small block", "training", "random"]
    for result in results:
        assert result["events"] >= 2000
        assert min(result[name] for name in ("first_ns", "bp_ns", "c10_ns", "malloc_ns")) > 0
        assert result["reserved_per_allocated"] >= 1


@pytest.fixture
def benchmark() -> ModuleType:
    return benchmark_modules.load("allocator")


def test_times_are_of_the_best_pass_per_event(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replay starts with an empty cache. For each allocator, the best of its passes is reported."""
    trace = benchmark.Trace("two blocks", array("q", [0, 1000, 1, 700, 0, -1, 1, -1]))
    replay = _C._memory_replay
    replayed = []
    times = {"bp": iter([800, 60, 40]), "data_ptr": iter([100, 120]), "malloc": iter([32, 20])}

    def timed(events: array[int], allocator: str) -> int:
        replayed.append(allocator)
        replay(events, allocator)
        return next(times[allocator])

    monkeypatch.setattr(benchmark, "_C", SimpleNamespace(_memory_replay=timed))
    with torch.bp.stream(torch.bp.Stream()):  # segments belong to streams; free ones of other tests are on others
        result = benchmark.measure(trace, passes=2)
    assert replayed == ["bp"] + 2 * ["bp", "data_ptr", "malloc"]
    assert (result.sequence, result.events) == ("two blocks", 4)
    assert (result.first_ns, result.bp_ns, result.c10_ns, result.malloc_ns, result.ratio) == (200, 10, 25, 5, 5)
    assert result.peak_allocated == 1024 + 1024  # in multiples of 512 bytes
    assert result.reserved_per_allocated == 2 * benchmark.MIB / 2048  # in segments of 2 MiB


def well_formed(trace: Any) -> list[int]:
    """Returns the sizes of the allocations. Asserts that slots are allocated only if free, and freed only if in use."""
    taken: set[int] = set()
    sizes = []
    pairs = iter(trace.events)
    for slot, size in zip(pairs, pairs, strict=True):
        if size == -1:
            taken.remove(slot)
        else:
            assert slot not in taken
            taken.add(slot)
            sizes.append(size)
    return sizes


def test_sequences_match_their_names(benchmark: ModuleType) -> None:
    assert well_formed(benchmark.pair_trace(10)) == [1000] * 5
    random = benchmark.random_trace(4000, live=50)
    assert random.count == 4000
    sizes = sorted(well_formed(random))
    assert 16 <= sizes[0] < 64
    assert 2**22 < sizes[-1] <= 2**24
    assert 2**12 < sizes[len(sizes) // 2] < 2**16  # uniform on a logarithmic scale: half are below 16 KiB


def test_recording_of_training(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_tensors(steps: int) -> None:
        for step in range(steps):
            kept = torch.empty(1000 * (step + 1), dtype=torch.uint8, device="bp")
            torch.empty(5000, dtype=torch.uint8, device="bp")
        del kept

    monkeypatch.setattr(benchmark, "train", two_tensors)
    trace = benchmark.record_training(2)
    assert well_formed(trace) == [1000, 5000, 2000, 5000]
    assert list(trace.events[:6]) == [0, 1000, 1, 5000, 1, -1]
    again = benchmark.repeat(trace, 3 * trace.count - 1)
    assert again.count == 3 * trace.count
    assert well_formed(again) == 3 * well_formed(trace)


def test_replay_follows_the_sequence() -> None:
    memory.caching_allocator_delete(memory.caching_allocator_alloc(1))
    memory.reset_accumulated_memory_stats()
    allocated = memory.memory_allocated()
    _C._memory_replay(array("q", [0, 1000, 1, 5000, 0, -1, 0, 300]), "bp")
    assert memory.memory_stats()["requested_bytes.all.allocated"] == 1000 + 5000 + 300
    assert memory.memory_allocated() == allocated  # allocations that the sequence leaves are freed


@pytest.mark.parametrize(
    ("events", "allocator", "message"),
    [
        (array("q", [0, 1000]), "tcmalloc", "allocator must be 'bp', 'data_ptr' or 'malloc', not 'tcmalloc'"),
        (array("q", [-1, 1000]), "bp", "slots must not be negative, but got -1"),
        (array("q", [0]), "bp", "pairs of 64-bit integers"),
        (array("i", [0, 1000]), "bp", "pairs of 64-bit integers"),
    ],
)
def test_malformed_sequences(events: array[int], allocator: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C._memory_replay(events, allocator)
