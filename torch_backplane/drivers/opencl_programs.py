"""OpenCL programs of one device: built from their text, or loaded as the binaries that an earlier process kept."""

from __future__ import annotations

import os
import threading

import pyopencl as cl

from torch_backplane.drivers import builds, kernel_cache

# Platforms that must not be asked for binaries. PoCL 3.1 compiles another variant of a kernel to answer, and if the
# kernel runs at that moment, confuses their reference counts and aborts the process (pocl_release_dlhandle_cache in its
# lib/CL/devices/common.c). It keeps what it compiles on the disk by itself.
KEEP_THEIR_OWN = ("Portable Computing Language",)


class Programs:
    """Thread-safe; PyOpenCL releases the GIL while the compiler runs.

    Attributes:
        counts: "built" from text, "loaded" from the disk.
    """

    def __init__(self, context: cl.Context, device: cl.Device) -> None:
        self._context = context
        self._device = device
        # All that a binary depends on, besides its text. PyOpenCL adds what PYOPENCL_BUILD_OPTIONS says to every build.
        self._origin = (
            *(device.platform.name, device.platform.version, device.name, device.vendor, device.version),
            *(device.driver_version, os.environ.get("PYOPENCL_BUILD_OPTIONS", "")),
        )
        self._lock = threading.Lock()
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
        # A program made from a _Program is built as it is. For one made from text, PyOpenCL has a cache of its own, and
        # writes the text of a program that does not build to a file that nobody deletes.
        return cl.Program(cl._cl._Program(self._context, text)).build()

    def _load(self, name: str) -> cl.Program | None:
        binary = kernel_cache.load(name)
        if binary is None:
            return None
        try:
            return cl.Program(self._context, [self._device], [binary]).build()
        except cl.Error:
            return None  # whole, but not for this device: it is built again

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
