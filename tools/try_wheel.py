"""Tries a wheel in a new environment without a compiler, away from the checkout.

    python tools/try_wheel.py WHEEL

The environment gets the wheel and the torch of the Python that runs this, from where pip finds them. Then the README's
first program and `python -m torch_backplane devices` run on host and OpenCL devices, with empty caches, and at the end
`doctor`. Without an OpenCL device, OpenCL is skipped, or with REQUIRE_OPENCL=1 an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99|nvcc|cl)(-[\d.]+)?")


class Environment:
    """A virtual environment, and a folder in which its Python runs."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        self.python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        for name in ("home", "cwd"):
            (folder / name).mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "PYTHON", "POCL"))}
        self.variables = {**kept, "PATH": self._path_without_compilers()}
        for name in ("CC", "CXX"):
            self.variables.pop(name, None)

    def _path_without_compilers(self) -> str:
        """Makes links to the programs of PATH, except compilers, and returns their folder as a PATH."""
        links = self.folder / "bin"
        links.mkdir()
        for folder in os.get_exec_path():
            for program in pathlib.Path(folder).glob("*"):
                link = links / program.name
                if not COMPILERS.fullmatch(program.stem) and not os.path.lexists(link):
                    link.symlink_to(program)
        return f"{self.python.parent}{os.pathsep}{links}"

    def run(self, *arguments: str, shown: int | None = 5, **variables: str) -> str:
        """Runs Python, shows the first lines of the output (None: all) and the time, and returns the output. Exits if
        it fails."""
        print("==", *(f"{name}={value}" for name, value in variables.items()), "python", *arguments, flush=True)
        start = time.perf_counter()
        finished = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder / "cwd",
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(*finished.stdout.splitlines()[:shown], f"({time.perf_counter() - start:.1f} s)", sep="\n", flush=True)
        if finished.returncode != 0:
            sys.exit(f"failed with exit status {finished.returncode}")
        return finished.stdout

    def run_on(self, driver: str, *arguments: str) -> str:
        """Runs a program on the devices of a driver, without a cache of earlier programs."""
        home = str(self.folder / "home")
        return self.run(*arguments, HOME=home, XDG_CACHE_HOME=home, TORCH_BACKPLANE_DRIVERS=driver)


def first_program() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return program


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment(pathlib.Path(folder))
        (environment.folder / "cwd" / "first.py").write_text(first_program(), encoding="utf-8")
        torch = importlib.metadata.version("torch")
        environment.run("-m", "pip", "install", "-q", os.path.abspath(wheel), f"torch=={torch}")
        environment.run("-m", "pip", "check")
        for driver in ("host", "opencl"):
            devices = environment.run_on(driver, "-m", "torch_backplane", "devices")
            if "bp:0" not in devices:
                if driver == "host" or os.environ.get("REQUIRE_OPENCL") == "1":
                    sys.exit(f"the driver {driver!r} has no device")
                print("no OpenCL device: not tested on OpenCL")
                continue
            loss = float(environment.run_on(driver, "first.py").split(maxsplit=1)[0])
            if not loss < 0.5:
                sys.exit(f"the first program ends with a loss of {loss} on {driver!r}, but it must be less than 0.5")
        home = str(environment.folder / "home")
        environment.run("-m", "torch_backplane", "doctor", shown=None, HOME=home, XDG_CACHE_HOME=home)


if __name__ == "__main__":
    main(*sys.argv[1:])
