"""Empty operands: kernels do not divide by a size of 0, and results and errors match the CPU's.

A sample on OpenCL, in separate processes, because a division by 0 ends them.
`python tests/sweeps/sweep_process.py empty_operands_sweep.py` runs the whole operator database.
"""

from __future__ import annotations

import empty_operands_sweep
import on_opencl
import pytest
import sweep_process

SAMPLE = (
    r"^(argmax|argwhere|bincount|bucketize|cat|cdist|cumsum|diff|fft\.fft|flip|gather|grid_sampler_2d|index_(add|fill|put|"
    r"select)|kthvalue|masked_select|median|mm|mode|nn\.functional\.(avg_pool2d|conv2d|embedding_bag|fold|group_norm|"
    r"interpolate\.bilinear|layer_norm|max_pool2d|pad\.reflect|pixel_shuffle|softmin|unfold)|nonzero|nonzero_static|repeat|"
    r"repeat_interleave|roll|scatter_add|searchsorted|softmax|sort|take|topk|tril|unique|var)$"
)


@pytest.mark.slow
def test_results_match_cpu_without_division_by_zero() -> None:
    on_opencl.require_platform()
    names = empty_operands_sweep.names(SAMPLE)
    assert len(names) > 40
    settings = {"TORCH_BACKPLANE_DRIVERS": "opencl", "TORCH_BACKPLANE_FALLBACK": "silent"}
    assert sweep_process.findings("empty_operands_sweep.py", names, settings, "--samples", "5") == []
