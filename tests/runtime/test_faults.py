"""torch_backplane.testing.faults: calls fail as requested, and devices work afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import paths
import pytest

SWEEP = paths.SWEEPS / "fault_sweep.py"
PREPARED = """
import pytest, torch
from torch_backplane.testing import faults
faults.prepare()
x = torch.ones(1000, device="bp")
def injected(call): return pytest.raises(RuntimeError, match=f"injected fault in {call}")
"""


def run(code: str, **settings: str) -> None:
    unset = {name: None for name in os.environ if name.startswith("TORCH_BACKPLANE_")}
    done = forked.run(PREPARED + code, Path(), **{**unset, "TORCH_BACKPLANE_DRIVERS": "host", **settings})
    assert done.returncode == 0, done.stderr


def test_the_nth_call_fails_and_no_other() -> None:
    run(
        """
for nth in (1, 2, 3):
    faults.fail("copy", nth)
    for _ in range(nth - 1):
        torch.ones(3).to("bp", copy=True)
    with injected("copy"):
        torch.ones(3).to("bp", copy=True)
    assert torch.ones(3).to("bp", copy=True).tolist() == [1, 1, 1]
with faults.fails("synchronize_stream"), injected("synchronize_stream"):
    torch.bp.synchronize()
with faults.fails("synchronize_stream", 1000):
    torch.bp.synchronize()
torch.bp.synchronize()
""",
        TORCH_BACKPLANE_DISCRETE="1",
    )


def test_allocations_are_retried_after_out_of_memory() -> None:
    run("""
torch.bp.empty_cache()
with faults.fails("allocate", kind="out of memory"):
    y = torch.ones(1 << 22, device="bp")  # the retry succeeds
assert faults.failed(reset=True) == 1
faults.fail("allocate", kind="error")
with injected("allocate"):
    torch.ones(1 << 24, device="bp")
assert torch.ones(1 << 24, device="bp").sum().item() == 1 << 24
""")


def test_counts_and_chance() -> None:
    run("""
faults.counts(reset=True)
torch.bp.Stream().synchronize()
found = faults.counts()
assert found["synchronize_stream"] == 1 and set(found) <= set(faults.CALLS), found

def failures(seed):
    failed = []
    with faults.by_chance(0.3, seed, ["synchronize_stream"]):
        for number in range(50):
            try: torch.bp.current_stream().synchronize()
            except RuntimeError: failed.append(number)
    return failed

assert failures(1) == failures(1) != failures(2)
assert 3 < len(failures(1)) < 30
assert failures(3) and faults.failed() > 3
torch.bp.synchronize()
""")


def test_slow_device_calls() -> None:
    run("""
import time
def seconds():
    start = time.perf_counter()
    for _ in range(5): torch.bp.current_stream().synchronize()
    return time.perf_counter() - start
with faults.slow(20):
    assert seconds() >= 0.1
""")


def test_a_lost_device_stays_lost_and_others_work() -> None:
    run(
        """
other = torch.ones(3, device="bp:1")
faults.fail("synchronize_stream", kind="lost")
for _ in range(2):
    with pytest.raises(torch.AcceleratorError, match="injected device loss"):
        torch.bp.synchronize(0)
faults.clear()
with pytest.raises(torch.AcceleratorError, match="injected device loss"):
    x.cpu()
assert (other + 1).tolist() == [2, 2, 2]
del x
""",
        TORCH_BACKPLANE_HOST_DEVICES="2",
    )


def test_invalid_faults_raise() -> None:
    run("""
for wrong, words in (
    (lambda: faults.fail("lunch"), "unknown device call lunch: the calls that can fail are allocate, "),
    (lambda: faults.fail("copy", 0), "counted from 1"),
    (lambda: faults.fail("copy", kind="sad"), "error, out of memory, lost, and got 'sad'"),
    (lambda: faults.fail("copy", kind="out of memory"), "copy does not allocate"),
    (lambda: faults.by_chance(2, 0).__enter__(), "probability must be between 0 and 1"),
    (lambda: faults.by_chance(0.5, 0, ["lunch"]).__enter__(), "unknown device call lunch"),
    (lambda: faults.slow(-1).__enter__(), "milliseconds must be at least 0"),
):
    with pytest.raises(ValueError, match=words):
        wrong()
with pytest.raises(RuntimeError, match="before devices are discovered"):
    faults.prepare()
assert (x + 1).sum().item() == 2000
""")


@pytest.mark.parametrize("kind", ["error", "out of memory"])
@pytest.mark.parametrize("driver", ["host", "opencl"])
@pytest.mark.slow
def test_every_call_of_a_step_fails_once(driver: str, kind: str, request: pytest.FixtureRequest) -> None:
    if driver == "opencl":
        request.getfixturevalue("platform")
    command = [sys.executable, str(SWEEP), "--driver", driver, "--kind", kind, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert report["calls"]["allocate"] > 0
    assert done.returncode == 0
    if kind == "error":
        assert sum(report["raised"].values()) > sum(report["unnoticed"].values())
