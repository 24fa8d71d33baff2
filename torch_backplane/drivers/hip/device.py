"""The device of the HIP driver: that of the CUDA driver, with HIP's functions."""

from __future__ import annotations

from typing import ClassVar

from torch_backplane.drivers.base import Device
from torch_backplane.drivers.cuda.compiler import Compiler
from torch_backplane.drivers.cuda.device import CUDADevice, Kernel
from torch_backplane.drivers.hip import api
from torch_backplane.kernels.dialects.hip_cpp import HipCpp

DLPACK_ROCM = 10  # kDLROCM


class HIPDevice(CUDADevice):
    """A HIP device. `native_context` is its number plus 1, because HIP has no contexts."""

    dialect: ClassVar = HipCpp
    dlpack_type: ClassVar = DLPACK_ROCM
    sensors = ()
    read_sensor = Device.read_sensor  # none

    triton_target = None  # type: ignore[assignment]

    def load(self, binary: bytes, entry: str) -> Kernel:
        return self._load(binary, entry)

    def _make_compiler(self, named: str = "") -> Compiler:
        return super()._make_compiler(named or api.architecture(int(self.handle)))

    @property
    def architecture(self) -> str:
        return self._compiler.architecture
