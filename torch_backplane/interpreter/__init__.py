"""A kernel interpreter: runs the text of kernels on the host and tells an observer of each access to memory.

A tool: the audit and the kernel sanitizer bring the observers. `import torch_backplane` does not load it.

    language.py          what a language is, and the text of a kernel as it is compiled
    opencl_c.py          OpenCL C, by clang; opencl_builtins.py has its functions
    host_c.py            C, by the system's compiler
    library.py           compiling and loading runtime.cpp with an observer, and kernels
    runtime.cpp          memory, launches, groups, barriers, swaps; interpreter.h is what it shares with observers
    device.py            a device of the driver contract

Another language, such as CUDA C++, is a subclass of `Language`. Its compiler must have -fsanitize=thread, and its words
are spelled with the functions of `language.WORDS`: `threadIdx` is a place, `__syncthreads()` a barrier of both kinds of
memory, a shuffle an exchange in local memory between two of them, dynamic shared memory a local array.
"""
