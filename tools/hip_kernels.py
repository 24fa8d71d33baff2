"""Compiles kernels in HIP C++ with clang for AMD's GPUs, without one, and lists errors and spilled registers.

    python tools/hip_kernels.py [--architectures gfx90a,gfx1100] [TITLE…]

The kernels are those of operators of the audit; titles choose some. Needs clang with the AMDGPU target, HIP's headers
and ROCm's device libraries. ROCM_PATH names the folder of ROCm, /opt/rocm by default; the system's folders are also
searched.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_backplane.audit.workloads import WORKLOADS
from torch_backplane.kernels import HipCpp
from torch_backplane.kernels.modelled import SHIPPED
from torch_backplane.ptxas.collect import Kernel, collect

# The work items of a wavefront, by architecture.
ARCHITECTURES = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}

_COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(22, 15, -1)))
_LIBRARIES = ("amdgcn/bitcode", "lib/amdgcn/bitcode", "lib/x86_64-linux-gnu/amdgcn/bitcode")
# The name of a kernel, or one of its figures.
_REMARK = re.compile(r"remark: (?:Function Name: (\w+)|\s+([A-Za-z ]+?)(?: \[[\w/]+\])?: (\d+)) \[-Rpass-analysis=")


class Missing(RuntimeError):
    """Something that compiles kernels is not installed."""


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel on an architecture.

    Args:
        error: the compiler's messages, if it did not compile.
        figures: the compiler's figures by name, such as "VGPRs", "VGPRs Spill" and "ScratchSize".
    """

    error: str
    figures: dict[str, int]

    @property
    def spills(self) -> bool:
        """Whether registers are spilled."""
        return any(value for name, value in self.figures.items() if name.endswith("Spill"))


