"""The OpenCL driver, which finds the devices of all platforms. Imports PyOpenCL only at discovery."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.base import KINDS, Driver, Finding
from torch_backplane.drivers.opencl import implementations, machine

if TYPE_CHECKING:
    from torch_backplane.drivers.opencl.device import OpenCLDevice

_PYOPENCL = "PyOpenCL"


class OpenCLDriver(Driver):
    """The driver of all OpenCL devices that can run a kernel: GPUs first, then accelerators, then CPUs."""

    def __init__(self) -> None:
        self._pyopencl = Finding(_PYOPENCL, False, "not installed", "pip install pyopencl")
        self._loader = ""  # a library that is linked with the OpenCL loader
        self._opened: list[OpenCLDevice] = []
        self._skipped: list[Finding] = []

    def devices(self) -> Sequence[OpenCLDevice]:
        """Return the devices; an empty list, without a warning, if there is no PyOpenCL or no OpenCL platform.

        Raises:
            SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
        """
        kernel_cache.size_limit()
        try:
            import pyopencl as cl
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "pyopencl":
                return []
            self._pyopencl = Finding(
                _PYOPENCL, False, f"{type(error).__name__}: {error}", "pip install --force-reinstall pyopencl"
            )
            raise
        self._pyopencl = Finding(_PYOPENCL, True, f"version {cl.VERSION_TEXT}")
        self._loader = cl._cl.__file__
        self._opened, self._skipped = open_devices(platforms(cl))
        return self._opened

    def diagnose(self) -> Sequence[Finding]:
        """Return findings about PyOpenCL, the OpenCL implementations, their devices, and the GPUs of this machine."""
        # CL_DEVICE_VENDOR_ID is the PCI vendor.
        gpus = [device.device for device in self._opened if device.properties.kind == "gpu"]
        return [
            self._pyopencl,
            *machine.nodes(),
            *implementation_findings(self._loader),
            *self._skipped,
            *machine.used({gpu.vendor_id for gpu in gpus}),
        ]


def platforms(cl: Any) -> list[Any]:
    """Return the OpenCL platforms that PyOpenCL (`cl`) finds, or an empty list.

    Implementations that would end the process are excluded with a warning.
    """
    unusable = implementations.unusable(cl._cl.__file__)
    for one, how in unusable.items():
        finding = _crash_finding(one, how)
        warnings.warn(
            f"torch_backplane: {finding.what} is skipped. {finding.found}; {finding.remedy}", stacklevel=2
        )
    with implementations.excluded(unusable):
        try:
            return list(cl.get_platforms())
        except cl.LogicError as error:
            if error.code == cl.status_code.PLATFORM_NOT_FOUND_KHR:
                return []
            raise


def open_devices(platforms: Sequence[Any]) -> tuple[list[OpenCLDevice], list[Finding]]:
    """Return the usable devices of `platforms`, and findings about the others. Also warns about each of these.

    If PoCL is installed twice, by the system and by pip, the OpenCL loader lists both installations. The first PoCL
    platform with a working device is used, so that the processor is not listed twice.
    """
    from torch_backplane.drivers.opencl.device import OpenCLDevice
    from torch_backplane.drivers.opencl.errors import POCL

    opened: list[OpenCLDevice] = []
    skipped: list[Finding] = []
    for platform in platforms:
        if platform.name == POCL and any(device.device.platform.name == POCL for device in opened):
            continue
        try:
            devices = platform.get_devices()
        except Exception as error:
            skipped.append(_skip(f"OpenCL platform {platform.name!r}", error))
            continue
        for device in devices:
            try:
                opened.append(OpenCLDevice(device))
            except Exception as error:
                skipped.append(_skip(f"OpenCL device {device.name.strip()!r} of platform {platform.name!r}", error))
    return sorted(opened, key=lambda device: KINDS.index(device.properties.kind)), skipped


def implementation_findings(loader: str) -> Iterator[Finding]:
    """Yield a finding for each installed OpenCL implementation. Each is listed in a separate process.

    Args:
        loader: a library that is linked with the OpenCL loader, or an empty string if there is none.
    """
    found = implementations.installed()
    if not found:
        remedy = _unset() or machine.install_command()
        yield Finding("OpenCL implementation", False, f"no .icd file in {implementations.place()}", remedy)
    crashed = implementations.unusable(loader) if loader else {}
    for one in found:
        if one in crashed:
            yield _crash_finding(one, crashed[one])
        elif loader:
            yield _listing_finding(one, implementations.list_apart(loader, [one]))
        else:
            yield Finding(_named(one), True, one.library)


def _listing_finding(one: implementations.Implementation, listing: implementations.Listing) -> Finding:
    what = _named(one)
    if listing.crash:
        return _crash_finding(one, listing.crash)
    if not listing.answered:
        return Finding(what, True, one.library)
    if listing.error:
        return Finding(what, False, listing.error, _unset() or f"reinstall its package: dpkg -S {one.file}")
    devices = sum(count for _, count in listing.platforms)
    platforms = ", ".join(name for name, _ in listing.platforms) or "no platform"
    listed = f"{platforms}, {devices} device{'' if devices == 1 else 's'} ({one.library})"
    rusticl = any(name == "rusticl" and not count for name, count in listing.platforms)
    return Finding(what, devices > 0, listed, machine.rusticl_setting() if rusticl else "")


def _crash_finding(one: implementations.Implementation, how: str) -> Finding:
    return Finding(
        _named(one), False, f"{one.library}: {how} when its devices are listed",
        f"update or remove its package: dpkg -S {one.file}",
    )  # fmt: skip


def _unset() -> str:
    variable = implementations.variable()
    return f"unset {variable}" if variable else ""


def _named(one: implementations.Implementation) -> str:
    return f"OpenCL implementation {one.file.name}"


def _skip(what: str, error: Exception) -> Finding:
    finding = Finding(what, False, f"is skipped: {type(error).__name__}: {error}")
    warnings.warn(f"torch_backplane: {what} {finding.found}", stacklevel=3)
    return finding
