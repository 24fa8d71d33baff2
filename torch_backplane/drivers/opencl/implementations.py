"""The installed OpenCL implementations, and which of them end a process that lists them.

The OpenCL loader loads every installed implementation into the process and calls it to list platforms. If one of them
crashes, the process ends, and with it a program that only wanted another device. Therefore a separate process lists the
platforms first. That takes about as long as loading the implementations does, so the kernel cache remembers if nothing
crashed, until the system is started again or an implementation is installed or changed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path

from torch_backplane.drivers import kernel_cache

FOLDER = "/etc/OpenCL/vendors"
# Variables of the loaders that name a folder, an .icd file or a library. The first that is set decides.
VARIABLES = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")
# Set by PyOpenCL: the loader in its wheel also reads the folder `.libs` of this one.
SHIPPED = "PYOPENCL_HOME"
LONGEST = 60  # seconds that listing may take

_SCRIPT = Path(__file__).with_name("listing.py")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KILLED = ("SIGKILL", "SIGTERM", "SIGINT")  # by the user or the system, so not by an implementation


@dataclass(frozen=True)
class Implementation:
    """An installed OpenCL implementation (an ICD)."""

    file: Path  # its .icd file
    library: str  # the library that the file names


@dataclass(frozen=True)
class Listing:
    """What a separate process has listed."""

    crash: str = ""  # how the process ended while it listed platforms; empty if it did not crash
    answered: bool = False  # whether the rest is known
    platforms: tuple[tuple[str, int], ...] = ()  # name and number of devices
    error: str = ""  # of loading the library


def variable() -> str:
    """Return the environment variable that says where the loader looks, or an empty string if none is set."""
    return next((name for name in VARIABLES if os.environ.get(name)), "")


def place() -> str:
    """Return the folder, .icd file or library in which the loader looks for implementations."""
    return os.environ.get(variable(), FOLDER)


def installed() -> list[Implementation]:
    """Return the implementations that the loader finds. PyOpenCL has been imported, if it is installed."""
    chosen = Path(place())
    if chosen.is_dir():
        files = sorted(chosen.glob("*.icd"))
    elif chosen.suffix == ".icd":
        files = [chosen]
    else:
        files = []
    if SHIPPED in os.environ:
        files += sorted(Path(os.environ[SHIPPED], ".libs").glob("*.icd"))
    found = []
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):  # the loader ignores such a file, too
            found.append(Implementation(file, file.read_text(encoding="utf-8").split("\n")[0].strip()))
    if not chosen.is_dir() and chosen.suffix != ".icd" and str(chosen) != FOLDER:
        found.append(Implementation(chosen, str(chosen)))  # the variable names a library
    return found


@functools.cache
def unusable(loader: str) -> Mapping[Implementation, str]:
    """Return the implementations that end a process that lists them, and how.

    If implementations crash only together, the first ones are usable.

    Args:
        loader: a library that is linked with the OpenCL loader.
    """
    found = installed()
    if not found or getattr(sys, "frozen", False):  # a frozen program has no Python that runs scripts
        return {}
    key = kernel_cache.key(_state(loader, found))
    if kernel_cache.load(key) is not None:
        return {}
    together = list_apart(loader)
    if together.answered:
        kernel_cache.store(key, b"listed")
    if not together.crash:
        return {}
    usable: list[Implementation] = []
    crashed: dict[Implementation, str] = {}
    for one in found:
        if crash := list_apart(loader, [*usable, one]).crash:
            crashed[one] = crash
        else:
            usable.append(one)
    return crashed


def list_apart(loader: str, chosen: Sequence[Implementation] | None = None) -> Listing:
    """List platforms in a separate process.

    Args:
        loader: a library that is linked with the OpenCL loader.
        chosen: the implementations to list; by default all that are installed.
    """
    with _only(chosen) as variables:
        command = [os.fsdecode(spawn.get_executable()), "-I", "-S", str(_SCRIPT), loader]
        if chosen is not None:
            command.append(chosen[-1].library)
        try:
            ended = subprocess.run(
                command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Listing(crash=f"it does not return within {LONGEST} s")
        except OSError:  # no process can be started
            return Listing()
    began, _, answer = ended.stdout.decode(errors="replace").partition("\n")
    status = _status(ended.returncode)
    if began != "listing" or status in _KILLED:
        return Listing()
    if not answer:
        return Listing(crash=f"it ends the process with {status}")
    known = json.loads(answer)
    return Listing("", True, tuple((name, count) for name, count in known["platforms"]), known["error"])


@contextlib.contextmanager
def excluded(implementations: Mapping[Implementation, str]) -> Iterator[None]:
    """While this is active, the loader does not find `implementations`, if it has not been used in this process yet.

    The variables that it reads are set meanwhile. If there is nothing to exclude, nothing changes.
    """
    if not implementations:
        yield
        return
    with _only([one for one in installed() if one not in implementations]) as variables:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _only(chosen: Sequence[Implementation] | None) -> Iterator[dict[str, str]]:
    """Yield environment variables with which the loader finds only `chosen`; none if it is None."""
    if chosen is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ".libs").mkdir()
        for number, one in enumerate(chosen):
            Path(folder, f"{number:03}.icd").write_text(f"{one.library}\n", encoding="utf-8")
        yield {VARIABLES[0]: f"{folder}/", SHIPPED: folder}


def _state(loader: str, found: Sequence[Implementation]) -> list[str]:
    """Return everything on which it depends whether an implementation crashes, as far as it can be known."""
    files = [loader, *(name for one in found for name in (str(one.file), one.library))]
    times = []
    for name in files:
        with contextlib.suppress(OSError):  # most .icd files name a library without its folder
            status = os.stat(name)
            times.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    with contextlib.suppress(OSError):
        times.append(_BOOT.read_text(encoding="utf-8"))  # a driver in the kernel changes at a start of the system
    paths = [os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "LD_PRELOAD")]
    return ["OpenCL implementations that can be listed", *files, *times, *paths]


def _status(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
