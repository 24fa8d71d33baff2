"""The list of what does not run on OpenCL devices names what there is; without such devices a run says so, or fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import on_opencl
import pytest

HERE = Path(__file__).parent


def test_the_list_names_files_folders_and_tests_that_exist() -> None:
    assert [name for name in on_opencl.FILES if not (HERE / name).is_file()] == []
    assert [name for name in on_opencl.FOLDERS if not (HERE / name).is_dir()] == []
    for name in [*on_opencl.TESTS, *on_opencl.LATE_TESTS]:
        file, _, function = name.partition("[")[0].partition("::")
        assert f"def {function}(" in (HERE / file).read_text(encoding="utf-8"), name
        assert file not in on_opencl.FILES, name


@pytest.mark.parametrize(("required", "status"), [("", 0), ("1", 1)])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "opencl", "test_seeds.py"], "NO TEST RUNS ON OPENCL: there is no device"),
        (["test_docs.py", "-k", "python_of_kernels"], "without OpenCL: needs an OpenCL device"),
    ],
    ids=["--on opencl", "one test"],
)
def test_a_run_without_opencl_is_loud_and_fails_where_it_is_required(
    options: list[str], said: str, required: str, status: int, tmp_path: Path
) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options],
        cwd=HERE,
        env={**os.environ, "OCL_ICD_VENDORS": str(tmp_path), "REQUIRE_OPENCL": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == status, finished.stdout + finished.stderr
    assert said in finished.stdout + finished.stderr
    summary = "1 tests have not run, as there is no OpenCL device. REQUIRE_OPENCL=1 makes that a failure."
    assert (summary in finished.stdout) == (status == 0 and options[0] == "test_docs.py")