def _roots() -> list[Path]:
    return [Path(one) for one in (os.environ.get("ROCM_PATH") or "/opt/rocm", "/usr")]


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the command of clang, with the options that find HIP's headers and the device libraries.

    Raises:
        Missing: one of them is not installed.
    """
    places = os.pathsep.join([*(str(root / "llvm/bin") for root in _roots()), os.environ.get("PATH", "")])
    found = next(filter(None, (shutil.which(name, path=places) for name in _COMPILERS)), None)
    if found is None:
        raise Missing("clang is not installed (apt-get install clang-19)")
    headers = next((root for root in _roots() if (root / "include/hip/hip_runtime.h").exists()), None)
    if headers is None:
        raise Missing("HIP's headers are not installed (apt-get install libamdhip64-dev)")
    libraries = next((root / one for root in _roots() for one in _LIBRARIES if (root / one / "ocml.bc").exists()), None)
    if libraries is None:
        raise Missing("ROCm's device libraries are not installed (apt-get install rocm-device-libs)")
    folder = _complete(found, libraries)
    return (found, f"--rocm-path={headers}", f"--rocm-device-lib-path={folder}")


@functools.cache
def _complete(clang: str, libraries: Path) -> str:
    """Return a folder of the device libraries with the numbers of all ARCHITECTURES, which older libraries lack."""
    folder = Path(_temporary().name, "libraries")
    folder.mkdir()
    for one in libraries.glob("*.bc"):
        (folder / one.name).symlink_to(one)
    for name in ARCHITECTURES:
        number = name.removeprefix("gfx")
        file = folder / f"oclc_isa_version_{number}.bc"
        if not file.exists():
            version = int(number[:-2]) * 1000 + int(number[-2], 16) * 100 + int(number[-1], 16)
            text = f"constant int __oclc_ISA_version = {version};"
            options = ["-x", "cl", "-cl-std=CL2.0", "-target", "amdgcn-amd-amdhsa", "-nogpulib", "-emit-llvm", "-c"]
            command = [clang, *options, "-", "-o", str(file)]
            made = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
            if made.returncode != 0:
                raise Missing(f"clang has no AMDGPU target: {made.stderr.strip()}")
    return str(folder)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def compile_all(kernels: Sequence[Kernel], architecture: str) -> list[Compiled]:
    """Compile kernels in one run of clang, because HIP's headers take most of its time.

    If one has an error, each is compiled by itself.

    Raises:
        Missing: see `compiler`.
    """
    command = [
        *compiler(), "-x", "hip", "--offload-device-only", f"--offload-arch={architecture}", "-O3", "-S", "-w",
        "-mcode-object-version=5", "-Rpass-analysis=kernel-resource-usage", *HipCpp().compile_options,
        "-", "-o", os.devnull,
    ]  # fmt: skip
    source = "#include <hip/hip_runtime.h>\n" + "".join(_apart(one, number) for number, one in enumerate(kernels))
    made = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    if made.returncode != 0:
        one_by_one = len(kernels) > 1
        return [compile_all([one], architecture)[0] for one in kernels] if one_by_one else [Compiled(made.stderr, {})]
    figures: dict[str, dict[str, int]] = {}
    for name, figure, value in _REMARK.findall(made.stderr):
        if name:
            of_kernel = figures.setdefault(name, {})
        else:
            of_kernel[figure.strip()] = int(value)
    return [Compiled("", figures[f"{one.entry}_{number}"]) for number, one in enumerate(kernels)]


def _apart(kernel: Kernel, number: int) -> str:
    """Return the text of a kernel with names that no other one has."""
    macros = {kernel.entry, *re.findall(r"^#define (\w+)", kernel.text, re.MULTILINE)}
    return (
        f"#define {kernel.entry} {kernel.entry}_{number}\nnamespace kernel_{number} {{\n"
        f'#line 1 "{kernel.entry}"\n{kernel.text}\n}}\n' + "".join(f"#undef {name}\n" for name in sorted(macros))
    )


def target_file(subgroup: int) -> str:
    """Return the path of a target file for AMD's GPUs with wavefronts of `subgroup` work items."""
    content = json.loads(SHIPPED["amd-rdna3"].read_text(encoding="utf-8"))
    content["name"] = f"an AMD GPU with wavefronts of {subgroup}"
    content["figures"] |= {"subgroup_size": subgroup, "group_multiple": subgroup, "max_argument_bytes": 4096}
    file = Path(_temporary().name, f"wavefronts of {subgroup}.json")
    file.write_text(json.dumps(content), encoding="utf-8")
    return str(file)


def kernels(titles: Sequence[str], subgroup: int) -> tuple[list[Kernel], dict[str, str]]:
    """Return the kernels of cases of the audit in HIP C++, and the errors of cases that ended early."""
    return collect([f"audit: {one}" for one in titles], target=target_file(subgroup), dialect=HipCpp.name)


def main() -> int:
    """Compile kernels, and print those with errors or spilled registers. Returns 1 if there are errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="(default: %(default)s)")
    parser.add_argument("titles", nargs="*", help="of cases of the audit (default: those of benchmarks/kernels.py)")
    given = parser.parse_args()
    chosen = given.architectures.split(",")
    compiler()
    failed = 0
    for subgroup in sorted({ARCHITECTURES[one] for one in chosen}):
        found, errors = kernels(given.titles or [one.title for one in WORKLOADS], subgroup)
        for title, error in errors.items():
            print(f"{title} ended early: {error}")
        for architecture in (one for one in chosen if ARCHITECTURES[one] == subgroup):
            made = dict(zip(found, compile_all(found, architecture), strict=True))
            wrong = [one for one in found if made[one].error]
            spilled = [one for one in found if made[one].spills]
            counts = f"{len(found)} kernels, {len(wrong)} with errors, {len(spilled)} with spilled registers"
            print(f"{architecture}: {counts}")
            for one in wrong:
                print(f"  {one.case}: {one.entry}\n{made[one].error}")
            for one in spilled:
                print(f"  {one.case}: {one.entry}, groups of {one.group}: {made[one].figures}")
            failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as error:
        sys.exit(str(error))
