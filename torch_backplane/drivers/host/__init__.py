"""The host driver: devices in host memory, without kernels and libraries. Operators run PyTorch's CPU kernels."""

from torch_backplane.drivers.host.driver import HostDriver

__all__ = ["HostDriver"]
