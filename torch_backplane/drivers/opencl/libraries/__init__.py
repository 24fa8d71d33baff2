"""Libraries of kernels for OpenCL devices, each where it is installed."""
