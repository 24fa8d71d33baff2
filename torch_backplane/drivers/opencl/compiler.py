"""Builds the OpenCL programs of a device from text, or loads their binaries from the kernel cache."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import pyopencl as cl

from torch_backplane.drivers import builds, kernel_cache

# Platforms whose binaries must not be queried. PoCL 3.1 compiles another variant of the kernel to answer the query. If
# the kernel is running, PoCL corrupts its reference counts and aborts the process (pocl_release_dlhandle_cache in its
# lib/CL/devices/common.c). PoCL has its own disk cache.
KEEP_THEIR_OWN = ("Portable Computing Language",)

# Platforms whose compiler is not thread-safe: concurrent builds are a segmentation fault in Oclgrind 21.10.
ONE_BUILD_AT_A_TIME = ("Oclgrind",)
_one_build = threading.Lock()

# On SIGINT (Ctrl-C), LLVM, the compiler of PoCL and others, removes the temporary files of all builds of its process.
# These builds fail with this error and are repeated, with PATIENCE attempts in total.
FILES_ARE_GONE = "No such file or directory"
PATIENCE = 20

# Build option, before the user's own (PYOPENCL_BUILD_OPTIONS). PoCL's compiler prints the number of warnings to stderr;
# the warnings are about generated kernels, which users do not see.
_QUIET = "-w"

_log = logging.getLogger(__name__)


class Programs:
    """The programs of a device. Thread-safe; PyOpenCL releases the GIL while the compiler runs.

    The compiler's output for a successful build is logged (level DEBUG). PyOpenCL's own build method would warn.

    Attributes:
        counts: the number of programs "built" from text and "loaded" from the kernel cache.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._context = context
        self._device = device
        # Everything that a binary depends on, except its text.
        self._origin = (
            *(device.platform.name, device.platform.version, device.name, device.vendor, device.version),
            *(device.driver_version, _options()),
        )
        self._lock = threading.Lock()
        self._building = _one_build if device.platform.name in ONE_BUILD_AT_A_TIME else contextlib.nullcontext()
        self.counts = {"built": 0, "loaded": 0}

    def get(self, text: str) -> cl.Program:
        """Return the program of a text, from the kernel cache if possible (except on platforms in KEEP_THEIR_OWN).

        Raises:
            pyopencl.Error: the build failed; the message contains the compiler's log.
        """
        if self._device.platform.name in KEEP_THEIR_OWN:
            self._count("built")
            return self.build(text)
        name = kernel_cache.key((*self._origin, text))
        program = self._load(name)
        if program is None:
            program = self.build(text)
            # Some implementations (PoCL) compile again when the binary is queried, so this has low priority.
            builds.submit_later(lambda: self._keep(name, program))
            self._count("built")
        else:
            self._count("loaded")
        return program

    def build(self, text: str) -> cl.Program:
        """Build a program without the kernel cache. Raises like `get`."""
        for attempt in range(PATIENCE):
            try:
                # cl.Program(text) would use PyOpenCL's cache, which leaves a file with the text of a failed build
                # behind.
                return self._built(cl._cl._Program(self._context, text))
            except cl.Error as error:
                if FILES_ARE_GONE not in str(error) or attempt == PATIENCE - 1:
                    raise
        raise AssertionError

    def load(self, binary: bytes) -> cl.Program:
        """Return the program of a binary.

        Raises:
            pyopencl.Error: the binary is not for this device.
        """
        return self._built(cl._cl._Program(self._context, [self._device], [binary]))

    def _load(self, name: str) -> cl.Program | None:
        binary = kernel_cache.load(name)
        if binary is None:
            return None
        try:
            return self.load(binary)
        except cl.Error:
            return None  # an intact entry, but not for this device: build it again

    def _built(self, program: Any) -> cl.Program:
        try:
            with self._building:
                program._build(options=_options().encode())
        except cl.Error as error:
            raise cl.RuntimeError(
                cl._cl._ErrorRecord(msg=f"{error}\n{self._build_log(program)}", code=error.code, routine=error.routine)
            ) from None
        if log := self._build_log(program):
            _log.debug("the build log of %s: %s", self._device.name, log)
        return cl.Program(program)

    def _build_log(self, program: Any) -> str:
        try:
            return str(program.get_build_info(self._device, cl.program_build_info.LOG) or "").strip()
        except cl.Error as error:
            return f"(no log: {error})"

    def _keep(self, name: str, program: cl.Program) -> None:
        try:
            binary = program.binaries[0]
        except cl.Error:
            return  # the implementation has no binaries
        if binary:
            kernel_cache.store(name, binary)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _options() -> str:
    return f"{_QUIET} {os.environ.get('PYOPENCL_BUILD_OPTIONS', '')}"
