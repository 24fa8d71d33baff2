"""Dialects: one class per compiler, which writes the text of types, operations and kernel parts."""

from torch_backplane.kernels.dialects.base import WORDS, Dialect, MissingOperation
from torch_backplane.kernels.dialects.cuda_cpp import CudaCpp
from torch_backplane.kernels.dialects.hip_cpp import HipCpp
from torch_backplane.kernels.dialects.opencl_c import OpenCLC

# Dialects that a driver can select by name. A driver can also provide its own class.
DIALECTS = {one.name: one for one in (OpenCLC, CudaCpp, HipCpp)}

__all__ = ["DIALECTS", "WORDS", "CudaCpp", "Dialect", "HipCpp", "MissingOperation", "OpenCLC"]
