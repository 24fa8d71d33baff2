"""OpenCL programs of one device: built from their text, or loaded as the binaries that an earlier process kept."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import pyopencl as cl

from torch_backplane.drivers import builds, kernel_cache

# Platforms that must not be asked for binaries. PoCL 3.1 compiles another variant of a kernel to answer, and if the
# kernel runs at that moment, confuses their reference counts and aborts the process (pocl_release_dlhandle_cache in its
# lib/CL/devices/common.c). It keeps what it compiles on the disk by itself.
KEEP_THEIR_OWN = ("Portable Computing Language",)

# Platforms whose compiler is not thread-safe: two programs built at once are a segmentation fault in Oclgrind 21.10.
ONE_BUILD_AT_A_TIME = ("Oclgrind",)
_one_build = threading.Lock()

# At SIGINT (Ctrl-C), LLVM, which is the compiler of PoCL and others, removes the files of all builds of its process.
# These fail then, which is nobody's fault, and are begun again, so often.
FILES_ARE_GONE = "No such file or directory"
PATIENCE = 20

# For every build, before the user's own (PYOPENCL_BUILD_OPTIONS): PoCL's compiler writes to stderr how many warnings it
# has had, of texts that users never see.
_QUIET = "-w"

_log = logging.getLogger(__name__)


class Programs:
    """Thread-safe; PyOpenCL releases the GIL while the compiler runs.

    What a compiler says of a program that it builds is logged (level DEBUG); PyOpenCL's own way to build makes it a
    warning.

    Attributes:
        counts: "built" from text, "loaded" from the disk.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._context = context
        self._device = device
        # All that a binary depends on, besides its text.
        self._origin = (
            *(device.platform.name, device.platform.version, device.name, device.vendor, device.version),
            *(device.driver_version, _options()),
        )
        self._lock = threading.Lock()
        self._building = _one_build if device.platform.name in ONE_BUILD_AT_A_TIME else contextlib.nullcontext()
        self.counts = {"built": 0, "loaded": 0}

    def get(self, text: str) -> cl.Program:
        """The program of this text, from the disk if it is there (except on platforms that KEEP_THEIR_OWN).

        Raises:
            pyopencl.Error: it cannot be built; the message has the compiler's log.
        """
        if self._device.platform.name in KEEP_THEIR_OWN:
            self._count("built")
            return self.build(text)
        name = kernel_cache.key((*self._origin, text))
        program = self._load(name)
        if program is None:
            program = self.build(text)
            # Some implementations (PoCL) compile once more to answer what the binary is; that can wait.
            builds.submit_later(lambda: self._keep(name, program))
            self._count("built")
        else:
            self._count("loaded")
        return program

    def build(self, text: str) -> cl.Program:
        """The same, without the disk."""
        for attempt in range(PATIENCE):
            try:
                # A program made from text has a cache of PyOpenCL's, which writes the text of one that does not build
                # to a file that nobody deletes.
                return self._built(cl._cl._Program(self._context, text))
            except cl.Error as error:
                if FILES_ARE_GONE not in str(error) or attempt == PATIENCE - 1:
                    raise
        raise AssertionError

    def load(self, binary: bytes) -> cl.Program:
        """The program of a binary.

        Raises:
            pyopencl.Error: it is none of this device's.
        """
        return self._built(cl._cl._Program(self._context, [self._device], [binary]))

    def _load(self, name: str) -> cl.Program | None:
        binary = kernel_cache.load(name)
        if binary is None:
            return None
        try:
            return self.load(binary)
        except cl.Error:
            return None  # whole, but not for this device: it is built again

    def _built(self, program: Any) -> cl.Program:
        try:
            with self._building:
                program._build(options=_options().encode())
        except cl.Error as error:
            raise cl.RuntimeError(
                cl._cl._ErrorRecord(msg=f"{error}\n{self._said(program)}", code=error.code, routine=error.routine)
            ) from None
        if said := self._said(program):
            _log.debug("the compiler of %s said: %s", self._device.name, said)
        return cl.Program(program)

    def _said(self, program: Any) -> str:
        try:
            return str(program.get_build_info(self._device, cl.program_build_info.LOG) or "").strip()
        except cl.Error as error:
            return f"(no log: {error})"

    def _keep(self, name: str, program: cl.Program) -> None:
        try:
            binary = program.binaries[0]
        except cl.Error:
            return  # an implementation without binaries
        if binary:
            kernel_cache.store(name, binary)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _options() -> str:
    return f"{_QUIET} {os.environ.get('PYOPENCL_BUILD_OPTIONS', '')}"
