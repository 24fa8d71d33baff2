"""A kernel interpreter: runs the text of kernels on the host and tells an observer of each access to memory.

A tool: the audit and the kernel sanitizer bring the observers. `import torch_backplane` does not load it.

    language.py          what a language is, and the text of a kernel as it is compiled
    opencl_c.py          OpenCL C, by clang; opencl_builtins.py has its functions
    cuda_cpp.py          CUDA C++, by the system's C++ compiler
    library.py           compiling and loading runtime.cpp with an observer, and kernels
    runtime.cpp          memory, launches, groups, barriers, swaps; interpreter.h is what it shares with observers
    device.py            a device of the driver contract

A shuffle is an exchange among items that take turns, in subgroups of 32, whatever the language. A word that no text
uses yet has its place: dynamic shared memory is an array that a launch sizes.
"""
