"""Tests the command-line interface: output, JSON files, exit codes, and errors of invalid options."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import paths
import pytest
import torch
from typer.testing import CliRunner, Result

from torch_backplane import drivers
from torch_backplane.cli import app, main
from torch_backplane.conformance import coverage

DATABASE = "conformance_faulty_ops:FATAL"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents wrapped tables and colours, and makes the faulty operators importable in worker processes."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")
    here = str(paths.SUPPORT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))


def backplane(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_command() -> None:
    result = backplane("--help")
    assert result.exit_code == 0
    for command in ("devices", "doctor", "info", "conformance", "ops", "audit"):
        assert command in result.stdout


def test_module_runs_before_torch_was_imported() -> None:
    """`python -m torch_backplane` imports this package before torch, which then loads its autoload entry point."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_backplane", "--help"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "conformance" in done.stdout


# --- devices -----------------------------------------------------------------------------------------------------
def test_devices_lists_all_devices() -> None:
    result = backplane("devices")
    assert result.exit_code == 0
    for index in range(torch.bp.device_count()):
        assert f"bp:{index}" in result.stdout
    assert "host" in result.stdout


def test_devices_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = backplane("devices").stdout.splitlines()
    assert len(lines) == 1 + torch.bp.device_count()
    details = backplane("devices", "--verbose").stdout
    for title in ("software", "host-accessible", "compute units", "capability", "dtypes"):
        assert details.count(f"  {title}:") == torch.bp.device_count()


def test_devices_as_json(tmp_path: Path) -> None:
    file = tmp_path / "devices.json"
    assert backplane("devices", "--json", str(file)).exit_code == 0
    found = json.loads(file.read_text())
    assert len(found) == torch.bp.device_count()
    first = found[0]
    assert set(first) == {
        "index", "driver", "name", "total_memory", "free_memory", "host_accessible", "compute_units", "capability",
        "dtypes", "software",
    }  # fmt: skip
    assert first["driver"] == "host"
    assert first["host_accessible"] is True
    assert first["total_memory"] >= first["free_memory"] > 0
    assert {"float32", "int64", "bool"} <= set(first["dtypes"])


def test_skipped_driver_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = drivers.Finding("PyOpenCL", False, "OSError: libOpenCL.so.1 [not found]", "pip install pyopencl[x]")
    monkeypatch.setattr(drivers, "findings", lambda: {"opencl": (finding,)})
    monkeypatch.setattr(drivers, "reasons", lambda: {"opencl": f"{finding.what}: {finding.found} ({finding.remedy})"})
    for command in ("devices", "info"):
        told = backplane(command).stdout
        assert "OSError: libOpenCL.so.1 [not found]" in told
        assert "(pip install pyopencl[x])" in told


