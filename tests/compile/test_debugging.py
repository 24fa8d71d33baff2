"""What PyTorch's settings for debugging compiled programs write for bp: TORCH_COMPILE_DEBUG and TORCH_LOGS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_backplane import drivers

HAS_KERNELS = bool(drivers.device(0).properties.dialect)
GRAPHS = ("0_forward", "0_backward", "1_inference")
FILES = {
    "fx_graph_readable.py": "torch.ops.aten",
    "fx_graph_runnable.py": "class Repro",
    "fx_graph_transformed.py": "torch.ops.aten",
    "ir_pre_fusion.txt": "buf0",
    "ir_post_fusion.txt": "buf0",
    "output_code.py": "void bp_fused_" if HAS_KERNELS else 'extern "C"',
}

PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).to("bp")
x = torch.randn(4, 8, device="bp")
torch.compile(model)(x).sum().backward()
torch.compile(lambda x: torch.softmax(x, -1) + x.shape[0], dynamic=True)(x)
"""

STANDALONE = """
import runpy, sys
files = sys.argv[1:]
for file in files:
    sys.argv = [file]
    runpy.run_path(file, run_name="__main__")
    print("done")
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    variables = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    finished = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that TORCH_COMPILE_DEBUG fills."""
    path = tmp_path_factory.mktemp("debug")
    settings = {"TORCH_COMPILE_DEBUG_DIR": str(path), "TORCH_LOGS": "output_code,schedule,fusion"}
    logs = run(PROGRAM, TORCH_COMPILE_DEBUG="1", **settings)
    (path / "logs").write_text(logs.stderr)
    return path


def graph_folders(folder: Path) -> dict[str, Path]:
    (inductor,) = folder.glob("torch_compile_debug/run_*/torchinductor")
    return {name: path for path in inductor.iterdir() for name in GRAPHS if path.name.startswith(f"model__{name}")}


def test_the_folder_of_each_graph_is_complete(folder: Path) -> None:
    found = graph_folders(folder)
    assert set(found) == set(GRAPHS)
    for path in found.values():
        for name, part in FILES.items():
            assert part in (path / name).read_text(), (path, name)


@pytest.mark.parametrize("name", ["output_code.py", "fx_graph_runnable.py"])
@pytest.mark.slow
def test_the_written_programs_run_alone(folder: Path, name: str) -> None:
    programs = [str(path / name) for path in graph_folders(folder).values()]
    assert run(STANDALONE, *programs).stdout.count("done") == len(GRAPHS)


def test_logs(folder: Path) -> None:
    logs = (folder / "logs").read_text()
    for part in ("[__output_code] Output code", "[__fusion] fusing op", "[__fusion] cannot fuse op"):
        assert part in logs, part
    assert ("[__schedule]" in logs) == HAS_KERNELS  # Inductor's scheduling for CPUs logs nothing


def test_no_warning_is_about_backplanes_operators_or_templates(folder: Path) -> None:
    logs = (folder / "logs").read_text()
    for part in ("backplane::", "custom operator", "max_autotune"):
        assert part not in logs, part
