"""Driver packages for tests, as pip leaves them: a module and its metadata in a folder that goes on PYTHONPATH.

And running code with OpenCL's driver as a test has changed it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import forked
import paths

EXAMPLES = paths.ROOT / "examples" / "drivers"

# A driver in the fewest words; tests replace parts of it.
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

# What a call raises, in one line, for programs that print it.
RAISED = '''
def raised(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raise AssertionError("nothing was raised")
'''


def install(site: Path, name: str, source: str, cls: str, distribution: str | None = None) -> None:
    """Makes `source` importable from `site` as a driver called `name` whose class is `cls`."""
    distribution = distribution or f"driver_{name}"
    module = f"{distribution}_module"
    (site / f"{module}.py").write_text(source)
    metadata = site / f"{distribution}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch_backplane.drivers]\n{name} = {module}:{cls}\n")


def install_toy(site: Path) -> None:
    """The example driver, called `toy`."""
    install(site, "toy", (EXAMPLES / "toy" / "toy_driver.py").read_text(), "ToyDriver")


def opencl_runner(site: Path, name: str, preamble: str, **settings: str) -> Callable[..., str]:
    """run(code, **env) with the driver `name` of `{name}_opencl_driver.py`, which is installed in `site`.

    It runs `preamble + code` in a process of its own, which must end well and without a word on stderr (no warning,
    nothing printed by a destructor), and returns what was printed. `env` goes before `settings` in the environment.
    """
    source = (paths.SUPPORT / f"{name}_opencl_driver.py").read_text(encoding="utf-8")
    install(site, name, source, f"{name.title()}Driver")

    def run(code: str, **env: str) -> str:
        result = forked.run(preamble + code, site, **{"TORCH_BACKPLANE_DRIVERS": name} | settings | env)
        assert result.returncode == 0, result.stderr
        assert not result.stderr, result.stderr
        return result.stdout

    return run


def python_path(site: Path) -> str:
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))


def install_null(site: Path) -> dict[str, str]:
    """The example driver that executes nothing, called `null`, which takes planners' calls at once. Returns the
    environment variables of a process that uses it.
    """
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