def test_invalid_environment_variable_is_an_error() -> None:
    environment = {**os.environ, "TORCH_BACKPLANE_DRIVERS": "nonsense"}
    command = [sys.executable, "-m", "torch_backplane"]
    for name in ("devices", "ops"):
        done = subprocess.run([*command, name], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "TORCH_BACKPLANE_DRIVERS='nonsense'" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unexpected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("it broke\nhere")

    monkeypatch.setattr("torch_backplane.cli.app", broken)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[0] == "Error: RuntimeError: it broke"


# --- info --------------------------------------------------------------------------------------------------------
def test_info_contains_facts_for_bug_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the older name, used if the other one is not set
    monkeypatch.setenv("TORCH_BACKPLANE_SOMETHING", "else")
    result = backplane("info")
    assert result.exit_code == 0
    for expected in (
        f"- torch: {torch.__version__}",
        "- python: 3.",
        "- PYTORCH_ALLOC_CONF: `garbage_collection_threshold:0.8`",
        "- PYTORCH_CUDA_ALLOC_CONF: ``",
        "- TORCH_BACKPLANE_SOMETHING: `else`",
        "- host: `torch_backplane.drivers.host:HostDriver`",
        "| bp:0 | host |",
        "### Allocator",
    ):
        assert expected in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 400  # Markdown is not wrapped to a terminal's width


# --- ops ---------------------------------------------------------------------------------------------------------
def test_ops_counts_add_up(tmp_path: Path) -> None:
    file = tmp_path / "ops.json"
    assert backplane("ops", "--json", str(file)).exit_code == 0
    data = json.loads(file.read_text())
    for row in data["counts"].values():
        assert row["total"] == sum(row[source] for source in coverage.SOURCES)
    assert len(data["operators"]) == sum(row["total"] for row in data["counts"].values())
    required = {operator["name"] for operator in data["operators"] if operator["required"]}
    assert {"aten::add.out", "aten::empty.memory_format", "aten::_local_scalar_dense"} <= required
    assert not {"aten::add_.Tensor", "aten::matmul", "aten::zeros_like"} & required  # composite kernels cover these
    by_name = {operator["name"]: operator["source"] for operator in data["operators"]}
    assert by_name["aten::empty.memory_format"] == "native"
    assert by_name["aten::matmul"] == "decomposition"


def test_ops_missing_lists_required_operators_that_fall_back() -> None:
    result = backplane("ops", "--missing", "--match", r"^aten::(linalg_eig|empty|matmul)\b")
    assert result.exit_code == 0
    listed = result.stdout.split()
    assert "aten::linalg_eig" in listed
    assert not [name for name in listed if "empty.memory_format" in name or "matmul" in name]


@pytest.mark.parametrize("match", ["(", "no_such_operator"])
def test_ops_rejects_an_invalid_match(match: str) -> None:
    result = backplane("ops", "--match", match)
    assert result.exit_code == 2
    assert match in result.stderr


OTHER_LIBRARY = """
import torch
library = torch.library.Library("backplane_other", "DEF")
keys = {"fast": "PrivateUse1", "on_cpu": "CPU", "composed": "CompositeImplicitAutograd", "far": "CUDA"}
for name, key in keys.items():
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x, key)
"""


def test_ops_of_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backplane_other.py").write_text(OTHER_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # the second time it is imported already
        result = backplane("ops", "--import", "backplane_other")
        assert result.exit_code == 0, result.output
        assert [line.split() for line in result.stdout.splitlines()] == [
            ["backplane_other::composed", "decomposition"],
            ["backplane_other::far", "none"],
            ["backplane_other::fast", "native"],
            ["backplane_other::on_cpu", "fallback"],
        ]
    assert backplane("ops", "--import", "backplane_other", "--missing").stdout.split() == ["backplane_other::on_cpu"]
    data = json.loads(backplane("ops", "--import", "backplane_other", "--match", "fast", "--json", "-").stdout)
    assert data == {"operators": [{"name": "backplane_other::fast", "required": False, "source": "native"}]}
    for module, match, message in (
        ("backplane_absent", "", "No module named 'backplane_absent'"),
        ("json", "", "json registers no operators"),
        ("backplane_other", "aten", "no operator of backplane_other matches 'aten'"),
    ):
        result = backplane("ops", "--import", module, "--match", match)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


# --- conformance -------------------------------------------------------------------------------------------------
def test_conformance_passes_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = backplane("conformance", "--database", DATABASE, "--match", "^good", "--jobs", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "passed 2 of 2 (100.00 %)" in result.stdout
    data = json.loads(file.read_text())
    assert data["schema"] == 1
    assert data["totals"]["passed"] == 2
    assert [entry["op"] for entry in data["entries"]] == ["good_before", "good_after"]
    assert data["fallbacks"]


def test_conformance_groups_failures_by_cause_and_fails() -> None:
    result = backplane("conformance", "--database", DATABASE, "--match", "wrong_values", "--jobs", "1", "--grad")
    assert result.exit_code == 1
    assert "Failures by cause" in result.stdout
    assert "wrong_values (float32)" in result.stdout
    assert "Mismatched elements" in result.stdout


def test_conformance_lists_without_running() -> None:
    result = backplane("conformance", "--database", DATABASE, "--dtypes", "float32,float64", "--list")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == ["good_before float32", "aborts float32"]
    assert len(result.stdout.splitlines()) == 10


def test_numbers_lists_without_running() -> None:
    result = backplane("conformance", "--numbers", "--match", "^mul", "--list")
    assert result.exit_code == 0
    listed = result.stdout.split()
    assert {"mul.Scalar", "mul_.Scalar"} <= set(listed)
    assert "mul.Tensor" not in listed  # has no number argument


@pytest.mark.slow
def test_numbers_uses_the_given_dtypes() -> None:
    def run(*arguments: str) -> tuple[str, str]:
        command = ["conformance", "--numbers", "--device", "cpu", "--match", r"^mul\.Scalar$", *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "torch_backplane", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def calls(printed: str) -> int:
        (count,) = re.findall(r"^(\d+) calls of", printed, re.MULTILINE)
        return int(count)

    of_one, _ = run("--dtypes", "float32")
    findings, of_all = run("--json", "-")
    assert 0 < calls(of_one) < calls(of_all)
    assert json.loads(findings) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--numbers", "--dtypes", "float31"], "unknown dtype 'float31'"),
        (["--numbers", "--dtypes", ","], "dtypes is empty"),
        (["--numbers", "--match", "("], "malformed --match"),
        (["--numbers", "--samples", "3"], "--numbers cannot be combined with --samples"),
        (["--accuracy", "--grad"], "--accuracy cannot be combined with --grad"),
        (["--forms", "--sizes"], "--forms cannot be combined with --sizes"),
        (["--numbers", "--match", "^no_such_operator"], "no operator with a Scalar argument matches"),
        (["--dtypes", "float31"], "unknown dtype 'float31'"),
        (["--dtypes", ","], "dtypes is empty"),
        (["--match", "("], "malformed --match"),
        (["--database", "no.such:thing"], "module:attribute"),
        (["--samples", "-1"], "--samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_conformance_rejects_invalid_options(arguments: list[str], expected: str) -> None:
    result = backplane("conformance", "--device", "cpu", "--jobs", "1", "--database", DATABASE, *arguments)
    assert result.exit_code == 2
    assert expected in result.stderr
