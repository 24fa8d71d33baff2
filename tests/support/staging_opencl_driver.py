"""A driver for tests: the first OpenCL device, with transfers through pinned staging memory in pieces of 100 kB."""

from __future__ import annotations

from collections.abc import Sequence

import pyopencl as cl

from torch_backplane.drivers import Driver
from torch_backplane.drivers.opencl.device import OpenCLDevice, native_launcher
from torch_backplane.drivers.opencl.driver import platforms
from torch_backplane.drivers.opencl.staging import Staging


class StagingDevice(OpenCLDevice):
    def __init__(self, device: cl.Device) -> None:
        super().__init__(device)
        self.staging = Staging(self.context, self._own_stream.queue, self.health, piece=100_000)
        self.native_launcher = native_launcher(device.platform.name, calls_functions=True, stages=True)


class StagingDriver(Driver):
    def devices(self) -> Sequence[OpenCLDevice]:
        return [StagingDevice(platforms(cl)[0].get_devices()[0])]
