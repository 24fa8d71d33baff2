"""tests/soak.py: runs for some seconds, and reports wrong results, leaked bytes and a growing process."""

from __future__ import annotations

import os
import subprocess
import sys

import paths
import pytest

SOAK = paths.TESTS / "soak.py"


def run(*options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    driver = "opencl" if "opencl" in os.environ.get("TORCH_BACKPLANE_DRIVERS", "") else "host"
    code = f"import sys; sys.path.insert(0, {str(SOAK.parent)!r}); import soak\n{before}\nsys.exit(soak.main())"
    arguments = [sys.executable, "-c", code, "--driver", driver, *options]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_all_activities_for_some_seconds() -> None:
    done = run("--seconds", "12", "--growth", "1000")  # caches are still filling
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout


WRONG = {
    "Tensor-likes are not close": "lambda device: [1.0 if device.type == 'bp' else 0.0]",
    "bytes are still allocated": "lambda device: (kept.append(soak.LABELS.to(device)), [0.0])[1]",
    "the process grew": "lambda device: (kept.append(b'x' * (1 << 24)), [0.0])[1]",
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.slow
def test_failures_are_reported(words: str) -> None:
    before = f"kept = []; soak.ACTIVITIES['wrong'] = {WRONG[words]}"
    done = run("--seconds", "2", "--only", "wrong", "--growth", "10", before=before)
    assert (done.returncode, words in done.stderr) == (1, True), done.stdout + done.stderr


def test_an_unknown_activity() -> None:
    done = run("--only", "sleep")
    assert done.returncode == 2
    assert "unknown activity sleep; activities: train, " in done.stderr
