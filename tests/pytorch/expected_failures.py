"""Tests of this folder that are expected to fail, by the devices on which they do: patterns of names, with reasons."""

from __future__ import annotations

EXPECTED: dict[str, dict[str, str]] = {
    "all": {
        "test_vmap_torch__scaled_mm_*": "the test turns operands around, which PyTorch cannot do with float8",
        "test_out_on_another_device_lu_*": "torch.lu copies its results in Python, to any device",
        "test_[!v]*_tensor_split_*": "wants indices on the CPU, as with CUDA's tensors",
        "test_variants_tensor_split_*": "wants indices on the CPU, as with CUDA's tensors",
        "test_errors_cat_bp": "the first operand, which has no elements, is resized where it is the result, too",
    },
    "host": {},
    "opencl": {},
}
