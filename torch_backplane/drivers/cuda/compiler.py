"""Compiles kernels with NVRTC or hiprtc, or loads the result from the kernel cache.

TORCH_BACKPLANE_CUDA_OPTIONS   options of NVRTC, after our own, such as --generate-line-info
TORCH_BACKPLANE_HIP_OPTIONS    options of hiprtc
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch_backplane.drivers import builds, kernel_cache
from torch_backplane.drivers.cuda import platforms
from torch_backplane.drivers.cuda.platforms import nvrtc

_log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """A program does not compile. The message contains the compiler's log."""


class UnsupportedArchitecture(RuntimeError):
    """NVRTC cannot compile for a GPU of this compute capability."""


def version() -> tuple[int, int]:
    """Return the version of the compiler.

    Raises:
        Exception: it is not installed or does not work.
    """
    major, minor = _checked(nvrtc.nvrtcVersion())
    return major, minor


def architecture(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Return the architecture to compile for, as an option of NVRTC.

    Args:
        capability: the GPU's compute capability.
        supported: the architectures that NVRTC supports, such as 80 and 90.

    Returns:
        Such as "sm_90", for machine code of this GPU. If NVRTC does not know the GPU, "compute_90", for PTX of the
        newest older architecture: the driver then compiles it for the GPU.

    Raises:
        UnsupportedArchitecture: all architectures that NVRTC supports are newer.
    """
    number = capability[0] * 10 + capability[1]
    if number in supported:
        return f"sm_{number}"
    older = [one for one in supported if one < number]
    if not older:
        raise UnsupportedArchitecture(
            f"its compute capability is {capability[0]}.{capability[1]}, and NVRTC compiles for "
            f"{min(supported) // 10}.{min(supported) % 10} or later: install an older NVRTC"
        )
    return f"compute_{max(older)}"


class Compiler:
    """The compiler for a device. Thread-safe; the GIL is released while NVRTC or hiprtc runs.

    Args:
        capability: the GPU's compute capability.
        options: options before those of the environment variable.
        named: the architecture. "": NVRTC's for the capability.

    Attributes:
        architecture: see `architecture`.
        counts: the number of programs "built" from text and "loaded" from the kernel cache.

    Raises:
        UnsupportedArchitecture: see `architecture`.
    """

    def __init__(self, capability: tuple[int, int], options: Sequence[str], named: str = "") -> None:
        platform = platforms.chosen()
        self.architecture = named or architecture(capability, _checked(nvrtc.nvrtcGetSupportedArchs()))
        extra = shlex.split(os.environ.get(platform.options_variable, ""))
        self._options = [f"{platform.architecture_option}={self.architecture}", *options, *extra]
        self._origin = (platform.name, *map(str, version()), *self._options)
        self._lock = threading.Lock()
        self.counts = {"built": 0, "loaded": 0}

    def get(self, text: str, load: Callable[[bytes], Any]) -> Any:
        """Return `load(program)` for the program of a text, from the kernel cache if possible.

        Raises:
            CompileError: the text does not compile.
            Exception: those of `load` for a new program.
        """
        name = kernel_cache.key((*self._origin, text))
        program = kernel_cache.load(name)
        if program is not None:
            try:
                loaded = load(program)
            except ValueError:  # an intact entry, but not for this device: build it again
                pass
            else:
                self._count("loaded")
                return loaded
        program = self.build(text)
        loaded = load(program)
        self._count("built")
        builds.submit_later(lambda: kernel_cache.store(name, program))
        return loaded

    def build(self, text: str) -> bytes:
        """Compile a text: a cubin, a code object, or PTX that ends with a zero byte. Does not use the kernel cache.

        Raises:
            CompileError: the text does not compile.
        """
        program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, None, None))
        try:
            words = [option.encode() for option in self._options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            log_text = log.rstrip(b"\0").decode(errors="replace").strip()
            if int(status) != 0:
                raise CompileError(f"{status.name} for {' '.join(self._options)}\n{log_text}")
            if log_text:
                _log.debug("the compiler's log: %s", log_text)
            if not self.architecture.startswith("compute_"):
                return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            return _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _output(get_size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    output = b"\0" * _checked(get_size(program))
    _checked(get(program, output))  # writes into the bytes, which nothing else refers to
    return output


def _checked(answer: Any) -> Any:
    status, *results = answer
    if int(status) != 0:
        raise RuntimeError(f"{platforms.chosen().compiler} answered {status.name} ({int(status)})")
    return results[0] if len(results) == 1 else tuple(results)
