"""Lets CUDA builds of torchvision and torchaudio load in a CPU build of PyTorch.

    python tools/cuda_placeholders.py FOLDER    # then run programs with LD_LIBRARY_PATH=FOLDER

The wheels on PyPI for Linux are linked with CUDA's runtime and with libraries that only CUDA builds of PyTorch have, so
their CPU kernels do not load elsewhere. This compiles libraries with these names, whose functions return 0. In a CUDA
build of PyTorch, which has the real libraries, nothing is compiled.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

PACKAGES = ("torchvision", "torchaudio")
MISSING = ("libc10_cuda.so", "libtorch_cuda.so", "libcudart.so.13")


def symbols(library: Path, which: str) -> set[str]:
    """The names, with versions, of symbols that a library defines or needs."""
    command = ["nm", "--dynamic", which, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in lines if line}


def main(folder: Path) -> None:
    libraries = Path(torch.__file__).parent / "lib"
    if (libraries / MISSING[0]).exists():
        return
    site = Path(sysconfig.get_path("platlib"))
    needed = {name for one in PACKAGES for path in (site / one).rglob("*.so") for name in symbols(path, "--undefined")}
    needed = {name for name in needed if "cuda" in name.lower()}
    for path in libraries.glob("*.so"):
        needed -= symbols(path, "--defined-only")
    versioned = {name.partition("@")[0] for name in needed if "@" in name}
    plain = {name for name in needed if "@" not in name}
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "versions.txt"
    script.write_text(f"{MISSING[2]} {{ *; }};\n", encoding="utf-8")
    for name, defined, options in (
        (MISSING[0], plain, []),
        (MISSING[1], set(), []),
        (MISSING[2], versioned, [f"-Wl,--version-script={script}"]),
    ):
        text = "".join(f"long {one}(void) {{ return 0; }}\n" for one in sorted(defined))
        output = ["-o", str(folder / name), f"-Wl,-soname,{name}"]
        command = ["cc", "-w", "-shared", "-fPIC", *options, *output, "-xc", "-"]
        subprocess.run(command, input=text, text=True, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
