"""Devices in host memory. They compile no kernels and bring no libraries: operators run as PyTorch's CPU kernels."""

from torch_backplane.drivers.host.driver import HostDriver

__all__ = ["HostDriver"]
