"""The HIP driver, which finds AMD's GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_backplane import _C
from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.base import Finding
from torch_backplane.drivers.cuda.driver import CUDADriver, Missing, choose
from torch_backplane.drivers.cuda.platforms import Platform
from torch_backplane.drivers.hip import library

if TYPE_CHECKING:
    from torch_backplane.drivers.hip.device import HIPDevice

OLDEST_HIP = (6, 0)

_UPDATE = "update ROCm"
_NO_DEVICE = "check rocminfo and HIP_VISIBLE_DEVICES; in a container: docker run --device=/dev/kfd --device=/dev/dri"

HIP = Platform(
    name="HIP",
    compiler="hiprtc",
    driver="torch_backplane.drivers.hip.api",
    nvrtc="torch_backplane.drivers.hip.rtc",
    options_variable="TORCH_BACKPLANE_HIP_OPTIONS",
    architecture_option="--offload-arch",
    name_of=library.name_of,
    remedies={
        2: "free memory, or see rocm-smi for other processes that use the GPU",
        100: _NO_DEVICE,
        101: "check HIP_VISIBLE_DEVICES",
        209: "the kernel was compiled for another architecture",
        700: "to find the kernel, run with TORCH_BACKPLANE_LAUNCH_BLOCKING=1",
        701: "the kernel needs more registers or shared memory than a group can have",
    },
)


class HIPDriver(CUDADriver):
    """The driver of all HIP devices that this process can see (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES)."""

    def devices(self) -> Sequence[HIPDevice]:
        """Return the devices; an empty list, without a warning, if there is no libamdhip64, libhiprtc or GPU.

        Raises:
            SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
        """
        kernel_cache.size_limit()
        self._findings = []
        try:
            self._note(*_load_hip())
            choose(HIP)
            version = self._note(*_initialize())
            self._note(*_load_hiprtc())
            functions = self._note(*_functions())
            count = self._note(*_count())
        except Missing as missing:
            self._findings.append(missing.finding)
            return []
        software = f"HIP {_dotted(version)}"
        return [device for index in range(count) if (device := self._opened(index, functions, software))]

    def _opened(self, index: int, functions: dict[str, int], software: str) -> HIPDevice | None:
        """Return a device, or None, with a warning, if it cannot be used."""
        from torch_backplane.drivers.hip.device import HIPDevice

        what = f"GPU {index}"
        try:
            device = HIPDevice(index, functions, software)
        except Exception as error:
            self._skip(Finding(what, False, f"is skipped: {type(error).__name__}: {error}"))
            return None
        self._findings.append(Finding(what, True, f"{device.properties.name}, {device.architecture}"))
        return device


def _load_hip() -> tuple[ctypes.CDLL, Finding]:
    what = "libamdhip64"
    try:
        loaded = library.hip()
    except OSError as error:
        raise Missing(Finding(what, False, str(error), "install ROCm")) from error
    return loaded, Finding(what, True, loaded._name)


def _initialize() -> tuple[tuple[int, int], Finding]:
    """Initialize HIP and return its version."""
    from torch_backplane.drivers.cuda.errors import checked, describe
    from torch_backplane.drivers.hip import api

    what = "HIP"
    try:
        (status,) = api.cuInit(0)
        if status != 0:
            raise Missing(Finding(what, False, f"hipInit answered {describe(int(status))}"))
        number = int(checked(api.cuDriverGetVersion))
    except library.MissingFunction as error:
        raise Missing(Finding(what, False, str(error), _UPDATE)) from error
    version = api.version_of(number)
    if version < OLDEST_HIP:
        found = f"the version is {_dotted(version)}, and {_dotted(OLDEST_HIP)} is required"
        raise Missing(Finding(what, False, found, _UPDATE))
    return version, Finding(what, True, f"version {_dotted(version)}")


def _load_hiprtc() -> tuple[ctypes.CDLL, Finding]:
    what = "libhiprtc"
    try:
        loaded = library.hiprtc()
    except OSError as error:
        raise Missing(Finding(what, False, str(error), "install ROCm's hiprtc")) from error
    return loaded, Finding(what, True, loaded._name)


def _functions() -> tuple[dict[str, int], None]:
    """Return the addresses of the functions that the native launcher calls, by CUDA's name."""
    try:
        return {name: library.function(name.partition("_v")[0]) for name in _C.cuda_functions()}, None
    except library.MissingFunction as error:
        raise Missing(Finding("libamdhip64", False, str(error), _UPDATE)) from error


def _count() -> tuple[int, None]:
    from torch_backplane.drivers.cuda.errors import describe
    from torch_backplane.drivers.hip import api

    status, count = api.cuDeviceGetCount()
    if status != 0:
        raise Missing(Finding("GPU", False, f"hipGetDeviceCount answered {describe(int(status))}"))
    if count == 0:
        raise Missing(Finding("GPU", False, "HIP lists none", _NO_DEVICE))
    return count, None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
