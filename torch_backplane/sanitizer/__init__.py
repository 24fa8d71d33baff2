"""A memory sanitizer for kernels: TORCH_BACKPLANE_SANITIZE_KERNELS=1.

    TORCH_BACKPLANE_SANITIZE_KERNELS=1 python program.py

The program then has one device, in host memory. It runs the kernels that an OpenCL device would get, or with
TORCH_BACKPLANE_TARGET a modelled device, and checks every access of every work item. It reports accesses outside of the
memory that the argument's storage requested; two accesses of different work items to the same byte, one of them a
write, without a barrier between them; and barriers that some work items of a group do not reach. These raise a
`KernelSanitizerError` like other errors of kernels: at the latest when the program synchronizes, or in the call itself
with TORCH_BACKPLANE_LAUNCH_BLOCKING=1.

Device discovery loads this package if the variable is set. `import torch_backplane` does not.

    device.py    the device and its driver
    observer.h   checks bounds, for the kernel interpreter (interpreter/)
    checks.h     finds races and divergent barriers
    findings.py  findings and their messages
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
