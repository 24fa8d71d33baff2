"""Transfers between a discrete device and ordinary host memory, through pinned memory.

Hardware can only transfer page-locked memory by itself. OpenCL cannot pin existing memory, but all common
implementations pin the memory of a mapped buffer with CL_MEM_ALLOC_HOST_PTR.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl

if TYPE_CHECKING:
    from torch_backplane.drivers.opencl.device import Stream
    from torch_backplane.drivers.opencl.errors import Health

LEAST = 64 << 10  # bytes: smaller transfers are not staged
PIECE = 4 << 20  # bytes of each staging buffer


class Piece:
    """A buffer of pinned memory and the last command that used it."""

    def __init__(self, context: cl.Context, queue: cl.CommandQueue, nbytes: int, health: Health) -> None:
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
        self._health = health
        self._buffer = cl.Buffer(context, flags, nbytes)
        access = cl.map_flags.READ | cl.map_flags.WRITE
        mapped: Any = cl.enqueue_map_buffer(queue, self._buffer, access, 0, (nbytes,), np.uint8)  # type: ignore[arg-type]
        self.memory: np.ndarray = mapped[0]  # mapped: the call blocks
        self.event: cl.Event | None = None

    def wait(self) -> None:
        event, self.event = self.event, None
        if event is not None:
            self._health.wait(event, "a transfer failed with")


class Staging:
    """Double buffering: while the device uses one staging buffer, the host fills or empties the other.

    Args:
        piece: bytes of each buffer.
    """

    def __init__(self, context: cl.Context, queue: cl.CommandQueue, health: Health, piece: int = PIECE) -> None:
        self.piece = piece
        self._pieces = [Piece(context, queue, piece, health) for _ in range(2)]
        self._lock = threading.Lock()  # a transfer uses both buffers

    def copy_in(self, destination: cl.Buffer, offset: int, host_memory: memoryview, stream: Stream) -> None:
        """Copy to the device. Returns when the host memory has been read; the last commands can be pending."""
        source = np.frombuffer(host_memory, np.uint8)
        with self._lock:
            for start in range(0, len(source), self.piece):
                piece = self._acquire()
                part = piece.memory[: min(self.piece, len(source) - start)]
                part[:] = source[start : start + len(part)]
                piece.event = stream.submit(
                    cl.enqueue_copy, destination, part, dst_offset=offset + start, is_blocking=False
                )

    def copy_out(self, source: cl.Buffer, offset: int, host_memory: memoryview, stream: Stream) -> None:
        """Copy from the device. Returns when the host memory has been written."""
        destination = np.frombuffer(host_memory, np.uint8)
        before: tuple[Piece, int] | None = None
        with self._lock:
            for start in range(0, len(destination), self.piece):
                piece = self._acquire()
                part = piece.memory[: min(self.piece, len(destination) - start)]
                piece.event = stream.submit(cl.enqueue_copy, part, source, src_offset=offset + start, is_blocking=False)
                self._empty(before, destination)
                before = (piece, start)
            self._empty(before, destination)

    def _acquire(self) -> Piece:
        """Return the least recently used buffer, after the device has finished with it."""
        self._pieces.reverse()
        self._pieces[0].wait()
        return self._pieces[0]

    def _empty(self, filled: tuple[Piece, int] | None, destination: np.ndarray) -> None:
        if filled is not None:
            piece, start = filled
            piece.wait()
            part = destination[start : start + self.piece]
            part[:] = piece.memory[: len(part)]
