"""A memory sanitizer for kernels: TORCH_BACKPLANE_SANITIZE_KERNELS=1.

    TORCH_BACKPLANE_SANITIZE_KERNELS=1 python program.py

Then there is one device, in host memory, which runs the kernels that an OpenCL device would get (with
TORCH_BACKPLANE_TARGET a modelled one), and looks at every access of every work item: one out of the bounds of the
memory that the argument's storage asked for, and two of different work items to one byte, of which one writes, that no
barrier orders, are a `KernelSanitizerError` where other errors of kernels are raised: at the latest when the program
synchronizes, with TORCH_BACKPLANE_LAUNCH_BLOCKING=1 by the call itself.

A tool: discovery loads it where the variable is set, and nothing that `import torch_backplane` loads imports it.

    device.py    the device and its driver
    observer.h   the checks, of what the kernel interpreter (interpreter/) runs
    findings.py  what is found, in words
"""

from torch_backplane.sanitizer.device import SanitizerDevice, SanitizerDriver, collected, counts, take
from torch_backplane.sanitizer.findings import Finding, KernelSanitizerError

__all__ = [
    "Finding",
    "KernelSanitizerError",
    "SanitizerDevice",
    "SanitizerDriver",
    "collected",
    "counts",
    "take",
]
