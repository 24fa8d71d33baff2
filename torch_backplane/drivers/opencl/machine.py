"""The GPUs of this machine, and what OpenCL needs to reach them. Reads /sys and /dev; imports no OpenCL."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_backplane.drivers.base import Finding

SYS, DEV = Path("/sys"), Path("/dev")
CLASSES = ("0x03", "0x12")  # PCI: display controllers, processing accelerators
NODES = ("dri/render*", "kfd", "nvidia[0-9]*")  # device nodes that OpenCL implementations open
CPU = "apt-get install pocl-opencl-icd"


@dataclass(frozen=True)
class Vendor:
    """A vendor of GPUs."""

    name: str
    install: str  # the command that installs its OpenCL implementation on Debian
    nodes: str  # its device nodes, one of NODES
    container: str  # the option that gives them to a container
    rusticl: str  # the value of RUSTICL_ENABLE, with which Mesa's implementation uses its GPUs


_AMD_NODES = "--device /dev/dri --device /dev/kfd"
VENDORS = {
    0x8086: Vendor("Intel", "apt-get install intel-opencl-icd", NODES[0], "--device /dev/dri", "iris"),
    0x1002: Vendor("AMD", "apt-get install mesa-opencl-icd", NODES[0], _AMD_NODES, "radeonsi"),
    0x10DE: Vendor("NVIDIA", "apt-get install nvidia-opencl-icd", NODES[2], "--gpus all", "nouveau"),
}
# The library of NVIDIA's implementation. In containers it is often there, but not the .icd file that names it.
NVIDIA, NVIDIA_ICD = 0x10DE, "/etc/OpenCL/vendors/nvidia.icd"


def gpus() -> list[tuple[str, int]]:
    """Return the PCI address and the PCI vendor of each GPU of a vendor in VENDORS."""
    found = []
    for folder in sorted((SYS / "bus/pci/devices").glob("*")):
        try:
            kind, vendor = (Path(folder, name).read_text(encoding="ascii").strip() for name in ("class", "vendor"))
        except OSError:
            continue
        if kind.startswith(CLASSES) and int(vendor, 16) in VENDORS:
            found.append((folder.name, int(vendor, 16)))
    return found


def install_command() -> str:
    """Return the command that installs an OpenCL implementation for the first GPU, else for the CPU."""
    return next((_install(vendor) for _, vendor in gpus()), CPU)


def rusticl_setting() -> str:
    """Return the setting with which Mesa's rusticl uses the GPUs of this machine, or an empty string."""
    names = ",".join(dict.fromkeys(VENDORS[vendor].rusticl for _, vendor in gpus()))
    return f"RUSTICL_ENABLE={names}" if names else ""


def nodes() -> Iterator[Finding]:
    """Yield a finding for each device node that this user may not open."""
    for pattern in NODES:
        for node in sorted(DEV.glob(pattern)):
            if not os.access(node, os.R_OK | os.W_OK):
                group = _group(node)
                yield Finding(
                    str(node), False, f"no permission: it is for the group {group}",
                    f"sudo usermod -aG {group} $USER, then log in again",
                )  # fmt: skip


def used(vendors: Collection[int]) -> Iterator[Finding]:
    """Yield a finding for each GPU.

    Args:
        vendors: the PCI vendors of the GPUs that OpenCL has listed.
    """
    for address, number in gpus():
        vendor = VENDORS[number]
        what = f"{vendor.name} GPU at PCI {address}"
        if number in vendors:
            yield Finding(what, True, "OpenCL has listed it")
        elif not any(DEV.glob(vendor.nodes)):
            yield Finding(
                what, False, f"there is no /dev/{vendor.nodes}",
                f"load its kernel driver; in a container: docker run {vendor.container}",
            )  # fmt: skip
        else:
            yield Finding(what, False, "no OpenCL implementation lists it", _install(number))


def _install(number: int) -> str:
    library = ctypes.util.find_library("nvidia-opencl") if number == NVIDIA else None
    if library and not os.path.exists(NVIDIA_ICD):
        return f"mkdir -p {os.path.dirname(NVIDIA_ICD)} && echo {library} > {NVIDIA_ICD}"
    return VENDORS[number].install


def _group(node: Path) -> str:
    import grp  # only where there are device nodes

    number = node.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:  # the group of another system, in a container
        return str(number)
