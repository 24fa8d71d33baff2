"""A device for the driver interface, with host memory and kernels that run in the interpreter."""

from __future__ import annotations

import ctypes

from torch_backplane.drivers import Device, DeviceProperties, NativeLauncher
from torch_backplane.interpreter.library import Interpreter, Kernel


class Segment:
    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class InterpreterDevice(Device):
    """A synchronous device whose kernels run in an interpreter."""

    def __init__(self, interpreter: Interpreter, properties: DeviceProperties) -> None:
        self.interpreter = interpreter
        self.properties = properties
        self.native_launcher = NativeLauncher(api="c", functions=interpreter.launcher)

    def allocate(self, nbytes: int) -> Segment:
        address = self.interpreter.functions.interpreter_allocate(nbytes)
        if not address:
            raise MemoryError(f"cannot allocate {nbytes:,} bytes of host memory")
        return Segment(address, nbytes)

    def free(self, handle: Segment) -> None:
        self.interpreter.functions.interpreter_free(handle.address)

    def address(self, handle: Segment) -> int:
        return handle.address

    def copy_in(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        memoryview(place).cast("B")[:] = host_memory

    def copy_out(self, handle: Segment, offset: int, host_memory: memoryview, stream: object) -> None:
        place = (ctypes.c_char * len(host_memory)).from_address(handle.address + offset)
        host_memory[:] = memoryview(place).cast("B")

    def compile(self, text: str, entry: str) -> Kernel:
        return self.interpreter.build(text, entry)

    def native_kernel(self, kernel: Kernel) -> int:
        return ctypes.addressof(kernel.native)

    def native_stream(self, stream: object) -> int:
        return id(stream)

    def native_segment(self, handle: Segment) -> int:
        return handle.address
