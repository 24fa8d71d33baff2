"""How kernel text is spelled for one compiler: a class of small methods for each."""

from torch_backplane.kernels.dialects.base import WORDS, Dialect, MissingOperation
from torch_backplane.kernels.dialects.cuda_cpp import CudaCpp
from torch_backplane.kernels.dialects.opencl_c import OpenCLC

# What devices may name; others bring a class of their driver's.
DIALECTS = {one.name: one for one in (OpenCLC, CudaCpp)}

__all__ = ["DIALECTS", "WORDS", "CudaCpp", "Dialect", "MissingOperation", "OpenCLC"]
