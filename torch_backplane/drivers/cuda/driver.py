"""The CUDA driver, which finds NVIDIA's GPUs. Imports cuda-bindings only at discovery, and if there is a libcuda."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_backplane import _C
from torch_backplane.drivers import kernel_cache
from torch_backplane.drivers.base import Driver, Finding
from torch_backplane.drivers.cuda import library, platforms

if TYPE_CHECKING:
    import ctypes

    from torch_backplane.drivers.cuda.device import CUDADevice

OLDEST_CUDA = (12, 0)  # of libcuda

_UPDATE = "update NVIDIA's driver"
_BINDINGS = "pip install cuda-bindings nvidia-cuda-nvrtc"


class Missing(Exception):
    """Something that all devices need is missing. `finding` says what."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


class CUDADriver(Driver):
    """The driver of all CUDA devices that this process can see (CUDA_VISIBLE_DEVICES)."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []

    def devices(self) -> Sequence[CUDADevice]:
        """Return the devices; an empty list, without a warning, if there is no libcuda, cuda-bindings, NVRTC or GPU.

        Raises:
            SettingError: TORCH_BACKPLANE_CACHE_SIZE is not a size.
        """
        kernel_cache.size_limit()
        self._findings = []
        try:
            loaded = self._note(*_load_cuda())
            choose(platforms.CUDA)
            cuda, bindings = self._note(*_import_bindings())
            version = self._note(*_initialize(cuda))
            nvrtc = self._note(*_load_nvrtc(version))
            functions = self._note(*_functions(loaded))
            count = self._note(*_count(cuda))
        except Missing as missing:
            self._findings.append(missing.finding)
            return []
        from torch_backplane.drivers.cuda.libraries import load_all  # imported late: only used with a libcuda

        libraries = load_all(version)
        parts = (f"CUDA {_dotted(version)}", f"NVRTC {_dotted(nvrtc)}", f"cuda-bindings {bindings}")
        software = ", ".join((*parts, *libraries.versions))
        opened = [device for index in range(count) if (device := self._open(cuda, index, functions, software))]
        for device in opened:
            device.libraries = libraries.of_device(device.index, device.properties.capability)
            if libraries.communication is not None:
                device.communication = libraries.communication(device.index, device.bus)
        self._findings += libraries.findings
        return opened

    def diagnose(self) -> Sequence[Finding]:
        """Return findings about libcuda, cuda-bindings, NVRTC, each GPU and the libraries."""
        return tuple(self._findings)

    def _note(self, value: Any, finding: Finding | None) -> Any:
        if finding is not None:
            self._findings.append(finding)
        return value

    def _open(self, cuda: Any, index: int, functions: dict[str, int], software: str) -> CUDADevice | None:
        """Return a device, or None, with a warning, if it cannot be used."""
        from torch_backplane.drivers.cuda.device import CUDADevice

        what = f"GPU {index}"
        try:
            device = CUDADevice(index, functions, software)
        except Exception as error:
            self._skip(Finding(what, False, f"is skipped: {type(error).__name__}: {error}"))
            return None
        mode = device.attribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)
        name = device.properties.name
        if mode == int(cuda.CUcomputemode.CU_COMPUTEMODE_PROHIBITED):
            remedy = f"nvidia-smi -i {index} -c DEFAULT"
            self._skip(Finding(what, False, f"{name} is skipped: its compute mode prohibits programs", remedy))
            return None
        major, minor = device.properties.capability
        exclusive = mode == int(cuda.CUcomputemode.CU_COMPUTEMODE_EXCLUSIVE_PROCESS)
        note = "; its compute mode allows one process at a time" if exclusive else ""
        self._findings.append(Finding(what, True, f"{name}, compute capability {major}.{minor}{note}"))
        return device

    def _skip(self, finding: Finding) -> None:
        self._findings.append(finding)
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        platform = platforms.chosen().name
        warnings.warn(f"torch_backplane: {platform} {finding.what} {finding.found}{remedy}", stacklevel=4)


def choose(platform: platforms.Platform) -> None:
    """Choose the platform, or raise Missing."""
    try:
        platforms.choose(platform)
    except platforms.OtherPlatform as error:
        raise Missing(Finding("process", False, str(error), "set TORCH_BACKPLANE_DRIVERS")) from error


def _load_cuda() -> tuple[ctypes.CDLL, Finding]:
    what, name = "libcuda", library.cuda_name()
    try:
        return library.load_cuda(), Finding(what, True, name)
    except OSError as error:
        remedy = "install NVIDIA's driver; in a container: docker run --gpus all"
        raise Missing(Finding(what, False, str(error), remedy)) from error


def _import_bindings() -> tuple[tuple[Any, str], Finding]:
    what = "cuda-bindings"
    try:
        import cuda.bindings
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise Missing(Finding(what, False, "not installed", _BINDINGS)) from error
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise Missing(Finding(what, False, found, f"pip install --force-reinstall {what}")) from error
    version = str(cuda.bindings.__version__)
    return (driver, version), Finding(what, True, f"version {version}")


def _initialize(cuda: Any) -> tuple[tuple[int, int], Finding]:
    """Initialize CUDA and return the version that NVIDIA's driver supports."""
    from torch_backplane.drivers.cuda.errors import checked, describe

    what = "CUDA"
    try:
        (status,) = cuda.cuInit(0)
    except Exception as error:  # a libcuda without the functions that cuda-bindings needs
        raise Missing(Finding(what, False, f"{type(error).__name__}: {error}", _UPDATE)) from error
    if int(status) != 0:
        found = f"cuInit answered {describe(int(status))}"
        raise Missing(Finding(what, False, found, "" if int(status) in platforms.CUDA.remedies else "check nvidia-smi"))
    number = int(checked(cuda.cuDriverGetVersion))
    version = (number // 1000, number % 1000 // 10)
    if version < OLDEST_CUDA:
        found = f"NVIDIA's driver supports CUDA {_dotted(version)}, and {_dotted(OLDEST_CUDA)} is required"
        raise Missing(Finding(what, False, found, _UPDATE))
    return version, Finding(what, True, f"NVIDIA's driver supports CUDA {_dotted(version)}")


def _load_nvrtc(cuda_version: tuple[int, int]) -> tuple[tuple[int, int], Finding]:
    what = "NVRTC"
    try:
        library.load_chosen_nvrtc()
        from torch_backplane.drivers.cuda import compiler

        version = compiler.version()
    except Exception as error:
        package = "nvidia-cuda-nvrtc" if cuda_version[0] >= 13 else f"nvidia-cuda-nvrtc-cu{cuda_version[0]}"
        found = f"{type(error).__name__}: {error}"
        raise Missing(Finding(what, False, found.splitlines()[0], f"pip install {package}")) from error
    if version[0] > cuda_version[0]:
        found = f"version {_dotted(version)} is newer than NVIDIA's driver, which supports CUDA {_dotted(cuda_version)}"
        packages = f"'cuda-bindings=={cuda_version[0]}.*' nvidia-cuda-nvrtc-cu{cuda_version[0]}"
        raise Missing(Finding(what, False, found, f"{_UPDATE}, or pip install {packages}"))
    return version, Finding(what, True, f"version {_dotted(version)}")


def _functions(loaded: ctypes.CDLL) -> tuple[dict[str, int], None]:
    """Return the addresses of the functions that the native launcher calls."""
    names = _C.cuda_functions()
    found = library.addresses(loaded, names)
    missing = [name for name in names if name not in found]
    if missing:
        raise Missing(Finding("libcuda", False, f"has no function {', '.join(missing)}", _UPDATE))
    return found, None


def _count(cuda: Any) -> tuple[int, None]:
    from torch_backplane.drivers.cuda.errors import checked

    count = int(checked(cuda.cuDeviceGetCount))
    if count == 0:
        raise Missing(Finding("GPU", False, "CUDA lists none", platforms.CUDA.remedies[100]))
    return count, None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
