"""Runs public models on a device, unchanged, and compares inference and training with the CPU.

    make models ARGS=--compile
    python tests/models --driver opencl --compile --only torch timm/nfnet

The models have small configurations and random weights. Nothing is downloaded. `make models` installs the libraries.
"""
