"""A kernel interpreter: runs kernels on the host and calls an observer for each memory access.

The audit and the kernel sanitizer provide the observers. `import torch_backplane` does not load this package.

    language.py          base class of languages, and the source as it is compiled
    opencl_c.py          OpenCL C, compiled with clang; opencl_builtins.py has its built-in functions
    cuda_cpp.py          CUDA C++, compiled with the system's C++ compiler
    library.py           compiles and loads runtime.cpp with an observer, and kernels
    runtime.cpp          memory, launches, groups, barriers, atomics; interpreter.h is shared with observers
    device.py            a device for the driver interface

Shuffles exchange values between work items that take turns, in subgroups of 32 in every language. Dynamic shared memory
is not supported, because no kernel uses it. The emulated CUDA driver of the tests (tests/cuda_emulator) adds it.
"""
