"""The guides' code runs as it stands: all Python of a page in one program, then its shell commands, on OpenCL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import on_opencl
import pytest

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page} has no {language} left"
    return found


def run(command: list[str], **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # `python` is this one
    finished = subprocess.run(
        command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return finished.stdout


@pytest.fixture(autouse=True)
def _opencl() -> None:
    on_opencl.require_platform()


def test_all_blocks_are_run() -> None:
    text = (ROOT / "docs" / "write-an-operator.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) == {"python", "sh"}


def test_the_python_of_write_an_operator_runs() -> None:
    program = "\n".join(blocks("write-an-operator.md", "python"))
    printed = run([sys.executable, "-c", program], TORCH_BACKPLANE_DRIVERS="opencl")
    for told in ("aten::cumsum: planned", "aten::cumsum: replayed", "launch bp_cumsum", "kernels have no complex32"):
        assert told in printed


@pytest.mark.parametrize("command", "".join(blocks("write-an-operator.md", "sh")).splitlines())
def test_the_commands_of_write_an_operator_run(command: str) -> None:
    run(["bash", "-c", command])
