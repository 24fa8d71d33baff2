"""benchmarks/allocator.py runs, and what it replays is what was recorded. Its times are not judged here."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from array import array

import pytest

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

BENCHMARK = pathlib.Path(__file__).parents[1] / "benchmarks" / "allocator.py"


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
        assert result["reserved_per_allocated"] >= 1
        assert result["ratio"] == result["c10_ns"] / result["malloc_ns"]


def test_replay_allocates_and_frees_what_the_sequence_says() -> None:
    memory.caching_allocator_delete(memory.caching_allocator_alloc(1))
    memory.reset_accumulated_memory_stats()
    allocated = memory.memory_allocated()
    _C._memory_replay(array("q", [0, 1000, 1, 5000, 0, -1, 0, 300]), "bp")
    assert memory.memory_stats()["requested_bytes.all.allocated"] == 1000 + 5000 + 300
    assert memory.memory_allocated() == allocated  # what the sequence left is freed after it


@pytest.mark.parametrize(
    ("events", "allocator", "message"),
    [
        (array("q", [0, 1000]), "tcmalloc", "allocator must be 'bp', 'data_ptr' or 'malloc', not 'tcmalloc'"),
        (array("q", [-1, 1000]), "bp", "slots are numbers from 0 on, not -1"),
        (array("q", [0]), "bp", "pairs of 64-bit integers"),
        (array("i", [0, 1000]), "bp", "pairs of 64-bit integers"),
    ],
)
def test_malformed_sequences(events: array[int], allocator: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C._memory_replay(events, allocator)
