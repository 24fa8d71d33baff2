"""Random programs, run on a device and on the CPU side by side.

    make fuzz SECONDS=600 DRIVER=opencl
    python tests/fuzz --seconds 60 --seed 7

A program is a list of lines of plain PyTorch code. After every line, each living tensor of the two runs is compared,
and so are errors. What differs is a finding; it is shrunk, and printed as a program to paste.
"""
