"""The OpenCL driver: the devices of all platforms, through PyOpenCL (`pip install pyopencl`). See `docs/opencl.md`."""

from torch_backplane.drivers.opencl.driver import OpenCLDriver

__all__ = ["OpenCLDriver"]
