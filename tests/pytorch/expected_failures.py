"""Tests of this folder that are expected to fail: devices → patterns of test names → reasons."""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {
    "all": {
        "test_out_on_another_device_lu_bp*": "torch.lu copies its results in Python, to any device",
        "test_vmap_torch__scaled_mm_*": "the test flips operands, which PyTorch does not support for float8",
        "test_[!v]*_tensor_split_*": "requires indices on the CPU, as for CUDA tensors",
        "test_variants_tensor_split_*": "requires indices on the CPU, as for CUDA tensors",
        "test_errors_cat_bp": "an empty first operand is resized if it is also the result",
    },
    "host": {},
    "opencl": {
        "test_errors_scatter_*": "kernels report an index and the size of its dimension, not which dimension it is",
    },
}
