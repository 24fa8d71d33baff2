"""Training on bp leaves the process, and PyTorch for other devices, as they are without Backplane.

The program is process_facts.py. test_neighbours.py checks what Backplane changes in PyTorch's Python modules.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import exit_scenarios
import paths
import pytest
import torch

# Changes by the libraries that a driver loads.
BY_LIBRARIES: dict[str, dict[str, str]] = {
    "host": {},
    "opencl": {
        "process/signals caught": "PoCL's compiler, LLVM, handles signals",
        "process/environment/PYOPENCL_HOME": "set by pyopencl",
    },
}

DISPATCHED = ("dispatch", "dispatch in a thread")


@pytest.fixture(scope="module")
def fake_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build fake_device.cpp")
    library = tmp_path_factory.mktemp("fake") / "fake_device.so"
    torch_folder = Path(torch.__file__).parent
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    command = [compiler, *options, str(paths.SUPPORT / "fake_device.cpp"), "-o", str(library), "-lc10"]
    subprocess.run(command, check=True)
    return library


def facts(*arguments: str, **environment: str) -> dict[str, Any]:
    """Returns the program's output. It runs with PyTorch's default number of threads, not that of the tests."""
    changed = ("OMP_", "MALLOC_", "TORCH_BACKPLANE_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(changed)}
    command = [sys.executable, str(paths.SUPPORT / "process_facts.py"), *arguments]
    done = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=exit_scenarios.DRIVERS)
def both(request: pytest.FixtureRequest, fake_device: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts without Backplane and with it. The run without it imports the modules that PyTorch loaded in the other."""
    if request.param == "opencl":
        request.getfixturevalue("platform")
    found = facts(str(fake_device), "bp", **exit_scenarios.DRIVERS[request.param])
    alone = facts(str(fake_device), *found["modules"], TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for name in BY_LIBRARIES[request.param]:
        *parts, last = name.split("/")
        for one in (found["facts"], alone["facts"]):
            for part in parts:
                one = one[part]
            one.pop(last, None)
    return alone["facts"], found["facts"]


AREAS = ["malloc", "cpu parallelism", "cpu parallelism in a thread", "affinity", "autograd", "process", "results"]


@pytest.mark.parametrize("area", AREAS)
def test_the_process_is_the_same_as_without_backplane(area: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    alone, found = both
    assert set(alone) == set(found) == {*AREAS, *DISPATCHED}
    assert found[area] == alone[area]


def test_pytorchs_engine_runs_backward_passes(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for one in both:
        assert one["autograd"]["cpu"] == ["here", "cpu", True]
        assert one["autograd"]["maia"] == ["in another thread", "maia:0", True]


# Registered with torch.library.register_vmap (torch_backplane/fused_attention.py), because PyTorch has none.
BATCHING_RULES = {
    f"aten::_scaled_dot_product_fused_attention_overrideable{suffix} FuncTorchBatched" for suffix in ("", "_backward")
}


def is_ours(registration: str) -> bool:
    return registration.startswith("backplane::") or "PrivateUse1" in registration


def test_kernels_are_registered_only_for_our_keys_and_operators(
    both: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    alone, found = (one["dispatch"]["kernels"] for one in both)
    assert len(alone) > 10_000
    different = {name for name in alone.keys() | found.keys() if alone.get(name) != found.get(name)}
    assert any(map(is_ours, different))
    assert {name for name in different if not is_ours(name)} == BATCHING_RULES


def test_batching_rules_leave_other_devices_pytorchs_error() -> None:
    x = torch.ones(2, 1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(torch.ops.aten._scaled_dot_product_fused_attention_overrideable)(x, x, x)


@pytest.mark.parametrize("where", DISPATCHED)
def test_other_fallbacks_and_thread_local_keys_are_unchanged(
    where: str, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    alone, found = (one[where] for one in both)
    assert [key for key in found["fallbacks"] if not is_ours(key)] == [
        key for key in alone["fallbacks"] if not is_ours(key)
    ]
    assert (found["included"], found["excluded"]) == (alone["included"], alone["excluded"])
