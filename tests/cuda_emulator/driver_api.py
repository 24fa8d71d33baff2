"""CUDA's driver API and NVRTC through ctypes, for tests of the emulator: the emulator must have been loaded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import emulator

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_DEVICE, INVALID_IMAGE, INVALID_CONTEXT = 101, 200, 201
NO_BINARY_FOR_GPU, INVALID_PTX, INVALID_HANDLE, NOT_FOUND, NOT_READY = 209, 218, 400, 500, 600
ILLEGAL_ADDRESS, ASSERT, MISALIGNED_ADDRESS, LAUNCH_FAILED = 700, 710, 716, 719
NOT_PERMITTED, NOT_SUPPORTED = 800, 801

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
NON_BLOCKING, DISABLE_TIMING, INTERPROCESS = 1, 2, 4
LEGACY, PER_THREAD = 1, 2  # default streams


def status(name: str, *arguments: Any) -> int:
    """Call a function of libcuda, and return its status. Integers are passed as 64 bits."""
    return int(emulator.load()[name](*map(_argument, arguments)))


def call(name: str, *arguments: Any) -> None:
    """Call a function of libcuda that must succeed."""
    error = status(name, *arguments)
    assert error == 0, f"{name}: error {error}"


def result(name: str, *arguments: Any, kind: Any = ctypes.c_uint64) -> Any:
    """Call a function of libcuda that must succeed, and return what it stores at its first parameter."""
    stored = kind()
    call(name, ctypes.byref(stored), *arguments)
    return stored.value


def number(name: str, *arguments: Any) -> int:
    """The same for a function that stores an int."""
    return int(result(name, *arguments, kind=ctypes.c_int))


def _argument(given: Any) -> Any:
    if isinstance(given, int):
        return ctypes.c_uint64(given & 0xFFFFFFFFFFFFFFFF)
    if isinstance(given, str):
        return given.encode()
    return given


# --- memory ----------------------------------------------------------------------------------------------------------


def allocate(nbytes: int) -> int:
    return int(result("cuMemAlloc_v2", nbytes))


def pinned(nbytes: int) -> int:
    return int(result("cuMemHostAlloc", nbytes, 0))


def write(address: int, data: bytes) -> None:
    call("cuMemcpyHtoD_v2", address, data, len(data))


def read(address: int, nbytes: int) -> bytes:
    data = ctypes.create_string_buffer(nbytes)
    call("cuMemcpyDtoH_v2", data, address, nbytes)
    return data.raw


# --- streams ---------------------------------------------------------------------------------------------------------


def stream(flags: int = NON_BLOCKING) -> int:
    return int(result("cuStreamCreate", flags))


def event(flags: int = 0) -> int:
    return int(result("cuEventCreate", flags))


def synchronize(of: int = 0) -> None:
    call("cuStreamSynchronize", of)


_called_later: list[Any] = []


@contextmanager
def blocked(which: int) -> Iterator[Callable[[], None]]:
    """Keep a stream busy with a host function until the result is called, or the block ends."""
    released = threading.Event()
    function = HostFunction(lambda _: bool(released.wait(60)) and None)
    _called_later.append(function)  # until the process ends, because the stream can be destroyed before it is called
    call("cuLaunchHostFunc", which, function, 0)
    try:
        yield released.set
    finally:
        released.set()
        status("cuStreamSynchronize", which)


# --- kernels ---------------------------------------------------------------------------------------------------------


def _nvrtc() -> ctypes.CDLL:
    emulator.load()
    return ctypes.CDLL(str(emulator.library_folder() / "libnvrtc.so.13"))


def compile_source(source: str, *options: str, expressions: Sequence[str] = ()) -> Program:
    """Compile with NVRTC. `--gpu-architecture=sm_80` is added if there is no architecture."""
    return Program(source, options, expressions)


class Program:
    """A program of NVRTC: its status, log, binary, PTX and lowered names."""

    def __init__(
        self,
        source: str,
        options: Sequence[str] = (),
        expressions: Sequence[str] = (),
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._library = _nvrtc()
        self._handle = ctypes.c_void_p()
        texts, names = ([one.encode() for one in part] for part in (headers.values(), headers))
        lists = [(ctypes.c_char_p * max(len(headers), 1))(*one) for one in (texts, names)]
        self.call("nvrtcCreateProgram", ctypes.byref(self._handle), source.encode(), b"kernel.cu", len(headers), *lists)
        for one in expressions:
            self.call("nvrtcAddNameExpression", self._handle, one.encode())
        given = list(options)
        if not any("arch" in one for one in given):
            given.append("--gpu-architecture=sm_80")
        words = (ctypes.c_char_p * len(given))(*(one.encode() for one in given))
        self.status = self._library.nvrtcCompileProgram(self._handle, len(given), words)
        self.log = self._part("ProgramLog").rstrip(b"\0").decode()

    def call(self, name: str, *arguments: Any) -> None:
        error = self._library[name](*arguments)
        assert error == 0, f"{name}: error {error}"

    def _part(self, name: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{name}Size", self._handle, ctypes.byref(size))
        data = ctypes.create_string_buffer(max(size.value, 1))
        self.call(f"nvrtcGet{name}", self._handle, data)
        return data.raw[: size.value]

    @property
    def binary(self) -> bytes:
        return self._part("CUBIN")

    @property
    def ptx(self) -> bytes:
        return self._part("PTX")

    def lowered_name(self, expression: str) -> str:
        name = ctypes.c_char_p()
        self.call("nvrtcGetLoweredName", self._handle, expression.encode(), ctypes.byref(name))
        assert name.value is not None
        return name.value.decode()


def module(source: str, *options: str) -> int:
    """Compile a source, and load it in the current context."""
    program = Program(source, options)
    assert program.status == 0, program.log
    return int(result("cuModuleLoadData", program.binary))


def kernel(source: str, name: str) -> int:
    return int(result("cuModuleGetFunction", module(source), name))


def launch(
    function: int, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any, shared: int = 0, on: int = 0
) -> int:
    """Launch a kernel, and return the status. Arguments: integers are pointers, others are ctypes values."""
    values = [ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments]
    pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(one) for one in values))
    sizes = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
    return status("cuLaunchKernel", function, *sizes, shared, on, pointers, None)


def inject(name: str, call_number: int, error: int) -> None:
    """Make a coming call of a function fail: the next one is number 1. 0 removes the faults of the function."""
    library = _nvrtc() if name.startswith("nvrtc") else emulator.load()
    library.emulator_inject_fault(name.encode(), ctypes.c_long(call_number), error)


def calls() -> dict[str, int]:
    """Return how often each function was called in this process."""
    library = emulator.load()
    library.emulator_calls.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(library.emulator_calls(None, ctypes.c_size_t(0)) + 256)
    library.emulator_calls(text, ctypes.c_size_t(len(text)))
    return {name: int(count) for name, count in map(str.split, text.value.decode().splitlines())}
