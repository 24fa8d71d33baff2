"""How kernel text is spelled for one compiler: a class of small methods for each."""

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dialects.cuda_cpp import CudaCpp
from torch_backplane.kernels.dialects.opencl_c import OpenCLC

__all__ = ["CudaCpp", "Dialect", "OpenCLC"]
