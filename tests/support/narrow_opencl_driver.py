"""A driver for tests: the first OpenCL device without float64 and without native 16-bit floating point.

NARROW_KIND sets the device kind that it reports (default: `cpu`). Kernels for kind `gpu` differ.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

import pyopencl as cl
import torch

from torch_backplane.drivers import Driver
from torch_backplane.drivers.opencl.device import OpenCLDevice
from torch_backplane.drivers.opencl.driver import platforms

# What a compiler without cl_khr_fp64 and cl_khr_fp16 rejects. It accepts pointers to half: vload_half is core OpenCL.
MISSING = re.compile(r"\b(double\d*|cl_khr_fp(64|16)|(convert|as)_(double|half)\w*)\b|\bhalf\d*\b(?! *\*)")


class NarrowDevice(OpenCLDevice):
    def __init__(self, device: cl.Device) -> None:
        super().__init__(device)
        kept = [one for one in self.properties.dtypes if one not in (torch.float64, torch.complex128)]
        kind = os.environ.get("NARROW_KIND", "cpu")
        self.properties = dataclasses.replace(self.properties, name="Narrow", dtypes=kept, kind=kind)

    def compile(self, text: str, entry: str) -> cl.Kernel:
        found = MISSING.search(text)
        if found:
            raise RuntimeError(f"this device has no {found[0]}")
        return super().compile(text, entry)


class NarrowDriver(Driver):
    def devices(self) -> Sequence[OpenCLDevice]:
        device = platforms(cl)[0].get_devices()[0]
        return [NarrowDevice(device), OpenCLDevice(device)]
