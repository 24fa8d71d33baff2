"""Forms of kernels for CPUs, where a work group is one thread and the compiler vectorizes."""
