"""The HIP driver: AMD's GPUs, by the code of the CUDA driver (`drivers/cuda/`). See `docs/hip.md`."""

from torch_backplane.drivers.hip.driver import HIPDriver

__all__ = ["HIPDriver"]
