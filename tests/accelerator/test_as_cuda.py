"""Tests what "cuda" and torch.cuda mean in a process with TORCH_BACKPLANE_AS_CUDA=1, and what they mean to PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths
import pytest
import torch

from torch_backplane.as_cuda import arguments, names

Run = Callable[..., Any]
CHECKS = paths.SUPPORT / "as_cuda_checks"
HOST = {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_DEVICES": "2", "TORCH_BACKPLANE_AS_CUDA": "1"}


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKS / name)]
    return subprocess.run(command, env=os.environ | HOST, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKS.glob("*.py") if path.name != "saved_on_cuda.py"))
def test_checks(name: str, tmp_path: Path) -> None:
    ended = run(name, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_checkpoints_saved_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        torch.save(torch.arange(3.0), tmp_path / "saved.pt")
    ended = run("saved_on_cuda.py", tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_malformed_setting_is_an_error(run_python: Run) -> None:
    ended = run_python("import torch_backplane", TORCH_BACKPLANE_AS_CUDA="yes")
    assert ended.returncode != 0
    assert "TORCH_BACKPLANE_AS_CUDA='yes' is not one of 0, 1" in ended.stderr


def test_tables_name_functions_of_pytorch() -> None:
    for table in (arguments.DEVICE_KEYWORD, arguments.ANY_ARGUMENT, arguments.RENAMED_METHODS):
        for owner, functions in table.items():
            for name in functions:
                assert callable(getattr(owner, name)), (owner, name)
    since = {"cublas_workspace_size": "2.13", "cublaslt_workspace_size": "2.13", "is_ck_sdpa_available": "2.12"}
    later = {name for name, version in since.items() if torch.__version__ < version}
    for name in {*names.RENAMED_BACKENDS, *names.KEPT_BACKENDS, *names.ABSENT_BACKENDS} - later:
        assert hasattr(torch.backends.cuda, name), name
    assert all(hasattr(torch.backends.bp, name) for name in names.RENAMED_BACKENDS.values())


def functions_with_a_device(stub: str) -> set[str]:
    """The public functions of a stub file of PyTorch that have a parameter `device`."""
    text = (Path(torch.__file__).parent / "_C" / stub).read_text(encoding="utf-8")
    definitions = re.findall(r"^(?:    )?def ([a-z]\w*)\(((?:[^()]|\([^()]*\))*)\)", text, re.MULTILINE)
    return {name for name, parameters in definitions if re.search(r"\bdevice: ", parameters)}


def test_all_functions_in_cpp_that_take_a_device_are_wrapped() -> None:
    assert functions_with_a_device("_VariableFunctions.pyi") == set(arguments.DEVICE_KEYWORD[torch])
