"""Installs driver packages for tests as pip does: a module and its metadata in a folder that is put on PYTHONPATH.

Also runs code with modified versions of the OpenCL driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import forked
import paths

EXAMPLES = paths.ROOT / "examples" / "drivers"

# A minimal driver; tests replace parts of it.
MINIMAL = '''
from torch_backplane.drivers import Device, DeviceProperties, Driver

class MinimalDevice(Device):
    properties = DeviceProperties(name="Minimal", total_memory=1 << 26)
    def allocate(self, nbytes): return bytearray(nbytes)
    def free(self, handle): pass
    def copy_in(self, handle, offset, host_memory, stream): handle[offset:offset + len(host_memory)] = host_memory
    def copy_out(self, handle, offset, host_memory, stream): host_memory[:] = handle[offset:offset + len(host_memory)]

class MinimalDriver(Driver):
    def devices(self): return [MinimalDevice()]
'''

# For programs that print errors: returns the error that a call raises as one line.
RAISED = '''
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("nothing was raised")
'''


def install(site: Path, name: str, source: str, cls: str, distribution: str | None = None) -> None:
    """Installs `source` in `site` as the driver `name` with the class `cls`."""
    distribution = distribution or f"driver_{name}"
    module = f"{distribution}_module"
    (site / f"{module}.py").write_text(source)
    metadata = site / f"{distribution}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch_backplane.drivers]\n{name} = {module}:{cls}\n")


def install_toy(site: Path) -> None:
    """Installs the example driver `toy`."""
    install(site, "toy", (EXAMPLES / "toy" / "toy_driver.py").read_text(), "ToyDriver")


def opencl_runner(site: Path, name: str, preamble: str, **settings: str) -> Callable[..., str]:
    """Installs the driver of `{name}_opencl_driver.py` in `site` and returns a function run(code, **env) that uses it.

    `run` executes `preamble + code` in a separate process and returns its stdout. The process must succeed and print
    nothing to stderr (no warnings, no output of destructors). Values in `env` override those in `settings`.
    """
    source = (paths.SUPPORT / f"{name}_opencl_driver.py").read_text(encoding="utf-8")
    install(site, name, source, f"{name.title()}Driver")

    def run(code: str, **env: str) -> str:
        result = forked.run(preamble + code, site, **{"TORCH_BACKPLANE_DRIVERS": name} | settings | env)
        assert result.returncode == 0, result.stderr
        # PyTorch's CUDA builds write this if there is a CUDA toolkit and no GPU.
        written = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]
        assert not written, result.stderr
        return result.stdout

    return run


def python_path(site: Path) -> str:
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def install_null(site: Path) -> dict[str, str]:
    """Installs the example driver `null`, which executes nothing. Returns the environment of processes that use it."""
    install(site, "null", (EXAMPLES / "null" / "null_driver.py").read_text(encoding="utf-8"), "NullDriver")
    return {
        "PYTHONPATH": python_path(site),
        "TORCH_BACKPLANE_DRIVERS": "null",
        "TORCH_BACKPLANE_FALLBACK": "silent",
        "TORCH_BACKPLANE_VISIBLE_DEVICES": "null",
        "TORCH_BACKPLANE_DISCRETE": "0",
    }


def install_queued(site: Path) -> None:
    plain_c = (EXAMPLES / "plain_c" / "plain_c_driver.py").read_text(encoding="utf-8")
    install(site, "plain_c", plain_c, "PlainCDriver")
    source = (paths.SUPPORT / "queued_c_driver.py").read_text(encoding="utf-8")
    install(site, "queued", source, "QueuedDriver")
