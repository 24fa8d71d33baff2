"""Tests that the list of tests left out on OpenCL devices is valid, and that a run without OpenCL warns or fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import on_opencl
import paths
import pytest


def test_listed_files_folders_and_tests_exist() -> None:
    files = {path.name: path for path in paths.TESTS.rglob("test_*.py")}
    assert set(on_opencl.FILES) <= set(files)
    assert [name for name in on_opencl.FOLDERS if not (paths.TESTS / name).is_dir()] == []
    for name in [*on_opencl.TESTS, *on_opencl.LATE_TESTS]:
        file, _, function = name.partition("[")[0].partition("::")
        defined = re.findall(r"def (test_\w+)\(", files[file].read_text(encoding="utf-8"))
        # PyTorch's classes add operator, device and dtype to the name.
        assert function in defined or any(function.startswith(f"{one}_") for one in defined), name
        assert file not in on_opencl.FILES, name


@pytest.mark.parametrize(("required", "status"), [("", 0), ("1", 1)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on", "opencl", "accelerator/test_seeds.py"], "NO TEST RUNS ON OPENCL: there is no device"),
        (["project/test_docs.py", "-k", "python_of_kernels"], "without OpenCL: needs an OpenCL device"),
    ],
    ids=["--on opencl", "one test"],
)
def test_run_without_opencl_warns_or_fails(
    options: list[str], message: str, required: str, status: int, tmp_path: Path
) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options],
        cwd=paths.TESTS,
        env={**os.environ, "OCL_ICD_VENDORS": str(tmp_path), "REQUIRE_OPENCL": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == status, finished.stdout + finished.stderr
    assert message in finished.stdout + finished.stderr
    summary = "1 tests have not run, as there is no OpenCL device. REQUIRE_OPENCL=1 makes that a failure."
    assert (summary in finished.stdout) == (status == 0 and options[0] == "project/test_docs.py")
