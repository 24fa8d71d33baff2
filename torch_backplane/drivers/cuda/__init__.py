"""The CUDA driver: NVIDIA GPUs through CUDA's driver API (`pip install cuda-bindings`). See `docs/cuda.md`."""

from torch_backplane.drivers.cuda.driver import CUDADriver

__all__ = ["CUDADriver"]
