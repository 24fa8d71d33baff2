"""A memory sanitizer for kernels: TORCH_BACKPLANE_SANITIZE_KERNELS=1.

    TORCH_BACKPLANE_SANITIZE_KERNELS=1 python program.py

Then there is one device, in host memory, which runs the kernels that an OpenCL device would get (with
TORCH_BACKPLANE_TARGET a modelled one), and looks at every access of every work item: one out of the bounds of the
memory that the argument's storage asked for, and two of different work items to one byte, of which one writes, that no
barrier orders, are a `KernelSanitizerError` where other errors of kernels are raised: at the latest when the program
synchronizes, with TORCH_BACKPLANE_LAUNCH_BLOCKING=1 by the call itself.

    device.py    the device and its driver      text.py      what kernels' text is compiled with
    runtime.cpp  launches and checks            runtime.py   compiling and loading
    findings.py  what is found, in words        builtins.py  OpenCL C's functions
"""

from torch_backplane.drivers.sanitizer.device import SanitizerDevice, SanitizerDriver, collected, take
from torch_backplane.drivers.sanitizer.findings import Finding, KernelSanitizerError
from torch_backplane.drivers.sanitizer.runtime import NoCompiler, library

__all__ = [
    "Finding",
    "KernelSanitizerError",
    "NoCompiler",
    "SanitizerDevice",
    "SanitizerDriver",
    "collected",
    "library",
    "take",
]
