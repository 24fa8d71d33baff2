"""Tests the conformance engine's workers: a crash or a hang fails only the operator that caused it."""

from __future__ import annotations

import os
import time

import paths
import pytest

from torch_backplane.conformance import ConformanceError, EntryResult, Report, Settings, WorkerPool, run

DATABASE = "conformance_faulty_ops:FATAL"


@pytest.fixture(scope="module", autouse=True)
def workers_find_the_operators() -> None:
    """Makes the faulty operators importable in the workers."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(paths.SUPPORT), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def report() -> Report:
    """Runs all operators with one worker, so that each crash and hang needs a replacement worker."""
    return run(Settings(database=DATABASE, timeout=8), jobs=1)


def result(report: Report, op: str) -> EntryResult:
    (found,) = (entry for entry in report.results if entry.op == op)
    return found


def test_correct_operators_pass_before_and_after_crashes(report: Report) -> None:
    assert result(report, "good_before").status == "passed"
    assert result(report, "good_after").status == "passed"
    assert result(report, "good_after").fallbacks  # counted separately for each operator
    assert report.environment["device"] == "bp:0"


def test_crash_is_reported(report: Report) -> None:
    crashed = result(report, "aborts")
    (finding,) = crashed.findings
    assert (finding.kind, finding.variant, finding.sample) == ("crash", "forward", "sample 0")
    assert finding.message.startswith("SIGABRT")
    assert crashed.status == "failed"


def test_hang_is_terminated_and_reported(report: Report) -> None:
    hung = result(report, "hangs")
    (finding,) = hung.findings
    assert (finding.kind, finding.message) == ("hang", "not finished after 8 s")
    assert hung.status == "failed"


def test_wrong_operator_fails_the_run(report: Report) -> None:
    assert result(report, "wrong_values").of_kind("values")
    assert not report.ok
    assert [entry.op for entry in report.results] == ["good_before", "aborts", "hangs", "wrong_values", "good_after"]


@pytest.mark.slow
def test_a_run_ends_after_its_minutes_and_counts_what_is_left_out() -> None:
    began = time.monotonic()
    found = run(Settings(database=DATABASE, match="^(good_before|hangs|good_after)$", minutes=0.3), jobs=1)
    assert time.monotonic() - began < 90  # `hangs` takes 120 s
    assert {entry.op for entry in found.results} <= {"good_before"}  # none, if the worker starts slowly
    assert found.left_out == found.totals()["left_out"] == 3 - len(found.results)


def test_driver_setting_reaches_the_workers() -> None:
    with pytest.raises(ConformanceError, match=r"TORCH_BACKPLANE_DRIVERS='nonsense'.*installed drivers"):
        run(Settings(database=DATABASE, driver="nonsense"), jobs=1)
    assert os.environ.get("TORCH_BACKPLANE_DRIVERS") != "nonsense"


def test_invalid_device_raises_an_error() -> None:
    with (
        WorkerPool(Settings(database=DATABASE, device="bp:99"), jobs=1) as pool,
        pytest.raises(ConformanceError, match="99"),
    ):
        pool.entries()
