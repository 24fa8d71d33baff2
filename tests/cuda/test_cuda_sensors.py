"""Tests the sensors of CUDA devices, which NVML reads, on emulated devices."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]

READ = """
import torch
print([
    [
        torch.bp.temperature(i), torch.bp.power_draw(i), torch.bp.clock_rate(i), torch.bp.utilization(i),
        torch.bp.memory_usage(i), torch.bp.device_memory_used(i) >> 20,
    ]
    for i in range(torch.bp.device_count())
])
"""
ERROR = """
import torch
try:
    torch.bp.{name}()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
assert torch.ones(3, device="bp").sum().item() == 3
"""


def readings(ordinal: int) -> list[int]:
    """The readings of the emulator's GPU with a number of NVML (src/nvml.cpp)."""
    memory = 1500 + ordinal  # MiB, with 500 MiB that the driver reserves
    return [40 + ordinal, 150_000 + ordinal, 1410 + ordinal, 70 + ordinal, 20 + ordinal, memory]


@pytest.mark.parametrize("visible", ["0,1,2", "2,0", "1"])
def test_readings_are_of_the_visible_devices(run: Run, visible: str) -> None:
    expected = [readings(int(ordinal)) for ordinal in visible.split(",")]
    assert run(READ, CUDA_VISIBLE_DEVICES=visible) == f"{expected}\n"


def test_the_current_device_is_the_default(run: Run) -> None:
    out = run("""
import torch
with torch.bp.device(3):
    print(torch.bp.temperature(), torch.bp.temperature("bp:1"), torch.bp.temperature(torch.device("bp", 2)))
try:
    torch.bp.temperature(9)
except AssertionError as error:
    print(error)
""")
    assert out == "43 41 42\nInvalid device id: 9; the number of bp devices is 4\n"


def test_readings_make_no_context(run: Run) -> None:
    """A context takes hundreds of megabytes of a GPU. The first use that makes one fails."""
    code = READ + """
try:
    torch.bp.mem_get_info()
except Exception as error:
    print("CUDA_ERROR_UNKNOWN" in str(error))
"""
    out = run(code, CUDA_VISIBLE_DEVICES="1", CUDA_EMULATOR_FAULTS="cuDevicePrimaryCtxRetain:1:999")
    assert out == f"{[readings(1)]}\nTrue\n"


@pytest.mark.parametrize(
    ("status", "kind", "described"),
    [
        (3, "NotImplementedError", "NVML_ERROR_NOT_SUPPORTED (3): Not Supported"),
        (4, "RuntimeError", "NVML_ERROR_NO_PERMISSION (4): Insufficient Permissions"),
        (15, "RuntimeError", "NVML_ERROR_GPU_IS_LOST (15): GPU is lost"),
        (777, "RuntimeError", "NVML error (777): Unknown Error"),
    ],
)
def test_errors_of_nvml_are_named(run: Run, status: int, kind: str, described: str) -> None:
    out = run(ERROR.format(name="power_draw"), CUDA_EMULATOR_FAULTS=f"nvmlDeviceGetPowerUsage:1:{status}")
    assert out == f"{kind}: NVML cannot read the power_draw of the GPU at 0000:01:00.0: {described}\n"


def test_a_failed_initialization_is_named_and_tried_again(run: Run) -> None:
    code = ERROR.format(name="temperature") + "print(torch.bp.temperature())"
    assert run(code, CUDA_EMULATOR_FAULTS="nvmlInit:1:9") == (
        "RuntimeError: NVML cannot be initialized: NVML_ERROR_DRIVER_NOT_LOADED (9): Unknown Error\n40\n"
    )


def test_without_nvml_errors_say_what_installs_it(run: Run) -> None:
    for name in ("utilization", "device_memory_used"):
        out = run(ERROR.format(name=name), TORCH_BACKPLANE_NVML_LIBRARY="/nowhere/libnvidia-ml.so.1")
        assert out.startswith("RuntimeError: NVML cannot be loaded: /nowhere/libnvidia-ml.so.1: cannot open")
        assert "; it is a part of NVIDIA's driver; in a container: docker run --gpus all -e NVIDIA_DRIVER" in out


OLD_NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* name, void** device) { *device = (void*)1; return name == 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: install cc")
def test_a_function_that_an_older_nvml_does_not_have(run: Run, tmp_path: Path) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(OLD_NVML)
    subprocess.run(["cc", "-shared", f"-Wl,-soname,{library.name}", str(source), "-o", str(library)], check=True)
    out = run(ERROR.format(name="temperature"), TORCH_BACKPLANE_NVML_LIBRARY=str(library))
    assert out == (
        "RuntimeError: NVML cannot read the temperature of the GPU at 0000:01:00.0: "
        "function nvmlDeviceGetTemperatureV is not found; update NVIDIA's driver\n"
    )


def test_without_the_bindings_of_nvml(run: Run) -> None:
    code = "import sys; sys.modules['cuda.bindings.nvml'] = None\n" + ERROR.format(name="clock_rate")
    out = run(code)
    assert out.startswith("ModuleNotFoundError: sensors need a cuda-bindings with NVML (")
    assert "pip install -U cuda-bindings" in out


def test_readings_of_a_lost_device(run: Run) -> None:
    code = """
import torch
x = torch.ones(3, device="bp")
try:
    x.cpu()
except torch.AcceleratorError as error:
    print("was lost" in str(error))
print(torch.bp.temperature())
"""
    assert run(code, CUDA_EMULATOR_FAULTS="cuMemcpyDtoHAsync:1:700") == "True\n40\n"
