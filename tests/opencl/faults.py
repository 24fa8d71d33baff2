"""What is wrong in implementations of OpenCL, each shown by a program without Backplane (docs/opencl.md).

A test that such a fault breaks has the marker `fault`, with its name here. Where the fault is, the test is expected to fail.
"""

from __future__ import annotations

from functools import cache

import numpy
import pyopencl as cl
import torch

DESCRIPTIONS = {
    "short loops": "the implementation ends all loops of a work item after 65,535 rounds",
    "zeros without sign": "the implementation takes x + 0 for x, -0 too, and NaN * 0 for 0",
}


@cache
def present(name: str) -> bool:
    """Whether the implementation behind bp:0 has the fault."""
    if name == "short loops":
        return _runs("int rounds = 0; while (rounds < x) ++rounds; result = rounds;", 70_000.0) != 70_000.0
    assert name == "zeros without sign"
    return bool(numpy.signbit(_runs("result = x + 0.0f;", -0.0)) or _runs("result = x * 0.0f;", numpy.nan) == 0)


def _runs(text: str, x: float) -> numpy.float32:
    name = torch.bp.get_device_properties(0).name
    (device, *_) = [one for platform in cl.get_platforms() for one in platform.get_devices() if one.name.strip() == name]
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    source = f"kernel void run(const float x, global float* to) {{ float result; {text} *to = result; }}"
    result = numpy.empty(1, numpy.float32)
    memory = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, result.nbytes)
    cl.Program(context, source).build().run(queue, (1,), None, numpy.float32(x), memory)
    cl.enqueue_copy(queue, result, memory)
    return result[0]
