"""Runs random programs on a device and on the CPU, and compares them.

    make fuzz SECONDS=600 DRIVER=opencl
    python tests/fuzz --seconds 60 --seed 7

A program is a list of lines of PyTorch code. After each line, all live tensors and the errors of both runs are
compared. A difference is a finding. It is shrunk and printed as a standalone program.
"""
