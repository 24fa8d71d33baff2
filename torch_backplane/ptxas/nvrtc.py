"""Compiles CUDA C++ with NVRTC, which contains ptxas: to machine code for an architecture, or to PTX.

NVRTC is a library without a driver: `pip install nvidia-cuda-nvrtc`. It needs no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Missing(RuntimeError):
    """A part of the CUDA toolkit is not installed."""


class CompileError(RuntimeError):
    """A kernel does not compile. The message is the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Args:
        code: machine code (a cubin), or PTX.
        log: warnings, and what `--ptxas-options=-v` reports.
    """

    code: bytes
    log: str


def find(pattern: str, package: str) -> Path:
    """Return a file of NVIDIA's wheels.

    Args:
        pattern: of its path in the wheels' common folder, such as "*/lib/libnvrtc.so.*".
        package: the wheel that has it.

    Raises:
        Missing: it is not installed.
    """
    try:
        import nvidia
    except ImportError:
        roots: list[str] = []
    else:
        roots = list(nvidia.__path__)
    found = [path for root in roots for path in sorted(Path(root).glob(pattern))]
    if not found:
        raise Missing(f"{package} is not installed: pip install {package}")
    return found[0]


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC.

    Raises:
        Missing: it is not installed.
    """
    return ctypes.CDLL(str(find("*/lib/libnvrtc.so.*", "nvidia-cuda-nvrtc")))


def version() -> str:
    """Return NVRTC's version, such as "13.0"."""
    parts = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(*map(ctypes.byref, parts))
    return ".".join(str(one.value) for one in parts)


def compile_text(text: str, options: Sequence[str], architecture: str = "") -> Compiled:
    """Compile a program.

    Args:
        text: CUDA C++.
        options: NVRTC's, except for the architecture.
        architecture: such as "sm_90", for machine code. Empty: PTX for NVRTC's oldest architecture.

    Raises:
        CompileError: the text is wrong.
        Missing: NVRTC is not installed.
    """
    nvrtc, program = library(), ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    try:
        words = [one.encode() for one in options]
        words += [f"--gpu-architecture={architecture}".encode()] if architecture else []
        result = nvrtc.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if result != 0:
            raise CompileError(log)
        form = "CUBIN" if architecture else "PTX"
        code = _output(getattr(nvrtc, f"nvrtcGet{form}Size"), getattr(nvrtc, f"nvrtcGet{form}"), program)
        return Compiled(code if architecture else code.rstrip(b"\0"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(result: int) -> None:
    if result != 0:
        get_text = library().nvrtcGetErrorString
        get_text.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {get_text(result).decode()}")


def _output(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(get_size(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(get(program, buffer))
    return buffer.raw


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for a kernel.

    Args:
        registers: per work item.
        stack: bytes of private memory per work item, for arrays that are not in registers, and spilled registers.
        spilled: bytes that a work item stores to private memory because it has too few registers.
        shared: bytes of static shared memory per work group.
    """

    registers: int
    stack: int
    spilled: int
    shared: int


def resources(log: str, entry: str) -> Resources:
    """Read the log of a program that was compiled with `--ptxas-options=-v`.

    Raises:
        ValueError: it does not describe this kernel.
    """
    start = "Compiling entry function"
    part = re.search(rf"{start} '{re.escape(entry)}'.*?(?={start}|\Z)", log, re.DOTALL)
    sizes = part and re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part[0])
    registers = part and re.search(r"Used (\d+) registers", part[0])
    if not part or not sizes or not registers:
        raise ValueError(f"ptxas reports nothing about {entry}: {log}")
    shared = re.search(r"(\d+) bytes smem", part[0])
    return Resources(int(registers[1]), int(sizes[1]), int(sizes[2]), int(shared[1]) if shared else 0)
