"""The benchmarks run and report what they say they do. What they measure is not judged here."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def run_json(script: str, *options: str) -> dict[str, Any]:
    """What the benchmark prints with --json."""
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
        assert result["ratio"] == result["device_us"] / result["cpu_us"]


def test_overhead_names_an_unknown_device() -> None:
    finished = subprocess.run(
        [sys.executable, str(BENCHMARKS / "overhead.py"), "--device", "nonsense"], capture_output=True, text=True
    )
    assert finished.returncode != 0
    assert "Expected one of cpu, cuda" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_import_time_measures_both_programs() -> None:
    report = run_json("import_time.py", "--rounds", "1")
    without, with_backplane = report["medians"].values()
    assert with_backplane["backplane_ms"] > without["backplane_ms"]  # an import takes longer than nothing
    assert report["added_process_ms"] == with_backplane["process_ms"] - without["process_ms"]
