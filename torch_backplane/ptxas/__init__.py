"""Compiles the kernels of programs for NVIDIA's GPUs, without a GPU, and reports what the compiler made of them.

cases.py lists programs. collect.py starts worker.py, which runs them on device.py's device: it records kernels and
launches nothing. nvrtc.py compiles the kernels, sass.py disassembles them, and occupancy.py computes how many work
groups a compute unit can hold. measure.py does this for many kernels in parallel processes, and report.py writes the
results.
"""
