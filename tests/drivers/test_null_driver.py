"""Tests the driver that executes nothing (examples/drivers/null), and the overhead benchmark on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import driver_packages
import forked
import paths
import pytest

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc")) is None, reason="needs a C compiler: install cc, or set CC"
)

SOURCE = (driver_packages.EXAMPLES / "null" / "null_driver.py").read_text(encoding="utf-8")
OVERHEAD = paths.ROOT / "benchmarks" / "overhead.py"

PROGRAM = """
import torch
from torch_backplane import _C, drivers
from torch_backplane.drivers.base import NATIVE_GROUPS
torch.bp.device_count()
launcher = drivers.device(0).native_launcher
assert all(launcher.has(group) for group in NATIVE_GROUPS["c"]) and len(NATIVE_GROUPS["c"]) >= 8

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Dropout(), torch.nn.GELU(), torch.nn.Linear(4, 1)).to("bp")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(3, 8).to("bp")).sum().backward()
    optimizer.step()
with torch.no_grad():
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        y = model(torch.ones(3, 8, device="bp"))
graph.replay()
assert not y.to("bp:1").cpu().any()
event = torch.bp.Event(interprocess=True)
event.record()
torch.bp.Event.from_ipc_handle(1, event.ipc_handle()).wait()
assert _C.import_memory(0, *_C.export_memory(y)).numel() == 12
print(_C.fallback_counts())
"""


@pytest.mark.slow
def test_null_driver_has_every_native_group_and_runs_programs(tmp_path: Path) -> None:
    driver_packages.install(tmp_path, "null", SOURCE, "NullDriver")
    result = forked.run(PROGRAM, tmp_path, TORCH_BACKPLANE_DRIVERS="null")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "{}\n"


@pytest.mark.slow
def test_overhead_benchmark_runs_on_the_null_driver(tmp_path: Path) -> None:
    driver_packages.install(tmp_path, "null", SOURCE, "NullDriver")
    command = [sys.executable, str(OVERHEAD), "--driver", "null", "--rounds", "1", "--scale", "0.01", "--json"]
    environment = os.environ | {"PYTHONPATH": driver_packages.python_path(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["results"][0]["workload"] == "a * b, 16 elements"
    assert measured["parts_us"]["call"] > 0
